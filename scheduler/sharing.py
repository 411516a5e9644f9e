"""Sharing within a step: requests with one opening compute it once, even when they arrive together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np

from paged.media import is_inside
from scheduler.request import Int32, Request
from scheduler.slots import Slots


class StepSharing:
    """Pages that running requests are about to fill, so that others with the same opening can wait for or use them.

    `begin` starts a step. Pages that this step fills are `offered` at once: every layer writes its rows before it
    reads any, so a request admitted in the same step may attach them (`follow`). They enter the prefix cache only
    when the step has committed. A page that a prefill will fill in a later step is `expected`: a request whose next
    page it is waits for it instead of computing it too; the wait ends, since a running prefill advances every step.

    Offered pages are found by their exact tokens below their exact parent, expected ones by hash alone, because
    waiting for the wrong page costs time and never changes a token. In a looped model a request takes the pages of
    its own depth, and waits for those of its own or a greater one.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._offered: dict[tuple[Hashable, int, bytes], tuple[int, Int32]] = {}
        self._expected: dict[Hashable, Request] = {}
        self._owners: set[Request] = set()  # the requests that fill expected pages

    def begin(self) -> None:
        self._offered.clear()

    def offer(self, request: Request, state: Slots, num_tokens: int) -> None:
        """This step computes `num_tokens` more of the running `request`. O(pages filled)."""
        cursor, slot, size = request.cursor, request.slot, self.page_size
        if cursor is None or not cursor.open:
            return
        computed = int(state.computed[slot] + state.rows_ahead[slot])
        first, last = cursor.depth, (computed + num_tokens) // size
        parent: Hashable = cursor.last if cursor.depth else cursor.namespace
        tokens = state.tokens[slot]
        for column in range(first, last):
            key = (parent, request.view.loops, tokens[column * size : (column + 1) * size].tobytes())
            found = self._offered.get(key)
            if found is None:
                pages = state.page_table[:, slot, column]
                if int(pages[request.view.groups].min()) < 0:  # of a prefix that a window had left before
                    break
                found = (-1 - len(self._offered), np.array(pages, np.int32))
                self._offered[key] = found
            parent = found[0]

    def follow(self, request: Request) -> Int32 | None:
        """Offered pages right below the cached ones of a waiting request, int32 [num_groups, n], or None."""
        cursor, known, size = request.cursor, request.readable, self.page_size
        if cursor is None or not self._offered:
            return None
        parent: Hashable = cursor.last if cursor.depth else cursor.namespace
        pages: list[Int32] = []
        for column in range(cursor.depth, (len(known) - 1) // size):
            key = (parent, request.view.loops, known[column * size : (column + 1) * size].tobytes())
            found = self._offered.get(key)
            if found is None:
                break
            parent = found[0]
            pages.append(found[1])
        while pages and is_inside(known[(cursor.depth + len(pages)) * size]):  # no match ends inside a media span
            pages.pop()
        return np.stack(pages, axis=1) if pages else None

    def expect(self, request: Request) -> None:
        """`request` will fill the pages of its known tokens in this step and later ones."""
        cursor = request.cursor
        if cursor is not None and cursor.open:
            self._owners.add(request)
            known = request.known
            for key in cursor.keys_to(known, (len(known) - 1) // self.page_size)[cursor.depth :]:
                if not self._is_expected(key, request):
                    self._expected[key] = request

    def settle(self, requests: Iterable[Request]) -> None:
        """The prefill of `requests` is over, or they lost their slots: nobody waits for them any more."""
        if not self._owners:
            return
        for request in requests:
            if request in self._owners and request.cursor is not None:
                self._owners.discard(request)
                for key in request.cursor.keys:
                    if self._expected.get(key) is request:
                        del self._expected[key]

    def awaits(self, request: Request, num_pages: int) -> bool:
        """Whether page `num_pages` of the waiting `request` is being computed by a running one that will publish it."""
        cursor, known = request.cursor, request.readable
        if cursor is None or not self._expected or num_pages >= (len(known) - 1) // self.page_size:
            return False
        return self._is_expected(cursor.keys_to(known, num_pages + 1)[num_pages], request)

    def _is_expected(self, key: Hashable, request: Request) -> bool:
        """Whether a running request will publish the page of this key at the depth of `request` or a greater one."""
        owner = self._expected.get(key)
        if owner is None or owner.view.loops < request.view.loops:
            return False
        return owner.cursor is not None and owner.cursor.open
