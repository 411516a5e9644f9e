"""First come, first served."""

from __future__ import annotations

from scheduler.policy.base import Key, Policy
from scheduler.request import Request


class FCFS(Policy):
    """Admission in order of submission; a preempted request keeps its place, ahead of every later one.

    Replaces the default of vLLM and SGLang, where a head that does not fit holds up everything behind it. Waiting is
    bounded: nobody starts before an earlier request but in passes in which that one did not fit, and there are at most
    `max_bypass` of these; then every page that comes free is kept for it.
    """

    name = "fcfs"

    def key(self, request: Request) -> Key:
        return (request.arrival,)
