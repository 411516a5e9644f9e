"""Tenants: what a policy knows of each namespace, in arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

KEPT = 1024  # idle namespaces that are remembered at least


class Tenants:
    """Namespaces by index, with a counter and a weight each. Idle ones are forgotten, the least counters first, once
    there are far more than `KEPT`: who comes back later is lifted to where the others are anyway.

    counters     float64  tokens served, weighted
    weights      float64
    num_waiting  int64    requests in the queue
    num_live     int64    requests that wait or run
    since        int64    no request that waits has arrived before: the arrival of the oldest, or of one before it
    """

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._index: dict[str, int] = {}
        self._free: list[int] = []
        self._most = 2 * KEPT
        self.names: list[str] = []
        self.counters = np.zeros(0)
        self.weights = np.ones(0)
        self.num_waiting = np.zeros(0, np.int64)
        self.num_live = np.zeros(0, np.int64)
        self.since = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._index)

    def enter(self, namespace: str) -> int:
        """The index of a namespace; a new one begins at counter 0."""
        i = self._index.get(namespace)
        if i is None:
            if not self._free:
                self._grow()
            i = self._index[namespace] = self._free.pop()
            self.names[i] = namespace
            self.counters[i], self.weights[i] = 0.0, self._weight_of(namespace)
        return i

    def value(self, namespace: str) -> float:
        """The counter of a namespace; 0.0 for one that is not known."""
        i = self._index.get(namespace)
        return 0.0 if i is None else float(self.counters[i])

    def index(self, namespace: str) -> int:
        """The index of a namespace; -1 for one that is not known."""
        return self._index.get(namespace, -1)

    def forget_idle(self, keep: int) -> None:
        """Forget idle namespaces but index `keep`, if it is time. O(1) amortised."""
        if len(self._index) <= self._most:
            return
        idle = np.array([i for i in self._index.values() if not self.num_live[i] and i != keep], np.int64)
        for i in idle[np.argsort(self.counters[idle])][: max(0, len(idle) - KEPT)].tolist():
            del self._index[self.names[i]]
            self._free.append(i)
        self._most = 2 * max(KEPT, len(self._index))

    def _grow(self) -> None:
        size, more = len(self.names), max(16, len(self.names))
        self.names += [""] * more
        self._free += range(size + more - 1, size - 1, -1)
        self.counters = np.append(self.counters, np.zeros(more))
        self.weights = np.append(self.weights, np.ones(more))
        self.num_waiting = np.append(self.num_waiting, np.zeros(more, np.int64))
        self.num_live = np.append(self.num_live, np.zeros(more, np.int64))
        self.since = np.append(self.since, np.zeros(more, np.int64))
