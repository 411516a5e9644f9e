"""Slots: the state of all running requests in arrays, one row a slot."""

from __future__ import annotations

import numpy as np

from paged.errors import check
from paged.kv.pages import Int64, PagePool
from scheduler.request import Int32, Request

NO_STOP = 2**31 - 1


class Slots:
    """Per-slot arrays, so that a step over many requests is a few vectorised operations.

    tokens      int32 [num_slots, max_seq_len]          prompt and output
    prompt_len  int32 [num_slots]
    known       int32 [num_slots]                       tokens whose ids are known
    computed    int32 [num_slots]                       tokens whose rows are in the pages
    limit       int32 [num_slots]                       `known` at which the request ends with "length"
    min_known   int32 [num_slots]                       `known` below which end ids do not end it
    end_ids     int32 [num_slots, width]                padded with -1
    arrival     int64 [num_slots]                       order of submission
    stop        int32 [num_slots]                       `computed` at which a step must pause (NO_STOP: nowhere)
    work        int32 [num_slots]                       rows computed since the request was placed
    loops       int32 [num_slots]                       depth in a looped model; 0 = not looped
    cache_window  int32 [num_slots]                     positions that each token sees at most; 0 = all
    uses        bool [num_groups, num_slots]            the groups that its rows are in
    windows     int32 [num_groups, num_slots]           its window in each group; 0 = none
    num_pages   int32 [num_slots]                       columns in use
    page_table  int32 [num_groups, num_slots, columns]  -1: given back, since no window reaches there any more, or a
                                                        group that the slot does not use
    left        int32 [num_groups, num_slots]           leading columns that were given back
    rows_ahead    int32 [num_slots]                     rows of the step in flight, which `computed` does not count yet
    tokens_ahead  int32 [num_slots]                     tokens it may give, which `known` does not count yet
    running     int32 [num_running]                     slots in order of admission

    Invariants (`check()`): `running` and the free slots partition the slots; computed < known for each running
    slot; each has exactly the pages of its known tokens and of those in flight, in the groups it uses; no page id
    stands twice in one slot; every page is live; the columns given back are the first `left` of their group.
    """

    def __init__(self, num_slots: int, max_seq_len: int, pool: PagePool, num_groups: int) -> None:
        self.pool = pool
        pool.holders.add(self)
        columns = -(-max_seq_len // pool.page_size)
        self.tokens = np.zeros((num_slots, max_seq_len), np.int32)
        self.prompt_len = np.zeros(num_slots, np.int32)
        self.known = np.zeros(num_slots, np.int32)
        self.computed = np.zeros(num_slots, np.int32)
        self.limit = np.zeros(num_slots, np.int32)
        self.min_known = np.zeros(num_slots, np.int32)
        self.end_ids = np.full((num_slots, 1), -1, np.int32)
        self.arrival = np.zeros(num_slots, np.int64)
        self.stop = np.full(num_slots, NO_STOP, np.int32)
        self.work = np.zeros(num_slots, np.int32)
        self.loops = np.zeros(num_slots, np.int32)
        self.cache_window = np.zeros(num_slots, np.int32)
        self.uses = np.zeros((num_groups, num_slots), np.bool_)
        self.windows = np.zeros((num_groups, num_slots), np.int32)
        self.num_pages = np.zeros(num_slots, np.int32)
        self.page_table = np.zeros((num_groups, num_slots, columns), np.int32)
        self.left = np.zeros((num_groups, num_slots), np.int32)
        self.rows_ahead = np.zeros(num_slots, np.int32)
        self.tokens_ahead = np.zeros(num_slots, np.int32)
        self.running = np.zeros(0, np.int32)
        self.requests: list[Request | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def place(self, request: Request, pages: Int32, matched: int) -> int:
        """Give `request` a slot with the columns `pages [num_groups, n]`, of which `matched` tokens are computed."""
        slot = self._free[-1]  # taken at the end: what fails on the way must not cost a slot
        known = request.known
        self.tokens[slot, : len(known)] = known
        self.prompt_len[slot] = request.num_prompt
        self.known[slot] = len(known)
        self.computed[slot] = matched
        self.limit[slot] = request.limit
        # Under a grammar an end id is drawn only where one may end the output, or nothing else may follow.
        least = request.params.min_tokens if request.matcher is None else 0
        self.min_known[slot] = min(request.num_prompt + least, request.limit)
        ends = request.end_ids
        if len(ends) > self.end_ids.shape[1]:
            wider = np.full((len(self.end_ids), len(ends)), -1, np.int32)
            wider[:, : self.end_ids.shape[1]] = self.end_ids
            self.end_ids = wider
        self.end_ids[slot] = -1
        self.end_ids[slot, : len(ends)] = ends
        self.work[slot] = 0
        self.arrival[slot] = request.arrival
        view = request.view
        self.loops[slot] = view.loops
        self.cache_window[slot] = view.cache_window
        self.uses[:, slot] = view.uses
        self.windows[:, slot] = np.where(view.uses, view.windows, 0)
        self.num_pages[slot] = pages.shape[1]
        self.page_table[:, slot, : pages.shape[1]] = pages
        self.left[:, slot] = np.where(view.uses, (pages < 0).sum(axis=1), 0)
        self.requests[slot] = request
        self.running = np.append(self.running, np.int32(slot))
        return self._free.pop()

    def pages(self, slot: int) -> Int32:
        """The page ids of a slot, int32 [num_groups, columns]; a view."""
        return self.page_table[:, slot, : self.num_pages[slot]]

    def page_ids(self, slot: int) -> Int32:
        """Every page that a slot holds, int32 [n]; a copy, without the places that were given back."""
        pages = self.pages(slot)
        return pages[pages >= 0]

    def extend(self, slots: Int32) -> None:
        """One more column for each of `slots`, with fresh pages in the groups that it uses."""
        uses = self.uses[:, slots]
        pages = np.full(uses.shape, -1, np.int32)
        pages[uses] = self.pool.alloc(int(np.count_nonzero(uses)))
        self.page_table[:, slots, self.num_pages[slots]] = pages
        self.num_pages[slots] += 1

    def shrink(self, slots: Int32) -> None:
        """Give back the columns of `slots` behind their known tokens: those of drafts that were wrong."""
        surplus = self.num_pages[slots] * self.pool.page_size - self.known[slots] >= self.pool.page_size
        for slot in slots[surplus].tolist():
            columns = -(-int(self.known[slot]) // self.pool.page_size)
            pages = self.pages(slot)[:, columns:]
            self.pool.release(pages[pages >= 0])
            self.num_pages[slot] = columns

    def launch(self, slots: Int32, num_tokens: Int32, sample_slots: Int32) -> None:
        """A step over `slots` is in flight. It gives one token for each of `sample_slots`."""
        self.rows_ahead[slots] = num_tokens
        self.tokens_ahead += np.bincount(sample_slots, minlength=len(self.tokens_ahead))

    def land(self, slots: Int32) -> None:
        """The step over `slots` is not in flight any more."""
        self.rows_ahead[slots] = self.tokens_ahead[slots] = 0

    def leave(self, slots: Int32) -> None:
        """Give back the pages of `slots` that lie wholly outside the window of their group. O(slots + pages)."""
        windows = self.windows[:, slots]
        if not windows.any():
            return
        first = np.maximum(0, self.computed[slots] - windows + 1) // self.pool.page_size
        for group, i in np.argwhere((windows > 0) & (first > self.left[:, slots])).tolist():
            slot, end = int(slots[i]), int(first[group, i])
            columns = self.page_table[group, slot, self.left[group, slot] : end]
            ids = np.array(columns[::-1], np.int32)  # of pages that leave together the deepest goes first
            columns[:] = -1
            self.left[group, slot] = end
            self.pool.release(ids)

    def exchange(self, column: int, groups: Int64, old: Int32, new: Int32) -> Int64:
        """Put `new[i]` where `old[i]` stands in a column of group `groups[i]`; how often, [len(groups)]. The caller
        (`PagePool.exchange`) moves the references."""
        slots = self.running[self.num_pages[self.running] > column]
        here = self.page_table[groups[:, None], slots, column] == old[:, None]
        for i, j in np.argwhere(here).tolist():
            self.page_table[groups[i], slots[j], column] = new[i]
        return here.sum(axis=1)

    def count(self, refs: Int32) -> None:
        """Add the references that the running slots hold to `refs` [num_pages]."""
        for slot in self.running.tolist():
            refs[self.page_ids(slot)] += 1

    def vacate(self, slot: int) -> Int32:
        """Free the slot and return a copy of its known tokens; its pages go back to the pool."""
        known = np.array(self.tokens[slot, : self.known[slot]], np.int32)
        self.pool.release(self.page_ids(slot))
        self.num_pages[slot] = 0
        self.requests[slot] = None
        self.running = self.running[self.running != slot]
        self._free.append(slot)
        return known

    def check(self) -> None:
        """Assert the invariants of the class docstring."""
        both = sorted(self.running.tolist() + self._free)
        check(both == list(range(len(self.requests))), "running and free slots do not partition the slots")
        size = self.pool.page_size
        running: list[int] = self.running.tolist()
        for slot in running:
            known, computed = int(self.known[slot]), int(self.computed[slot])
            check(0 <= computed < known <= self.tokens.shape[1], f"slot {slot}: {computed} of {known} computed")
            pages = self.page_ids(slot)
            for group, left in enumerate(self.left[:, slot].tolist()):
                gone = self.pages(slot)[group] < 0
                if not self.uses[group, slot]:
                    check(bool(gone.all()), f"slot {slot} has pages of a group that it does not use")
                    continue
                check(bool(gone[:left].all()) and not gone[left:].any(), f"slot {slot}: not the pages of its window")
            check(len(np.unique(pages)) == len(pages), f"a page stands twice in slot {slot}")
            check(int(self.pool.refs[pages].min(initial=1)) >= 1, f"slot {slot} holds a freed page")
            least, most = -(-known // size) - 1, -(-(known + int(self.tokens_ahead[slot])) // size)
            check(least <= int(self.num_pages[slot]) <= most, f"slot {slot}: pages do not cover its tokens")
            request = self.requests[slot]
            check(request is not None and request.slot == slot, f"slot {slot} and its request disagree")
