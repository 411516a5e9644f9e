"""The native CPU backend: checks tensors, binds addresses, calls `paged._native`.

Results of a row are the same bits whatever its neighbours, the chunking, the page placement, the page size and the
number of threads: see csrc/README.md. Environment: PAGED_CPU_ISA forces an instruction set (baseline, avx2, avx512),
PAGED_THREADS the number of threads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import finalize

import torch

from paged.errors import NativeMissing, UnsupportedShape
from paged.kv.storage import PageStorage
from paged.ops.checks import check_append, check_attend, check_lse, check_page_ids
from paged.ops.plan import AttendPlan, Int32, check_plan

if TYPE_CHECKING:
    from paged._native import Kernels, Pages, Plan

try:
    from paged import _native
except ImportError as error:
    raise NativeMissing(
        f"paged._native cannot be imported ({error}): install the package (pip install -e . in a checkout), or set "
        "PAGED_BACKEND=reference to compute with plain torch"
    ) from error

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
PAGES = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3, "int4": 4}  # by codec; enum Dtype in csrc/include/paged/cpu.h
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class _Bound:
    """A storage whose geometry was checked, and its memory at that time."""

    memory: torch.Tensor
    pages: Pages
    layers: int
    kv_heads: int
    page_size: int
    head_dim: int


class CpuBackend:
    """`Backend` over the native kernels of one instruction set ("" is the widest that this processor has).

    Limits: pages of any codec; queries in fp32, fp16 or bf16; a head size that is a multiple of 8 and at most 256;
    query heads a multiple of kv heads; any page size.
    """

    def __init__(self, isa: str = "") -> None:
        self.name = "cpu"
        self.kernels: Kernels = _native.Kernels(isa)
        self.isa = self.kernels.isa
        self._bound: dict[int, _Bound] = {}  # by id of the storage; gone with it

    def append(self, storage: PageStorage, layer: int, k: torch.Tensor, v: torch.Tensor, plan: AttendPlan) -> None:
        """Store the step's K and V rows at `plan.slots`; rows whose slot is -1 are skipped. O(T)."""
        bound = self._bound.get(id(storage))
        if bound is None or bound.memory is not storage.pages:
            bound = self._bind(storage)
        check_append(storage, layer, k, v, plan)
        if k.dtype != v.dtype:
            raise TypeError(f"k and v must have one dtype, got {k.dtype} and {v.dtype}")
        handle = self._plan(plan, storage)
        k, v = _rows(k), _rows(v)
        dtype = DTYPES[k.dtype]
        self.kernels.append(handle, bound.pages, layer, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), dtype)

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
        """Causal attention of `q [T, q_heads, head_dim]` over the pages; see `Backend.attend`.

        A row that sees no key (position -1) becomes 0, its lse -inf. The rows of q may lie apart (a view of a fused
        projection is not copied). Cost before the kernel: about 3 microseconds.
        """
        bound = self._bound.get(id(storage))
        if bound is None or bound.memory is not storage.pages:
            bound = self._bind(storage)
        dtype = DTYPES.get(q.dtype)
        shape = q.shape
        if not (
            len(shape) == 3
            and shape[0] == len(plan.positions)
            and shape[2] == bound.head_dim
            and shape[1] % bound.kv_heads == 0 < shape[1]
            and 0 <= layer < bound.layers
            and plan.page_size == bound.page_size
            and window >= 0
            and softcap >= 0
            and dtype is not None
        ):
            check_attend(q, storage, layer, plan, window, softcap)  # names what is wrong
            raise TypeError(f"q must be fp32, fp16 or bf16, got {q.dtype}")
        address = 0
        if lse is not None:
            check_lse(lse, q)
            address = lse.data_ptr()
        handle = plan.handle
        if type(handle) is not _native.Plan:
            handle = self._plan(plan, storage)
        if q.is_contiguous():
            stride = shape[1] * shape[2]
            out = torch.empty_like(q)
        else:
            q = _rows(q)
            stride = q.stride(0)
            out = torch.empty(shape, dtype=q.dtype)
        self.kernels.attend(
            handle,
            bound.pages,
            layer,
            q.data_ptr(),
            stride,
            shape[1],
            dtype,
            out.data_ptr(),
            address,
            scale,
            window,
            softcap,
        )
        return out

    def copy_pages(self, storage: PageStorage, src: Int32, dst: Int32) -> None:
        """Copy whole pages `src[i]` to `dst[i]`."""
        check_page_ids(storage, src, dst)
        _native.copy_pages(self.pages(storage), src, dst)

    def info(self) -> dict[str, str | int]:
        """Instruction set and threads."""
        return {"isa": self.isa, "threads": _native.num_threads()}

    def pages(self, storage: PageStorage) -> Pages:
        """The native view of the storage."""
        bound = self._bound.get(id(storage))
        return (bound if bound and bound.memory is storage.pages else self._bind(storage)).pages

    def _bind(self, storage: PageStorage) -> _Bound:
        """Check the storage once; again when its memory has moved."""
        spec = storage.spec
        dtype = PAGES.get(storage.codec.name)
        if dtype is None:
            raise UnsupportedShape(f"the cpu backend stores {', '.join(PAGES)}, got {storage.codec.name}")
        if spec.head_dim % 8 or spec.head_dim > MAX_HEAD_DIM:
            raise UnsupportedShape(
                f"the head size must be a multiple of 8 and at most {MAX_HEAD_DIM}, got {spec.head_dim}; "
                "PAGED_BACKEND=reference computes any"
            )
        if storage.device.type != "cpu":
            raise UnsupportedShape(f"the cpu backend needs pages in main memory, these are on {storage.device}")
        size, heads, dim = storage.page_size, spec.num_kv_heads, spec.head_dim
        pages = _native.Pages(storage.pages.data_ptr(), storage.num_pages, spec.layers, heads, size, dim, dtype)
        if id(storage) not in self._bound:
            finalize(storage, self._bound.pop, id(storage), None)
        bound = self._bound[id(storage)] = _Bound(storage.pages, pages, spec.layers, heads, size, dim)
        return bound

    def _plan(self, plan: AttendPlan, storage: PageStorage) -> Plan:
        """The plan's native form, kept in `plan.handle`: made by the first call of a step, used by all its layers."""
        handle = plan.handle
        if type(handle) is _native.Plan:
            return handle
        try:
            handle = _native.Plan(plan.page_size, plan.q_indptr, plan.kv_lens, plan.page_table, plan.slots)
        except (TypeError, ValueError):
            check_plan(plan, storage.num_pages)
            raise
        plan.handle = handle
        return handle


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x [rows, heads, dim]` with each row contiguous, copied only if it is not."""
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous()


def make_backend() -> CpuBackend:
    """The native backend of the instruction set in PAGED_CPU_ISA, else of the widest that this processor has."""
    return CpuBackend(os.environ.get("PAGED_CPU_ISA", ""))
