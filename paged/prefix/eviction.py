"""Which cached page goes first when room is needed: the policies, each a rank. EvictionQueue keeps them in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from paged.prefix.hashing import Int32
from paged.prefix.index import PrefixIndex


class EvictionPolicy(Protocol):
    """Ranks a page that could be evicted; the smallest rank goes first. A rank is taken when the page falls idle.

    Only leaves are asked for: a page on which another stands cannot go, whatever its rank.
    """

    name: str

    def rank(self, index: PrefixIndex, node: int) -> float:
        """The rank of `node` now. O(1)."""
        ...


@runtime_checkable
class LearningPolicy(EvictionPolicy, Protocol):
    """A policy that also hears what happens to pages. Every call costs O(nodes named in it)."""

    def entered(self, index: PrefixIndex, nodes: Sequence[int]) -> None:
        """New pages stand at `nodes`, where others may have stood before."""
        ...

    def attached(self, index: PrefixIndex, nodes: Int32) -> None:
        """A sequence attached the pages of `nodes`."""
        ...

    def idle(self, index: PrefixIndex, nodes: Int32) -> None:
        """The last user of `nodes` has left."""
        ...

    def gone(self, index: PrefixIndex, node: int) -> None:
        """`node` is about to go for room."""
        ...


class LRU:
    """The page whose last user left longest ago. Of one chain the deepest goes first, since only leaves go.

    The default: it has no parameters, adapts at once, and what a running conversation uses stays. A burst of prompts
    that never come back displaces what would have. O(1) a rank, and no other call.
    """

    name = "lru"

    def rank(self, index: PrefixIndex, node: int) -> float:
        return float(index.last_use[node])


class Shortest:
    """The page that ends the shortest prefix, in tokens; of equals the one that fell idle first.

    After the prefix pool of TinyLoop, which lets the shortest of its prefixes go. In place of LRU for a few long
    documents that are asked about again and again: what is cheapest to compute anew goes first, however popular. It
    never forgets, so long prompts that nobody repeats keep their pages. O(1) a rank, and no other call.
    """

    name = "shortest"

    def rank(self, index: PrefixIndex, node: int) -> float:
        return float(index.end[node])


class LFUDA:
    """Least frequently used, with dynamic ageing: a page's worth is its uses plus the cache's age at the last of them.

    The age is the greatest worth that went for room so far, so that what was popular once goes in the end. In place
    of LRU where a stable set of openings is shared by many and single prompts rush through between them. A use is a
    donation or an attach.

    O(nodes) for each call, O(1) a rank; 16 bytes a node. M. Arlitt, L. Cherkasova, J. Dilley, R. Friedrich, T. Jin:
    Evaluating content management techniques for Web proxy caches (ACM SIGMETRICS Performance Evaluation Review 27(4),
    2000), section on LFU with dynamic aging.
    """

    name = "lfu_da"

    def __init__(self) -> None:
        self.age = 0.0
        self.uses: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.worth: npt.NDArray[np.float64] = np.zeros(0, np.float64)

    def weight(self, index: PrefixIndex, nodes: Int32) -> npt.NDArray[np.float64]:
        """What one use of each node counts. O(nodes)."""
        return np.ones(len(nodes))

    def rank(self, index: PrefixIndex, node: int) -> float:
        return float(self.worth[node])

    def entered(self, index: PrefixIndex, nodes: Sequence[int]) -> None:
        more = len(index.birth) - len(self.uses)
        if more > 0:
            self.uses = np.concatenate([self.uses, np.zeros(more, np.int64)])
            self.worth = np.concatenate([self.worth, np.zeros(more, np.float64)])
        self.uses[list(nodes)] = 1

    def attached(self, index: PrefixIndex, nodes: Int32) -> None:
        self.uses[nodes] += 1

    def idle(self, index: PrefixIndex, nodes: Int32) -> None:
        self.worth[nodes] = self.age + self.uses[nodes] * self.weight(index, nodes)

    def gone(self, index: PrefixIndex, node: int) -> None:
        self.age = max(self.age, float(self.worth[node]))


class GDSF(LFUDA):
    """Greedy-dual-size-frequency: `lfu_da` with each use weighted by what the page costs to recompute, for its size.

    A row at position p costs what the weights cost, and attention over p positions: 1 + p / even_at, in units of the
    former; `even_at` is the position at which both are equal, about six times the width of the model. All pages have
    one size, so a page's weight is the mean cost of its rows (of a tail less, by the rows that it lacks). In place of
    `lfu_da` where long and short prompts mix and long ones are dear.

    O(nodes) for each call, O(1) a rank; 16 bytes a node. P. Cao, S. Irani: Cost-aware WWW proxy caching algorithms
    (USENIX Symposium on Internet Technologies and Systems, 1997); L. Cherkasova: Improving WWW proxies performance with
    greedy-dual-size-frequency caching policy (HP Laboratories, HPL-98-69, 1998).
    """

    name = "gdsf"

    def __init__(self, even_at: int = 16_384) -> None:
        super().__init__()
        if even_at < 1:
            raise ValueError(f"even_at must be a position of 1 or more, got {even_at}")
        self.even_at = even_at

    def weight(self, index: PrefixIndex, nodes: Int32) -> npt.NDArray[np.float64]:
        rows = index.rows[nodes]
        middle = index.end[nodes] - rows / 2
        return rows / index.page_size * (1 + middle / self.even_at)


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU, "lfu_da": LFUDA, "gdsf": GDSF, "shortest": Shortest}


def get_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """A policy by its name, or the object itself. ValueError lists the names there are; TypeError for what is none."""
    if not isinstance(policy, str):
        if not callable(getattr(policy, "rank", None)):
            raise TypeError(f"an eviction policy must be a name, or have a name and rank(), got {policy!r}")
        return policy
    try:
        return POLICIES[policy]()
    except KeyError:
        raise ValueError(f"the eviction policy must be one of {', '.join(sorted(POLICIES))}, got {policy!r}") from None
