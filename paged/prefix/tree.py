"""PageTree: the cached pages of attention layers, how they enter, how they are attached, and which go for room."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable
from dataclasses import replace

import numpy as np

from paged.errors import GeometryMismatch, check
from paged.kv.pages import PagePool
from paged.ops.dispatch import get_backend
from paged.prefix.cursor import NO_NODE, Cursor
from paged.prefix.events import CacheEvent, PagesCleared, PagesStored
from paged.prefix.eviction import EvictionPolicy, get_policy
from paged.prefix.eviction_queue import EvictionQueue
from paged.prefix.eviction_run import run_up, take_out
from paged.prefix.hashing import Int32, PageHash, namespace_key, require_namespace
from paged.prefix.index import NO_PAGE, PrefixIndex
from paged.prefix.stats import PrefixChain, PrefixStats
from paged.spec import KVSpec, KVView


class PageTree:
    """The page part of a PrefixCache: a PrefixIndex over one pool, and the rules of who holds what in it.

    An entry is one reference to each of its pages; a page that a sequence also uses stays alive when its entry goes.
    Room is made by evicting leaves only, so a cached page's whole prefix is always cached. The exception are the pages
    that a prefix may lack (`KVView.loose`): once no sequence uses such a page it may go alone, and its node stays. What
    lies below needs a page behind a window only within the window, and one of a deep iteration only at that depth.

    Prefixes of all depths of a looped model share one tree, for iteration i depends on those before it alone (unless
    layers follow the loop block: then each depth is a namespace of its own). What one depth computed serves every
    smaller one, and a greater one adds its pages to the nodes that are there.

    Invariants (`check()`): those of the index; the pool's `held` flags are exactly the index's pages; every idle leaf
    can be evicted, and so can every idle page that may go alone; any other page that is in use has its whole prefix in
    use, so every idle page can be had by evicting; each chain's live pages are those in the index; no more than
    `max_pages` pages are held.
    """

    def __init__(
        self, pool: PagePool, max_pages: int, policy: str | EvictionPolicy, exact: bool, hash_page: PageHash
    ) -> None:
        if max_pages < 0:
            raise ValueError(f"max_pages must be 0 (no bound) or more, got {max_pages}")
        if pool.held.any():
            raise GeometryMismatch("this pool already serves a prefix cache; release() that one first")
        self.pool = pool
        self.max_pages = max_pages
        self.exact = exact
        self.spec = pool.storage.spec if pool.storage is not None else KVSpec(1, 1, 1)
        self.num_groups = self.spec.num_groups
        self.ever_loose = False  # whether any sequence so far had groups that a prefix may lack pages of
        self.index = PrefixIndex(pool.page_size, self.num_groups, hash_page, pool.num_pages)
        self.stats = PrefixStats()
        self.queue = EvictionQueue(self.index, get_policy(policy), self.stats)
        self.listen: Callable[[CacheEvent], object] | None = None  # hears of every page that comes and goes
        self.remembered = 65_536  # keys of evicted pages that `explain` still knows
        self.evicted: dict[object, None] = {}  # keys of pages that went for room, oldest first
        self._chains: dict[int, PrefixChain] = {}
        self._next_chain = itertools.count(1)
        pool.reclaim = self._reclaim
        pool.on_idle = self._on_idle

    # A cursor for each sequence -------------------------------------------------------------------------------

    def namespace_key(self, namespace: str = "", **fields: object) -> bytes:
        """The root of a namespace's chains: the caller's salt, further `fields` (adapter=...), the model, the codec."""
        storage = self.pool.storage
        codec = storage.kv_dtype if storage is not None else ""
        return namespace_key(model=self.pool.fingerprint, codec=codec, salt=require_namespace(namespace), **fields)

    def cursor(self, namespace: str = "", view: KVView | None = None, **fields: object) -> Cursor:
        """A cursor at the root of a namespace: `namespace` is the caller's salt, `fields` (adapter=...) add to it.

        `view` is what the sequence uses of the page groups; None: that of a sequence that asks for nothing.
        """
        view = self.spec.view() if view is None else view
        return self.cursor_of(self.namespace_key(namespace, **view.fields, **fields), view)

    def cursor_of(self, key: bytes, view: KVView) -> Cursor:
        """A cursor at the root of the namespace with this key."""
        self.ever_loose = self.ever_loose or len(view.loose) > 0
        return self.index.cursor(key, view)

    def seek(self, cursor: Cursor, prompt: Int32, exact: bool = True) -> int:
        """How many leading tokens of `prompt` are cached, one token short of it. Touches nothing.

        Whole pages; where this tree is `exact`, and `exact` is not False, also the `rows` that the prompt shares with
        the page where it leaves the tree. Called again with the same cursor, it costs only what has changed, and
        O(log siblings) for these rows.
        """
        size = self.pool.page_size
        depth = self.index.seek(cursor, prompt, max(0, len(prompt) - 1) // size)
        self._look_below(cursor, prompt, exact)
        if depth and len(cursor.view.loose) and not self._has_pages(cursor, depth, cursor.rows):
            depth = self._deepest(cursor)
            cursor.cut(depth)
            self._look_below(cursor, prompt, exact)
        return depth * size + cursor.rows

    def _look_below(self, cursor: Cursor, prompt: Int32, exact: bool) -> None:
        cursor.rows = 0
        if self.exact and exact:
            rest = prompt[cursor.depth * self.pool.page_size : len(prompt) - 1]
            cursor.near, cursor.rows = self.index.closest(cursor, rest)
            if cursor.rows and len(cursor.view.loose) and not self._whole(cursor.near, cursor.view):
                cursor.rows = 0

    def _whole(self, node: int, view: KVView) -> bool:
        """Whether a node has all pages of a view."""
        return int(self.index.pages[node, view.groups].min()) >= 0

    def _has_pages(self, cursor: Cursor, depth: int, rows: int = 0) -> bool:
        """Whether everything is there that a query behind `depth` pages and `rows` more tokens sees."""
        view, size = cursor.view, self.pool.page_size
        first = view.first_columns(depth * size + rows, size)[view.wanted]
        pages = self.index.pages[cursor.nodes[:depth]][:, view.wanted]
        return not ((pages < 0) & (np.arange(depth)[:, None] >= first)).any()

    def _deepest(self, cursor: Cursor) -> int:
        """The most of the cursor's pages behind which everything is there that a query sees."""
        view, size, depth = cursor.view, self.pool.page_size, cursor.depth
        gone = self.index.pages[cursor.nodes][:, view.wanted] < 0
        last = np.full((depth + 1, len(view.wanted)), -1)  # the last page in front of each depth that is gone
        last[1:] = np.maximum.accumulate(np.where(gone, np.arange(depth)[:, None], -1), axis=0)
        windows = view.windows[view.wanted]
        first = np.maximum(0, np.arange(depth + 1)[:, None] * size - windows + 1) // size
        return int(np.flatnonzero((last < np.where(windows > 0, first, 0)).all(axis=1))[-1])

    def attachable(self, cursor: Cursor) -> Int32:
        """Ids of the pages that `take` would share, int32 [n]; those of one reference become live by it. O(pages)."""
        pages = self._columns(cursor)
        return pages[pages >= 0]

    def take(self, cursor: Cursor) -> Int32:
        """Attach the pages that the cursor stands on: int32 [num_groups, pages], one reference to each taken.

        What no window reaches any more is not taken and reads NO_PAGE (-1).
        """
        pages = self._columns(cursor)
        self.pool.share(pages[pages >= 0])
        self.queue.attached(cursor.nodes)
        return pages

    def _columns(self, cursor: Cursor) -> Int32:
        pages = np.ascontiguousarray(self.index.pages[cursor.nodes].T)
        position = cursor.depth * self.pool.page_size + cursor.rows
        view = cursor.view
        if len(view.loose):
            first = view.first_columns(position, self.pool.page_size)
            pages[(np.arange(pages.shape[1]) < first[:, None]) | ~view.uses[:, None]] = NO_PAGE
        return pages

    def take_rows(self, cursor: Cursor, more: int = 0) -> Int32:
        """Fresh pages, int32 [groups of the view + more]: the first hold a copy of the page whose rows the cursor
        matched.

        OutOfPages, or what the copy raises; then nothing was taken. Making room never takes that page itself.
        """
        source = self.index.pages[cursor.near, cursor.view.groups]
        self.pool.share(source)
        try:
            own = self.pool.alloc(len(source) + more)
            try:
                storage = self.pool.storage
                if storage is not None:
                    get_backend(storage.device).copy_pages(storage, source, own[: len(source)])
            except BaseException:
                self.pool.release(own)
                raise
        finally:
            self.pool.release(source)
        return own

    def count(self, cursor: Cursor, num_tokens: int) -> None:
        """Count one prompt of `num_tokens` tokens whose pages, and rows of the next one, were just taken."""
        stats, rows = self.stats, cursor.rows
        stats.num_queries += 1
        stats.query_tokens += num_tokens
        stats.hit_tokens += rows
        stats.partial_hits += rows > 0
        if cursor.depth:
            stats.hit_pages += cursor.depth * cursor.view.num_groups
            stats.hit_tokens += cursor.depth * self.pool.page_size
            chain = self._chains.get(int(self.index.chain[cursor.last]))
            if chain is not None:
                chain.num_hits += 1
                chain.last_hit_at = time.time()

    # Pages in -------------------------------------------------------------------------------------------------

    def publish(self, cursor: Cursor, tokens: Int32, pages: Int32, preview: str = "") -> int:
        """Enter the computed pages `pages [num_groups, n]`, which hold `tokens[: n * page_size]`, below the cursor.

        Pages up to the cursor's depth are known already. Where another sequence published first, every holder of the
        page goes on with the cached one: who shares what stands below it shares its prefix too. Returns how many pages
        were computed twice. O(new pages). NO_PAGE stands for what a window left behind.
        """
        index, stats, size = self.index, self.stats, self.pool.page_size
        start, end = cursor.depth, pages.shape[1]
        if end <= start or not self._may_publish(cursor):
            return 0
        index.seek(cursor, tokens, end)
        merged = 0
        for column in range(start, cursor.depth):
            theirs = self._merge(int(cursor.nodes[column]), pages[:, column])
            if theirs is not None:
                ours = pages[:, column].copy()
                merged += int(np.count_nonzero(theirs != ours))
                self.pool.exchange(column, ours, theirs)
        stats.merged_pages += merged
        first, keys = cursor.depth, cursor.keys_to(tokens, end)
        for column in range(first, end):
            key = keys[column]
            if key in index.by_key:  # other tokens have this key, or the same ones elsewhere in the tree
                stats.num_collisions += 1
                cursor.closed = True
                break
            ids: list[int] = pages[:, column].tolist()
            if self._held_elsewhere(ids):
                break
            own = tokens[column * size : (column + 1) * size]
            if column == first:  # what follows has a new parent, without children
                self._supersede(cursor, own, pages[:, column])
            self._enter(cursor, key, own, pages[:, column], preview)
        if self.listen is not None and cursor.depth > first:
            self._tell_stored(cursor, first, keys[first : cursor.depth], tokens[first * size :])
        self._trim(cursor, first)
        if cursor.chain in self._chains:
            self.forget(cursor.chain, 0)  # a donation of places alone, whose pages a window left, is none
        return merged

    def publish_tail(self, cursor: Cursor, tokens: Int32, pages: Int32, preview: str = "") -> int:
        """Enter the last, partial page `pages [num_groups]` of a sequence that writes no more into it.

        `tokens` is the whole history; the cursor stands on all of its full pages. A prompt that goes on from here
        copies the page. Nothing happens where a page with these rows is cached already. Returns the node that was
        entered, or NO_NODE (-1).
        """
        index, size = self.index, self.pool.page_size
        rows = tokens[len(tokens) // size * size :]
        if not len(rows) or cursor.depth != len(tokens) // size or not self._may_publish(cursor):
            return NO_NODE
        node, shared = index.closest(cursor, rows)
        if shared == len(rows) and self._whole(node, cursor.view):
            return NO_NODE
        if shared == len(rows) == index.rows[node]:
            self._merge(node, pages)
            return NO_NODE
        key = index.hash_page(cursor.key_above(), rows.astype("<i4", copy=False).tobytes())
        if key in index.by_key:
            self.stats.num_collisions += 1
            return NO_NODE
        if self._held_elsewhere(pages.tolist()):
            return NO_NODE
        self._supersede(cursor, rows, pages)
        while self.max_pages and self.held_pages + np.count_nonzero(pages >= 0) > self.max_pages:
            other = self.queue.pop()
            if other is None:
                return NO_NODE
            self.pool.unhold(self._give_up(other))
        if not self._may_publish(cursor):  # places whose pages a window had left went too
            return NO_NODE
        node = self._enter(cursor, key, rows, pages, preview)
        if self.listen is not None:
            self._tell_stored(cursor, cursor.depth, [key], rows)
        return node

    def drop_places(self, cursor: Cursor) -> None:
        """Take out what the cursor ends with where a window left the pages and nothing stands on it.

        For after the last donation with this cursor: no prompt could attach it, and no eviction would ever find it.
        """
        index = self.index
        while cursor.depth and cursor.alive:
            node = cursor.last
            if index.children[node] or int(index.pages[node].max()) >= 0:
                break
            key = index.keys[node]
            cursor.cut(cursor.depth - 1)
            self._evict(node)
            del self.evicted[key]  # it did not go for room

    def _tell_stored(self, cursor: Cursor, column: int, keys: list[Hashable], tokens: Int32) -> None:
        assert self.listen is not None
        parent = self.index.keys[int(cursor.nodes[column - 1])] if column else None  # the cursor may not know it yet
        tokens = tokens[: len(keys) * self.pool.page_size].copy()
        self.listen(PagesStored(cursor.namespace, parent, tuple(keys), tokens))

    def require_pool(self) -> None:
        """GeometryMismatch where the pool serves another cache by now: nobody would evict what this one takes."""
        if self.pool.on_idle != self._on_idle:
            raise GeometryMismatch("this cache was released, and its pool serves another prefix cache since")

    def _may_publish(self, cursor: Cursor) -> bool:
        if not cursor.open:
            return False
        self.require_pool()
        if not cursor.alive:
            cursor.closed = True  # its chain was dropped while it ran: a page without its parent is never cached
            return False
        return True

    def _merge(self, node: int, ours: Int32) -> Int32 | None:
        """Give a cached node the pages that it lacks; the pages to use instead of `ours`, if any differs."""
        theirs = self.index.pages[node]
        for group in np.flatnonzero((theirs < 0) & (ours >= 0)).tolist():
            if self.max_pages and self.held_pages >= self.max_pages:
                break
            self.index.fill(node, group, int(ours[group]))
            self.pool.hold(ours[group : group + 1])
            self._chain_of(node).num_pages += 1
            self.stats.inserted_pages += 1
        differs = (theirs != ours) & (theirs >= 0) & (ours >= 0)
        return np.where(differs, theirs, ours) if differs.any() else None

    def _held_elsewhere(self, pages: list[int]) -> bool:
        """Whether one of `pages` is held already: for another namespace, by a session that went deeper from there."""
        return any(self.pool.held[page] for page in pages if page >= 0)

    def _enter(self, cursor: Cursor, key: object, tokens: Int32, pages: Int32, preview: str) -> int:
        own = pages[pages >= 0]
        self._begin_chain(cursor)
        node = self.index.add(cursor, key, tokens, pages)
        self._count(cursor, len(tokens), len(own), preview)
        self.queue.entered((node,))
        self.pool.hold(np.ascontiguousarray(own))
        self.stats.inserted_pages += len(own)
        return node

    def _begin_chain(self, cursor: Cursor) -> None:
        """What a sequence enters belongs to its donation; it begins one where it has none."""
        if cursor.chain not in self._chains:
            cursor.chain = next(self._next_chain)

    def _count(self, cursor: Cursor, num_tokens: int, num_pages: int, preview: str = "") -> None:
        if cursor.chain not in self._chains:
            self._chains[cursor.chain] = PrefixChain(cursor.chain, preview, time.time())
        chain = self._chains[cursor.chain]
        chain.num_tokens += num_tokens
        chain.num_pages += num_pages

    def _supersede(self, cursor: Cursor, tokens: Int32, pages: Int32) -> None:
        """A tail whose rows all stand at the head of `pages`, about to be entered, is of no more use."""
        index = self.index
        node, shared = index.closest(cursor, tokens)
        if node < 0 or not shared == index.rows[node] < self.pool.page_size or not self.idle(node):
            return
        if not ((index.pages[node] >= 0) & (pages < 0)).any():  # else it has iterations that these lack
            self._evict(node)

    # Room -----------------------------------------------------------------------------------------------------

    @property
    def held_pages(self) -> int:
        """Pool pages that the cache holds a reference to."""
        return self.index.num_pages

    def chains(self) -> list[PrefixChain]:
        """A snapshot of every donation that still has a page in the cache, oldest first. O(chains)."""
        return [replace(chain) for chain in self._chains.values()]

    def _clear(self) -> None:
        if self.listen is not None:
            self.listen(PagesCleared(None))
        self.pool.unhold(self.index.clear())
        self.queue.clear()
        self.evicted.clear()
        self._chains.clear()

    def _reclaim(self, num_pages: int) -> int:
        """Evict idle leaves until at least `num_pages` pages became free, or none is left; returns how many did."""
        freed, gone = 0, list[Int32]()
        while freed < num_pages and (node := self.queue.pop()) is not None:
            gone.append(self._give_up(node, num_pages - freed))
            freed += len(gone[-1])
        if freed:
            self.pool.unhold(np.concatenate(gone))
        return freed

    def _give_up(self, node: int, most: int = 1) -> Int32:
        """Take out what can go of a queued node: all of an idle leaf, and up to `most` nodes with those above it that
        go next; else its idle pages that may go alone."""
        if not self.index.children[node] and self.idle(node):
            return take_out(self, run_up(self, node, most))
        loose = self._loose(node)
        pages = self.index.pages[node, loose]
        return self.uncount(node, self.index.hollow(node, loose[(pages >= 0) & (self.pool.refs[pages] == 1)]))

    def _evict(self, node: int) -> int:
        """Take a leaf out and give its pages up; returns how many that were."""
        pages = take_out(self, [node])
        self.pool.unhold(pages)
        return len(pages)

    def uncount(self, node: int, pages: Int32) -> Int32:
        """`pages` of a node are on their way out; returns them."""
        self.stats.evicted_pages += len(pages)
        self.forget(int(self.index.chain[node]), len(pages))
        return pages

    def forget(self, chain: int, num_pages: int) -> None:
        """`num_pages` of a donation are gone."""
        record = self._chains.get(chain)
        if record is not None:
            record.num_pages -= num_pages
            if record.num_pages <= 0:
                del self._chains[chain]

    def _chain_of(self, node: int) -> PrefixChain:
        chain = int(self.index.chain[node])
        return self._chains.setdefault(chain, PrefixChain(chain, "", time.time()))

    def idle(self, node: int) -> bool:
        pages = self.index.pages[node]
        if self.num_groups == 1:
            return int(pages[0]) < 0 or int(self.pool.refs[pages[0]]) == 1
        pages = pages[pages >= 0]
        return not len(pages) or int(self.pool.refs[pages].max()) == 1

    def _loose(self, node: int) -> Int32:
        """The groups whose page a node can do without."""
        return self.spec.view(None, int(self.index.window[node])).loose

    def _on_idle(self, ids: Int32) -> None:
        """Pages `ids` lost their last user: from now on they age, and those that nothing stands on can be evicted."""
        index = self.index
        nodes = np.unique(index.node_of_page[ids]) if self.num_groups > 1 else index.node_of_page[ids]
        index.tick += 1
        index.last_use[nodes] = index.tick
        self.queue.idle(nodes)
        if self.ever_loose:
            for node in nodes[::-1].tolist():  # of pages that fall idle together the deepest goes first
                if len(self._loose(node)) or (not index.children[node] and self.idle(node)):
                    self.queue.push(node)
            return
        for node in nodes[index.children[nodes] == 0].tolist():
            if self.num_groups == 1 or self.idle(node):
                self.queue.push(node)

    def _trim(self, cursor: Cursor, first: int) -> None:
        """Hold the bound: idle leaves go first, then the tail that this donation just brought."""
        if not self.max_pages:
            return
        while self.held_pages > self.max_pages:
            node = self.queue.pop()
            if node is not None:
                self.pool.unhold(self._give_up(node))
            elif cursor.depth > first and not self.index.children[cursor.last]:
                cursor.closed = True
                node = cursor.last
                cursor.cut(cursor.depth - 1)
                self._evict(node)
            else:
                break

    def check(self) -> None:
        """Assert the invariants of the class docstring. O(pages)."""
        index = self.index
        index.check()
        live = np.flatnonzero(index.birth >= 0)
        held = np.zeros(self.pool.num_pages, np.bool_)
        pages = index.pages[live]
        held[pages[pages >= 0]] = True
        check(bool((held == self.pool.held).all()), "the pool's held flags are not the cached pages")
        counts: dict[int, int] = {}
        for chain, n in zip(index.chain[live].tolist(), (pages >= 0).sum(axis=1).tolist(), strict=True):
            counts[chain] = counts.get(chain, 0) + n
        counts = {chain: n for chain, n in counts.items() if n}
        check(counts == {c.id: c.num_pages for c in self._chains.values()}, "a chain's live pages are wrong")
        queued = self.queue.nodes()
        refs = np.where(index.pages >= 0, self.pool.refs[index.pages], 1)  # [nodes, groups]
        firm = np.ones(index.pages.shape, np.bool_)
        for node in live.tolist():
            loose = self._loose(node)
            firm[node, loose] = False
            idle_leaf = not index.children[node] and self.idle(node) and (index.pages[node] >= 0).any()
            check(not idle_leaf or node in queued, "an idle leaf cannot be evicted")
            idle = (refs[node, loose] == 1) & (index.pages[node, loose] >= 0)
            check(not idle.any() or node in queued, "an idle page that may go alone cannot be evicted")
        check(not (firm & (index.pages < 0))[live].any(), "a page is missing that every sequence needs")
        below = live[index.parent[live] >= 0]
        used = (refs > 1) & firm
        idle_above = used[below] & ~(used | ~firm)[index.parent[below]]
        check(not idle_above.any(), "a page is in use and its parent is not")
        check(not self.max_pages or self.held_pages <= self.max_pages, "more pages are held than max_pages")
