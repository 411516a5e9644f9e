"""Quota: what one namespace may have at once."""

from __future__ import annotations

from dataclasses import dataclass

from paged.errors import require_integer


@dataclass(frozen=True, slots=True)
class Quota:
    """What the running requests of one namespace may have; 0: no limit.

    max_pages    pages that they hold, shared ones counted for each. It bounds the length of a request too: one whose
                 prompt is longer is refused, one that reaches it ends with "length", as with the whole pool
    max_running  requests that run at once
    """

    max_pages: int = 0
    max_running: int = 0

    def __post_init__(self) -> None:
        for name in ("max_pages", "max_running"):
            value = require_integer(f"{name} of a quota", getattr(self, name))
            if value < 0:
                raise ValueError(f"{name} of a quota must be 0 or more, got {value}")
