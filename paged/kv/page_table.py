"""PageTable: the pages of one sequence, one row a page group, with copy-on-write forks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged.errors import check
from paged.kv.pages import Int32, Int64, PagePool
from paged.ops.dispatch import get_backend


class PageTable:
    """Page ids of one sequence, int32 `[num_groups, num_pages]`; position p lies in column `p // page_size`.

    `ensure` is the only place that takes pages. A fork shares every page; `ensure` copies a shared page before
    rows are written into it, so a full page never changes and a partial page has one writer. Where a page lies wholly
    outside its group's sliding window it can be given back (`leave`): its place then reads -1.

    Invariants (`check()`): each id is live and stands once in the table; the places left are the first of their group.
    """

    def __init__(self, pool: PagePool, num_groups: int = 1, groups: Int32 | None = None) -> None:
        """`groups`, ascending, are those that the sequence uses (None: all); the places of the others read -1."""
        self.pool = pool
        self.groups: Int32 = np.arange(num_groups, dtype=np.int32) if groups is None else groups
        self._rows = np.zeros((num_groups, 0), np.int32)
        pool.holders.add(self)

    @property
    def num_groups(self) -> int:
        return self._rows.shape[0]

    @property
    def num_pages(self) -> int:
        """Columns: pages of one group."""
        return self._rows.shape[1]

    @property
    def rows(self) -> Int32:
        """The table itself, `[num_groups, num_pages]`; not to be written to."""
        return self._rows

    @property
    def ids(self) -> Int32:
        """Every page of the table, int32 [n]; a copy, without the places that are left."""
        return self._rows[self._rows >= 0]

    def ensure(self, start: int, end: int) -> None:
        """Make positions `start <= p < end` writable: add the missing columns and copy a shared partial page first.

        OutOfPages if the pool cannot supply them; nothing changed then, nor if a copy fails. Idempotent. O(pages
        added).
        """
        size = self.pool.page_size
        missing = max(0, -(-end // size) - self.num_pages)
        first = start // size
        shared = np.zeros(0, np.int32)
        if start < end and start % size and first < self.num_pages:
            column = self._rows[self.groups, first]
            if (self.pool.refs[column] > 1).any():
                shared = column.copy()
        fresh = self.pool.alloc(len(shared) + missing * len(self.groups))
        if len(shared):
            try:
                if self.pool.storage is not None:
                    get_backend(self.pool.storage.device).copy_pages(self.pool.storage, shared, fresh[: len(shared)])
            except BaseException:
                self.pool.release(fresh)
                raise
            self._rows = self._rows.copy()  # earlier readers keep the table they were given
            self._rows[self.groups, first] = fresh[: len(shared)]
            self.pool.release(shared)
        if missing:
            added = np.full((self.num_groups, missing), -1, np.int32)
            added[self.groups] = fresh[len(shared) :].reshape(missing, -1).T
            self._rows = np.ascontiguousarray(np.concatenate([self._rows, added], axis=1))

    def append(self, columns: Int32) -> None:
        """Take over columns `[num_groups, n]` whose references were already taken for this table."""
        self._rows = np.ascontiguousarray(np.concatenate([self._rows, columns], axis=1))

    def exchange(self, column: int, groups: Int64, old: Int32, new: Int32) -> Int64:
        """Put `new[i]` where `old[i]` stands in a column of group `groups[i]`; how often, [len(groups)]. The caller
        (`PagePool.exchange`) moves the references."""
        here = np.zeros(len(groups), np.int64)
        if column < self.num_pages:
            here[self._rows[groups, column] == old] = 1
            self._rows = self._rows.copy()  # earlier readers keep the table they were given
            self._rows[groups[here > 0], column] = new[here > 0]
        return here

    def count(self, refs: Int32) -> None:
        """Add the references that this table holds to `refs` [num_pages]."""
        refs[self.ids] += 1

    def slot(self, position: int, group: int = 0) -> int:
        """Where a position lies: page id * page_size + offset, in 64 bits."""
        size = self.pool.page_size
        return int(self._rows[group, position // size]) * size + position % size

    def fork(self) -> PageTable:
        """A table over the same pages, each with one more reference. O(pages), copies nothing."""
        other = PageTable(self.pool, self.num_groups, self.groups)
        self.pool.share(self.ids)
        other._rows = self._rows
        return other

    def narrow(self, groups: Int32) -> None:
        """Use only `groups` from now on, some of those used so far, and give the pages of the others back."""
        rows = np.full(self._rows.shape, -1, np.int32)
        rows[groups] = self._rows[groups]
        gone = np.setdiff1d(self.groups, groups)
        ids = self._rows[gone]
        self._rows, self.groups = rows, groups
        self.pool.release(ids[ids >= 0])

    def widen(self, groups: Int32) -> None:
        """Use `groups` from now on: those used so far and others, whose pages are fresh in every column.

        OutOfPages if the pool cannot supply them; nothing changed then.
        """
        new = np.setdiff1d(groups, self.groups)
        fresh = self.pool.alloc(len(new) * self.num_pages)
        self._rows = self._rows.copy()
        self._rows[new] = fresh.reshape(len(new), -1)
        self.groups = groups

    def truncate(self, num_pages: int) -> None:
        """Give back the columns from `num_pages` on. O(pages)."""
        ids = self._rows[:, num_pages:].ravel()
        self._rows = np.ascontiguousarray(self._rows[:, :num_pages])
        self.pool.release(ids[ids >= 0])

    def leave(self, position: int, windows: Sequence[int]) -> None:
        """Give back what no query at `position` or later sees: pages wholly outside the window of their group.

        `windows[g]` counts the query itself; 0: group g sees everything. O(pages given back).
        """
        for group, window in enumerate(windows):
            if not window:
                continue
            first = max(0, position - window + 1) // self.pool.page_size
            ids = self._rows[group, :first]
            ids = ids[ids >= 0][::-1].copy()  # of pages that leave together the deepest goes first
            if len(ids):
                self._rows = self._rows.copy()  # earlier readers keep the table they were given
                self._rows[group, :first] = -1
                self.pool.release(ids)

    def release(self) -> None:
        """Give every page back and be empty; a second call does nothing."""
        self.truncate(0)

    def check(self) -> None:
        """Assert the invariants of the class docstring."""
        ids = self.ids
        unused = np.delete(self._rows, self.groups, axis=0)
        check(bool((unused < 0).all()), "a table holds a page of a group that it does not use")
        left = self._rows[self.groups] < 0
        check(bool((left[:, 1:] <= left[:, :-1]).all()), "a page behind the window was given up before one in front")
        check(len(np.unique(ids)) == len(ids), "a page stands twice in one table")
        check(not len(ids) or int(self.pool.refs[ids].min()) >= 1, "a table holds a freed page")
