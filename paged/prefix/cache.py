"""PrefixCache: keeps what sequences computed, and attaches it to prompts that start with the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paged.errors import GeometryMismatch, SessionInUse, require_integer, require_text
from paged.kv.pages import PagePool
from paged.media import is_inside, span_start
from paged.prefix.checkpoints import CheckpointStore
from paged.prefix.cursor import NO_NODE, Cursor
from paged.prefix.events import PagesCleared
from paged.prefix.eviction import EvictionPolicy
from paged.prefix.explain import Explanation, explain
from paged.prefix.hashing import Int32, PageHash, as_tokens, fields_of, page_hash
from paged.prefix.index import NO_PAGE
from paged.prefix.pins import Pin, Pins
from paged.prefix.retention import Retain, Retention
from paged.prefix.stats import PrefixChain
from paged.prefix.tree import PageTree

if TYPE_CHECKING:
    import os

    from paged.session import Session


class PrefixCache(PageTree):
    """What past and running sequences computed, found by the tokens they started with. It serves one pool.

    For an attention model that is its full pages, in a tree (see PageTree). Whole pages match, and a match ends at
    least one token short of the prompt, since the model needs one row to compute logits. With `partial` a donation
    keeps its last, partial page too, and an attach also copies the rows that the prompt shares with the page where it
    leaves the tree: then the match is the longest common prefix, to the token.

    For a model with recurrent state pages alone continue nothing. The cache keeps checkpoints instead (see
    CheckpointStore): at most `max_states`, within `max_state_bytes` (0: no bound) of states and pages. A checkpoint
    matches a prompt that starts with all of its tokens.

    `max_pages` bounds the pages of the tree (0: the pool is the only bound). `max_pinned_pages` bounds what `pin` can
    keep; default: half of the pool. Not thread-safe.

    `listen`, if set, is called with a CacheEvent for every page of the tree that comes or goes, as it happens; it
    must not call the cache.

    Invariants (`check()`): those of the tree or of the checkpoints, and of the pins.
    """

    def __init__(
        self,
        pool: PagePool,
        max_pages: int = 0,
        max_states: int = 16,
        max_state_bytes: int = 0,
        policy: str | EvictionPolicy = "lru",
        partial: bool = False,
        max_pinned_pages: int | None = None,
        hash_page: PageHash = page_hash,  # type: ignore[assignment]
    ) -> None:
        """TypeError for a bound that is no integer, ValueError for one below 0; only `max_states` counts as 0 then."""
        for name, bound in (("max_pages", max_pages), ("max_states", max_states), ("max_state_bytes", max_state_bytes)):
            require_integer(name, bound)
        if max_pinned_pages is not None and require_integer("max_pinned_pages", max_pinned_pages) < 0:
            raise ValueError(f"max_pinned_pages must be 0 or more, got {max_pinned_pages}")
        super().__init__(pool, max_pages, policy, partial, hash_page)
        self.checkpoints: CheckpointStore | None = None
        if pool.state_spec is not None:
            self.checkpoints = CheckpointStore(pool, self.num_groups, max_states, max_state_bytes, self.stats)
        self.pins = Pins(pool, pool.max_pages // 2 if max_pinned_pages is None else max_pinned_pages)

    def seek(self, cursor: Cursor, prompt: Int32, exact: bool = True) -> int:
        """As PageTree.seek; a match that would end inside a media span ends where that begins."""
        matched = super().seek(cursor, prompt, exact)
        while matched and is_inside(prompt[matched]):
            prompt = prompt[: span_start(prompt, matched) + 1]
            matched = super().seek(cursor, prompt, exact)
        return matched

    # By hand: a session donates and attaches ------------------------------------------------------------------

    def insert(
        self, session: Session, tokens: object, preview: str = "", opening: bool = False, retain: Retain = None
    ) -> int:
        """Donate what `session` evaluated of `tokens`, its history; returns the pages new to the cache.

        Where a page is cached already, the session, and whoever shares the page, goes on with that one. Of a recurrent
        model a checkpoint is kept of where the session stands now; `opening` marks it as one that every conversation
        on this opening shares, which the budget drops last. `preview` labels the donation in `chains()`; `retain` says
        what its pages may expect (see Retention; checkpoints heed none). Nothing is taken of a session whose first rows
        are of weights that the model does not have any more.
        GeometryMismatch if the session is not paged out of this pool, or the pool serves another cache by now.
        """
        self._own(session)
        require_text("preview", preview)  # else a file would be written that `load` refuses
        retention = Retention.of(retain)
        history = as_tokens(tokens)
        covered = min(len(history), session.n_past)
        history = history[:covered]
        if not np.array_equal(history, session.tokens[:covered]):
            raise ValueError("the tokens to donate are not the ones that the session evaluated")
        if session.outdated:
            return 0
        before = self.held_pages
        if self.checkpoints is not None:
            self.require_pool()
            if session.states is not None and session.states.positions[0] == covered:
                key, snapshot = self.namespace_key(session.namespace, **session.view.fields), session.states.snapshot(0)
                self.checkpoints.insert(key, history, session.table.rows, snapshot, opening, session.id, preview)
            return max(0, self.held_pages - before)
        before = self.stats.inserted_pages
        cursor = self.cursor(session.namespace, session.view)
        full = covered // self.pool.page_size
        self.publish(cursor, history, session.table.rows[:, :full], preview)
        tail = NO_NODE
        if self.exact and covered == session.n_past and covered % self.pool.page_size:
            tail = self.publish_tail(cursor, history, session.table.rows[:, full], preview)
        self.retain(cursor, retention, tail)
        self.drop_places(cursor)
        return self.stats.inserted_pages - before

    def attach(self, session: Session, tokens: object) -> int:
        """Give a fresh session what is cached of the tokens' beginning; returns the tokens matched.

        The caller evaluates `tokens[matched:]`. SessionInUse if the session already holds context. OutOfPages if the
        copy of a partial page finds no room; nothing was taken then.
        """
        self._own(session)
        if session.n_past or session.table.num_pages:
            raise SessionInUse(
                f"pages can be attached only to a fresh session; this one holds {session.n_past} tokens "
                f"and {session.table.num_pages} pages"
            )
        prompt = as_tokens(tokens)
        if self.checkpoints is not None:
            return self._attach_checkpoint(session, prompt)
        cursor = self.cursor(session.namespace, session.view)
        matched = self.seek(cursor, prompt)
        pages = self.take(cursor)
        if cursor.rows:
            try:
                own = self.take_rows(cursor)
            except BaseException:
                self.pool.release(pages[pages >= 0])
                raise
            column = np.full((self.num_groups, 1), NO_PAGE, np.int32)
            column[session.view.groups, 0] = own
            pages = np.concatenate([pages, column], axis=1)
        self.count(cursor, len(prompt))
        session.adopt(prompt[:matched], pages)
        return session.n_past

    def _attach_checkpoint(self, session: Session, prompt: Int32) -> int:
        assert self.checkpoints is not None and session.states is not None
        found = self.checkpoints.find(self.namespace_key(session.namespace, **session.view.fields), prompt)
        if found is None:
            self.count_checkpoint(len(prompt), 0)
            return 0
        session.states.restore(0, found.snapshot)
        try:
            pages = self.checkpoints.attach(found)
        except BaseException:
            session.states.reset(0)
            raise
        self.count_checkpoint(len(prompt), found.num_tokens)
        session.adopt(found.tokens, pages)
        return session.n_past

    def count_checkpoint(self, num_tokens: int, matched: int) -> None:
        """Count one prompt of `num_tokens` tokens that attached a checkpoint of `matched` tokens, or none (0)."""
        self.stats.num_queries += 1
        self.stats.query_tokens += num_tokens
        self.stats.hit_tokens += matched

    def match_len(self, tokens: object, namespace: str = "", loops: int | None = None, cache_window: int = 0) -> int:
        """The tokens that `attach` would attach right now. Touches no entry, takes nothing."""
        prompt, view = as_tokens(tokens), self.spec.view(loops, cache_window)
        if self.checkpoints is not None:
            found = self.checkpoints.find(self.namespace_key(namespace, **view.fields), prompt)
            return 0 if found is None else found.num_tokens
        return self.seek(self.cursor(namespace, view), prompt)

    def checkpoint_at(self, session: Session, tokens: object, matched: int, stable_at: int = 0) -> int:
        """The position to stop the prefill of `tokens` at, so that `insert` there serves later prompts; 0: nowhere.

        `matched` is what `attach` gave; `stable_at` is a position that the caller knows others will share (the end
        of a system prompt). Else it is where `tokens` leaves a cached checkpoint. Both must lie a page past the match.
        Always 0 for a model without recurrent state: its pages are the cache already.
        """
        self._own(session)
        if self.checkpoints is None:
            return 0
        key = self.namespace_key(session.namespace, **session.view.fields)
        return self.checkpoints.stop_at(key, as_tokens(tokens), matched, stable_at)

    def explain(
        self, tokens: object, namespace: str = "", loops: int | None = None, cache_window: int = 0
    ) -> Explanation:
        """How far a prompt matches and why it stops there. Touches nothing. O(pages of the prompt x namespaces)."""
        return explain(self, as_tokens(tokens), namespace, self.spec.view(loops, cache_window))

    def retain(self, cursor: Cursor, retention: Retention | None, tail: int = NO_NODE) -> None:
        """What the pages that the cursor stands on, and the `tail` that its donation left, may expect: see Retention.

        For when a sequence is about to give them back. None changes nothing. O(pages).
        """
        if retention is not None and self._may_publish(cursor):
            nodes = cursor.nodes if tail == NO_NODE else np.append(cursor.nodes, np.int32(tail))
            self.queue.retentions.mark(self.index, nodes, retention, cursor.chain)

    # Keeping, and giving back ---------------------------------------------------------------------------------

    def pin(
        self,
        tokens: object,
        namespace: str = "",
        ttl_s: float | None = None,
        priority: int = 0,
        preview: str = "",
        loops: int | None = None,
        cache_window: int = 0,
    ) -> Pin:
        """Keep what is cached of `tokens` (all of them, not one short) until `unpin`, or for `ttl_s` seconds.

        ValueError where nothing of it is cached. OutOfPages where the budget `max_pinned_pages` does not allow it,
        after expired pins and those of lower priority have gone.
        """
        history, view = as_tokens(tokens), self.spec.view(loops, cache_window)
        checkpoint = None
        require_text("preview", preview)
        if self.checkpoints is not None:
            key = self.namespace_key(namespace, **view.fields)
            checkpoint = self.checkpoints.find(key, np.append(history, np.int32(-1)))
            pages = checkpoint.pages if checkpoint is not None else np.zeros((1, 0), np.int32)
            covered = checkpoint.num_tokens if checkpoint is not None else 0
        else:
            cursor = self.cursor(namespace, view)
            covered = self.index.seek(cursor, history, len(history) // self.pool.page_size) * self.pool.page_size
            pages = self.index.pages[cursor.nodes]
        if not covered:
            raise ValueError("nothing of these tokens is cached, so nothing can be pinned; insert them first")
        return self.pins.add(pages[pages >= 0], covered, namespace, ttl_s, priority, preview, checkpoint)

    def unpin(self, pin: Pin) -> bool:
        """Let a pinned prefix go; it stays cached until its turn to be evicted. False if the pin had ended before,
        or is one of another cache."""
        return self.pins.end(pin)

    def drop(self, namespace: str = "", **fields: object) -> int:
        """Forget a namespace at once, as `release` does with all; returns the pages that the cache gave up.

        All depths and cache windows of it. Its pins end. Pages that sequences use stay theirs, and what they compute
        from now on is not cached.
        """
        for pin in self.pins:
            if pin.namespace == namespace and not fields:
                self.pins.end(pin)
        before = self.held_pages
        for key in self._keys_of(namespace, **fields):
            self._drop_key(key)
        return before - self.held_pages

    def _keys_of(self, namespace: str, **fields: object) -> list[bytes]:
        """The namespace itself, and what else is cached of it with a depth or a cache window."""
        own = self.namespace_key(namespace, **fields)
        known = self.index.known_namespaces() if self.checkpoints is None else self.checkpoints.namespaces()
        plain = fields_of(own)
        return list(dict.fromkeys([own, *(key for key in known if plain == _without_view(key))]))

    def _drop_key(self, key: bytes) -> None:
        if self.checkpoints is not None:
            self.checkpoints.drop_namespace(key)
        chains = self.index.chain[self.index.below(key)]
        held = (self.index.pages[self.index.below(key)] >= 0).sum(axis=1)
        self.pool.unhold(self.index.drop(key))
        for chain, pages in zip(chains.tolist(), held.tolist(), strict=True):
            self.forget(chain, pages)
        if self.listen is not None:
            self.listen(PagesCleared(key))

    def chains(self) -> list[PrefixChain]:
        """A snapshot of every donation that is still there, oldest first; of a recurrent model, of every checkpoint.

        O(donations).
        """
        if self.checkpoints is None:
            return super().chains()
        kept = sorted(self.checkpoints, key=lambda checkpoint: checkpoint.id)
        return [
            PrefixChain(c.id, c.preview, c.born_at, c.num_tokens, len(c.page_ids), c.num_hits, c.last_hit_at)
            for c in kept
        ]

    def evict(self, num_pages: int) -> int:
        """Evict until at least `num_pages` pages became free, or nothing idle is left; returns how many did."""
        return self._reclaim(num_pages)

    def release(self) -> None:
        """Drop everything at once, pins too. Pages that sequences use stay theirs; later look-ups match nothing.

        Also the call to make after a model's weights were changed in place: what cursors of before compute from now
        on is not cached. A session that holds rows of the old weights must not be donated.
        """
        self.pins.clear()
        if self.checkpoints is not None:
            self.checkpoints.clear()
        self._clear()

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write all that is cached to one safetensors file; returns the pages written. `load` takes it in elsewhere.

        Pages, tokens, chains, checkpoints and the order of use; no pins, and nothing from a media span on. Nothing here
        changes, and `path` is replaced
        only once the new file is whole. The file holds what the prompts say. GeometryMismatch where the pool has no
        storage or its model no fingerprint, OSError where the file cannot be written.
        """
        from paged.prefix.saved import save_cache

        return save_cache(self, path)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Take in what a file of `save` holds and this cache does not; returns the pages taken in.

        They are held by the cache alone and count as used now, in the order of their last use. A growing pool grows
        for them; nothing is evicted. What finds no free page, or no place in the budgets, is left out, oldest first,
        and counted in `stats.load_refused`. A cache that matches whole pages takes no partial ones.

        LoadError for a file that is not there, damaged, or none of `save`; GeometryMismatch for one of another model,
        codec, page size or geometry. Then nothing changed. Cost: reads the file twice.
        """
        from paged.prefix.saved import load_cache

        return load_cache(self, path)

    @property
    def held_pages(self) -> int:
        """Pool pages that the cache holds a reference to."""
        return super().held_pages if self.checkpoints is None else self.checkpoints.held_pages

    def _reclaim(self, num_pages: int) -> int:
        self.pins.expire()
        return super()._reclaim(num_pages) if self.checkpoints is None else self.checkpoints.reclaim(num_pages)

    def _on_idle(self, ids: Int32) -> None:
        if self.checkpoints is None:
            super()._on_idle(ids)

    def _own(self, session: Session) -> None:
        if session.pool is not self.pool:
            raise GeometryMismatch("the session is not paged out of this cache's pool")

    def check(self) -> None:
        """Assert the invariants of the class docstring. O(pages)."""
        if self.checkpoints is None:
            super().check()
        else:
            self.checkpoints.check()
        self.pins.check()


def _without_view(namespace: bytes) -> dict[str, object]:
    """The fields of a namespace but for those that a depth or a cache window adds."""
    return {name: value for name, value in fields_of(namespace).items() if name not in ("loops", "cache_window")}
