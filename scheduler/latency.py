"""How long requests wait and run: the times of one, and histograms over all that ended."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields
from itertools import pairwise

import numpy as np

from paged.kv.pages import Int64


@dataclass(slots=True)
class Times:
    """When things happened to one request, in seconds of `perf_counter`; 0.0 for what has not happened."""

    queued: float
    admitted: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0

    @property
    def wait_s(self) -> float | None:
        return self.admitted - self.queued if self.admitted else None

    @property
    def first_token_s(self) -> float | None:
        return self.first_token - self.queued if self.first_token else None

    @property
    def end_to_end_s(self) -> float | None:
        return self.ended - self.queued if self.ended else None


class Histogram:
    """Counts of durations by upper bound, the last bucket for all that is longer. O(log buckets) to add one."""

    __slots__ = ("bounds", "counts", "sum_s")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        if any(a >= b for a, b in pairwise(bounds)):
            raise ValueError(f"the bounds of a histogram must rise, got {bounds}")
        self.bounds = bounds
        self.counts: Int64 = np.zeros(len(bounds) + 1, np.int64)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration; one that equals a bound is below it."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, how many are not above it) for each bucket, the last bound infinite."""
        return list(zip((*self.bounds, float("inf")), np.cumsum(self.counts).tolist(), strict=True))


_WAITS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


@dataclass(slots=True)
class Latencies:
    """What servers are judged by. Each sample of a request is counted by itself, once, when it ends: a token costs
    nothing. Of requests that were cancelled or failed the waits count that are over, and no time per token or in all.
    """

    queue_wait: Histogram = field(
        default_factory=lambda: Histogram(_WAITS), metadata={"help": "Seconds from submission to the first admission."}
    )
    time_to_first_token: Histogram = field(
        default_factory=lambda: Histogram(_WAITS), metadata={"help": "Seconds from submission to the first token."}
    )
    time_per_output_token: Histogram = field(
        default_factory=lambda: Histogram(_TOKENS),
        metadata={"help": "Seconds a token after the first, by request."},
    )
    end_to_end: Histogram = field(
        default_factory=lambda: Histogram(_WAITS), metadata={"help": "Seconds from submission to an end of its own."}
    )

    def record(self, times: Times, num_tokens: int, complete: bool) -> None:
        """Count a request that ended; `complete` if it came to an end of its own."""
        if times.wait_s is not None:
            self.queue_wait.add(times.wait_s)
        if times.first_token_s is not None:
            self.time_to_first_token.add(times.first_token_s)
        if complete:
            self.end_to_end.add(times.ended - times.queued)
            if num_tokens > 1:
                self.time_per_output_token.add((times.ended - times.first_token) / (num_tokens - 1))

    def items(self) -> list[tuple[str, str, Histogram]]:
        """(name, what it measures, histogram) of each."""
        return [(item.name, item.metadata["help"], getattr(self, item.name)) for item in fields(self)]
