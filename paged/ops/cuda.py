"""The CUDA backend: checks, one upload a step, and the launchers of `paged._cuda`.

Pages hold fp16 or bf16, or records of int8 or int4, which are decoded to fp16 as they are read; sums are fp32. A row's
bits depend only on its own query, keys and position: not on its neighbours, the size of its chunk, the pages it lies
on, or a prefix that it shares (see `paged/ops/cuda_work.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paged.errors import NativeMissing, UnsupportedShape
from paged.kv.codecs.int4 import rotation_size
from paged.kv.storage import PageStorage
from paged.ops.checks import check_append, check_attend, check_lse, check_page_ids
from paged.ops.cuda_work import Cut, HostWork, build_work, table_offsets
from paged.ops.plan import AttendPlan, Int32, check_plan

HEAD_SIZES = (64, 80, 96, 128, 256)
_TYPES = {"fp16": 0, "bf16": 1, "int8": 2, "int4": 3}  # by codec; csrc/cuda/api.h, enum Type
_NO_DRIVER = 35  # cudaErrorInsufficientDriver


@dataclass(slots=True)
class _Step:
    """What a plan holds on the device: uploaded once, used by every layer."""

    made_for: tuple[torch.device, int]  # the storage's device and number of pages, which the plan was checked against
    slots: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor
    work: dict[tuple[int, int, int, int], _Uploaded] = field(default_factory=dict)


@dataclass(slots=True)
class _Uploaded:
    """The work of one (heads, kv heads, head size, window), and the memory that its addresses point into."""

    work: Any
    memory: tuple[torch.Tensor, ...]


class CudaBackend:
    """`Backend` over a module with the functions of `paged/_cuda.pyi`.

    Cost of a call: one kernel launch to append, up to four to attend; host work once per plan, O(rows + items).
    """

    def __init__(self, module: Any, cut: Cut, name: str = "cuda") -> None:
        self.name = name
        self.cut = cut
        self._module = module

    def append(self, storage: PageStorage, layer: int, k: torch.Tensor, v: torch.Tensor, plan: AttendPlan) -> None:
        """Store K and V of the step's rows at `plan.slots`; rows whose slot is -1 are skipped. fp16 clamps."""
        check_append(storage, layer, k, v, plan)
        pool = self._pool(storage)
        if k.dtype != v.dtype:
            raise TypeError(f"k and v must have one dtype, got {k.dtype} and {v.dtype}")
        _check_device(storage, k=k, v=v)
        step = self._step(plan, storage)
        if storage.codec.dtype == torch.uint8:
            k, v = self._rotated(k, storage), v.float()
        k, v = _aligned(k), _aligned(v)
        rows = _fill(
            self._module.Rows(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            slots=step.slots.data_ptr(),
            num_rows=plan.num_rows,
            fp32=k.dtype == torch.float32,
        )
        self._launch(storage, self._module.append, pool, layer, rows)

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

        q is fp32 or of the stored dtype. The tensor cores multiply in the stored dtype: an fp32 q is rounded to it.
        """
        check_attend(q, storage, layer, plan, window, softcap)
        pool = self._pool(storage)
        if q.dtype not in storage.codec.row_dtypes:
            raise TypeError(f"q must be fp32 or the stored {storage.codec.dtype}, got {q.dtype}")
        if plan.page_size != storage.page_size:
            raise UnsupportedShape(f"the plan has page_size {plan.page_size}, the storage {storage.page_size}")
        _check_device(storage, q=q)
        if lse is not None:
            check_lse(lse, q)
            _check_device(storage, lse=lse)
        step = self._step(plan, storage)
        wanted = q.dtype
        if storage.codec.dtype == torch.uint8:
            q = self._rotated(q, storage)
            scale = scale / rotation_size(storage.spec.head_dim) if storage.codec.name == "int4" else scale
        q = _aligned(q)
        out = torch.empty_like(q)
        query = _fill(
            self._module.Query(),
            q=q.data_ptr(),
            out=out.data_ptr(),
            lse=0 if lse is None else lse.data_ptr(),
            heads=q.shape[1],
            fp32=q.dtype == torch.float32,
            scale=float(scale),
            window=window,
            softcap=float(softcap),
        )
        if plan.num_rows:
            work = self._work(plan, step, storage, q.shape[1], window)
            self._launch(storage, self._module.attend, pool, layer, query, work)
        return out.to(wanted)

    def copy_pages(self, storage: PageStorage, src: Int32, dst: Int32) -> None:
        """Copy whole pages `src[i]` to `dst[i]`."""
        check_page_ids(storage, src, dst)
        if not len(src):
            return
        pool = self._pool(storage)
        ids = _upload(np.concatenate([src, dst]), storage)
        address = ids.data_ptr()
        self._launch(storage, self._module.copy_pages, pool, address, address + 4 * len(src), len(src))

    def info(self) -> dict[str, str | int]:
        """The device's name."""
        return {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none"}

    def _launch(self, storage: PageStorage, call: Callable[..., None], *args: Any) -> None:
        """Call a launcher with the current stream of the storage's device; nothing waits for it."""
        device = storage.pages.device
        if device.type != "cuda":  # the simulation
            call(*args, 0)
            return
        with torch.cuda.device(device):
            self._module.set_device(device.index)
            call(*args, torch.cuda.current_stream(device).cuda_stream)

    def _rotated(self, x: torch.Tensor, storage: PageStorage) -> torch.Tensor:
        """Rows for pages of records: `x` in fp32; for int4 a rotated copy."""
        if storage.codec.name != "int4":
            return x.float()
        x = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        size = rotation_size(storage.spec.head_dim)
        self._launch(storage, self._module.rotate, x.data_ptr(), x.numel(), size)
        return x

    def _pool(self, storage: PageStorage) -> Any:
        kind, spec = storage.codec.name, storage.spec
        if kind not in _TYPES:
            raise UnsupportedShape(f"the CUDA kernels read pages of fp16 or bf16, int8 or int4, got {kind}")
        if spec.head_dim not in HEAD_SIZES:
            raise UnsupportedShape(
                f"the CUDA kernels are built for head sizes {', '.join(map(str, HEAD_SIZES))}, got {spec.head_dim}"
            )
        return _fill(
            self._module.Pool(),
            pages=storage.pages.data_ptr(),
            num_pages=storage.num_pages,
            layers=spec.layers,
            kv_heads=spec.num_kv_heads,
            page_size=storage.page_size,
            head_dim=spec.head_dim,
            type=_TYPES[kind],
        )

    def _step(self, plan: AttendPlan, storage: PageStorage) -> _Step:
        """The plan's arrays on the device; the first call of a step checks and uploads them."""
        made_for = (storage.pages.device, storage.num_pages)
        if not isinstance(plan.handle, _Step) or plan.handle.made_for != made_for:
            check_plan(plan, storage.num_pages)
            tables, _ = table_offsets(plan)
            slots, positions, tables = (_upload(array, storage) for array in (plan.slots, plan.positions, tables))
            plan.handle = _Step(made_for, slots, positions, tables)
        return plan.handle

    def _work(self, plan: AttendPlan, step: _Step, storage: PageStorage, heads: int, window: int) -> Any:
        spec = storage.spec
        key = (heads, spec.num_kv_heads, spec.head_dim, window)
        found = step.work.get(key)
        if found is None:
            host = build_work(
                plan, heads=heads, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, window=window, cut=self.cut
            )
            found = step.work[key] = self._place(host, step, storage, heads)
        return found.work

    def _place(self, host: HostWork, step: _Step, storage: PageStorage, heads: int) -> _Uploaded:
        """Uploads the arrays as one, items first: they are read 16 bytes at a time."""
        parts = (host.items, host.merges, host.rows, host.part_base)
        packed = _upload(np.concatenate([p.reshape(-1) for p in parts]), storage)
        size = host.num_partials * heads * (storage.spec.head_dim + 2)
        partials = torch.empty(size, dtype=torch.float32, device=storage.pages.device)
        items = packed.data_ptr()
        merges = items + host.items.nbytes
        rows = merges + host.merges.nbytes
        work = _fill(
            self._module.Work(),
            wide=items,
            narrow=items + 32 * host.num_wide,
            simple=items + 32 * (host.num_wide + host.num_narrow),
            num_wide=host.num_wide,
            num_narrow=host.num_narrow,
            num_simple=host.num_simple,
            rows=rows,
            positions=step.positions.data_ptr(),
            tables=step.tables.data_ptr(),
            part_base=rows + host.rows.nbytes,
            merges=merges,
            num_merges=len(host.merges),
            partials=partials.data_ptr(),
            folds=host.folds,
        )
        return _Uploaded(work, (packed, partials))


def _fill(record: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """`x` contiguous and at a multiple of 16 bytes: as the kernels load it; a copy only where it is not so."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _upload(array: np.ndarray, storage: PageStorage) -> torch.Tensor:
    """A copy of `array` on the storage's device. From pageable memory: the host array may change at once."""
    return torch.tensor(array, device=storage.pages.device)


def _check_device(storage: PageStorage, **tensors: torch.Tensor) -> None:
    """An address of another device's memory would be read as if it were one of this."""
    for name, x in tensors.items():
        if x.device != storage.pages.device:
            raise ValueError(f"{name} must be on {storage.pages.device}, where the pages are, got {x.device}")


def make_backend() -> CudaBackend:
    """The backend over `paged._cuda`. NativeMissing where it was not built, or where no CUDA device can be used."""
    try:
        from paged import _cuda  # pyright: ignore[reportMissingModuleSource]
    except ImportError as error:
        raise NativeMissing(
            f"paged._cuda cannot be imported ({error}); build it where nvcc is, with "
            "`pip install . -C cmake.define.PAGED_CUDA=ON`"
        ) from error
    error, count = _cuda.device_count()
    if error == _NO_DRIVER:
        raise NativeMissing(
            f"paged._cuda found no CUDA driver that it can use (error {error}: {_cuda.error_name(error)}); "
            "install a driver of version 580 or later, or use the cpu backend"
        )
    if error or not count:
        raise NativeMissing(
            f"paged._cuda found {count} CUDA devices (error {error}: {_cuda.error_name(error)}); use the cpu backend"
        )
    blocks = 2 * torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 264
    return CudaBackend(_cuda, Cut(min_blocks=blocks))
