"""First come, first served."""

from __future__ import annotations

from scheduler.request import Request


class FCFS:
    """Admission in order of submission; a preempted request keeps its place, ahead of every later one.

    Waiting is bounded: a request that does not fit is bypassed in at most `max_bypass` passes, then every page that
    comes free is kept for it.
    """

    name = "fcfs"

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.arrival,)
