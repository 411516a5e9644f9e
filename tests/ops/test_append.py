"""Rows land in their slots, and nowhere else, in the stored type."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from op_backends import BACKENDS, every_backend, fresh_seed
from poison import poison

from paged.errors import UnsupportedShape
from paged.kv.storage import PageStorage
from paged.ops.plan import AttendPlan, make_plan
from paged.spec import KVSpec


def plan_with_slots(slots: list[int], page_size: int = 4) -> AttendPlan:
    """Every row is a sequence of its own, so that any slot may be asked for."""
    rows = len(slots)
    plan = make_plan(
        page_size, np.arange(rows + 1, dtype=np.int32), np.ones(rows, np.int32), np.zeros((rows, 1), np.int32)
    )
    plan.slots = np.array(slots, np.int64)
    return plan


@every_backend
@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_position_p_lies_in_its_page_at_its_offset(name: str, kv_dtype: str, page_size: int):
    torch.manual_seed(fresh_seed() % 2**31)
    storage = PageStorage(KVSpec(3, 2, 24), 80, page_size, kv_dtype)
    storage.pages.zero_()
    table = np.random.default_rng(0).permutation(80)[None, : -(-50 // page_size)].astype(np.int32)
    k, v = torch.randn(20, 2, 24), torch.randn(20, 2, 24)
    BACKENDS[name]().append(
        storage, 2, k, v, make_plan(page_size, np.array([0, 20], np.int32), np.array([50], np.int32), table)
    )
    for row, position in enumerate(range(30, 50)):
        page, offset = table[0, position // page_size], position % page_size
        assert torch.equal(storage.pages[page, 2, 0, :, offset], k[row].to(storage.codec.dtype))
        assert torch.equal(storage.pages[page, 2, 1, :, offset], v[row].to(storage.codec.dtype))
    assert int(storage.pages.any(dim=-1).sum()) == 20 * 2 * 2


@every_backend
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_records_are_those_of_the_codec_and_lie_in_their_slots(name: str, kv_dtype: str, head_dim: int, page_size: int):
    torch.manual_seed(fresh_seed() % 2**31)
    storage = PageStorage(KVSpec(3, 2, head_dim), 80, page_size, kv_dtype)
    poison(storage)
    want = storage.pages.clone()
    table = np.random.default_rng(0).permutation(80)[None, : -(-50 // page_size)].astype(np.int32)
    k, v = torch.randn(20, 2, head_dim), torch.randn(20, 2, head_dim) * 100
    plan = make_plan(page_size, np.array([0, 20], np.int32), np.array([50], np.int32), table)
    plan.slots[4] = -1
    BACKENDS[name]().append(storage, 2, k, v, plan)
    records = storage.codec.encode(k, v)
    for row, position in enumerate(range(30, 50)):
        if row != 4:
            want[table[0, position // page_size], 2, :, position % page_size] = records[row]
    assert torch.equal(storage.pages, want)


@every_backend
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_records_of_every_kind_of_value_are_those_of_the_codec(name: str, kv_dtype: str):
    # Random bits hold every exponent, infinities and not-a-numbers; the rest are magnitudes that a model has, ties that
    # round to even, and scales that fp16 holds with few bits or none.
    torch.manual_seed(fresh_seed() % 2**31)
    bits = torch.randint(-(2**31), 2**31 - 1, (60, 64), dtype=torch.int64).to(torch.int32).view(torch.float32)
    one_bad = torch.randn(60, 64).masked_fill(torch.rand(60, 64) < 0.01, float("inf"))
    ties = torch.randint(-256, 256, (60, 64)) / 2
    sizes = torch.randn(300, 64) * 10.0 ** torch.linspace(-9, 6, 300)[:, None]
    values = torch.cat([bits, one_bad, ties, sizes, torch.zeros(2, 64), -torch.zeros(2, 64)]).unsqueeze(1)
    storage = PageStorage(KVSpec(1, 1, 64), len(values), 1, kv_dtype)
    plan = plan_with_slots(list(range(len(values))), page_size=1)
    BACKENDS[name]().append(storage, 0, values, values.flip(0), plan)
    assert torch.equal(storage.pages[:, 0, :, 0], storage.codec.encode(values, values.flip(0)))


@every_backend
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_16_bits_become_the_records_of_their_values(name: str, kv_dtype: str, dtype: torch.dtype):
    storage = PageStorage(KVSpec(1, 2, 64), 3, 2, kv_dtype)
    k, v = (torch.randn(4, 2, 64).to(dtype) for _ in range(2))
    BACKENDS[name]().append(storage, 0, k, v, plan_with_slots([0, 3, 4, 1], page_size=2))
    want = storage.codec.encode(k.float(), v.float())
    assert torch.equal(storage.pages[1, 0, :, 1], want[1]) and torch.equal(storage.pages[2, 0, :, 0], want[2])


@every_backend
def test_pages_need_not_follow_one_another(name: str):
    # B07: two pages of a prefix hit, then pages from a shuffled free list, written over their borders in one go.
    storage = PageStorage(KVSpec(1, 1, 8), 13, 16)
    storage.pages.fill_(float("nan"))
    table = np.array([[12, 4, 9, 3, 7]], np.int32)
    plan = make_plan(16, np.array([0, 39], np.int32), np.array([71], np.int32), table)
    assert plan.slots.tolist() == [int(table[0, p // 16]) * 16 + p % 16 for p in range(32, 71)]
    rows = torch.arange(39.0)[:, None, None].expand(39, 1, 8).contiguous()
    backend = BACKENDS[name]()
    backend.append(storage, 0, rows, rows, plan)
    assert storage.pages[[12, 4]].isnan().all()
    assert storage.pages[9, 0, 0, 0, :, 0].tolist() == list(range(16))
    assert storage.pages[7, 0, 1, 0, :7, 0].tolist() == list(range(32, 39))
    assert storage.pages[7, 0, 1, 0, 7:].isnan().all()


@every_backend
def test_slot_minus_one_writes_nothing(name: str):
    # B06: -1 is not the last row of the last page, which another request owns.
    storage = PageStorage(KVSpec(1, 2, 8), 4, 4)
    storage.pages.copy_(torch.randn(storage.pages.shape))
    before = storage.pages.clone()
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    BACKENDS[name]().append(storage, 0, k, v, plan_with_slots([5, 6, -1, -1]))
    assert torch.equal(storage.pages[1, 0, 0, :, 1:3].transpose(0, 1), k[:2])
    assert torch.equal(storage.pages[1, 0, 1, :, 1:3].transpose(0, 1), v[:2])
    storage.pages[1, :, :, :, 1:3] = before[1, :, :, :, 1:3]
    assert torch.equal(storage.pages, before)


@every_backend
@pytest.mark.parametrize("bad", [[5, 6, -2], [5, 16, 1], [2**40, 1, 2]])
def test_a_slot_outside_the_pool_is_refused_and_nothing_is_written(name: str, bad: list[int]):
    storage = PageStorage(KVSpec(1, 2, 8), 4, 4)
    storage.pages.zero_()
    with pytest.raises(ValueError, match="slots must be -1 or below 16"):
        BACKENDS[name]().append(storage, 0, torch.ones(3, 2, 8), torch.ones(3, 2, 8), plan_with_slots(bad))
    assert not storage.pages.any()


@every_backend
def test_the_number_of_rows_must_be_that_of_the_slots(name: str):
    storage = PageStorage(KVSpec(1, 2, 8), 4, 4)
    with pytest.raises(UnsupportedShape, match=r"\[5, 2, 8\], got \[8, 2, 8\]"):
        BACKENDS[name]().append(storage, 0, torch.ones(8, 2, 8), torch.ones(8, 2, 8), plan_with_slots([1, 2, 3, 4, 5]))


@every_backend
@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16"])
def test_rounding_is_that_of_torch_for_every_kind_of_value(name: str, kv_dtype: str):
    # All 16-bit patterns as fp32, values between them, values at the borders, infinities, not-a-numbers.
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[kv_dtype]
    exact = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    torch.manual_seed(fresh_seed() % 2**31)
    bits = torch.randint(-(2**31), 2**31 - 1, (2**15,), dtype=torch.int64).to(torch.int32)
    halfway = (exact.view(torch.int32) + (1 << (12 if kv_dtype == "fp16" else 15))).view(torch.float32)
    values = torch.cat([exact, bits.view(torch.float32), halfway])
    rows = values.reshape(-1, 1, 64)
    storage = PageStorage(KVSpec(1, 1, 64), len(rows), 1, kv_dtype)
    BACKENDS[name]().append(storage, 0, rows, rows, plan_with_slots(list(range(len(rows))), page_size=1))
    want = storage.codec.encode(values)
    stored = storage.pages[:, 0, 0].flatten()
    assert torch.equal(stored.isnan(), want.isnan())
    assert torch.equal(stored[~want.isnan()].view(torch.int16), want[~want.isnan()].view(torch.int16))
    if kv_dtype == "fp16":
        assert float(stored[~stored.isnan()].abs().max()) == 65504.0


@every_backend
@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16"])
def test_rows_of_the_stored_type_are_kept_as_they_are(name: str, kv_dtype: str):
    storage = PageStorage(KVSpec(1, 2, 16), 3, 2, kv_dtype)
    k, v = (torch.randn(4, 2, 16).to(storage.codec.dtype) for _ in range(2))
    BACKENDS[name]().append(storage, 0, k, v, plan_with_slots([0, 3, 4, 1], page_size=2))
    assert torch.equal(storage.pages[1, 0, 0, :, 1], k[1]) and torch.equal(storage.pages[2, 0, 1, :, 0], v[2])


@every_backend
def test_k_and_v_may_be_views_of_a_fused_projection(name: str):
    fused = torch.randn(5, 8 * 16)
    k, v = fused[:, 64:96].unflatten(1, (2, 16)), fused[:, 96:].unflatten(1, (2, 16))
    storage = PageStorage(KVSpec(1, 2, 16), 2, 4)
    BACKENDS[name]().append(storage, 0, k, v, plan_with_slots([7, 0, 1, 2, 3]))
    assert torch.equal(storage.pages[1, 0, 0, :, 3], k[0]) and torch.equal(storage.pages[0, 0, 1, :, 3], v[4])


@every_backend
@pytest.mark.parametrize("pages", [1, 3, 40])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "int4"])
def test_copied_pages_are_equal_and_the_rest_is_untouched(name: str, kv_dtype: str, pages: int):
    storage = PageStorage(KVSpec(2, 2, 64), 100, 16, kv_dtype)
    storage.pages.copy_(torch.randint(0, 100, storage.pages.shape))
    before = storage.pages.clone()
    order = np.random.default_rng(0).permutation(100).astype(np.int32)
    src, dst = order[:pages].copy(), order[50 : 50 + pages].copy()
    BACKENDS[name]().copy_pages(storage, src, dst)
    assert torch.equal(storage.pages[torch.from_numpy(dst).long()], before[torch.from_numpy(src).long()])
    rest = torch.ones(100, dtype=torch.bool)
    rest[torch.from_numpy(dst).long()] = False
    assert torch.equal(storage.pages[rest], before[rest])


@every_backend
@pytest.mark.parametrize(
    "src, dst, error",
    [
        ([0], [4], ValueError),
        ([-1], [1], ValueError),
        ([0, 1], [2], UnsupportedShape),
        ([0, 1], [2, 2], ValueError),
        ([0, 1], [1, 2], ValueError),
    ],
)
def test_page_copies_that_make_no_sense_are_refused(name: str, src: list[int], dst: list[int], error: type):
    storage = PageStorage(KVSpec(1, 1, 8), 4, 4)
    with pytest.raises(error):
        BACKENDS[name]().copy_pages(storage, np.array(src, np.int32), np.array(dst, np.int32))
    with pytest.raises(TypeError, match="int32"):
        BACKENDS[name]().copy_pages(storage, np.array([0]), np.array([1]))
