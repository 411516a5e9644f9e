"""Earliest deadline first."""

from __future__ import annotations

from scheduler.policy.base import Key, Policy
from scheduler.request import Request


class Deadline(Policy):
    """The request whose deadline, submission + `deadline_s`, is earliest starts first.

    Those without one are due `default_s` after their submission, so among themselves they go by arrival. Waiting is
    bounded: nothing that is submitted after a request is due goes before it, whatever its own deadline. A deadline
    that has passed cancels nothing; that is what `timeout_s` and `queue_timeout_s` are for. Nobody is pushed out.

    Replaces nothing that the peers have: of vLLM and SGLang neither knows deadlines, and users map them to priorities.
    """

    name = "deadline"

    def __init__(self, default_s: float = 60.0) -> None:
        if not default_s >= 0:
            raise ValueError(f"default_s must be 0 or more seconds, got {default_s}")
        self.default_s = default_s

    def key(self, request: Request) -> Key:
        wanted = self.default_s if request.deadline_s is None else request.deadline_s
        return (request.submitted + wanted, request.arrival)
