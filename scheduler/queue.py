"""WaitingQueue: the requests that hold no pages yet, in the policy's order."""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedKeyList

from scheduler.policy import Policy
from scheduler.request import Request


class WaitingQueue:
    """Waiting requests, smallest policy key first. Add and remove cost O(log n); iteration is in order."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._items: SortedKeyList = SortedKeyList(key=policy.key)
        self.num_tokens = 0  # known tokens of all waiting requests

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._items)

    def add(self, request: Request) -> None:
        self._items.add(request)
        self.num_tokens += len(request.known)

    def remove(self, request: Request) -> None:
        self._items.remove(request)
        self.num_tokens -= len(request.known)
