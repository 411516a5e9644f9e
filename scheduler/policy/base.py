"""What a scheduling policy decides: who starts next, who yields, and who may push whom out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scheduler.placement import Placer
from scheduler.policy.losses import least_loss
from scheduler.request import Int32, Request
from scheduler.slots import Slots
from scheduler.stats import SchedulerStats

if TYPE_CHECKING:
    from scheduler.queue import WaitingQueue

Key = tuple[float, ...]


class Policy:
    """Orders the waiting requests. A subclass gives `name` and `key`; the rest has defaults that suit most.

    One object serves one scheduler, which calls `bind` first. What a policy remembers of running requests it keeps in
    arrays indexed by slot, filled in `started`: nothing here runs in Python once a running request and step.

    by_namespace  the queue keeps a lane for each namespace
    displaces     a waiting request may push a running one out: `displaceable` is asked
    """

    name = ""
    by_namespace = False
    displaces = False

    def bind(self, state: Slots, stats: SchedulerStats, placer: Placer) -> None:
        """The scheduler that it decides for: its slots, its counters, and what a request would attach."""
        self.state = state
        self.stats = stats
        self.placer = placer

    # Waiting requests -----------------------------------------------------------------------------------------

    def key(self, request: Request) -> Key:
        """The smallest key is admitted first. It must not change while the request waits, and end with the arrival."""
        raise NotImplementedError

    def walk(self, queue: WaitingQueue, closed: set[str]) -> Iterator[Request]:
        """Waiting requests in the order in which they may start, without those of `closed` namespaces.

        The caller takes those that start out of the queue while it iterates, and may close more namespaces. O(log
        requests) for each that is looked at.
        """
        return queue.in_order(closed)

    def num_before(self, request: Request, queue: WaitingQueue) -> int:
        """How many of the waiting requests would start before one that is about to be queued, as things stand.

        Whoever changes the order of `walk` says it here. O(lanes log n).
        """
        return queue.num_before(request)

    def joined(self, request: Request) -> None:
        """The request was queued: it is new, or it was preempted."""

    def left(self, request: Request) -> None:
        """The request left the queue: it starts, or it has ended."""

    # Running requests -----------------------------------------------------------------------------------------

    def started(self, request: Request, new_tokens: int) -> None:
        """The request was placed in its slot; `new_tokens` of its prompt are computed for the first time."""

    def stopped(self, request: Request) -> None:
        """The request is about to lose its slot."""

    def victim(self, slots: Int32) -> int:
        """Which of the running `slots` yields where pages are short: the one that loses least, never the oldest.

        That the oldest goes on is what bounds recomputation: it ends, and the next oldest goes on.
        """
        return least_loss(self.state, slots)

    def displaceable(self, request: Request, slots: Int32) -> Int32:
        """Those of the running `slots` that the waiting `request` may push out, the first to go first.

        Whoever was pushed out must not be able to push back: the relation must be a strict order.
        """
        return slots[:0]

    def row_order(self, slots: Int32) -> npt.NDArray[np.intp] | None:
        """In which order prefills share a step's rows, as positions in `slots`; None: in order of admission."""
        return None
