"""What a scheduling policy decides."""

from __future__ import annotations

from typing import Protocol

from scheduler.request import Request


class Policy(Protocol):
    """Orders the waiting requests."""

    name: str

    def key(self, request: Request) -> tuple[float, ...]:
        """The smallest key is admitted first. It must not change while the request waits, and end with the arrival."""
        ...
