"""Counters that say what they count: one text each, for readers of the code and of the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any


def counter(text: str) -> int:
    """A dataclass field that starts at 0 and only grows; `text` says what it counts."""
    return field(default=0, metadata={"help": text, "kind": "counter"})


def gauge(text: str) -> int:
    """A dataclass field that starts at 0 and may also fall, or that keeps a greatest value."""
    return field(default=0, metadata={"help": text, "kind": "gauge"})


@dataclass(frozen=True, slots=True)
class Reading:
    """One field of a dataclass of counters: its name, what it counts, whether it only grows, and where it stands."""

    name: str
    text: str
    grows: bool
    value: int


def readings(stats: Any) -> Iterator[Reading]:
    """The fields of a dataclass whose fields are counters and gauges, in their order."""
    for item in fields(stats):
        yield Reading(item.name, item.metadata["help"], item.metadata["kind"] == "counter", getattr(stats, item.name))
