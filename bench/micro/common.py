"""Timing by turns: the machine's other load then falls on all that is compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def by_turns(calls: Mapping[str, Callable[[], object]], seconds: float, least: int = 5) -> dict[str, list[float]]:
    """Seconds of each call, in turns A B C A B C ..., for about `seconds` in all and at least `least` turns.

    The first turn warms up and is not counted. A turn that the machine's other load hit is seen by its neighbours:
    compare minima, or the medians.
    """
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    turn = 0
    while turn < least or time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
        turn += 1
    return times


def by_blocks(
    calls: Mapping[str, Callable[[], object]], seconds: float, block: int = 5, least: int = 3
) -> dict[str, list[float]]:
    """Seconds of each call, in blocks A A A .. B B B .. A A A .., for about `seconds` and at least `least` of each.

    The first call of each block is not counted: for a while the threads of the library that ran before still spin on
    the cores that those of the next one need. Whoever calls the two in turn pays that, but it belongs to neither.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    blocks = 0
    while blocks < least or time.perf_counter() < end:
        for name, call in calls.items():
            call()
            for _ in range(block):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
        blocks += 1
    return times


def best(times: list[float]) -> float:
    return min(times)
