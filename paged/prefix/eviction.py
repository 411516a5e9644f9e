"""Which cached page goes first when room is needed: a queue of idle leaves, ordered by a policy."""

from __future__ import annotations

import heapq
from typing import Protocol

from paged.prefix.index import PrefixIndex


class EvictionPolicy(Protocol):
    """Ranks a page that could be evicted; the smallest rank goes first. A rank is taken when the page falls idle."""

    name: str

    def rank(self, index: PrefixIndex, node: int) -> float:
        """The rank of `node` now. O(1)."""
        ...


class LRU:
    """The page whose last user left longest ago. Of one chain the deepest goes first, since only leaves go."""

    name = "lru"

    def rank(self, index: PrefixIndex, node: int) -> float:
        return float(index.last_use[node])


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU}


def get_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """A policy by its name, or the object itself. ValueError lists the names there are."""
    if not isinstance(policy, str):
        return policy
    try:
        return POLICIES[policy]()
    except KeyError:
        raise ValueError(f"the eviction policy must be one of {', '.join(sorted(POLICIES))}, got {policy!r}") from None


class EvictionQueue:
    """Idle leaves by rank. An entry that was overtaken (its page is used again, or gone) is dropped when it surfaces.

    A push and a pop cost O(log idle leaves) amortised, whatever the size of the cache; stale entries never outnumber
    the cached pages by more than two to one.
    """

    def __init__(self, index: PrefixIndex, policy: EvictionPolicy) -> None:
        self.index = index
        self.policy = policy
        self._heap: list[tuple[float, int, int, int]] = []  # rank, order of arrival, node, birth
        self._entry = [0]  # order of arrival of the valid entry of each node
        self._count = 0

    def push(self, node: int) -> None:
        """`node` has fallen idle and has no children."""
        self._count += 1
        if node >= len(self._entry):
            self._entry.extend([0] * (max(node + 1, len(self.index.birth)) - len(self._entry)))
        self._entry[node] = self._count
        heapq.heappush(self._heap, (self.policy.rank(self.index, node), self._count, node, int(self.index.birth[node])))
        if len(self._heap) > 2 * len(self.index) + 64:
            self._heap = [e for e in self._heap if self._entry[e[2]] == e[1] and self.index.birth[e[2]] == e[3]]
            heapq.heapify(self._heap)

    def pop(self) -> int | None:
        """The node to look at next, or None; the caller sees whether it is still an idle leaf."""
        while self._heap:
            _, count, node, birth = heapq.heappop(self._heap)
            if self._entry[node] == count and self.index.birth[node] == birth:
                return node
        return None

    def clear(self) -> None:
        self._heap.clear()
