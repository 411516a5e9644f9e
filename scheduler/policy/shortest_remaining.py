"""The least work left first."""

from __future__ import annotations

from scheduler.policy.base import Key, Policy
from scheduler.request import Request


class ShortestRemaining(Policy):
    """The request with the fewest tokens left, prompt and `max_tokens` together, starts first: the mean wait is least.

    A preempted request counts only what it has not generated yet, as its rows are mostly still cached. Ageing: each
    step between two submissions makes up for `ageing` tokens, so a request of n tokens goes before every one that is
    submitted n / ageing steps after it, however short. The key, tokens left + ageing * step of submission, changes
    only while the request runs.

    Replaces sorting the whole queue by length at each step, as schedulers do that guess output lengths, and their
    starvation of long requests; nobody is pushed out for a shorter one.
    """

    name = "shortest_remaining"

    def __init__(self, ageing: float = 16.0) -> None:
        if not ageing > 0:
            raise ValueError(f"ageing must be above 0 tokens a step, got {ageing}")
        self.ageing = ageing

    def key(self, request: Request) -> Key:
        done = len(request.known) if request.num_preemptions else 0
        return (request.limit - done + self.ageing * request.arrival_step, request.arrival)
