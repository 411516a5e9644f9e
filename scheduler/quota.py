"""Quota: what one namespace may have at once."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral


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
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name} of a quota must be an integer, got {value!r}")
            if value < 0:
                raise ValueError(f"{name} of a quota must be 0 or more, got {value}")
