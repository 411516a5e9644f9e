"""PagePool: who holds which page. Ids and reference counts, no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from paged.errors import OutOfPages, UnsupportedShape, check, require_integer

if TYPE_CHECKING:
    from paged.kv.storage import PageStorage
    from paged.spec import StateSpec

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

MAX_PAGES = 2**31 - 1  # page ids are int32 everywhere; offsets made from them are 64-bit


class PageHolder(Protocol):
    """Who has pages of sequences: see PageTable."""

    def exchange(self, column: int, groups: Int64, old: Int32, new: Int32) -> Int64: ...
    def count(self, refs: Int32) -> None: ...


class PagePool:
    """The ids of a fixed (or growing) number of pages, each free, live, or held by the prefix cache alone.

    `refs[id]` counts the holders of a page; the prefix cache is one of them where `held[id]` is set. Freed ids
    come back last in, first out, and a fresh pool hands out 0, 1, 2, ... Every operation costs O(pages named in
    it), whatever the size of the pool.

    Invariants (`check()`):
    - num_free + num_live + num_cached_only == num_pages;
    - the free list holds each id with refs 0 exactly once, and no other;
    - a page that the cache holds has refs >= 1; num_cached_only counts those with refs == 1.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 16,
        storage: PageStorage | None = None,
        max_pages: int | None = None,
    ) -> None:
        """`max_pages` above `num_pages` lets the pool double, up to that size, before anything is evicted."""
        num_pages, page_size = require_integer("num_pages", num_pages), require_integer("page_size", page_size)
        if not 1 <= num_pages <= MAX_PAGES:
            raise UnsupportedShape(f"num_pages must be between 1 and {MAX_PAGES}, got {num_pages}")
        if (max_pages or 0) > MAX_PAGES:
            raise UnsupportedShape(f"max_pages must be at most {MAX_PAGES}, got {max_pages}")
        if page_size < 1:
            raise UnsupportedShape(f"page_size must be at least 1 token, got {page_size}")
        self.page_size = page_size
        self.storage = storage
        self.fingerprint = ""  # of the model whose rows the pages hold: part of every prefix chain's root
        self.state_spec: StateSpec | None = None  # of that model: where it has recurrent state, pages are not all
        self.max_pages = max(num_pages, max_pages or 0)
        self.refs: Int32 = np.zeros(num_pages, np.int32)
        self.held = np.zeros(num_pages, np.bool_)
        self._free: Int32 = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages
        self._num_cached_only = 0
        self._dropped: deque[Int32] = deque()  # by finalisers
        self.holders: WeakSet[PageHolder] = WeakSet()  # tables of sessions, and slots of schedulers
        # The prefix cache sets both: `reclaim(n)` gives back at least n pages if it can; `on_idle(ids)` hears of
        # held pages that lost their last other holder.
        self.reclaim: Callable[[int], object] | None = None
        self.on_idle: Callable[[Int32], object] | None = None

    @property
    def num_pages(self) -> int:
        return len(self.refs)

    @property
    def num_free(self) -> int:
        self._collect()
        return self._num_free

    @property
    def num_cached_only(self) -> int:
        """Pages that only the prefix cache holds: they can be had by evicting."""
        self._collect()
        return self._num_cached_only

    @property
    def num_live(self) -> int:
        """Pages that at least one sequence holds."""
        return self.num_pages - self.num_free - self._num_cached_only

    @property
    def num_available(self) -> int:
        """Pages that `alloc` can supply now: free, still to be grown, or held by the cache alone."""
        return self.max_pages - self.num_live

    @property
    def usage(self) -> float:
        """Share of pages that sequences hold, 0.0 to 1.0; what only the cache holds does not count."""
        return self.num_live / self.num_pages

    def alloc(self, n: int) -> Int32:
        """`n` pages with one reference each, int32 [n]. Grows, then evicts from the cache, when too few are free.

        OutOfPages if that is not enough; then nothing was taken and nothing evicted.
        """
        if n < 0:
            raise ValueError(f"the number of pages must be 0 or more, got {n}")
        self._collect()
        if n > self._num_free:
            if n > self.num_available and self.reclaim is not None:
                self.reclaim(0)  # what is pinned may have expired
            if n > self.num_available:
                raise OutOfPages(
                    f"{n} pages were asked for, {self.num_available} of {self.num_pages} are free or evictable"
                )
            self._grow(n - self._num_free)
            if n > self._num_free and self.reclaim is not None:
                self.reclaim(n - self._num_free)
            if n > self._num_free:
                raise OutOfPages(f"{n} pages were asked for, {self._num_free} are free and no more could be evicted")
        end = self._num_free
        ids = np.array(self._free[end - n : end][::-1], np.int32)
        self._num_free = end - n
        self.refs[ids] = 1
        return ids

    def share(self, ids: Int32) -> None:
        """Add one reference to each page of `ids` (distinct, none of them free)."""
        refs = self.refs[ids]
        if len(refs) and refs.min() < 1:
            raise ValueError(f"page {int(ids[int(refs.argmin())])} is free and cannot be shared")
        self._num_cached_only -= int(np.count_nonzero((refs == 1) & self.held[ids]))
        self.refs[ids] = refs + 1

    def release(self, ids: Int32) -> None:
        """Drop one reference of each page of `ids` (distinct). Pages without holders return to the free list."""
        refs = self.refs[ids] - 1
        if len(refs) and refs.min() < 0:
            raise ValueError(f"page {int(ids[int(refs.argmin())])} was released more often than it was taken")
        self.refs[ids] = refs
        self._push(ids[refs == 0])
        idle = ids[(refs == 1) & self.held[ids]]
        if len(idle):
            self._num_cached_only += len(idle)
            if self.on_idle is not None:
                self.on_idle(idle)

    def exchange(self, column: int, old: Int32, new: Int32) -> None:
        """Whoever has page `old[g]` in a column of group g goes on with `new[g]`, which has the same contents.

        Both int32 [num_groups]; groups where they agree, or where one is -1, stay. O(holders).
        """
        groups = np.flatnonzero((old != new) & (old >= 0) & (new >= 0))
        old, new = old[groups], new[groups]
        counts = np.zeros(len(groups), np.int64)
        for holder in list(self.holders):
            counts += holder.exchange(column, groups, old, new)
        for i in range(int(counts.max(initial=0))):
            self.share(new[counts > i])
            self.release(old[counts > i])

    def drop(self, ids: Int32) -> None:
        """`release` for finalisers, which may run in the middle of any other call: it happens at the next one."""
        self._dropped.append(ids)

    def hold(self, ids: Int32) -> None:
        """The cache becomes a holder of each page of `ids` (distinct, live, not held yet)."""
        if (
            len(ids) == 1
        ):  # what one request publishes in a step: numpy costs ten times as much for one id as for its place
            page = int(ids[0])
            good = not self.held[page] and self.refs[page] >= 1
        else:
            page = ids
            good = not self.held[ids].any() and int(self.refs[ids].min(initial=1)) >= 1
        if not good:
            raise ValueError("the cache can hold only live pages, and each of them once")
        self.refs[page] += 1
        self.held[page] = True

    def unhold(self, ids: Int32) -> None:
        """The cache gives up each page of `ids` (distinct, held); those without other holders become free."""
        if not self.held[ids].all():
            raise ValueError("the cache gave up a page that it does not hold")
        refs = self.refs[ids] - 1
        self.held[ids] = False
        self.refs[ids] = refs
        freed = ids[refs == 0]
        self._num_cached_only -= len(freed)
        self._push(freed)

    def _collect(self) -> None:
        while self._dropped:
            self.release(self._dropped.popleft())

    def _push(self, ids: Int32) -> None:
        end = self._num_free + len(ids)
        self._free[self._num_free : end] = ids
        self._num_free = end

    def _grow(self, missing: int) -> None:
        """Double (at least by `missing`) up to max_pages; the lowest new id is handed out first."""
        old = self.num_pages
        new = min(self.max_pages, max(2 * old, old + missing))
        if new == old:
            return
        if self.storage is not None:
            self.storage.grow(new)
        self.refs = np.concatenate([self.refs, np.zeros(new - old, np.int32)])
        self.held = np.concatenate([self.held, np.zeros(new - old, np.bool_)])
        free = np.empty(new, np.int32)
        free[: new - old] = np.arange(new - 1, old - 1, -1, dtype=np.int32)
        free[new - old : new - old + self._num_free] = self._free[: self._num_free]
        self._free = free
        self._num_free += new - old

    def check(self) -> None:
        """Assert the invariants of the class docstring. O(num_pages)."""
        self._collect()
        free = self._free[: self._num_free]
        check(int((self.refs == 0).sum()) == self._num_free, "the free list and the reference counts disagree")
        check(len(np.unique(free)) == self._num_free, "an id stands twice in the free list")
        check(not self.refs[free].any(), "a page in the free list is still held")
        check(not (self.held & (self.refs < 1)).any(), "the cache holds a page whose count is 0")
        cached_only = int(((self.refs == 1) & self.held).sum())
        check(cached_only == self._num_cached_only, f"{cached_only} cached-only pages, counted {self._num_cached_only}")
        live = int((self.refs > self.held).sum())
        check(self.num_free + live + self.num_cached_only == self.num_pages, "the pages do not add up")
        if self.storage is not None:
            check(self.storage.num_pages == self.num_pages, "pool and storage differ in size")
            self.storage.check()
