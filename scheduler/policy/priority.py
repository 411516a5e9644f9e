"""Most urgent first, with ageing; the more urgent may push the less urgent out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.placement import Placer
from scheduler.policy.base import Key, Policy
from scheduler.request import Int32, Request
from scheduler.slots import Slots
from scheduler.stats import SchedulerStats


class Priority(Policy):
    """A smaller `priority` is more urgent; 0 is the default. Among equals, order of submission.

    Ageing: each `ageing` steps between two submissions make up for one level. A request of priority p goes before
    each one of priority q < p that is submitted at least ageing * (p - q) steps after it: no stream of urgent
    requests starves it. The key, priority * ageing + step of submission, never changes, so nothing is sorted again.

    Where slots, pages or rows of a step are short, a waiting request pushes out running ones of a strictly greater
    priority whose key is greater than its own, the greatest first, in the step in which it could start; nobody is
    pushed out where that would not be enough. Equals never push each other out, nobody pushes back whoever pushed him
    out, and a request is pushed out only by those submitted within ageing * (p - q) steps after it. On a shortage of
    pages among running requests the greatest key yields.

    Replaces vLLM's priority policy, where a running set that is full makes an urgent request wait for an end, and a low
    priority waits for ever behind a steady stream of urgent ones.
    """

    name = "priority"
    displaces = True

    def __init__(self, ageing: int = 1000) -> None:
        if ageing < 1:
            raise ValueError(f"ageing must be at least 1 step a level, got {ageing}")
        self.ageing = ageing

    def bind(self, state: Slots, stats: SchedulerStats, placer: Placer) -> None:
        super().bind(state, stats, placer)
        self._level = np.zeros(len(state.known), np.int64)
        self._rank = np.zeros(len(state.known), np.int64)

    def rank(self, request: Request) -> int:
        """The step of submission at which a request of priority 0 would stand where this one does."""
        return request.priority * self.ageing + request.arrival_step

    def key(self, request: Request) -> Key:
        return (self.rank(request), request.arrival)

    def started(self, request: Request, new_tokens: int) -> None:
        self._level[request.slot] = request.priority
        self._rank[request.slot] = self.rank(request)

    def victim(self, slots: Int32) -> int:
        return int(slots[self._order(slots)[-1]])

    def displaceable(self, request: Request, slots: Int32) -> Int32:
        slots = slots[self._level[slots] > request.priority]
        if not len(slots):
            return slots
        rank, ours = self._rank[slots], self.rank(request)
        slots = slots[(rank > ours) | ((rank == ours) & (self.state.arrival[slots] > request.arrival))]
        return slots[self._order(slots)[::-1]]

    def row_order(self, slots: Int32) -> npt.NDArray[np.intp] | None:
        return self._order(slots)

    def _order(self, slots: Int32) -> npt.NDArray[np.intp]:
        return np.lexsort((self.state.arrival[slots], self._rank[slots]))
