"""Time: requests that end when theirs is up, and how long a step takes."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

from scheduler.request import Request, RequestState


class TimeLimits:
    """The requests that may take only so long (`timeout_s`), or wait only so long (`queue_timeout_s`).

    A heap by the time at which each limit is up, looked at once a step: O(1) where nothing is due, and nothing at all,
    not even a look at the clock, while no request has a limit. `clock` gives seconds, and may be replaced.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int, bool, Request]] = []
        self._most = 64  # entries at which those of ended requests are thrown out

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, request: Request) -> None:
        """Begin the time of a request that was submitted at `request.submitted`. O(log n) amortised."""
        for limit, waiting in ((request.timeout_s, False), (request.queue_timeout_s, True)):
            if limit is not None:
                heapq.heappush(self._heap, (request.submitted + limit, request.arrival, waiting, request))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if entry[3].state != RequestState.FINISHED]
            heapq.heapify(self._heap)
            self._most = max(64, 2 * len(self._heap))

    def due(self) -> list[Request]:
        """The live requests whose time is up, each with its `error` set. They are not watched any more."""
        heap, late = self._heap, []
        if not heap:
            return late
        now = self.clock()
        while heap and heap[0][0] <= now:
            _, _, waiting, request = heapq.heappop(heap)
            if request.state == RequestState.FINISHED or request.error:
                continue  # it has ended, or both of its limits are up
            name, limit = ("queue_timeout_s", request.queue_timeout_s) if waiting else ("timeout_s", request.timeout_s)
            if waiting and (request.state == RequestState.RUNNING or request.num_preemptions):
                continue  # it has started in time
            took = now - request.submitted
            request.error = f"{name} of this request was {limit} s, and {took:.3f} s have passed since it was submitted"
            late.append(request)
        return late


class Pace:
    """Seconds a step, as a moving average over about 16 of them; None before the first one has ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.step_s: float | None = None
        self._began: float | None = None

    def begin(self) -> None:
        """A step was planned."""
        self._began = self.clock()

    def end(self) -> None:
        """It was committed."""
        if self._began is not None:
            took = self.clock() - self._began
            self.step_s = took if self.step_s is None else self.step_s + (took - self.step_s) / 16
            self._began = None
