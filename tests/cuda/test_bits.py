"""A row's bits depend on its query, its keys and its position, and on nothing else (promise 1)."""

from __future__ import annotations

from dataclasses import replace

import cuda_sim
import numpy as np
import pytest
import torch
from cuda_cases import Case, Step, make
from poison import poison

from paged.kv.storage import PageStorage
from paged.ops.cuda_work import Cut
from paged.ops.plan import AttendPlan, make_plan
from paged.spec import KVSpec

pytestmark = pytest.mark.skipif(bool(cuda_sim.missing_compiler()), reason=cuda_sim.missing_compiler())

WHOLE, SPLIT = Cut(min_blocks=0), Cut(min_blocks=1 << 20)
ALONE = Cut(min_blocks=1 << 20, shared_prefix=False)


def attend(step: Step, cut: Cut, plan: AttendPlan | None = None, q: torch.Tensor | None = None, **lanes: object):
    """(output, lse) of a step, or of another plan over its pages."""
    plan = plan or step.plan
    q = step.q if q is None else q
    lse = torch.full(q.shape[:2], float("nan"))
    plan.handle = None
    backend = cuda_sim.make_backend(cut, **lanes)
    out = backend.attend(q, step.storage, step.layer, plan, lse=lse, **step.options())
    return out, lse


def same(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


CASES = [
    Case((600, 270), (20, 1), heads=4, kv_heads=2, fp32=True),
    Case((530, 300), (3, 40), heads=3, kv_heads=1, kv_dtype="bf16", window=290, softcap=10.0),
    Case((520,), (9,), heads=8, kv_heads=1, head_dim=256, fp32=True),
    Case((600,), (70,), heads=1, kv_heads=1, head_dim=80, window=33),
    Case((600, 270), (20, 1), heads=4, kv_heads=2, kv_dtype="int8", fp32=True),
    Case((530,), (20,), heads=3, kv_heads=1, kv_dtype="int4", fp32=True, window=290),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_block_for_all_splits_or_one_for_each(case: Case) -> None:
    step = make(case)
    assert same(attend(step, WHOLE), attend(step, SPLIT))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("order, copies", [("reverse", "late"), ("random", "early")])
def test_the_order_of_lanes(case: Case, order: str, copies: str) -> None:
    step = make(case)
    assert same(attend(step, SPLIT), attend(step, SPLIT, order=order, copies=copies, seed=3))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_the_size_of_a_chunk(case: Case, chunk: int) -> None:
    step = make(case)
    whole = attend(step, WHOLE)
    for s, (kv_len, q_len) in enumerate(zip(case.kv_lens, case.q_lens, strict=True)):
        first = int(step.plan.q_indptr[s])
        for begin in range(0, q_len, chunk):
            rows = min(chunk, q_len - begin)
            length = kv_len - q_len + begin + rows
            plan = make_plan(
                case.page_size, np.array([0, rows], np.int32), np.array([length], np.int32), step.plan.page_table[[s]]
            )
            at = slice(first + begin, first + begin + rows)
            got = attend(step, SPLIT if begin % 2 else WHOLE, plan, step.q[at])
            assert same(got, (whole[0][at], whole[1][at]))


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_the_neighbours(case: Case) -> None:
    step = make(case)
    together = attend(step, SPLIT)
    for s in range(len(case.kv_lens)):
        at = slice(int(step.plan.q_indptr[s]), int(step.plan.q_indptr[s + 1]))
        plan = make_plan(
            case.page_size,
            np.array([0, case.q_lens[s]], np.int32),
            np.array([case.kv_lens[s]], np.int32),
            step.plan.page_table[[s]],
        )
        assert same(attend(step, WHOLE, plan, step.q[at]), (together[0][at], together[1][at]))


@pytest.mark.parametrize("page_size", [1, 5, 64, 512])
@pytest.mark.parametrize("kv_dtype", ["fp16", "int8"])
def test_the_pages_they_lie_on(page_size: int, kv_dtype: str) -> None:
    # The same rows of K and V, in pages of another size and another order.
    case = replace(CASES[0], kv_dtype=kv_dtype)
    step = make(case)
    spec = KVSpec(case.layers, case.kv_heads, case.head_dim)
    columns = [-(-n // page_size) for n in case.kv_lens]
    storage = PageStorage(spec, sum(columns), page_size, case.kv_dtype)
    poison(storage)
    ids = np.random.default_rng(5).permutation(sum(columns)).astype(np.int32)
    table = np.zeros((len(columns), max(columns)), np.int32)
    for s, length in enumerate(case.kv_lens):
        table[s, : columns[s]] = ids[sum(columns[:s]) : sum(columns[: s + 1])]
        at = np.arange(length)
        pages, offsets = torch.from_numpy(table[s, at // page_size]).long(), torch.from_numpy(at % page_size)
        storage.write(step.layer, pages, offsets, step.k[s], step.v[s])
    plan = make_plan(page_size, step.plan.q_indptr, step.plan.kv_lens, table)
    want = attend(step, SPLIT)
    step.storage = storage
    assert same(attend(step, SPLIT, plan), want)


SHARED = [
    Case((600, 530, 700), (1, 1, 1), shared=512, heads=8, kv_heads=2, fp32=True),
    Case((513, 560, 300), (1, 30, 3), shared=256, heads=4, kv_heads=1, kv_dtype="bf16"),
    Case((512, 512), (1, 1), shared=512, heads=2, kv_heads=1),
    Case((600, 530), (40, 2), shared=512, heads=3, kv_heads=1, page_size=64),
    Case((600, 530), (1, 2), shared=512, heads=3, kv_heads=1, kv_dtype="int4", fp32=True),
]


@pytest.mark.parametrize("case", SHARED, ids=str)
@pytest.mark.parametrize("cut", [WHOLE, SPLIT], ids=["whole", "split"])
def test_a_prefix_that_is_computed_once_for_all(case: Case, cut: Cut) -> None:
    step = make(case)
    alone = attend(step, ALONE)
    shared = attend(step, cut)
    assert same(shared, alone)
    step.plan.handle = None


def test_the_simple_kernel_has_one_sum_for_all_cuts_and_orders() -> None:
    step = make(Case((600, 270), (1, 1), heads=6, kv_heads=2, fp32=True))
    want = attend(step, replace(WHOLE, simple=True))
    assert same(attend(step, replace(SPLIT, simple=True)), want)
    assert same(attend(step, replace(SPLIT, simple=True), order="random", seed=9), want)
