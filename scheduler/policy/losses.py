"""What a running request would lose if it were preempted now."""

from __future__ import annotations

import numpy as np

from paged.kv.pages import Int64
from scheduler.request import Int32
from scheduler.slots import Slots


def tokens_lost(state: Slots, slots: Int32) -> Int64:
    """Tokens of each of `slots` whose rows are in no page that somebody else holds live, int64 [len(slots)].

    A preempted request's full pages stay in the cache, but pages are short then, so its own ones are what is evicted
    next: at worst all of them have to be computed again. What it shares with a running request cannot be evicted.
    O(columns of the slots), vectorised; nothing at all is asked unless pages are short.
    """
    pool, columns = state.pool, int(state.num_pages[slots].max(initial=0))
    pages = state.page_table[:, slots, :columns]
    mine = np.arange(columns) < state.num_pages[slots, None]
    own = (pages >= 0) & mine & (pool.refs[pages] - pool.held[pages] <= 1)
    shared = (mine & ~own.any(axis=0)).sum(axis=1) * pool.page_size
    return np.maximum(state.computed[slots] - shared, 0).astype(np.int64)


def least_loss(state: Slots, slots: Int32) -> int:
    """The slot that loses least, the latest of equals; never the oldest, unless it is alone."""
    arrivals = state.arrival[slots]
    lost = tokens_lost(state, slots)
    if len(slots) > 1:
        lost[arrivals.argmin()] = np.iinfo(np.int64).max
    return int(slots[np.lexsort((-arrivals, lost))[0]])
