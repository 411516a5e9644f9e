"""Publishing: the pages that a step filled enter the prefix cache, where others find them at once."""

from __future__ import annotations

from typing import cast

import numpy as np

from paged.prefix.cache import PrefixCache
from paged.prefix.cursor import Cursor
from paged.prefix.step_pages import publish_next
from scheduler.request import Int32, Request
from scheduler.slots import Slots


def publish_step(cache: PrefixCache, state: Slots, slots: Int32, before: Int32, after: Int32) -> None:
    """Enter the pages that a step filled, of `slots` whose computed tokens went from `before` to `after`; mostly that
    is one page of some requests that decode."""
    size = state.pool.page_size
    filled = np.flatnonzero(after // size > before // size)
    if not len(filled):
        return
    slots, columns = slots[filled], after[filled] // size - 1
    requests = [cast(Request, state.requests[slot]) for slot in slots.tolist()]
    rows = columns[:, None] * size + np.arange(size)
    tokens = state.tokens[slots[:, None], rows]
    pages = state.page_table[:, slots, columns]
    cursors = [request.cursor for request in requests]
    if any(cursor is None for cursor in cursors):
        left = list(range(len(requests)))
    else:
        left = publish_next(cache, cast("list[Cursor]", cursors), columns, tokens, pages)
    for i in left:
        _publish(cache, state, requests[i], int(after[filled[i]]))


def _publish(cache: PrefixCache, state: Slots, request: Request, computed: int) -> None:
    """Enter all full pages of one request up to `computed` tokens."""
    if request.cursor is None:
        return
    full = computed // state.pool.page_size
    cache.publish(request.cursor, state.tokens[request.slot, :computed], state.page_table[:, request.slot, :full])
