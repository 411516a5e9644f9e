"""What a model asks to be kept for a sequence: KV pages, by geometry and groups, and recurrent state, by planes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from paged.errors import require_integer


@dataclass(frozen=True, slots=True)
class LoopGroups:
    """How the page groups of a looped model stand for its iterations: iteration i has group `first_group + i`.

    Groups below `first_group` hold the layers around the loop block; `after_group` those behind it, whose rows depend
    on the number of iterations (None: there are none).
    """

    first_group: int
    max_loops: int
    default_loops: int
    after_group: int | None = None


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Geometry of the KV cache of one model.

    A page holds `page_size` positions of `layers` consecutive layers, K and V:
    `[layers, 2, kv_heads, page_size, head_dim]`. A sequence has one row of page ids per *group*; an ordinary
    model has one group that holds all its layers. `windows[g]` is the sliding window of group g in tokens,
    counting the query itself; 0 means full attention. `loop` is set where groups are iterations of a looped model.
    """

    layers: int
    num_kv_heads: int
    head_dim: int
    num_groups: int = 1
    windows: tuple[int, ...] = (0,)
    loop: LoopGroups | None = None

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

    def view(self, loops: int | None = None, cache_window: int = 0) -> KVView:
        """What one sequence of `loops` iterations uses of these groups; None: the default of a looped model, else 0.

        `cache_window` W > 0: each query sees the last W positions alone, itself included, in every layer. ValueError
        where the model does not loop, or not so often, or for a window below 0; TypeError for no integer.
        """
        if loops is None:
            loops = 0 if self.loop is None else self.loop.default_loops
        # Views are remembered by these: equal numbers of other types would share them.
        return _view(self, require_integer("loops", loops), require_integer("cache_window", cache_window))


class KVView:
    """What one sequence uses of a model's page groups, and how far back it sees in each. Equal ones are one object.

    loops         iterations of a looped model; 0 = the model does not loop
    cache_window  positions that every query sees at most, itself included; 0 = all
    groups        int32, ascending: the groups that its rows are in
    uses          bool [num_groups]: the same, as a mask
    windows       int32 [num_groups]: the window of each group for this sequence; 0 = none
    loose         int32, ascending: groups that a cached prefix may lack a page of: those with a window, and all
                  iterations but the first, since prefixes of different depths share what they have in common
    wanted        int32, ascending: those of `loose` that this sequence uses
    fields        what the rows depend on beside tokens and weights: they tell namespaces of cached pages apart
    """

    __slots__ = ("cache_window", "fields", "groups", "loops", "loose", "uses", "wanted", "windows")

    def __init__(self, spec: KVSpec, loops: int, cache_window: int) -> None:
        self.loops = loops
        self.cache_window = cache_window
        uses = np.ones(spec.num_groups, np.bool_)
        inner = np.zeros(spec.num_groups, np.bool_)
        if spec.loop is not None:
            uses[spec.loop.first_group + loops :] = False
            inner[spec.loop.first_group + 1 :] = True
        self.uses: npt.NDArray[np.bool_] = uses
        self.groups: npt.NDArray[np.int32] = np.flatnonzero(uses).astype(np.int32)
        own = np.array(spec.windows, np.int32)
        self.windows: npt.NDArray[np.int32] = own
        if cache_window:
            self.windows = np.where(own > 0, np.minimum(own, cache_window), cache_window).astype(np.int32)
        self.loose: npt.NDArray[np.int32] = np.flatnonzero((self.windows > 0) | inner).astype(np.int32)
        self.wanted: npt.NDArray[np.int32] = np.intersect1d(self.loose, self.groups)
        by_depth = spec.loop is not None and spec.loop.after_group is not None
        self.fields: dict[str, int | None] = {
            "cache_window": cache_window or None,
            "loops": loops if by_depth else None,
        }

    @property
    def num_groups(self) -> int:
        """Pages that each column of its page table has."""
        return len(self.groups)

    def first_columns(self, position: int, page_size: int) -> npt.NDArray[np.int32]:
        """The first page that a query at `position` sees, in each group; int32 [num_groups]."""
        return np.where(self.windows > 0, np.maximum(0, position - self.windows + 1) // page_size, 0)


@lru_cache(maxsize=4096)
def _view(spec: KVSpec, loops: int, cache_window: int) -> KVView:
    if cache_window < 0:
        raise ValueError(f"cache_window must be 0 (everything is seen) or more positions, got {cache_window}")
    if cache_window >= 2**31:
        raise ValueError(f"cache_window must be at most {2**31 - 1} positions, got {cache_window}")
    if spec.loop is None and loops:
        raise ValueError(f"this model does not loop: loops must be None or 0, got {loops}")
    if spec.loop is not None and not 1 <= loops <= spec.loop.max_loops:
        raise ValueError(f"loops must be between 1 and this model's {spec.loop.max_loops}, got {loops}")
    return KVView(spec, loops, cache_window)


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
