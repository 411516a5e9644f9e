"""The Python side of the CUDA backend: refusals, uploads, and what it says where it cannot run."""

from __future__ import annotations

import ctypes
import re
import sys
import types
from pathlib import Path
from typing import Any

import cuda_sim
import numpy as np
import pytest
import torch
from cuda_cases import Case, answer, check, make

import paged
from paged.errors import NativeMissing, UnsupportedShape
from paged.kv.storage import PageStorage
from paged.ops import cuda, cuda_work, get_backend
from paged.ops.plan import AttendPlan
from paged.spec import KVSpec

needs_sim = pytest.mark.skipif(bool(cuda_sim.missing_compiler()), reason=cuda_sim.missing_compiler())
CSRC = Path(__file__).resolve().parents[2] / "csrc"


class Recorder:
    """A module that launches nothing and remembers what it was told."""

    Pool, Rows, Query, Work = cuda_sim.Pool, cuda_sim.Rows, cuda_sim.Query, cuda_sim.Work

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, args))


def backend_of(**cut: Any) -> tuple[cuda.CudaBackend, Recorder]:
    module = Recorder()
    return cuda.CudaBackend(module, cuda_work.Cut(**cut)), module


def attend(step: Any, **changes: Any) -> torch.Tensor:
    backend, _ = backend_of()
    options = {**step.options(), **changes}
    q, storage, plan = (options.pop(name, getattr(step, name)) for name in ("q", "storage", "plan"))
    return backend.attend(q, storage, step.layer, plan, **options)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"heads": 3}, UnsupportedShape, "multiple of the 2 kv heads, got 3"),
        ({"dim": 32}, UnsupportedShape, "head_dim 64"),
        ({"dtype": torch.bfloat16}, TypeError, "q must be fp32 or the stored torch.float16, got torch.bfloat16"),
        ({"dtype": torch.float64}, TypeError, "got torch.float64"),
        ({"dtype": torch.int32}, TypeError, "floating-point"),
        ({"device": "meta"}, ValueError, "q must be on cpu, where the pages are, got meta"),
        ({"rows": 3}, UnsupportedShape, "2 rows"),
    ],
)
def test_a_query_that_no_kernel_computes_is_refused(change: dict[str, Any], error: type, message: str) -> None:
    step = make(Case((5,), (2,)))
    shape = (change.get("rows", 2), change.get("heads", 4), change.get("dim", 64))
    q = torch.zeros(shape, dtype=change.get("dtype", torch.float16), device=change.get("device", "cpu"))
    with pytest.raises(error, match=re.escape(message)):
        attend(step, q=q)


@pytest.mark.parametrize(
    "lse, error",
    [
        (torch.zeros(2, 3), UnsupportedShape),
        (torch.zeros(4, 2).T, UnsupportedShape),
        (torch.zeros(2, 4, dtype=torch.float64), TypeError),
        (torch.zeros(2, 4, device="meta"), ValueError),
    ],
)
def test_a_wrong_lse_is_refused(lse: torch.Tensor, error: type) -> None:
    with pytest.raises(error, match="lse must be"):
        attend(make(Case((5,), (2,))), lse=lse)


@pytest.mark.parametrize(
    "kv_dtype, head_dim, limit", [("fp32", 64, "fp16 or bf16"), ("fp16", 72, "64, 80, 96, 128, 256")]
)
def test_pages_that_no_kernel_reads_are_refused_by_name(kv_dtype: str, head_dim: int, limit: str) -> None:
    storage = PageStorage(KVSpec(2, 2, head_dim), 4, 16, kv_dtype)
    step = make(Case((5,), (2,), head_dim=64))
    backend, module = backend_of()
    with pytest.raises(UnsupportedShape, match=limit):
        backend.attend(torch.zeros(2, 4, head_dim), storage, 0, step.plan, scale=1.0)
    with pytest.raises(UnsupportedShape, match=limit):
        backend.append(storage, 0, torch.zeros(2, 2, head_dim), torch.zeros(2, 2, head_dim), step.plan)
    assert module.calls == []


def test_rows_of_two_dtypes_or_of_another_device_are_refused() -> None:
    step = make(Case((5,), (2,)))
    backend, _ = backend_of()
    k = torch.zeros(2, 2, 64)
    with pytest.raises(TypeError, match=r"one dtype, got torch\.float32 and torch\.float16"):
        backend.append(step.storage, 0, k, k.half(), step.plan)
    with pytest.raises(ValueError, match="v must be on cpu"):
        backend.append(step.storage, 0, k, k.to("meta"), step.plan)


def test_a_plan_of_another_page_size_or_past_the_pool_is_refused() -> None:
    step = make(Case((40,), (2,)))
    with pytest.raises(UnsupportedShape, match="the plan has page_size 16, the storage 8"):
        attend(step, storage=PageStorage(KVSpec(2, 2, 64), 9, 8, "fp16"))
    with pytest.raises(ValueError, match="page ids must be below"):
        attend(step, storage=PageStorage(KVSpec(2, 2, 64), 1, 16, "fp16"))
    step.plan.kv_lens = step.plan.kv_lens.astype(np.int64)
    with pytest.raises(TypeError, match="kv_lens must be an int32 array"):
        attend(step)


def test_page_ids_to_copy_are_checked() -> None:
    backend, module = backend_of()
    storage = PageStorage(KVSpec(1, 1, 64), 3, 4, "fp16")
    for src, dst in (([0], [3]), ([0, 1], [2, 2]), ([0], [0])):
        with pytest.raises(ValueError):
            backend.copy_pages(storage, np.array(src, np.int32), np.array(dst, np.int32))
    assert module.calls == []


def test_a_plan_is_uploaded_once_for_all_layers_and_again_for_a_grown_pool() -> None:
    step = make(Case((300, 20), (1, 3)))
    backend, module = backend_of(min_blocks=1 << 20)
    for layer in (0, 1):
        backend.append(step.storage, layer, torch.zeros(4, 2, 64), torch.zeros(4, 2, 64), step.plan)
        backend.attend(step.q, step.storage, layer, step.plan, **step.options())
    works = [args[3] for name, args in module.calls if name == "attend"]
    slots = {args[2].slots for name, args in module.calls if name == "append"}
    assert works[0] is works[1] and len(slots) == 1
    backend.attend(step.q, step.storage, 0, step.plan, scale=1.0, window=9)
    assert module.calls[-1][1][3] is not works[0]
    step.storage.grow(step.storage.num_pages + 5)
    backend.attend(step.q, step.storage, 0, step.plan, **step.options())
    pool, work = module.calls[-1][1][0], module.calls[-1][1][3]
    assert work is not works[0]
    assert pool.num_pages == step.storage.num_pages and pool.pages == step.storage.pages.data_ptr()


def test_a_handle_of_another_backend_is_replaced() -> None:
    step = make(Case((30,), (1,)))
    step.plan.handle = object()
    attend(step)
    assert isinstance(step.plan.handle, cuda._Step)


def test_every_address_given_to_the_kernels_is_aligned() -> None:
    step = make(Case((300, 20, 5), (1, 3, 1), heads=3, kv_heads=1))
    backend, module = backend_of(min_blocks=1 << 20, simple=True)
    q = torch.zeros(step.q.numel() + 4, dtype=step.q.dtype)[3:-1].view(step.q.shape)  # at an odd address
    q.copy_(step.q)
    backend.attend(q, step.storage, 0, step.plan, **step.options())
    _, _, query, work, stream = module.calls[-1][1]
    assert query.q % 16 == query.out % 16 == 0 and query.q != q.data_ptr()
    assert all(getattr(work, name) % 16 == 0 for name in ("wide", "narrow", "simple"))
    assert work.partials % 8 == 0 and stream == 0


@needs_sim
def test_a_query_that_is_not_contiguous_is_read_as_it_is() -> None:
    step = make(Case((30,), (3,)))
    want = answer(step)
    wide = torch.zeros(3, 4, 70, dtype=step.q.dtype)
    wide[:, :, 3:67] = step.q
    lse = step.empty_lse()
    out = cuda_sim.make_backend().attend(wide[:, :, 3:67], step.storage, 1, step.plan, lse=lse, **step.options())
    assert out.is_contiguous()
    check(step.case, out, lse, want)


@needs_sim
def test_a_launcher_refuses_what_the_checks_let_through() -> None:
    sim = cuda_sim.module()
    pool = sim.Pool()
    pool.pages = 8  # not a multiple of 16
    pool.head_dim = 64
    with pytest.raises(RuntimeError, match="the launcher returned 1"):
        sim.append(pool, 0, sim.Rows(), 0)
    pool.pages, pool.kv_heads, pool.head_dim = 16, 1, 72
    query = sim.Query()
    query.heads, query.q, query.out = 1, 16, 16
    with pytest.raises(RuntimeError, match="the launcher returned 1"):
        sim.attend(pool, 0, query, sim.Work(), 0)


def fake_module(monkeypatch: pytest.MonkeyPatch, code: int, count: int) -> None:
    module = types.ModuleType("paged._cuda")
    module.device_count = lambda: (code, count)  # type: ignore[attr-defined]
    module.error_name = lambda error: f"text of {error}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paged._cuda", module)
    monkeypatch.setattr(paged, "_cuda", module, raising=False)


@pytest.mark.parametrize(
    "code, count, message",
    [
        (35, 0, "found no CUDA driver that it can use (error 35: text of 35); install a driver of version 580"),
        (100, 0, "found 0 CUDA devices (error 100: text of 100); use the cpu backend"),
        (0, 0, "found 0 CUDA devices"),
    ],
)
def test_a_machine_without_a_device_is_told_so_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, code: int, count: int, message: str
) -> None:
    fake_module(monkeypatch, code, count)
    with pytest.raises(NativeMissing, match=re.escape(message)) as caught:
        cuda.make_backend()
    assert "\n" not in str(caught.value)


def test_a_device_makes_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_module(monkeypatch, 0, 1)
    assert cuda.make_backend().name == "cuda"


def test_a_missing_module_is_told_so_with_the_way_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paged._cuda", None)
    monkeypatch.delattr(paged, "_cuda", raising=False)
    with pytest.raises(NativeMissing, match=r"cannot be imported .*PAGED_CUDA=ON"):
        cuda.make_backend()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_asking_for_cuda_by_name_where_it_cannot_run_raises() -> None:
    with pytest.raises(NativeMissing, match=r"paged\._cuda"):
        get_backend("cpu", "cuda")


# ---- the same facts stand in C++ and in Python ----


def test_the_constants_of_both_sides_agree() -> None:
    header = (CSRC / "cuda" / "api.h").read_text()
    assert int(re.search(r"kSplit = (\d+)", header)[1]) == cuda_work.SPLIT
    assert int(re.search(r"kNarrowRows = (\d+)", header)[1]) == cuda_work.NARROW_ROWS
    limit, large, small = map(int, re.search(r"head_dim > (\d+) \? (\d+) : (\d+)", header).groups())
    for head_dim in cuda.HEAD_SIZES:
        assert cuda_work.wide_rows(head_dim) == (large if head_dim > limit else small)


def fields_of(struct: str) -> list[str]:
    """Names of a struct's fields in api.h, in order."""
    body = re.search(rf"struct (?:alignas\(16\) )?{struct} {{(.*?)\n}};", (CSRC / "cuda" / "api.h").read_text(), re.S)[
        1
    ]
    names: list[str] = []
    for line in body.splitlines():
        declared = line.split("//")[0].strip()
        if declared.endswith(";") and "(" not in declared:
            names += [part.split()[-1].strip("*") for part in declared[:-1].split(",")]
    return names


@pytest.mark.parametrize("struct", ["Pool", "Rows", "Query", "Work"])
def test_records_have_the_fields_of_the_header_everywhere(struct: str) -> None:
    names = fields_of(struct)
    assert [name for name, *_ in getattr(cuda_sim, struct)._fields_] == names
    stub = (Path(paged.__file__).parent / "_cuda.pyi").read_text()
    body = stub.split(f"class {struct}:")[1].split("\nclass ")[0].split("\ndef ")[0]
    assert sorted(re.findall(r"^    (\w+): ", body, re.M)) == sorted(names)
    bound = (CSRC / "bind" / "cuda.cpp").read_text()
    assert {name for name in names if f'"{name}"' not in bound} == set()


def test_an_item_has_the_columns_that_are_written() -> None:
    assert fields_of("Item") == [
        "row_begin", "flat_begin", "flat_count", "table", "key_begin", "key_end", "partial", "reserved",
    ]  # fmt: skip
    assert fields_of("Merge") == ["row", "base", "count"]
    step = make(Case((300,), (1,)))
    work = cuda_work.build_work(
        step.plan, heads=4, kv_heads=2, head_dim=64, window=0, cut=cuda_work.Cut(min_blocks=1 << 20)
    )
    assert work.items.shape[1] * work.items.itemsize == 32 and work.items.dtype == np.int32
    assert work.merges.shape[1] == 3 and ctypes.sizeof(cuda_sim.Query) == 48


def test_a_plan_reports_its_sizes() -> None:
    plan: AttendPlan = make(Case((300, 20), (1, 3))).plan
    tables, offsets = cuda_work.table_offsets(plan)
    assert offsets.tolist() == [0, 19] and len(tables) == 19 + 2
    assert tables.tolist() == [*plan.page_table[0, :19], *plan.page_table[1, :2]]
