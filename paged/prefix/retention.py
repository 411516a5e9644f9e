"""Retention: what a caller knows of a prefix's future, and what it does to the order in which pages go."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Union

import numpy as np
import numpy.typing as npt

from paged.prefix.hashing import Int32
from paged.prefix.index import PrefixIndex

Retain = Union[None, str, float, "Retention"]


@dataclass(frozen=True, slots=True)
class Retention:
    """What becomes of a prefix when its last user has left.

    keep      "none": this conversation is over, its own pages go before all others;
              "turn": it goes on, keep it for the next turn;
              a number of seconds: keep it for so long after each use, whoever uses it
    priority  of what is kept, the lower goes first; any int

    A hint orders what can go. It takes nothing out of reach: where only kept pages are left, they go. `pin` is for
    what must not.
    """

    keep: str | float
    priority: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.keep, str):
            known = self.keep in ("none", "turn")
        else:
            known = not isinstance(self.keep, bool) and not math.isnan(self.keep) and self.keep > 0
        if not known:
            raise ValueError(f'retain must be "none", "turn" or a number of seconds above 0, got {self.keep!r}')
        if not isinstance(self.priority, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"the priority of a retention must be an int, got {type(self.priority).__name__}")

    @staticmethod
    def of(value: Retain) -> Retention | None:
        """A hint as callers write it: None (nothing is known), "none", "turn", seconds, or a Retention."""
        if value is None or isinstance(value, Retention):
            return value
        if not isinstance(value, (str, int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f'retain must be "none", "turn", seconds or a Retention, got {type(value).__name__}')
        return Retention(value)


class Band(enum.IntEnum):
    """What goes first, second and last."""

    FIRST = 0
    PLAIN = 1
    KEPT = 2


_PLAIN, _NONE, _TURN, _TIMED = range(4)


class Retentions:
    """The hints of cached pages, as arrays indexed by node; nothing is kept before the first hint.

    A page carries the last hint given for a prefix that contains it, with these exceptions, since many prefixes may
    contain a page. Seconds stand until other seconds replace them. "none" ends "turn", and marks what the donation
    itself brought, but only below the last page that something else stands on. A page so marked that is attached
    after all counts like any other again.

    "turn" keeps a page for `turn_s` seconds after its last user left; people answer within minutes, or not at all. A
    page whose time is over counts like any other. `clock` gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, turn_s: float = 600.0) -> None:
        self.clock = clock
        self.turn_s = turn_s
        self._hint: npt.NDArray[np.int8] = np.zeros(0, np.int8)
        self._keep_s: npt.NDArray[np.float64] = np.zeros(0, np.float64)
        self._priority: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._until: npt.NDArray[np.float64] = np.zeros(0, np.float64)

    @property
    def used(self) -> bool:
        """Whether any hint was ever given."""
        return len(self._hint) > 0

    def mark(self, index: PrefixIndex, nodes: Int32, retention: Retention, chain: int) -> None:
        """A sequence that stands on all of `nodes`, from the first page on, gives a hint for them. O(nodes).

        `chain` is its donation. What it put among `nodes` without attaching it has that number in the index.
        """
        if not len(nodes):
            return
        self._reserve(len(index.birth))
        if retention.keep == "none":
            others = index.children[nodes] - 1
            others[-1] += 1
            above = np.flatnonzero(others > 0)
            nodes = nodes[above[-1] + 1 :] if len(above) else nodes
            nodes = nodes[(self._hint[nodes] == _TURN) | (index.chain[nodes] == chain)]
            hint, keep_s = _NONE, 0.0
        elif retention.keep == "turn":
            nodes = nodes[self._hint[nodes] != _TIMED]
            hint, keep_s = _TURN, self.turn_s
        else:
            hint, keep_s = _TIMED, float(retention.keep)
        self._hint[nodes] = hint
        self._keep_s[nodes] = keep_s
        self._priority[nodes] = retention.priority
        self._until[nodes] = self.clock() + keep_s

    def entered(self, nodes: Sequence[int]) -> None:
        """New pages stand at `nodes`, where others may have stood before. O(nodes)."""
        self._reserve(max(nodes) + 1)
        self._hint[list(nodes)] = _PLAIN

    def attached(self, nodes: Int32) -> None:
        """A sequence attached `nodes`. O(nodes)."""
        self._reserve(int(nodes.max()) + 1)
        self._hint[nodes[self._hint[nodes] == _NONE]] = _PLAIN

    def idle(self, nodes: Int32) -> None:
        """The last user of `nodes` has left: their time begins. O(nodes)."""
        self._reserve(int(nodes.max()) + 1)
        self._until[nodes] = self.clock() + self._keep_s[nodes]

    def standing(self, node: int) -> tuple[Band, int, float]:
        """Band and priority of `node` now, and until when it is kept. O(1)."""
        hint = self._hint[node] if node < len(self._hint) else _PLAIN
        if hint == _PLAIN:
            return Band.PLAIN, 0, 0.0
        if hint == _NONE:
            return Band.FIRST, int(self._priority[node]), 0.0
        until = float(self._until[node])
        if until <= self.clock():
            return Band.PLAIN, 0, 0.0
        return Band.KEPT, int(self._priority[node]), until

    def _reserve(self, num_nodes: int) -> None:
        more = num_nodes - len(self._hint)
        if more > 0:
            more += num_nodes // 2
            self._hint = np.concatenate([self._hint, np.zeros(more, np.int8)])
            self._keep_s = np.concatenate([self._keep_s, np.zeros(more)])
            self._priority = np.concatenate([self._priority, np.zeros(more, np.int64)])
            self._until = np.concatenate([self._until, np.zeros(more)])
