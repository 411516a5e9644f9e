"""The longest cached prefix first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from scheduler.placement import Placer
from scheduler.policy.base import Key, Policy
from scheduler.request import Request
from scheduler.slots import Slots
from scheduler.stats import SchedulerStats

if TYPE_CHECKING:
    from scheduler.queue import WaitingQueue

MOST = 128  # waiting requests up to which they are sorted by what they match
LOOKUPS = 16  # matches that one pass looks up again


class LongestPrefix(Policy):
    """The request that would attach the most cached tokens starts first, while its pages are still there.

    Of requests whose next page is the same one only the first keeps its place; the others go last in this pass, since
    they can attach that page once it is computed. With more than 128 waiting requests, order of arrival. A match is
    remembered, and a pass looks up at most 16 of them again, the oldest first: its cost is bounded, and a match that
    is out of date costs order, never a token.

    Waiting is bounded: who has waited `patience` steps goes by arrival before all who have not.

    Replaces SGLang's `lpm`, which matches and sorts the whole queue in every step and has no such bound.
    """

    name = "longest_prefix"

    def __init__(self, patience: int = 256) -> None:
        if patience < 0:
            raise ValueError(f"patience must be 0 or more steps, got {patience}")
        self.patience = patience

    def bind(self, state: Slots, stats: SchedulerStats, placer: Placer) -> None:
        super().bind(state, stats, placer)
        # Tokens matched, and the key of the page behind them; the one that was looked up longest ago first.
        self._known: OrderedDict[Request, tuple[int, Hashable]] = OrderedDict()

    def key(self, request: Request) -> Key:
        return (request.arrival,)

    def joined(self, request: Request) -> None:
        self._known[request] = (0, None)
        self._known.move_to_end(request, last=False)

    def left(self, request: Request) -> None:
        del self._known[request]

    def walk(self, queue: WaitingQueue, closed: set[str]) -> Iterator[Request]:
        if len(queue) > MOST:
            yield from super().walk(queue, closed)
            return
        for request in list(islice(self._known, LOOKUPS)):
            self._known[request] = self.placer.next_page(request)
            self._known.move_to_end(request)
        for request in self._in_order(self._known):
            if request.namespace not in closed:
                yield request

    def num_before(self, request: Request, queue: WaitingQueue) -> int:
        """O(waiting log waiting), of at most 128."""
        if len(queue) >= MOST:
            return super().num_before(request, queue)
        return self._in_order({**self._known, request: self.placer.next_page(request)}).index(request)

    def _in_order(self, known: Mapping[Request, tuple[int, Hashable]]) -> list[Request]:
        now = self.stats.num_steps
        late = [request for request in known if now - request.arrival_step >= self.patience]
        late.sort(key=lambda request: request.arrival)
        rest = [request for request in known if now - request.arrival_step < self.patience]
        rest.sort(key=lambda request: (-known[request][0], request.arrival))
        seen = {known[request][1] for request in late}
        first: list[Request] = []
        last: list[Request] = []
        for request in rest:
            page = known[request][1]
            if page is not None and page in seen:
                last.append(request)
            else:
                seen.add(page)
                first.append(request)
        return late + first + last
