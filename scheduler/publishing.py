"""Publishing: the pages that a step filled enter the prefix cache at once, the rows behind them at the end."""

from __future__ import annotations

from typing import cast

import numpy as np

from paged.prefix.cache import PrefixCache
from paged.prefix.cursor import NO_NODE, Cursor
from paged.prefix.step_pages import publish_next
from scheduler.request import Int32, Request
from scheduler.slots import Slots


def publish_step(cache: PrefixCache, state: Slots, slots: Int32, before: Int32, after: Int32) -> None:
    """Enter the pages that a step filled, of `slots` whose computed tokens went from `before` to `after`; mostly that
    is one page of some requests that decode."""
    size = state.pool.page_size
    filled = np.flatnonzero(after // size > before // size)
    cursors: dict[int, Cursor] = {}
    for i, slot in zip(filled.tolist(), slots[filled].tolist(), strict=True):
        cursor = cast(Request, state.requests[slot]).cursor
        if cursor is not None:  # else the request opted out of the cache
            cursors[i] = cursor
    if not cursors:
        return
    filled = np.fromiter(cursors, np.int64, len(cursors))
    slots, computed = slots[filled], after[filled]
    columns = computed // size - 1
    rows = columns[:, None] * size + np.arange(size)
    tokens = state.tokens[slots[:, None], rows]
    pages = state.page_table[:, slots, columns]
    each = list(cursors.values())
    for i in publish_next(cache, each, columns, tokens, pages):
        slot, end = int(slots[i]), int(computed[i])
        cache.publish(each[i], state.tokens[slot, :end], state.page_table[:, slot, : end // size])


def donate(cache: PrefixCache, state: Slots, request: Request, preempted: bool) -> None:
    """A running request loses its slot: enter the rows of its last page, which no step has published. Unless it comes
    back, what it computed is from now on kept as it asked for."""
    if request.cursor is None:
        return
    tail, slot = NO_NODE, request.slot
    if cache.exact:
        computed = int(state.computed[slot])
        last = state.page_table[:, slot, computed // state.pool.page_size]
        tail = cache.publish_tail(request.cursor, state.tokens[slot, :computed], last.copy())
    if not preempted:
        cache.retain(request.cursor, request.retain, tail)
