"""The argument checks that all backends share: each names the limit, what was found, and what to do."""

from __future__ import annotations

import numpy as np
import torch

from paged.errors import UnsupportedShape
from paged.kv.storage import PageStorage
from paged.ops.plan import AttendPlan, Int32


def check_attend(
    q: torch.Tensor, storage: PageStorage, layer: int, plan: AttendPlan, window: int, softcap: float
) -> None:
    """Refuse a query whose shape, dtype or head ratio no backend computes. O(1)."""
    spec = storage.spec
    if q.dim() != 3 or q.shape[0] != plan.num_rows or q.shape[2] != spec.head_dim:
        raise UnsupportedShape(
            f"q must be [{plan.num_rows} rows, q_heads, head_dim {spec.head_dim}], got {list(q.shape)}"
        )
    if q.shape[1] < 1 or q.shape[1] % spec.num_kv_heads:
        raise UnsupportedShape(
            f"the number of query heads must be a multiple of the {spec.num_kv_heads} kv heads, got {q.shape[1]}"
        )
    if not q.is_floating_point():
        raise TypeError(f"q must be a floating-point tensor, got {q.dtype}")
    if window < 0 or not softcap >= 0:
        raise ValueError(f"window and softcap must be 0 (off) or positive, got window {window}, softcap {softcap}")
    check_page_size(storage, plan)
    check_layer(storage, layer)


def check_lse(lse: torch.Tensor, q: torch.Tensor) -> None:
    """`lse` must be a contiguous fp32 `[T, q_heads]` on q's device."""
    if tuple(lse.shape) != tuple(q.shape[:2]) or not lse.is_contiguous():
        raise UnsupportedShape(f"lse must be contiguous {list(q.shape[:2])}, got {list(lse.shape)}")
    if lse.dtype != torch.float32:
        raise TypeError(f"lse must be fp32, got {lse.dtype}")


def check_append(storage: PageStorage, layer: int, k: torch.Tensor, v: torch.Tensor, plan: AttendPlan) -> None:
    """Refuse K or V rows that do not match the plan's slots or the storage. O(1)."""
    spec = storage.spec
    want = (plan.num_rows, spec.num_kv_heads, spec.head_dim)
    for name, x in (("k", k), ("v", v)):
        if tuple(x.shape) != want:
            raise UnsupportedShape(f"{name} must be [rows, kv_heads, head_dim] = {list(want)}, got {list(x.shape)}")
        if x.dtype not in storage.codec.row_dtypes:
            accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in storage.codec.row_dtypes[1:])
            raise TypeError(f"{name} must be fp32 or the stored {accepted}, got {x.dtype}")
    check_page_size(storage, plan)
    check_layer(storage, layer)


def check_page_size(storage: PageStorage, plan: AttendPlan) -> None:
    """Slots and page tables mean nothing at another page size."""
    if plan.page_size != storage.page_size:
        raise UnsupportedShape(f"the plan has page_size {plan.page_size}, the storage {storage.page_size}")


def check_layer(storage: PageStorage, layer: int) -> None:
    """The layer must be one of those that a page holds."""
    if not 0 <= layer < storage.spec.layers:
        raise UnsupportedShape(f"layer must be between 0 and {storage.spec.layers - 1}, got {layer}")


def check_page_ids(storage: PageStorage, src: Int32, dst: Int32) -> None:
    """Sources and targets of a page copy: int32, one length, inside the storage, no target twice or also a source."""
    if src.dtype != np.int32 or dst.dtype != np.int32:
        raise TypeError(f"page ids must be int32 arrays, got {src.dtype} and {dst.dtype}")
    if src.ndim != 1 or src.shape != dst.shape:
        raise UnsupportedShape(f"src and dst must be two lists of one length, got {src.shape} and {dst.shape}")
    if not len(src):
        return
    low, high = min(int(src.min()), int(dst.min())), max(int(src.max()), int(dst.max()))
    if low < 0 or high >= storage.num_pages:
        bad = low if low < 0 else high
        raise ValueError(f"page ids must be between 0 and {storage.num_pages - 1}, got {bad}")
    targets = set(dst.tolist())
    if len(targets) < len(dst) or targets & set(src.tolist()):
        raise ValueError("no page may be a target twice, or a target and a source; copy in two calls")
