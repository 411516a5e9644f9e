"""Pins: prefixes that stay cached whatever else needs room, within a budget, for a time, by priority."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paged.errors import OutOfPages, check, require_integer
from paged.kv.pages import Int32, PagePool

if TYPE_CHECKING:
    from paged.prefix.checkpoints import Checkpoint


@dataclass(slots=True, eq=False)
class Pin:
    """One pinned prefix. `expires_at` is in the clock's seconds; None: until it is unpinned."""

    id: int
    namespace: str
    num_tokens: int
    priority: int
    expires_at: float | None
    preview: str
    pages: Int32  # distinct ids, one reference each
    checkpoint: Checkpoint | None = None


class Pins:
    """The pins of one cache. A pin holds a reference to each of its pages, so that no eviction can take them.

    `max_pages` bounds the distinct pages that pins hold. A pin that would go over it first ends those that expired,
    then others of strictly lower priority, lowest and oldest first; if that is not enough it is refused. Expired pins
    end when pages run short, or at the next call here.

    Invariants (`check()`): the pages counted are those of the live pins; every one of them is referenced; no more
    than `max_pages` are pinned.
    """

    def __init__(self, pool: PagePool, max_pages: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool = pool
        self.max_pages = max_pages
        self.clock = clock
        self._pins: dict[int, Pin] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self):
        return iter(list(self._pins.values()))

    def refs(self) -> Int32:
        """References that pins hold, int32 [num_pages]. O(num_pages + pinned pages)."""
        refs = np.zeros(self.pool.num_pages, np.int32)
        for pin in self._pins.values():
            refs[pin.pages] += 1
        return refs

    @property
    def num_pages(self) -> int:
        """Distinct pages that pins hold."""
        return int(np.count_nonzero(self.refs()))

    def add(
        self,
        pages: Int32,
        num_tokens: int,
        namespace: str,
        ttl_s: float | None,
        priority: int,
        preview: str = "",
        checkpoint: Checkpoint | None = None,
    ) -> Pin:
        """Pin cached pages. OutOfPages, and nothing changed, where the budget does not allow it."""
        priority = require_integer("priority", priority)  # what cannot be compared would fail every later pin
        if ttl_s is not None and not ttl_s > 0:
            raise ValueError(f"ttl_s must be above 0, or None for no end, got {ttl_s}")
        self.expire()
        doomed = self._displaced_by(pages, priority)
        for pin in doomed:
            self.end(pin)
        self.pool.share(pages)
        if checkpoint is not None:
            checkpoint.pins += 1
        expires_at = None if ttl_s is None else self.clock() + ttl_s
        pin = Pin(self._next_id, namespace, num_tokens, priority, expires_at, preview, pages, checkpoint)
        self._pins[pin.id] = pin
        self._next_id += 1
        return pin

    def _displaced_by(self, pages: Int32, priority: int) -> list[Pin]:
        refs = self.refs()
        refs[pages] += 1
        over = int(np.count_nonzero(refs)) - self.max_pages
        doomed: list[Pin] = []
        lower = sorted((p for p in self._pins.values() if p.priority < priority), key=lambda p: (p.priority, p.id))
        for pin in lower:
            if over <= 0:
                break
            refs[pin.pages] -= 1
            over -= int(np.count_nonzero(refs[pin.pages] == 0))
            doomed.append(pin)
        if over > 0:
            raise OutOfPages(
                f"{len(pages)} pages were to be pinned, which is {over} over the budget of {self.max_pages} pinned "
                "pages; unpin something, pin with a higher priority, or raise max_pinned_pages"
            )
        return doomed

    def end(self, pin: Pin) -> bool:
        """Let a pin go; False if it had ended before, or is of another cache: numbers agree between caches."""
        if self._pins.get(pin.id) is not pin:
            return False
        del self._pins[pin.id]
        if pin.checkpoint is not None:
            pin.checkpoint.pins -= 1
        self.pool.release(pin.pages)
        return True

    def expire(self) -> int:
        """End the pins whose time is over; returns how many."""
        now = self.clock()
        over = [pin for pin in self._pins.values() if pin.expires_at is not None and pin.expires_at <= now]
        for pin in over:
            self.end(pin)
        return len(over)

    def clear(self) -> None:
        """End every pin."""
        for pin in self:
            self.end(pin)

    def check(self) -> None:
        """Assert the invariants of the class docstring."""
        for pin in self._pins.values():
            check(len(np.unique(pin.pages)) == len(pin.pages), "a page stands twice in one pin")
        check(bool((self.refs() <= self.pool.refs).all()), "a pinned page has fewer references than pins")
        check(self.num_pages <= self.max_pages, f"{self.num_pages} pages are pinned, the budget is {self.max_pages}")
