"""PrefixCache: keeps full pages for reuse, and attaches them to prompts that start with the same tokens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from paged.errors import GeometryMismatch, SessionInUse, check
from paged.kv.pages import PagePool
from paged.prefix.eviction import EvictionPolicy, EvictionQueue, get_policy
from paged.prefix.hashing import Int32, PageHash, as_tokens, namespace_key, page_hash
from paged.prefix.index import Cursor, PrefixIndex
from paged.prefix.stats import PrefixChain, PrefixStats

if TYPE_CHECKING:
    from paged.session import Session


class PrefixCache:
    """Full pages of past and running sequences, found by the tokens they hold. It serves one pool.

    Only whole pages match, and a match ends at least one token short of the prompt, since the model needs one row
    to compute logits. An entry is one reference to each of its pages; a page that a sequence also uses stays alive
    when its entry goes. Room is made by evicting leaves only, so a cached page's whole prefix is always cached.

    `max_pages` bounds the pages held (0: the pool is the only bound). A donation past the bound gives up idle
    pages of others first, then its own tail. Not thread-safe.

    Invariants (`check()`): those of the index; the pool's `held` flags are exactly the index's pages; every idle
    leaf can be evicted; a page in use has its whole prefix in use, so every idle page can be had by evicting; each
    chain's live pages are those in the index; no more than `max_pages` pages are held.
    """

    def __init__(
        self,
        pool: PagePool,
        max_pages: int = 0,
        policy: str | EvictionPolicy = "lru",
        hash_page: PageHash = page_hash,  # type: ignore[assignment]
    ) -> None:
        if max_pages < 0:
            raise ValueError(f"max_pages must be 0 (no bound) or more, got {max_pages}")
        if pool.held.any():
            raise GeometryMismatch("this pool already serves a prefix cache; release() that one first")
        self.pool = pool
        self.max_pages = max_pages
        self.num_groups = pool.storage.spec.num_groups if pool.storage is not None else 1
        self.index = PrefixIndex(pool.page_size, self.num_groups, hash_page, pool.num_pages)
        self.queue = EvictionQueue(self.index, get_policy(policy))
        self.stats = PrefixStats()
        self._chains: dict[int, PrefixChain] = {}
        self._next_chain = 1
        pool.reclaim = self._reclaim
        pool.on_idle = self._on_idle

    # By hand: a session donates and attaches ------------------------------------------------------------------

    def insert(self, session: Session, tokens: object, preview: str = "") -> int:
        """Donate the full pages of `session`, whose evaluated history is `tokens`; returns the pages new to the cache.

        Where a page is cached already, the session goes on with that one and gives its own copy back. `preview`
        labels the donation in `chains()`. GeometryMismatch if the session is not paged out of this pool.
        """
        self._own(session)
        history = as_tokens(tokens)
        covered = min(len(history), session.n_past)
        if not np.array_equal(history[:covered], session.tokens[:covered]):
            raise ValueError("the tokens to donate are not the ones that the session evaluated")
        cursor = self.cursor(session.namespace)
        before = self.stats.inserted_pages
        full = covered // self.pool.page_size
        for column, pages in self.publish(cursor, history[:covered], session.table.rows[:, :full], preview):
            session.table.replace(column, pages)
        return self.stats.inserted_pages - before

    def attach(self, session: Session, tokens: object) -> int:
        """Give a fresh session the cached pages that `tokens` starts with; returns the tokens matched.

        The caller evaluates `tokens[matched:]`. SessionInUse if the session already holds context.
        """
        self._own(session)
        if session.n_past or session.table.num_pages:
            raise SessionInUse(
                f"pages can be attached only to a fresh session; this one holds {session.n_past} tokens "
                f"and {session.table.num_pages} pages"
            )
        prompt = as_tokens(tokens)
        cursor = self.cursor(session.namespace)
        self.seek(cursor, prompt)
        pages = self.take(cursor)
        self.count(cursor, len(prompt))
        session.adopt(prompt[: pages.shape[1] * self.pool.page_size], pages)
        return session.n_past

    def match_len(self, tokens: object, namespace: str = "") -> int:
        """The tokens that `attach` would attach right now. Touches no entry, takes nothing."""
        return self.seek(self.cursor(namespace), as_tokens(tokens))

    # For a scheduler: a cursor for each request ---------------------------------------------------------------

    def cursor(self, namespace: str = "", **fields: object) -> Cursor:
        """A cursor at the root of a namespace: `namespace` is the caller's salt, `fields` (adapter=...) add to it."""
        storage = self.pool.storage
        codec = storage.codec.name if storage is not None else ""
        key = namespace_key(model=self.pool.fingerprint, codec=codec, salt=namespace, **fields)
        return self.index.cursor(key)

    def seek(self, cursor: Cursor, prompt: Int32) -> int:
        """How many leading tokens of `prompt` are cached (whole pages, one token short of it). Touches nothing.

        Called again with the same cursor, it costs only what has changed.
        """
        limit = max(0, len(prompt) - 1) // self.pool.page_size
        return self.index.seek(cursor, prompt, limit) * self.pool.page_size

    def idle_pages(self, cursor: Cursor) -> int:
        """Pages below the cursor that only the cache holds: attaching them makes them live. O(pages)."""
        return int(np.count_nonzero(self.pool.refs[self.index.pages[cursor.nodes].ravel()] == 1))

    def take(self, cursor: Cursor) -> Int32:
        """Attach the pages that the cursor stands on: int32 [num_groups, pages], one reference to each taken."""
        pages = np.ascontiguousarray(self.index.pages[np.array(cursor.nodes, np.int32)].T)
        self.pool.share(pages.ravel())
        return pages

    def count(self, cursor: Cursor, num_tokens: int) -> None:
        """Count one prompt of `num_tokens` tokens whose pages were just taken."""
        stats = self.stats
        stats.num_queries += 1
        stats.query_tokens += num_tokens
        if cursor.nodes:
            stats.hit_pages += len(cursor.nodes) * self.num_groups
            stats.hit_tokens += len(cursor.nodes) * self.pool.page_size
            chain = self._chains[int(self.index.chain[cursor.nodes[-1]])]
            chain.num_hits += 1
            chain.last_hit_at = time.time()

    def publish(self, cursor: Cursor, tokens: Int32, pages: Int32, preview: str = "") -> list[tuple[int, Int32]]:
        """Enter the computed pages `pages [num_groups, n]`, which hold `tokens[: n * page_size]`, below the cursor.

        Pages up to the cursor's depth are known already. Returns (column, page ids) for each page that another
        sequence published first: the caller puts those ids into its table and drops its own copy. O(new pages).
        """
        index, stats, size = self.index, self.stats, self.pool.page_size
        start, end = len(cursor.nodes), pages.shape[1]
        if not cursor.open or end <= start:
            return []
        if self.pool.on_idle != self._on_idle:
            raise GeometryMismatch("this cache was released, and its pool serves another prefix cache since")
        if start and index.birth[cursor.nodes[-1]] != cursor.births[-1]:
            cursor.closed = True  # its chain was dropped while it ran: a page without its parent is never cached
            return []
        index.seek(cursor, tokens, end)
        merged: list[tuple[int, Int32]] = []
        for column in range(start, len(cursor.nodes)):
            theirs = index.pages[cursor.nodes[column]]
            if (theirs != pages[:, column]).any():
                merged.append((column, theirs.copy()))
        stats.merged_pages += len(merged) * self.num_groups
        first = len(cursor.nodes)
        for column in range(first, end):
            key = cursor.keys[column]
            if key in index.by_key:  # other tokens have this key, or the same ones elsewhere in the tree
                stats.num_collisions += 1
                cursor.closed = True
                break
            if cursor.chain not in self._chains:
                self._open_chain(cursor, preview)
            index.add(cursor, key, tokens[column * size : (column + 1) * size], pages[:, column])
        new = pages[:, first : len(cursor.nodes)]
        if new.size:
            self.pool.hold(np.ascontiguousarray(new).ravel())
            stats.inserted_pages += new.size
            chain = self._chains[cursor.chain]
            chain.num_tokens += new.shape[1] * size
            chain.num_pages += new.size
            self._trim(cursor, first)
        return merged

    def _open_chain(self, cursor: Cursor, preview: str) -> None:
        cursor.chain = self._next_chain
        self._chains[cursor.chain] = PrefixChain(cursor.chain, preview, time.time())
        self._next_chain += 1

    # Room -----------------------------------------------------------------------------------------------------

    @property
    def held_pages(self) -> int:
        """Pool pages that the cache holds a reference to."""
        return len(self.index) * self.num_groups

    def chains(self) -> list[PrefixChain]:
        """Every donation that still has a page in the cache, oldest first."""
        return list(self._chains.values())

    def evict(self, num_pages: int) -> int:
        """Evict idle leaves until at least `num_pages` pages became free, or none is left; returns how many did."""
        return self._reclaim(num_pages)

    def release(self) -> None:
        """Drop every entry at once. Pages that sequences use stay theirs; later look-ups match nothing.

        Also the call to make after a model's weights were changed in place: what cursors of before compute from now
        on is not cached. A session that holds rows of the old weights must not be donated.
        """
        self.pool.unhold(self.index.clear())
        self.queue.clear()
        self._chains.clear()

    def _reclaim(self, num_pages: int) -> int:
        freed = 0
        while freed < num_pages:
            node = self.queue.pop()
            if node is None:
                break
            if not self.index.children[node] and self._idle(node):
                freed += self._evict(node)
        return freed

    def _evict(self, node: int) -> int:
        """Take a leaf out; its parent may become the next one to go. Returns the pages that became free."""
        pages = self.index.pages[node].copy()
        chain = self._chains[int(self.index.chain[node])]
        parent = self.index.remove(node)
        before = self.pool.num_free
        self.pool.unhold(pages)
        self.stats.evicted_pages += len(pages)
        chain.num_pages -= len(pages)
        if not chain.num_pages:
            del self._chains[chain.id]
        if parent >= 0 and not self.index.children[parent] and self._idle(parent):
            self.queue.push(parent)
        return self.pool.num_free - before

    def _idle(self, node: int) -> bool:
        return int(self.pool.refs[self.index.pages[node]].max()) == 1

    def _on_idle(self, ids: Int32) -> None:
        """Pages `ids` lost their last user: from now on they age, and the leaves among them can be evicted."""
        index = self.index
        nodes = np.unique(index.node_of_page[ids]) if self.num_groups > 1 else index.node_of_page[ids]
        index.tick += 1
        index.last_use[nodes] = index.tick
        for node in nodes[index.children[nodes] == 0].tolist():
            if self.num_groups == 1 or self._idle(node):
                self.queue.push(node)

    def _trim(self, cursor: Cursor, first: int) -> None:
        """Hold the bound: idle leaves go first, then the tail that this donation just brought."""
        if not self.max_pages:
            return
        while self.held_pages > self.max_pages:
            node = self.queue.pop()
            if node is not None:
                if not self.index.children[node] and self._idle(node):
                    self._evict(node)
            elif len(cursor.nodes) > first and not self.index.children[cursor.nodes[-1]]:
                cursor.closed = True
                cursor.births.pop()
                self._evict(cursor.nodes.pop())
            else:
                break

    def _own(self, session: Session) -> None:
        if session.pool is not self.pool:
            raise GeometryMismatch("the session is not paged out of this cache's pool")

    def check(self) -> None:
        """Assert the invariants of the class docstring. O(pages)."""
        index = self.index
        index.check()
        live = np.flatnonzero(index.birth >= 0)
        held = np.zeros(self.pool.num_pages, np.bool_)
        held[index.pages[live].ravel()] = True
        check(bool((held == self.pool.held).all()), "the pool's held flags are not the cached pages")
        counts: dict[int, int] = {}
        for chain in index.chain[live].tolist():
            counts[chain] = counts.get(chain, 0) + self.num_groups
        check(counts == {c.id: c.num_pages for c in self._chains.values()}, "a chain's live pages are wrong")
        queued = {e[2] for e in self.queue._heap if self.queue._entry[e[2]] == e[1] and index.birth[e[2]] == e[3]}
        for node in live.tolist():
            idle_leaf = not index.children[node] and self._idle(node)
            check(not idle_leaf or node in queued, "an idle leaf cannot be evicted")
        below = live[index.parent[live] >= 0]
        used = self.pool.refs[index.pages] > 1  # [nodes, groups]
        idle_above = used[below].any(axis=1) & ~used[index.parent[below]].all(axis=1)
        check(not idle_above.any(), "a page is in use and its parent is not")
        check(not self.max_pages or self.held_pages <= self.max_pages, "more pages are held than max_pages")
