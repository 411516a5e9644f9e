"""EvictionQueue: idle leaves in the order in which they go, by retention first and then by the policy's rank."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

from paged.prefix.eviction import EvictionPolicy, LearningPolicy
from paged.prefix.hashing import Int32
from paged.prefix.index import PrefixIndex
from paged.prefix.retention import Band, Retentions
from paged.prefix.stats import PrefixStats

_Entry = tuple[int, int, float, int, int, int]  # band, priority, rank, order of arrival, node, birth


class EvictionQueue:
    """Idle leaves in bands: what will not come back goes first, then what nobody said anything about, then what is
    kept; among the kept, low priority goes first; all else equal, the policy's smallest rank.

    An entry that was overtaken (its page is used again, or gone) is dropped when it surfaces. A kept page whose time
    is over moves to the middle band when the next page is asked for.

    A push and a pop cost O(log idle leaves) amortised, whatever the size of the cache; stale entries never outnumber
    the cached pages by more than two to one.

    A policy of the program's own may fail; it does so in the middle of taking or giving back pages, so that is counted
    (`policy_errors`) and goes no further. A page that it cannot rank goes first of its band.
    """

    def __init__(self, index: PrefixIndex, policy: EvictionPolicy, stats: PrefixStats | None = None) -> None:
        self.index = index
        self.policy = policy
        self.stats = stats or PrefixStats()
        self.retentions = Retentions()
        self._learner = policy if isinstance(policy, LearningPolicy) else None
        self._heap: list[_Entry] = []
        self._deadlines: list[tuple[float, int, int, int]] = []  # when, order of arrival, node, birth
        self._entry = [0]  # order of arrival of the valid entry of each node
        self._count = 0

    # What happens to pages ------------------------------------------------------------------------------------

    def entered(self, nodes: Sequence[int]) -> None:
        """New pages stand at `nodes`. O(nodes)."""
        if self.retentions.used:
            self.retentions.entered(nodes)
        if self._learner is not None:
            self._tell(self._learner.entered, nodes)

    def attached(self, nodes: Int32) -> None:
        """A sequence attached the pages of `nodes`. O(nodes)."""
        if self.retentions.used and len(nodes):
            self.retentions.attached(nodes)
        if self._learner is not None:
            self._tell(self._learner.attached, nodes)

    def idle(self, nodes: Int32) -> None:
        """The last user of `nodes` has left; those that can go are pushed next. O(nodes)."""
        if self.retentions.used:
            self.retentions.idle(nodes)
        if self._learner is not None:
            self._tell(self._learner.idle, nodes)

    def gone(self, node: int) -> None:
        """`node` is about to go for room."""
        if self._learner is not None:
            self._tell(self._learner.gone, node)

    def _tell(self, hook: Callable[[PrefixIndex, Any], None], nodes: Sequence[int] | Int32 | int) -> None:
        try:
            hook(self.index, nodes)
        except Exception:
            self.stats.policy_errors += 1

    def _rank(self, node: int) -> float:
        try:
            rank = float(self.policy.rank(self.index, node))
        except Exception:
            rank = math.nan
        if rank != rank:  # which has no place in an order
            self.stats.policy_errors += 1
            return -math.inf
        return rank

    # The order ------------------------------------------------------------------------------------------------

    def push(self, node: int) -> None:
        """`node` has fallen idle and has no children."""
        band, priority, until = self.retentions.standing(node)
        entry = self._add(node, band, priority)
        if band == Band.KEPT:
            heapq.heappush(self._deadlines, (until, entry[3], node, entry[5]))
            if len(self._deadlines) > 2 * len(self.index) + 64:
                self._deadlines = [d for d in self._deadlines if self._valid(*d[1:])]
                heapq.heapify(self._deadlines)

    def _add(self, node: int, band: int, priority: int) -> _Entry:
        self._count += 1
        if node >= len(self._entry):
            self._entry.extend([0] * (max(node + 1, len(self.index.birth)) - len(self._entry)))
        self._entry[node] = self._count
        rank, birth = self._rank(node), int(self.index.birth[node])
        entry = (band, priority, rank, self._count, node, birth)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self.index) + 64:
            self._heap = [e for e in self._heap if self._valid(*e[3:])]
            heapq.heapify(self._heap)
        return entry

    def pop(self) -> int | None:
        """The node to look at next, or None; the caller sees whether it is still an idle leaf."""
        if self._deadlines:
            self._expire()
        while self._heap:
            _, _, _, count, node, birth = heapq.heappop(self._heap)
            if self._valid(count, node, birth):
                return node
        return None

    def goes_next(self, node: int) -> bool:
        """Whether `node`, pushed now, would be the next to come out. False where only a push can tell: with hints."""
        if self.retentions.used or self._deadlines:
            return False
        return not self._heap or (Band.PLAIN, 0, self._rank(node)) < self._heap[0][:3]

    def _expire(self) -> None:
        now = self.retentions.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, count, node, birth = heapq.heappop(self._deadlines)
            if self._valid(count, node, birth):
                self._add(node, Band.PLAIN, 0)

    def _valid(self, count: int, node: int, birth: int) -> bool:
        return self._entry[node] == count and int(self.index.birth[node]) == birth

    def nodes(self) -> set[int]:
        """Every node that would come out. O(entries)."""
        return {entry[4] for entry in self._heap if self._valid(*entry[3:])}

    def clear(self) -> None:
        self._heap.clear()
        self._deadlines.clear()
