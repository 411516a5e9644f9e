"""Checkpoints: what a model with recurrent state can continue from, found by the tokens that they hold."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain, pairwise
from operator import attrgetter

import numpy as np
import xxhash
from sortedcontainers import SortedKeyList

from paged.errors import OutOfPages, check
from paged.kv.pages import Int32, PagePool
from paged.kv.state import StateSnapshot
from paged.ops.dispatch import get_backend
from paged.prefix.stats import PrefixStats

_REMEMBERED = 4096  # evicted checkpoints that an explanation still knows


@dataclass(slots=True, eq=False)
class Checkpoint:
    """Tokens, the pages of their rows and the recurrent state after them: valid at exactly that one position.

    An opening is what several conversations begin with, a tail is one conversation's own. Only the store changes a
    checkpoint, but for `pins`: whoever counts one up keeps it from making way, until it is counted down, and has a
    reference to each of its pages meanwhile, so that the pool promises them to nobody.
    """

    namespace: bytes
    tokens: Int32  # [n]
    pages: Int32  # [num_groups, ceil(n / page_size)]; a partial last page is its own; -1: no window reaches there
    snapshot: StateSnapshot
    opening: bool
    donor: int
    preview: str
    born_at: float  # seconds since the epoch
    last_use: int  # the store's tick
    num_hits: int = 0
    last_hit_at: float = 0.0  # 0 until the first hit
    pins: int = 0
    id: int = 0  # the store gives it, counting from 1
    above: Checkpoint | None = field(default=None, repr=False)  # the deepest other one that opens its tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def page_ids(self) -> Int32:
        """Its distinct pages, int32 [m]; a copy."""
        return self.pages[self.pages >= 0]


class CheckpointStore:
    """The checkpoints of past and running sequences. It serves one pool, whose page cache stays empty meanwhile.

    A prompt attaches a checkpoint only where it begins with all of its tokens and goes on. Whole pages are held
    together with the donor and with other checkpoints; a partial last page is copied, since the donor goes on
    writing into its own. A checkpoint's pages never go before it does, so none is ever stranded: what `find` gives
    can be attached.

    Past `max_states` checkpoints, or past `max_state_bytes` bytes of snapshots and of distinct pages (0: no bound),
    the tail used longest ago goes, an opening only when no tail can go; the newest stands even alone over the byte
    budget, and pinned ones stand. `drop`, `drop_namespace` and `clear` heed no pins. Not thread-safe.

    Invariants (`check()`):
    - a namespace's checkpoints stand in the order of their tokens, no two with the same, and each knows the deepest
      other one that opens it;
    - each is among the tails or the openings, as its kind says, in order of last use;
    - each has its pages, distinct, and the state of its last position; a partial last page is its own alone, and no
      sequence has it;
    - the pool holds for the cache whatever page is counted here, and each is counted once a checkpoint;
    - held_pages and num_bytes are what the checkpoints add up to;
    - both budgets hold, unless pins or the newest kept them from it at the last insert.
    """

    def __init__(
        self,
        pool: PagePool,
        num_groups: int,
        max_states: int = 16,
        max_state_bytes: int = 0,
        stats: PrefixStats | None = None,
    ) -> None:
        """`max_states` 0 keeps nothing, and a negative number counts as 0."""
        if max_state_bytes < 0:
            raise ValueError(f"max_state_bytes must be 0 (no bound) or more, got {max_state_bytes}")
        self.pool = pool
        self.num_groups = num_groups
        self.max_states = max(0, max_states)
        self.max_state_bytes = max_state_bytes
        self.stats = PrefixStats() if stats is None else stats
        self.evicted: dict[bytes, None] = {}  # digests of tokens whose checkpoint went for room, oldest first
        self._evicted_lengths: dict[int, None] = {}
        self._next_id = 1
        self.version = 0  # changes whenever a look-up might give something else
        self._by_tokens: dict[bytes, SortedKeyList] = {}  # of each namespace
        self._tails: OrderedDict[Checkpoint, None] = OrderedDict()  # both oldest use first
        self._openings: OrderedDict[Checkpoint, None] = OrderedDict()
        self._holders: Int32 = np.zeros(pool.num_pages, np.int32)  # checkpoints that hold each page
        self._num_held = 0
        self._snapshot_bytes = 0
        self._tick = 0
        self._excused = False  # the last insert could not bring both budgets to hold

    def __len__(self) -> int:
        return len(self._tails) + len(self._openings)

    def __iter__(self) -> Iterator[Checkpoint]:
        """Oldest use first."""
        return merge(list(self._tails), list(self._openings), key=attrgetter("last_use"))

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        """Whether it is still kept. O(1)."""
        return checkpoint in self._tails or checkpoint in self._openings

    def namespaces(self) -> list[bytes]:
        """The namespaces that have checkpoints."""
        return list(self._by_tokens)

    @property
    def held_pages(self) -> int:
        """Distinct pages held."""
        return self._num_held

    @property
    def num_bytes(self) -> int:
        """What `max_state_bytes` bounds: bytes of all snapshots, and of the pages held where the pool has storage."""
        page_bytes = 0 if self.pool.storage is None else self.pool.storage.page_bytes
        return self._snapshot_bytes + self._num_held * page_bytes

    # Looking up: touches nothing ------------------------------------------------------------------------------

    def find(self, namespace: bytes, tokens: Int32) -> Checkpoint | None:
        """The deepest checkpoint whose every token opens `tokens` and that is shorter than they are.

        O(log n + tokens compared) for n checkpoints; and where branches alternate with turns of one conversation, a
        step for each turn of one branch.
        """
        entries = self._by_tokens.get(namespace)
        if entries is None:
            return None
        prompt = tokens[:-1]
        # In this order nothing stands between a checkpoint and what it opens but what it opens too: all that open
        # the prompt open the greatest one that is not after the prompt, and stand on its way up.
        found = _last_before(_order(prompt), entries)
        shared = 0 if found is None else _common(found.tokens, prompt)
        if found is not None and found.above is not None and len(found.above.tokens) > shared:
            prompt = prompt[:shared]  # many turns of a conversation may lie past it: the order skips them at once
            found = _last_before(_order(prompt), entries)
            shared = 0 if found is None else _common(found.tokens, prompt)
        while found is not None and len(found.tokens) > shared:
            found = found.above
        return found

    def common(self, namespace: bytes, tokens: Int32) -> int:
        """Tokens of the longest common prefix with any checkpoint, at most `len(tokens) - 1`.

        O(log n + tokens compared) for n checkpoints.
        """
        entries = self._by_tokens.get(namespace)
        if entries is None:
            return 0
        prompt = tokens[:-1]
        key = _order(prompt)
        near = (_last_before(key, entries), next(entries.irange_key(min_key=key), None))
        return max(_common(checkpoint.tokens, prompt) for checkpoint in near if checkpoint is not None)

    def stop_at(self, namespace: bytes, tokens: Int32, matched: int, stable_at: int = 0) -> int:
        """Where to stop the prefill of `tokens` in order to leave a checkpoint there, or 0 where a stop buys nothing.

        `stable_at`, the caller's hint, if it lies inside the prompt and at least a page past the `matched` tokens;
        else where the prompt leaves the checkpoint that it shares most with, if that does. Costs what `common` does.
        """
        least = matched + self.pool.page_size
        if not self.max_states:
            return 0
        if least <= stable_at < len(tokens):
            return stable_at
        shared = self.common(namespace, tokens)
        return shared if shared >= least else 0

    # Keeping and attaching ------------------------------------------------------------------------------------

    def insert(
        self,
        namespace: bytes,
        tokens: Int32,
        pages: Int32,
        snapshot: StateSnapshot,
        opening: bool = False,
        donor: int = 0,
        preview: str = "",
    ) -> Checkpoint | None:
        """Keep a checkpoint of `tokens`, whose rows are in the live pages `pages [num_groups, >= ceil(n / page_size)]`.

        Where the same tokens are kept already, that one is touched and returned; it becomes an opening if `opening`
        says so, or if `donor`, the number of the sequence that stops here, is not the one that left it. None, and
        nothing is kept, where there are no tokens, `max_states` is 0, the snapshot is of another position, or the
        pool cannot supply the copy of a partial last page. ValueError for pages that are too few or free.

        O(log n + tokens), a comparison with each checkpoint that `tokens` open, and one copied page a group.
        """
        n, size = len(tokens), self.pool.page_size
        if not n or not self.max_states:
            return None
        if (same := self._same(namespace, tokens)) is not None:
            self._touch(same, opening or donor != same.donor)
            return same
        if snapshot.position != n:
            return None
        pages = self._own_pages(pages, n)
        if n % size:
            try:
                pages[:, -1] = self._copied(pages[:, -1].copy())
            except OutOfPages:
                self.stats.checkpoints_refused += 1
                return None
        self._hold(pages[pages >= 0])
        if n % size:
            self.pool.release(pages[:, -1])  # the reference that the copy came with; the hold stays
        self._tick += 1
        checkpoint = Checkpoint(
            namespace, np.array(tokens, np.int32), pages, snapshot, opening, donor, preview, time.time(), self._tick
        )
        self._enter(checkpoint)
        self.stats.checkpoint_inserts += 1
        self._trim(checkpoint)
        return checkpoint

    def attach(self, checkpoint: Checkpoint) -> Int32:
        """Pages `[num_groups, ceil(n / page_size)]` for a new sequence, with one reference to each taken for it.

        Whole pages are shared; a partial last page is copied, since the sequence will write into it. The caller
        restores `checkpoint.snapshot`. OutOfPages if the pool cannot supply the copy, ValueError for a checkpoint
        that was dropped; then nothing changed. O(pages), and one copied page a group.
        """
        if checkpoint not in self:
            raise ValueError(f"the checkpoint of {checkpoint.num_tokens} tokens was dropped; look it up again")
        pages = checkpoint.pages.copy()
        self.pool.share(checkpoint.page_ids)  # all of them: making room for the copy must not drop their checkpoint
        if checkpoint.num_tokens % self.pool.page_size:
            last = pages[:, -1].copy()
            try:
                pages[:, -1] = self._copied(last)
            except BaseException:
                self.pool.release(checkpoint.page_ids)
                raise
            self.pool.release(last)
        self._touch(checkpoint)
        checkpoint.num_hits += 1
        checkpoint.last_hit_at = time.time()
        self.stats.checkpoint_hits += 1
        return pages

    def attachable(self, checkpoint: Checkpoint) -> Int32:
        """Ids of the pages that `attach` would share, int32 [n]. O(pages)."""
        pages = checkpoint.pages[:, : checkpoint.num_tokens // self.pool.page_size]
        return pages[pages >= 0]

    def idle_pages(self, checkpoint: Checkpoint) -> int:
        """Those of them that only the cache holds: sharing makes them live. O(pages)."""
        return int(np.count_nonzero(self.pool.refs[self.attachable(checkpoint)] == 1))

    # Room -----------------------------------------------------------------------------------------------------

    def reclaim(self, num_pages: int) -> int:
        """Drop checkpoints until at least `num_pages` pages became free, or none is left that can go; returns how many.

        Tails by last use, then openings by last use; those stand that are pinned, or whose pages all are in use,
        since nothing becomes free by them.
        """
        freed = 0
        for checkpoint in self._victims():
            if freed >= num_pages:
                break
            if (self.pool.refs[checkpoint.page_ids] == 1).any():
                freed += self._evict(checkpoint)
        return freed

    def drop(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint; pages that sequences use stay theirs. ValueError if it was dropped before. O(pages)."""
        if checkpoint not in self:
            raise ValueError(f"the checkpoint of {checkpoint.num_tokens} tokens was dropped before")
        self.version += 1
        entries = self._by_tokens[checkpoint.namespace]
        entries.remove(checkpoint)
        for other in _opened_by(checkpoint, entries):
            if other.above is checkpoint:
                other.above = checkpoint.above
        checkpoint.above = None
        if not entries:
            del self._by_tokens[checkpoint.namespace]
        del self._by_use(checkpoint)[checkpoint]
        self._snapshot_bytes -= checkpoint.snapshot.num_bytes
        ids = checkpoint.page_ids
        self._holders[ids] -= 1
        gone = ids[self._holders[ids] == 0]
        self._num_held -= len(gone)
        self.pool.unhold(gone)

    def drop_namespace(self, namespace: bytes) -> int:
        """Forget every checkpoint of a namespace; returns how many there were."""
        entries: list[Checkpoint] = list(self._by_tokens.get(namespace, ()))
        for checkpoint in reversed(entries):  # what one opens goes before it: nothing is left to be told
            self.drop(checkpoint)
        return len(entries)

    def clear(self) -> None:
        """Forget every checkpoint."""
        for namespace in list(self._by_tokens):
            self.drop_namespace(namespace)
        self.evicted.clear()
        self._evicted_lengths.clear()

    def _victims(self) -> Iterator[Checkpoint]:
        """What may go to make room, first what should go first; not pinned ones. The caller may drop as it iterates."""
        return (checkpoint for checkpoint in [*self._tails, *self._openings] if not checkpoint.pins)

    def evicted_at(self, namespace: bytes, tokens: Int32, beyond: int) -> int:
        """The most leading tokens, more than `beyond`, whose checkpoint went for room; 0 if none is remembered.

        Costs a digest of the tokens for each length that was evicted: for explanations only.
        """
        lengths = sorted((n for n in self._evicted_lengths if beyond < n < len(tokens)), reverse=True)
        return next((n for n in lengths if _digest(namespace, tokens[:n]) in self.evicted), 0)

    def _evict(self, checkpoint: Checkpoint) -> int:
        if len(self.evicted) >= _REMEMBERED:
            del self.evicted[next(iter(self.evicted))]
        self.evicted[_digest(checkpoint.namespace, checkpoint.tokens)] = None
        self._evicted_lengths[checkpoint.num_tokens] = None
        before = self.pool.num_free
        self.drop(checkpoint)
        self.stats.checkpoint_evictions += 1
        return self.pool.num_free - before

    def _trim(self, newest: Checkpoint) -> None:
        for checkpoint in self._victims():
            if not self._over_budget():
                break
            if checkpoint is not newest:
                self._evict(checkpoint)
        self._excused = self._over_budget()

    def _over_budget(self) -> bool:
        return len(self) > self.max_states or 0 < self.max_state_bytes < self.num_bytes

    # The parts of an insert -----------------------------------------------------------------------------------

    def _same(self, namespace: bytes, tokens: Int32) -> Checkpoint | None:
        entries = self._by_tokens.get(namespace)
        key = _order(tokens)
        return None if entries is None else next(entries.irange_key(key, key), None)

    def _own_pages(self, pages: Int32, num_tokens: int) -> Int32:
        """A copy of the columns of `num_tokens` tokens, checked. A window may have left whole pages, even all."""
        size = self.pool.page_size
        columns = -(-num_tokens // size)
        if pages.ndim != 2 or pages.shape[0] != self.num_groups or pages.shape[1] < columns:
            raise ValueError(
                f"a checkpoint needs {columns} pages in each of {self.num_groups} groups, got an array {pages.shape}"
            )
        own = np.array(pages[:, :columns], np.int32, order="C")
        partial = own[:, num_tokens // size :]
        if int(self.pool.refs[own[own >= 0]].min(initial=1)) < 1 or int(partial.min(initial=0)) < 0:
            raise ValueError("a checkpoint can be made of live pages only, and one of these is free")
        return own

    def _copied(self, source: Int32) -> Int32:
        """Fresh pages with one reference each that hold what `source` holds; OutOfPages leaves nothing behind."""
        fresh = self.pool.alloc(len(source))
        storage = self.pool.storage
        try:
            if storage is not None:
                get_backend(storage.device).copy_pages(storage, source, fresh)
        except BaseException:
            self.pool.release(fresh)
            raise
        return fresh

    def _hold(self, ids: Int32) -> None:
        if self.pool.num_pages > len(self._holders):
            more = np.zeros(self.pool.num_pages - len(self._holders), np.int32)
            self._holders = np.concatenate([self._holders, more])
        new = ids[self._holders[ids] == 0]
        self.pool.hold(new)
        self._num_held += len(new)
        self._holders[ids] += 1

    def _enter(self, checkpoint: Checkpoint) -> None:
        self.version += 1
        checkpoint.id = self._next_id
        self._next_id += 1
        checkpoint.above = self.find(checkpoint.namespace, checkpoint.tokens)
        entries = self._by_tokens.setdefault(checkpoint.namespace, SortedKeyList(key=_order_of))
        for other in _opened_by(checkpoint, entries):
            if other.above is checkpoint.above:
                other.above = checkpoint
        entries.add(checkpoint)
        self._by_use(checkpoint)[checkpoint] = None
        self._snapshot_bytes += checkpoint.snapshot.num_bytes

    def _touch(self, checkpoint: Checkpoint, promote: bool = False) -> None:
        self._tick += 1
        checkpoint.last_use = self._tick
        del self._by_use(checkpoint)[checkpoint]
        checkpoint.opening |= promote
        self._by_use(checkpoint)[checkpoint] = None

    def _by_use(self, checkpoint: Checkpoint) -> OrderedDict[Checkpoint, None]:
        return self._openings if checkpoint.opening else self._tails

    def check(self) -> None:
        """Assert the invariants of the class docstring. O(tokens and pages of all checkpoints)."""
        size, storage = self.pool.page_size, self.pool.storage
        for namespace, entries in self._by_tokens.items():
            check(len(entries) > 0, "an empty namespace was kept")
            keys = [_order_of(checkpoint) for checkpoint in entries]
            check(all(a < b for a, b in pairwise(keys)), "checkpoints are out of order, or twice")
            way_up: list[Checkpoint] = []  # all that open the one at hand
            for checkpoint in entries:
                check(checkpoint.namespace == namespace, "a checkpoint is in another namespace than its own")
                while way_up and _common(way_up[-1].tokens, checkpoint.tokens) < way_up[-1].num_tokens:
                    way_up.pop()
                check(checkpoint.above is (way_up[-1] if way_up else None), "another one opens a checkpoint's tokens")
                way_up.append(checkpoint)
        everyone = list(chain.from_iterable(self._by_tokens.values()))
        check(
            set(everyone) == {*self._tails, *self._openings} and len(self) == len(everyone), "the kinds do not add up"
        )
        for kind, opening in ((self._tails, False), (self._openings, True)):
            check(all(checkpoint.opening == opening for checkpoint in kind), "a checkpoint is among the other kind")
            uses = [checkpoint.last_use for checkpoint in kind]
            check(uses == sorted(set(uses)) and (not uses or uses[-1] <= self._tick), "the order of use is wrong")
        holders = np.zeros(self.pool.num_pages, np.int32)
        for checkpoint in everyone:
            n, ids = checkpoint.num_tokens, checkpoint.page_ids
            check(n > 0 and checkpoint.snapshot.position == n, "a checkpoint has the state of another position")
            check(
                checkpoint.pages.shape == (self.num_groups, -(-n // size)), "a checkpoint has too few pages or too many"
            )
            check(len(np.unique(ids)) == len(ids), "a page stands twice in one checkpoint")
            holders[ids] += 1
        for checkpoint in everyone:
            own = checkpoint.pages[:, checkpoint.num_tokens // size :]
            used = self.pool.refs[own] > 1 + checkpoint.pins
            check(not used.any(), "a sequence has the partial page of a checkpoint")
            check(bool((holders[own] == 1).all()), "two checkpoints have one partial page")
        counted = np.zeros_like(holders)
        counted[: len(self._holders)] = self._holders
        check(bool((counted == holders).all()), "the holders of a page are miscounted")
        check(bool(self.pool.held[holders > 0].all()), "the pool does not hold a page of a checkpoint")
        check(self._num_held == int((holders > 0).sum()), f"held_pages is {self._num_held}")
        num_bytes = sum(checkpoint.snapshot.num_bytes for checkpoint in everyone)
        num_bytes += int((holders > 0).sum()) * (storage.page_bytes if storage is not None else 0)
        check(self.num_bytes == num_bytes, f"num_bytes is {self.num_bytes}, the checkpoints have {num_bytes}")
        check(
            self._excused or not self._over_budget(), "a budget is exceeded, and neither pins nor the newest ask for it"
        )


def _digest(namespace: bytes, tokens: Int32) -> bytes:
    return xxhash.xxh3_128_digest(namespace + tokens.tobytes())


def _order(tokens: Int32) -> bytes:
    """A key whose order is that of the tokens, one after the other, and a prefix stands before what it opens."""
    return tokens.astype(">i4").tobytes()


def _order_of(checkpoint: Checkpoint) -> bytes:
    return _order(checkpoint.tokens)


def _common(a: Int32, b: Int32) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _last_before(key: bytes, entries: SortedKeyList) -> Checkpoint | None:
    """The last one that stands at `key` or before it."""
    return next(entries.irange_key(max_key=key, reverse=True), None)


def _opened_by(checkpoint: Checkpoint, entries: SortedKeyList) -> Iterator[Checkpoint]:
    """Those of `entries` that begin with all tokens of `checkpoint`, which is not among them: they would follow it."""
    for other in entries.irange_key(min_key=_order_of(checkpoint)):
        if _common(checkpoint.tokens, other.tokens) < checkpoint.num_tokens:
            break
        yield other
