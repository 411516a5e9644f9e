"""Namespaces share by weight, whatever they ask for."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from scheduler.placement import Placer
from scheduler.policy.base import Key, Policy
from scheduler.policy.tenants import Tenants
from scheduler.request import Request, RequestState
from scheduler.slots import Slots
from scheduler.stats import SchedulerStats

if TYPE_CHECKING:
    from scheduler.queue import WaitingQueue


class FairShare(Policy):
    """The namespace that was served least, for its weight, starts its oldest request next.

    Each namespace has a virtual counter (VTC; Sheng et al. 2024, Fairness in Serving Large Language Models): one for
    each prompt token that is computed for it, `output_weight` for each token that it gets, divided by its weight.
    Cached tokens cost nothing, nor does recomputation after a preemption. A namespace that comes back with an empty
    queue is lifted to the least counter among those that wait (that of the last to wait, if none does): idling saves
    nothing up. Of namespaces with the same counter the one whose request is oldest comes first.

    Bound: while two namespaces both keep requests waiting, and these fit, their counters differ by at most U = the
    charge of the longest prompt + that of what all slots together may generate. So a namespace waits at most until
    another was served U more than itself. What does not fit is bypassed as in every policy.

    Replaces limits on requests a minute, and the single queue of vLLM and SGLang, where whoever sends most gets most.
    """

    name = "fair_share"
    by_namespace = True

    def __init__(
        self, weights: Mapping[str, float] | None = None, default_weight: float = 1.0, output_weight: float = 2.0
    ) -> None:
        """`weights` by namespace; all others have `default_weight`."""
        self.weights = dict(weights or {})
        for weight in (default_weight, output_weight, *self.weights.values()):
            if not weight > 0:
                raise ValueError(f"weights must be above 0, got {weight}")
        self.default_weight = default_weight
        self.output_weight = output_weight

    def bind(self, state: Slots, stats: SchedulerStats, placer: Placer) -> None:
        super().bind(state, stats, placer)
        self.tenants = Tenants(self._weight)
        self._of_slot = np.zeros(len(state.known), np.int64)
        self._charged = np.zeros(len(state.known), np.int64)  # by slot: output tokens that were counted
        self._last = -1  # who waited last, when nobody does

    def counter(self, namespace: str) -> float:
        """Tokens that a namespace was served, weighted; 0.0 for one that was not seen lately."""
        self._settle()
        return self.tenants.value(namespace)

    def key(self, request: Request) -> Key:
        return (request.arrival,)

    def joined(self, request: Request) -> None:
        tenants = self.tenants
        i = tenants.enter(request.namespace)
        tenants.num_live[i] += 1
        if not tenants.num_waiting[i]:
            self._settle()
            tenants.counters[i] = self._lifted(float(tenants.counters[i]))
            tenants.since[i] = request.arrival
        tenants.since[i] = min(tenants.since[i], request.arrival)
        tenants.num_waiting[i] += 1

    def left(self, request: Request) -> None:
        i = self.tenants.enter(request.namespace)
        self.tenants.num_waiting[i] -= 1
        self.tenants.num_live[i] -= 1
        self._last = i

    def started(self, request: Request, new_tokens: int) -> None:
        i = self.tenants.enter(request.namespace)
        self.tenants.num_live[i] += 1
        self.tenants.counters[i] += new_tokens / self.tenants.weights[i]
        self._of_slot[request.slot] = i
        self._charged[request.slot] = self.state.known[request.slot] - request.num_prompt

    def stopped(self, request: Request) -> None:
        self._settle()
        self.tenants.num_live[self._of_slot[request.slot]] -= 1
        self.tenants.forget_idle(self._last)

    def walk(self, queue: WaitingQueue, closed: set[str]) -> Iterator[Request]:
        """O(waiting namespaces) vectorised, then O(log) for each namespace and each request that comes up."""
        self._settle()
        tenants = self.tenants
        order = iter(self._in_order())
        walks: dict[int, Iterator[Request]] = {}
        heap: list[tuple[int, float, int, int]] = []  # of the namespaces that have come up
        following = next(order, None)
        while True:
            while following is not None:
                i, key = following, (0, float(tenants.counters[following]), int(tenants.since[following]))
                if heap and heap[0][:3] < key:
                    break
                lane = queue.lanes[tenants.names[i]]
                tenants.since[i] = first = lane.at(0).arrival
                heapq.heappush(heap, (*key[:2], first, i))
                walks[i] = lane.walk(closed)
                following = next(order, None)
            if not heap:
                return
            blocked, _, _, i = heapq.heappop(heap)
            request = next(walks[i], None)
            if request is not None:
                yield request
                blocked += request.state == RequestState.WAITING  # others come before the next of a lane that waits
                heapq.heappush(heap, (blocked, float(tenants.counters[i]), request.arrival, i))

    def num_before(self, request: Request, queue: WaitingQueue) -> int:
        """An estimate: each request is taken to be charged what this one may be. O(waiting namespaces) vectorised."""
        self._settle()
        tenants, mine = self.tenants, queue.lanes.get(request.namespace)
        num_mine = 0 if mine is None else len(mine.items)
        charge = request.num_prompt + self.output_weight * (request.limit - request.num_prompt)
        at = tenants.value(request.namespace) if num_mine else self._lifted(tenants.value(request.namespace))
        at += num_mine * charge / self._weight(request.namespace)
        others = np.flatnonzero(tenants.num_waiting)
        others = others[others != tenants.index(request.namespace)]
        turns = np.floor((at - tenants.counters[others]) * tenants.weights[others] / charge) + 1  # equals came before
        return num_mine + int(np.minimum(np.maximum(turns, 0), tenants.num_waiting[others]).sum())

    def _lifted(self, counter: float) -> float:
        """The counter of a namespace that comes back with an empty queue."""
        tenants = self.tenants
        waiting = np.flatnonzero(tenants.num_waiting)
        if len(waiting):
            return max(counter, float(tenants.counters[waiting].min()))
        return max(counter, float(tenants.counters[self._last])) if self._last >= 0 else counter

    def _in_order(self) -> list[int]:
        """The waiting namespaces, least counter first, of equals the one that has waited longest. No more are named
        than can come up, slots, closed ones, and those that are passed by, and their equals."""
        tenants = self.tenants
        waiting = np.flatnonzero(tenants.num_waiting)
        most = 2 * len(self.state.known) + self.placer.config.lookahead + 1
        if len(waiting) > most:
            counters = tenants.counters[waiting]
            waiting = waiting[counters <= np.partition(counters, most)[most]]
        return waiting[np.lexsort((tenants.since[waiting], tenants.counters[waiting]))].tolist()

    def _weight(self, namespace: str) -> float:
        return self.weights.get(namespace, self.default_weight)

    def _settle(self) -> None:
        """Charge what the running requests were given since the last time. O(running), vectorised."""
        state, slots = self.state, self.state.running
        made = state.known[slots] - state.prompt_len[slots]
        of = self._of_slot[slots]
        charge = (made - self._charged[slots]) * self.output_weight
        np.add.at(self.tenants.counters, of, charge / self.tenants.weights[of])
        self._charged[slots] = made
