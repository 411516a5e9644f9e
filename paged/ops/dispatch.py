"""Which backend computes: the choice is made once per device, and an environment variable forces it."""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import Protocol

import torch

from paged.errors import NativeMissing
from paged.kv.storage import PageStorage
from paged.ops.plan import AttendPlan, Int32

_MODULES = {"reference": "paged.ops.reference", "cpu": "paged.ops.cpu", "cuda": "paged.ops.cuda"}


class Backend(Protocol):
    """The operations on pages that a backend offers. Tensors lie on the storage's device; rows may be strided."""

    name: str

    def append(self, storage: PageStorage, layer: int, k: torch.Tensor, v: torch.Tensor, plan: AttendPlan) -> None:
        """Store K and V of the step's rows, each `[T, kv_heads, head_dim]` fp32 or the stored dtype, at `plan.slots`.

        Rows whose slot is -1 are skipped; nothing else is written.
        """
        ...

    def attend(
        self,
        q: torch.Tensor,
        storage: PageStorage,
        layer: int,
        plan: AttendPlan,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of `q [T, q_heads, head_dim]` over the pages; returns the same shape and dtype.

        q_heads must be a multiple of kv_heads; query head h reads kv head `h // (q_heads // kv_heads)`. A row at
        position p sees positions `0..p`, with a window W only `p - W + 1..p`. softcap c > 0 replaces a score s by
        `c * tanh(s / c)`. `lse`, if given, is fp32 `[T, q_heads]` and receives the natural log of the sum of
        exponentials.
        """
        ...

    def copy_pages(self, storage: PageStorage, src: Int32, dst: Int32) -> None:
        """Copy whole pages `src[i]` to `dst[i]` (int32 arrays of one length, no id both a source and a target)."""
        ...

    def info(self) -> dict[str, str | int]:
        """What `paged info` says about it beside the name: instruction set, threads, device."""
        ...


@cache
def _load(name: str) -> Backend:
    module = importlib.import_module(_MODULES[name])
    return module.make_backend()


def get_backend(device: str | torch.device = "cpu", name: str | None = None) -> Backend:
    """The backend for `device`: `name`, else `PAGED_BACKEND`, else cuda on a GPU, else cpu, else reference.

    NativeMissing if a backend that was asked for by name cannot be loaded; without a name, the reference backend
    takes the place of a missing native one (`paged info` shows which is used).
    """
    asked = name or os.environ.get("PAGED_BACKEND") or ""
    if asked:
        if asked not in _MODULES:
            raise ValueError(f"the backend must be one of {', '.join(_MODULES)}, got {asked!r} (PAGED_BACKEND)")
        return _load(asked)
    wanted = "cuda" if torch.device(device).type == "cuda" else "cpu"
    try:
        return _load(wanted)
    except NativeMissing:
        return _load("reference")
