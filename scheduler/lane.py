"""Lane: the waiting requests of one namespace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from sortedcontainers import SortedKeyList

from scheduler.request import Request


class Lane:
    """The waiting requests of one namespace (of all, where namespaces do not matter), smallest key first."""

    __slots__ = ("items", "name")

    def __init__(self, name: str, key: Callable[[Request], tuple[float, ...]]) -> None:
        self.name = name
        self.items: SortedKeyList = SortedKeyList(key=key)

    def at(self, i: int) -> Request:
        """Request `i` of the lane. O(log n)."""
        return cast(Request, self.items[i])

    def walk(self, closed: set[str]) -> Iterator[Request]:
        """The requests in order, until the lane is closed; those that are yielded may be taken out meanwhile."""
        items, passed = self.items, 0
        while passed < len(items) and self.name not in closed:
            request = self.at(passed)
            yield request
            if passed < len(items) and items[passed] is request:
                passed += 1
