"""WaitingQueue: the requests that hold no pages yet, in the policy's order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from sortedcontainers import SortedKeyList

from paged.errors import check
from scheduler.lane import Lane
from scheduler.policy import Policy
from scheduler.policy.base import Key
from scheduler.request import Request


class WaitingQueue:
    """Waiting requests in the order of a policy. Add and remove cost O(log n).

    With `by_namespace`, or where the policy asks for it, each namespace has a lane of its own, so that one that must
    wait is passed by at the cost of one lane, however many requests stand in it.

    Invariants (`check()`): no lane is empty; each stands in `fronts` under the key of its first request; the waiting
    tokens add up.
    """

    def __init__(self, policy: Policy, by_namespace: bool = False) -> None:
        self.by_namespace = by_namespace
        self.num_tokens = 0  # known tokens of all waiting requests
        self._num_requests = 0
        self._use(policy)

    def _use(self, policy: Policy) -> None:
        self.policy = policy
        self.lanes: dict[str, Lane] = {}
        self.fronts: SortedKeyList = SortedKeyList(key=self._front)

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        """All of them, in the order of their keys."""
        return heapq.merge(*(lane.items for lane in self.lanes.values()), key=self.policy.key)

    def add(self, request: Request) -> None:
        name = self._lane_of(request)
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = Lane(name, self.policy.key)
        else:
            self.fronts.remove(lane)
        lane.items.add(request)
        self.fronts.add(lane)
        self._num_requests += 1
        self.num_tokens += len(request.known)
        self.policy.joined(request)

    def remove(self, request: Request) -> None:
        """ValueError if it does not wait."""
        lane = self.lanes.get(self._lane_of(request))
        if lane is None or request not in lane.items:
            raise ValueError(f"request {request.id!r} does not wait")
        self.fronts.remove(lane)
        lane.items.remove(request)
        if lane.items:
            self.fronts.add(lane)
        else:
            del self.lanes[lane.name]
        self._num_requests -= 1
        self.num_tokens -= len(request.known)
        self.policy.left(request)

    def set_policy(self, policy: Policy) -> None:
        """Order the waiting requests by another policy. O(n log n)."""
        requests = sorted(self, key=lambda request: request.arrival)
        self.num_tokens = self._num_requests = 0
        self._use(policy)
        for request in requests:
            self.add(request)

    def in_order(self, closed: set[str]) -> Iterator[Request]:
        """The requests in the order of their keys, without those of `closed` namespaces.

        Requests that are yielded may be taken out, and namespaces closed, while this iterates. Lanes are opened as
        their first request comes up, so that O(log n) is paid for each request looked at and each closed lane.
        """
        if len(self.lanes) == 1:
            yield from next(iter(self.lanes.values())).walk(closed)
            return
        opened: list[tuple[Key, int, Iterator[Request], Request]] = []
        fronts = self._unopened()
        front = next(fronts, None)
        number = 0
        while True:
            while front is not None and (not opened or self._front(front) < opened[0][0]):
                requests = front.walk(closed)
                request = next(requests, None)
                if request is not None:
                    heapq.heappush(opened, (self.policy.key(request), number, requests, request))
                    number += 1
                front = next(fronts, None)
            if not opened:
                return
            _, i, requests, request = heapq.heappop(opened)
            if request.namespace not in closed:
                yield request
            following = next(requests, None)
            if following is not None:
                heapq.heappush(opened, (self.policy.key(following), i, requests, following))

    def _unopened(self) -> Iterator[Lane]:
        """Lanes in the order of their first requests, as these stood at the start; in portions, while some are gone."""
        seen: set[str] = set()
        last: Key | None = None
        while True:
            lanes: list[Lane] = [
                lane for lane, _ in zip(self.fronts.irange_key(last), range(32 + len(seen)), strict=False)
            ]
            lanes = [lane for lane in lanes if lane.name not in seen]
            if not lanes:
                return
            last = self._front(lanes[-1])
            for lane in lanes:
                seen.add(lane.name)
                yield lane

    def num_before(self, request: Request) -> int:
        """Waiting requests whose key is smaller than that of a request that does not wait. O(lanes log n)."""
        key = self.policy.key(request)
        return sum(lane.items.bisect_key_left(key) for lane in self.lanes.values())

    def _lane_of(self, request: Request) -> str:
        return request.namespace if self.by_namespace or self.policy.by_namespace else ""

    def _front(self, lane: Lane) -> Key:
        return self.policy.key(lane.at(0))

    def check(self) -> None:
        """Assert the invariants of the class docstring. O(n)."""
        check(all(lane.items for lane in self.lanes.values()), "a lane of the queue is empty")
        check([*map(self._front, self.fronts)] == sorted(map(self._front, self.lanes.values())), "a front is stale")
        check(sum(len(request.known) for request in self) == self.num_tokens, "the waiting tokens do not add up")
        check(sum(len(lane.items) for lane in self.lanes.values()) == len(self), "the queue has lost count")
