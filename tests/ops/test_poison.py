"""What was never written, or may not be seen, may hold NaN or infinity: nothing of it reaches a result (B02)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_cases import Case, answer, make
from op_backends import BACKENDS, every_backend, fresh_seed, tolerance
from poison import refill

from paged.kv.storage import PageStorage
from paged.ops.plan import make_plan
from paged.spec import KVSpec

STEPS = [
    Case((1, 15, 16, 17, 33), (1, 1, 1, 1, 1), kv_dtype="fp32", fp32=True),
    Case((1, 15, 16, 17, 33), (1, 15, 16, 17, 33), kv_dtype="fp32", fp32=True),
    Case((200, 70), (50, 70), kv_dtype="bf16", fp32=True, window=40),
    Case((200, 170, 165), (1, 2, 1), kv_dtype="fp16", fp32=True, shared=160),
    Case((1, 15, 16, 17, 33), (1, 15, 1, 17, 33), kv_dtype="int8", fp32=True),
    Case((200, 170, 165), (1, 2, 1), kv_dtype="int8", fp32=True, shared=160),
    Case((200, 70), (50, 70), kv_dtype="int4", fp32=True, window=40),
    Case((200, 70), (1, 1), kv_dtype="int4", fp32=True),
]


@every_backend
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("case", STEPS, ids=str)
def test_unwritten_memory_does_not_reach_a_result(name: str, case: Case, poison: float):
    seed = fresh_seed()
    step, clean = make(replace(case, seed=seed)), make(replace(case, seed=seed))
    refill(step.storage, poison)
    refill(clean.storage, 0.0)
    backend = BACKENDS[name]()
    out = backend.attend(step.q, step.storage, step.layer, step.plan, **step.options())
    assert out.isfinite().all()
    assert torch.equal(out, backend.attend(step.q, clean.storage, step.layer, clean.plan, **step.options()))
    assert float((out - answer(step)[0]).abs().max()) < tolerance(name, case.kv_dtype, 1e-5)


@every_backend
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("position", [0, 1, 9, 16, 39])
@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "int4"])
def test_a_later_row_of_the_chunk_does_not_poison_an_earlier_one(
    name: str, kv_dtype: str, poison: float, position: int
):
    # Zero times infinity is NaN: a masked value must not be multiplied at all.
    step = make(Case((40,), (40,), heads=3, kv_heads=1, kv_dtype=kv_dtype, fp32=True, seed=fresh_seed()))
    backend = BACKENDS[name]()
    clean = backend.attend(step.q, step.storage, 1, step.plan, scale=0.125)
    page = torch.from_numpy(step.plan.page_table[0, position // 16 : position // 16 + 1]).long()
    row = torch.full((1, 1, 64), poison)
    step.storage.write(1, page, torch.tensor([position % 16]), row, row)
    out = backend.attend(step.q, step.storage, 1, step.plan, scale=0.125)
    assert torch.equal(out[:position], clean[:position])
    assert not out[position:].isfinite().all(dim=2).any()


@every_backend
def test_an_earlier_row_outside_the_window_does_not_poison_a_later_one(name: str):
    step = make(Case((60,), (50,), heads=3, kv_heads=1, kv_dtype="fp32", fp32=True, window=8, seed=fresh_seed()))
    backend = BACKENDS[name]()
    clean = backend.attend(step.q, step.storage, 1, step.plan, scale=0.125, window=8)
    step.storage.pages[step.plan.page_table[0, 1], 1, :, :, 4] = float("inf")  # position 20, row 10
    out = backend.attend(step.q, step.storage, 1, step.plan, scale=0.125, window=8)
    assert torch.equal(out[:10], clean[:10]) and torch.equal(out[18:], clean[18:])
    assert not out[10:18].isfinite().all(dim=2).any()


@every_backend
def test_page_ids_past_the_length_and_before_the_window_are_never_read(name: str):
    step = make(Case((40, 100), (1, 3), kv_dtype="fp32", fp32=True, window=20, seed=fresh_seed()))
    backend = BACKENDS[name]()
    want = backend.attend(step.q, step.storage, 1, step.plan, scale=0.125, window=20)
    assert (step.plan.page_table == -1).sum() > 4
    wild = np.where(step.plan.page_table < 0, np.int32(2**31 - 1), step.plan.page_table)
    wild[:, :1] = -(2**31)
    for table in (wild, np.pad(step.plan.page_table, ((0, 0), (0, 9)), constant_values=-7)):
        plan = replace(step.plan, page_table=np.ascontiguousarray(table), handle=None)
        if name == "reference" and table is wild:
            continue  # it checks every id below the length, in front of a window too
        assert torch.equal(backend.attend(step.q, step.storage, 1, plan, scale=0.125, window=20), want)


@every_backend
def test_other_pages_keep_their_bytes_when_padding_rows_are_appended(name: str):
    storage = PageStorage(KVSpec(2, 2, 8), 6, 4, "fp16")
    storage.pages.copy_(torch.randn(storage.pages.shape))
    before = storage.pages.clone()
    table = np.array([[3, 1], [0, 0]], np.int32)
    plan = make_plan(4, np.array([0, 3, 4], np.int32), np.array([5, 0], np.int32), table)
    BACKENDS[name]().append(storage, 1, torch.randn(4, 2, 8), torch.randn(4, 2, 8), plan)
    changed = (storage.pages != before).any(dim=-1).any(dim=2)  # [page, layer, head? -> kv, offset]
    assert changed[:, 0].sum() == 0
    assert sorted({int(p) for p in changed[:, 1].nonzero()[:, 0]}) == [1, 3]
