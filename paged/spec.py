"""What a model asks to be kept for a sequence: KV pages, by geometry and groups, and recurrent state, by planes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Geometry of the KV cache of one model.

    A page holds `page_size` positions of `layers` consecutive layers, K and V:
    `[layers, 2, kv_heads, page_size, head_dim]`. A sequence has one row of page ids per *group*; an ordinary
    model has one group that holds all its layers. `windows[g]` is the sliding window of group g in tokens,
    counting the query itself; 0 means full attention.
    """

    layers: int
    num_kv_heads: int
    head_dim: int
    num_groups: int = 1
    windows: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        for name in ("layers", "num_kv_heads", "head_dim", "num_groups"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"KVSpec.{name} must be a positive int, got {value!r}")
        if len(self.windows) != self.num_groups or any(w < 0 for w in self.windows):
            raise ValueError(
                f"KVSpec.windows needs one window >= 0 for each of {self.num_groups} groups, got {self.windows!r}"
            )

    def page_values(self, page_size: int) -> int:
        """Number of K and V values in one page of `page_size` positions."""
        return self.layers * 2 * self.num_kv_heads * page_size * self.head_dim


_STATE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int64": 8}


@dataclass(frozen=True, slots=True)
class StatePlane:
    """One tensor of a sequence's recurrent state: its name, its shape for one sequence, and its dtype.

    `dtype` is "fp32", "fp16", "bf16" or "int64".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("StatePlane.name must not be empty")
        # the annotation promises ints; a caller without a type checker may still pass others
        if not all(isinstance(n, int) and n >= 0 for n in self.shape):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"StatePlane.shape of {self.name} must be ints >= 0, got {self.shape!r}")
        if self.dtype not in _STATE_BYTES:
            raise ValueError(
                f"StatePlane.dtype of {self.name} must be one of {', '.join(_STATE_BYTES)}, got {self.dtype!r}"
            )

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _STATE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Geometry of the recurrent state of one sequence: what layers keep whose state only moves forward.

    Unlike pages, a state is valid at exactly one position; it does not grow with the sequence.
    """

    planes: tuple[StatePlane, ...]

    def __post_init__(self) -> None:
        names = [plane.name for plane in self.planes]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"StateSpec.planes needs at least one plane, each with a name of its own, got {names}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the state of one sequence."""
        return sum(plane.num_bytes for plane in self.planes)
