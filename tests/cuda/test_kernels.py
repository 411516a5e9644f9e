"""The CUDA kernels, run by the simulation, against a dense float64 answer."""

from __future__ import annotations

import cuda_cases
import cuda_sim
import numpy as np
import pytest
import torch
from cuda_cases import CORE, Case, answer, check, make

from paged.kv.codecs.int4 import rotate
from paged.kv.storage import PageStorage
from paged.ops.cuda_work import Cut
from paged.ops.plan import make_plan
from paged.spec import KVSpec

pytestmark = pytest.mark.skipif(bool(cuda_sim.missing_compiler()), reason=cuda_sim.missing_compiler())

WHOLE, SPLIT = Cut(min_blocks=0), Cut(min_blocks=1 << 20)
CUTS = {
    "whole": WHOLE,
    "split": SPLIT,
    "whole-simple": Cut(min_blocks=0, simple=True),
    "split-simple": Cut(min_blocks=1 << 20, simple=True),
    "split-alone": Cut(min_blocks=1 << 20, shared_prefix=False),
}


def run(case: Case, cut: Cut, **settings: object) -> None:
    step = make(case)
    lse = step.empty_lse()
    backend = cuda_sim.make_backend(cut, **settings)
    out = backend.attend(step.q, step.storage, step.layer, step.plan, lse=lse, **step.options())
    assert out.dtype == step.q.dtype
    check(case, out, lse, answer(step))


@pytest.mark.parametrize("copies", ["late", "early"])
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("case", CORE, ids=str)
def test_every_order_of_lanes_and_both_copy_modes_agree_with_the_answer(case: Case, order: str, copies: str) -> None:
    run(case, SPLIT, order=order, copies=copies, seed=7)
    run(case, Cut(min_blocks=0, simple=True), order=order, copies=copies, seed=8)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("case", CORE, ids=str)
def test_every_way_to_cut_a_step_agrees_with_the_answer(case: Case, cut: Cut) -> None:
    run(case, cut)


@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16", "int8", "int4"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_size_and_type(head_dim: int, kv_dtype: str) -> None:
    fp32 = kv_dtype.startswith("int")
    case = Case((300, 40), (2, 20), head_dim=head_dim, kv_dtype=kv_dtype, page_size=16, fp32=fp32)
    run(case, WHOLE)
    run(case, SPLIT)
    run(
        cuda_cases.with_dim(Case((270, 9), (1, 1), heads=3, kv_heads=1, kv_dtype=kv_dtype, fp32=fp32), head_dim),
        CUTS["split-simple"],
    )


RECORDS = [
    Case((5,), (1,), kv_dtype="int4", fp32=True),
    Case((300, 17, 64), (1, 1, 1), heads=3, kv_heads=1, kv_dtype="int4", fp32=True),
    Case((290, 33), (40, 33), heads=8, kv_heads=2, page_size=7, kv_dtype="int8", fp32=True),
    Case((270, 600), (3, 70), heads=2, kv_heads=2, kv_dtype="int4", window=129, softcap=15.0, page_size=48, fp32=True),
    Case((290, 270, 257), (1, 5, 2), shared=256, kv_dtype="int8", fp32=True, heads=4, kv_heads=1, page_size=1),
]


@pytest.mark.parametrize("order, copies", [("forward", "late"), ("reverse", "early"), ("random", "late")])
@pytest.mark.parametrize("case", RECORDS, ids=str)
def test_records_in_every_order_of_lanes(case: Case, order: str, copies: str) -> None:
    run(case, SPLIT, order=order, copies=copies, seed=7)
    run(case, Cut(min_blocks=0, simple=True), order=order, copies=copies, seed=8)


@pytest.mark.parametrize("size", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("count", [64, 128, 320, 64 * 9])
def test_rotated_blocks_are_those_of_the_codec_bit_for_bit(size: int, count: int) -> None:
    x = torch.randn(count)
    want = x.unflatten(0, (-1, size)).clone()
    if size > 1:
        want = rotate(want)
    sim = cuda_sim.module()
    sim.rotate(x.data_ptr(), count, size, 0)
    assert torch.equal(x, want.flatten())


def test_a_rotation_ends_with_its_last_block() -> None:
    x = torch.ones(40)
    x[24:] = 7.0
    cuda_sim.module().rotate(x.data_ptr(), 24, 8, 0)
    assert x[:24].tolist() == [8.0, 0, 0, 0, 0, 0, 0, 0] * 3 and (x[24:] == 7).all()
    for count, size in ((24, 16), (24, 3), (128, 128), (8, 0)):
        with pytest.raises(RuntimeError, match="the launcher returned 1"):
            cuda_sim.module().rotate(x.data_ptr(), count, size, 0)


@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (9, 3), (14, 2), (4, 2), (6, 1), (71, 1), (1, 1), (16, 1)])
def test_every_ratio_of_heads_that_divides(heads: int, kv_heads: int) -> None:
    run(Case((70, 20), (1, 3), heads=heads, kv_heads=kv_heads), WHOLE)


@pytest.mark.parametrize("page_size", [1, 2, 8, 15, 48, 256, 300])
def test_every_page_size(page_size: int) -> None:
    run(Case((260, 90), (1, 18), page_size=page_size), SPLIT)


@pytest.mark.parametrize("kv_len", [1, 63, 64, 65, 255, 256, 257, 512, 513])
def test_lengths_around_tiles_and_splits(kv_len: int) -> None:
    for q_len in {1, min(17, kv_len)}:
        run(Case((kv_len,), (q_len,), kv_heads=1, heads=2), SPLIT)
        run(Case((kv_len,), (q_len,), kv_heads=1, heads=2), WHOLE)


@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 256, 257, 1000])
def test_windows_around_tiles_and_splits(window: int) -> None:
    case = Case((520, 100), (1, 20), window=window, heads=2, kv_heads=1)
    run(case, SPLIT)
    run(case, CUTS["whole-simple"])


@pytest.mark.parametrize("softcap", [1.0, 30.0])
@pytest.mark.parametrize("spread", [0.01, 4.0])
def test_soft_caps_of_flat_and_of_peaked_scores(softcap: float, spread: float) -> None:
    run(Case((90,), (4,), softcap=softcap, spread=spread), WHOLE)


@pytest.mark.parametrize("suffix", [1, 15, 16, 17])
def test_a_suffix_after_cached_keys_sees_all_of_them(suffix: int) -> None:
    run(Case((32 + suffix,), (suffix,)), WHOLE)


def test_a_padding_sequence_gives_zeros_beside_others() -> None:
    run(Case((0, 20, 0), (1, 2, 1)), WHOLE)
    run(Case((0, 300, 0), (1, 2, 1)), SPLIT)


def test_a_sequence_without_rows_changes_nothing() -> None:
    run(Case((40, 30, 20), (1, 0, 2)), WHOLE)


def test_a_step_without_rows_returns_no_rows() -> None:
    step = make(Case((40,), (0,)))
    out = cuda_sim.make_backend().attend(step.q, step.storage, 1, step.plan, **step.options())
    assert out.shape == (0, 4, 64)


def test_blocks_on_two_threads_agree_with_the_answer() -> None:
    run(CORE[2], SPLIT, workers=2)


@pytest.mark.parametrize("cut", [WHOLE, SPLIT, CUTS["whole-simple"]], ids=["whole", "split", "simple"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kv_dtype", ["fp16", "int8", "int4"])
def test_a_value_behind_the_mask_never_reaches_a_result(cut: Cut, bad: float, kv_dtype: str) -> None:
    # Rows 1.. of the chunk hold no number in K and V: row 0 must not see them, although they share its tile.
    case = Case((40, 20), (6, 1), heads=2, kv_heads=1, kv_dtype=kv_dtype, fp32=kv_dtype != "fp16")
    step = make(case)
    want, _ = answer(step)
    slots, row = torch.from_numpy(step.plan.slots[1:6]), torch.full((5, 1, 64), bad)
    if kv_dtype == "fp16":  # as they are: the codec would clamp infinity
        for plane in step.storage.layer(step.layer):
            plane[slots // 16, :, slots % 16] = bad
    else:
        step.storage.write(step.layer, slots // 16, slots % 16, row, row)
    out = cuda_sim.make_backend(cut).attend(step.q, step.storage, step.layer, step.plan, **step.options())
    assert out[[0, 6]].isfinite().all()
    assert float((out.double() - want)[[0, 6]].abs().max()) < 2e-3
    assert not out[1:6].isfinite().any()  # and rows that do see them say so


def test_a_number_that_is_none_before_the_window_never_reaches_a_result() -> None:
    case = Case((60,), (8,), window=10, heads=2, kv_heads=1)
    step = make(case)
    want, _ = answer(step)
    position = 60 - 8 - 10 + 1  # the first key of the first row, behind the window of the second
    page, offset = step.plan.page_table[0, position // 16], position % 16
    step.storage.layer(step.layer)[1][int(page), :, offset] = float("nan")
    out = cuda_sim.make_backend(WHOLE).attend(step.q, step.storage, step.layer, step.plan, **step.options())
    assert not out[0].isfinite().any()
    assert float((out.double() - want)[1:].abs().max()) < 2e-3


def plan_of(slots: list[int], page_size: int = 4):
    plan = make_plan(page_size, np.array([0, len(slots)], np.int32), np.array([len(slots)], np.int32),
                     np.arange(-(-len(slots) // page_size), dtype=np.int32)[None])  # fmt: skip
    plan.slots = np.array(slots, np.int64)
    return plan


@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_append_writes_its_slots_and_nothing_else(kv_dtype: str, fp32: bool, head_dim: int) -> None:
    storage = PageStorage(KVSpec(3, 2, head_dim), 6, 4, kv_dtype)
    storage.pages.fill_(-7.0)
    before = storage.pages.clone()
    plan = plan_of([5, 6, -1, 23, -1, 0])
    k, v = torch.randn(2, 6, 2, head_dim)
    if not fp32:
        k, v = k.to(storage.codec.dtype), v.to(storage.codec.dtype)
    cuda_sim.make_backend().append(storage, 1, k, v, plan)
    for row, slot in enumerate(plan.slots.tolist()):
        if slot >= 0:
            for kind, x in enumerate((k, v)):
                at = (slot // 4, 1, kind, slice(None), slot % 4)
                assert torch.equal(storage.pages[at], storage.codec.encode(x[row]))
                before[at] = storage.pages[at]
    assert torch.equal(storage.pages, before)


@pytest.mark.parametrize("fp32", [True, False])
def test_append_clamps_fp16_and_keeps_what_is_not_a_number(fp32: bool) -> None:
    storage = PageStorage(KVSpec(1, 1, 64), 1, 4, "fp16")
    storage.pages.zero_()
    k = torch.zeros(2, 1, 64)
    k[0, 0, :5] = torch.tensor([1e6, -1e6, float("inf"), float("nan"), 65519.0])
    v = -k
    if not fp32:
        k, v = k.half(), v.half()
    cuda_sim.make_backend().append(storage, 0, k, v, plan_of([1, 2]))
    kept = storage.pages[0, 0, :, 0, 1, :5]
    assert torch.equal(kept[0, :3], torch.tensor([65504.0, -65504.0, 65504.0]).half())
    assert torch.equal(kept[1, :3], torch.tensor([-65504.0, 65504.0, -65504.0]).half())
    assert kept[:, 3].isnan().all() and float(kept[0, 4]) == 65504.0


@pytest.mark.parametrize(
    "kv_dtype, head_dim, page_size, piece", [("bf16", 80, 5, 16), ("int8", 64, 16, 16), ("int4", 64, 1, 4)]
)
def test_copied_pages_are_equal_and_the_others_untouched(kv_dtype, head_dim: int, page_size: int, piece: int) -> None:
    storage = PageStorage(KVSpec(1, 3, head_dim), 9, page_size, kv_dtype)
    assert storage.page_bytes % 16 == 0 if piece == 16 else storage.page_bytes % 16
    storage.pages.copy_(torch.randint(0, 100, storage.pages.shape))
    before = storage.pages.clone()
    src, dst = np.array([1, 8, 1], np.int32), np.array([0, 3, 7], np.int32)
    cuda_sim.make_backend().copy_pages(storage, src, dst)
    before[[0, 3, 7]] = before[[1, 8, 1]]
    assert torch.equal(storage.pages, before)
    cuda_sim.make_backend().copy_pages(storage, src[:0], dst[:0])
    assert torch.equal(storage.pages, before)


def test_pages_past_two_to_the_31_values_are_read_and_written() -> None:
    # 24 layers, 8 heads, 16 tokens of 64 values: 393216 values a page, so page 5461 begins past 2^31. The pages in
    # between are never touched: they cost address space, not memory.
    spec = KVSpec(24, 8, 64)
    num_pages = 5470
    storage = PageStorage(spec, num_pages, 16, "fp16")
    small = make(Case((40,), (2,), heads=8, kv_heads=8, layers=24))
    high = np.array([5469, 5468, 5461], np.int32)
    for column, page in enumerate(small.plan.page_table[0]):
        storage.pages[int(high[column])] = small.storage.pages[int(page)]
    plan = make_plan(16, small.plan.q_indptr, small.plan.kv_lens, high[None])
    backend = cuda_sim.make_backend()
    low = backend.attend(small.q, small.storage, 23, small.plan, **small.options())
    assert torch.equal(backend.attend(small.q, storage, 23, plan, **small.options()), low)
    k, v = torch.randn(2, 2, 8, 64).half()
    backend.append(storage, 23, k, v, plan)
    assert torch.equal(storage.pages[5461, 23, 0, :, 6:8].transpose(0, 1), k)
    backend.copy_pages(storage, np.array([5461], np.int32), np.array([5467], np.int32))
    assert torch.equal(storage.pages[5467, 23, 1, :, 6:8].transpose(0, 1), v)
