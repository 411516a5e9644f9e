"""Attention of every backend against a dense float64 answer, on inputs that are new in every run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_cases import Case, Step, answer, make
from op_backends import BACKENDS, every_backend, fresh_seed, tolerance

from paged.kv.storage import PageStorage
from paged.ops.plan import make_plan
from paged.spec import KVSpec

SHAPES = [(64, 9, 3), (80, 8, 8), (96, 14, 2), (128, 8, 2), (256, 5, 1), (8, 16, 1), (40, 6, 2), (120, 3, 3)]
# A decode, a long one over two splits, a first token, a chunk over cached keys, a whole prompt, nothing new.
RAGGED = {"kv_lens": (37, 600, 1, 150, 64, 20), "q_lens": (1, 1, 1, 70, 64, 0)}


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest value; finite first, because a NaN passes any comparison of maxima."""
    assert out.isfinite().all(), f"{int((~out.isfinite()).sum())} values are not finite"
    return float((out.double() - want).abs().max() / want.abs().max())


def run(name: str, case: Case) -> tuple[Step, torch.Tensor, torch.Tensor]:
    step = make(case)
    lse = step.empty_lse()
    out = BACKENDS[name]().attend(step.q, step.storage, step.layer, step.plan, lse=lse, **step.options())
    return step, out, lse


def compare(name: str, case: Case, limit: float = 1e-6) -> None:
    step, out, lse = run(name, case)
    want, want_lse = answer(step)
    assert out.dtype == step.q.dtype and out.shape == step.q.shape
    assert relative_error(out, want) < tolerance(name, case.kv_dtype, limit), str(case)
    assert float((lse.double() - want_lse).abs().max()) < tolerance(name, case.kv_dtype, 4e-6), str(case)


@every_backend
@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "bf16", "int8", "int4"])
@pytest.mark.parametrize("head_dim, heads, kv_heads", SHAPES)
def test_a_ragged_step_equals_the_dense_answer(name: str, kv_dtype: str, head_dim: int, heads: int, kv_heads: int):
    case = Case(**RAGGED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, kv_dtype=kv_dtype, fp32=True)
    compare(name, replace(case, seed=fresh_seed()))


@every_backend
@pytest.mark.parametrize("page_size", [1, 7, 8, 16, 48, 256])
@pytest.mark.parametrize("window, softcap", [(0, 0.0), (33, 0.0), (0, 5.0), (100, 30.0), (1, 0.0)])
@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "int4"])
def test_every_page_size_with_windows_and_soft_caps(
    name: str, kv_dtype: str, page_size: int, window: int, softcap: float
):
    case = Case(**RAGGED, heads=6, kv_heads=2, head_dim=64, page_size=page_size, kv_dtype=kv_dtype, fp32=True)
    compare(name, replace(case, window=window, softcap=softcap, seed=fresh_seed()))


@every_backend
@pytest.mark.parametrize("heads", range(1, 10))
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8", "int4"])
def test_every_number_of_query_heads_a_kv_head(name: str, heads: int, kv_dtype: str):
    case = Case((70, 130), (1, 5), heads=heads, kv_heads=1, head_dim=64, kv_dtype=kv_dtype, fp32=True)
    compare(name, replace(case, seed=fresh_seed()))


@every_backend
@pytest.mark.parametrize("kv_dtype, limit", [("fp16", 1e-3), ("bf16", 1e-2)])
def test_queries_of_16_bits_give_results_of_16_bits(name: str, kv_dtype: str, limit: float):
    compare(name, Case(**RAGGED, kv_dtype=kv_dtype, seed=fresh_seed()), limit)


@every_backend
@pytest.mark.parametrize(
    "kv_dtype, limit", [("fp32", 1e-6), ("fp16", 1e-3), ("bf16", 1e-2), ("int8", 2e-2), ("int4", 0.2)]
)
def test_stored_values_are_as_close_as_their_type_allows(name: str, kv_dtype: str, limit: float):
    # Here the answer comes from the values before they were rounded to the pages' type.
    seed = fresh_seed()
    exact = make(Case((200, 90), (1, 20), kv_dtype="fp32", fp32=True, seed=seed))
    storage = PageStorage(exact.storage.spec, exact.storage.num_pages, 16, kv_dtype)
    plan = make_plan(16, np.array([0, 200, 290], np.int32), np.array([200, 90], np.int32), exact.plan.page_table)
    backend = BACKENDS[name]()
    backend.append(storage, 1, torch.cat(exact.k), torch.cat(exact.v), plan)
    out = backend.attend(exact.q, storage, 1, exact.plan, scale=0.125)
    assert relative_error(out, answer(exact)[0]) < limit


@every_backend
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("query", [torch.float16, torch.bfloat16])
def test_records_are_read_by_queries_of_16_bits(name: str, kv_dtype: str, query: torch.dtype):
    step = make(Case(**RAGGED, kv_dtype=kv_dtype, seed=fresh_seed()))
    step.q = step.q.to(query)
    out = BACKENDS[name]().attend(step.q, step.storage, step.layer, step.plan, **step.options())
    assert out.dtype == query
    assert relative_error(out, answer(step)[0]) < tolerance(name, kv_dtype, 1e-3 if query == torch.float16 else 1e-2)


@every_backend
@pytest.mark.parametrize("spread", [0.01, 8.0])
def test_tiny_and_huge_scores_stay_accurate(name: str, spread: float):
    # At 8 the scores reach hundreds: the largest takes all, and exp of the rest underflows to an exact zero.
    case = Case((300, 77), (1, 30), kv_dtype="fp32", fp32=True, spread=spread, seed=fresh_seed())
    step, out, _ = run(name, case)
    assert relative_error(out, answer(step)[0]) < (1e-6 if spread < 1 else 5e-5)


@every_backend
@pytest.mark.parametrize("rows", [1, 48])
@pytest.mark.parametrize("length", [512, 1000, 4096])
def test_rounding_errors_do_not_add_up_over_many_equal_values(name: str, rows: int, length: int):
    # A sum of equal numbers rounds the same way at every step: one chain over 512 keys was wrong by 4e-6.
    storage = PageStorage(KVSpec(1, 1, 64), -(-length // 16), 16, "fp32")
    at = torch.arange(length)
    storage.write(0, at // 16, at % 16, torch.zeros(length, 1, 64), torch.full((length, 1, 64), 0.1))
    table = np.arange(storage.num_pages, dtype=np.int32)[None]
    plan = make_plan(16, np.array([0, rows], np.int32), np.array([length], np.int32), table)
    out = BACKENDS[name]().attend(torch.zeros(rows, 1, 64), storage, 0, plan, scale=0.125)
    want = torch.full(out.shape, 0.1).double()
    assert relative_error(out, want) < 6e-7


@every_backend
@pytest.mark.parametrize("suffix", [1, 5, 15, 16, 17])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_a_suffix_after_a_cache_hit_sees_all_cached_keys(name: str, suffix: int, chunk: int):
    # B03: the causal mask of fewer queries than keys aligns to the bottom right.
    whole = make(Case((32 + suffix,), (suffix,), kv_dtype="fp32", fp32=True, seed=fresh_seed()))
    want, _ = answer(whole)
    backend = BACKENDS[name]()
    for start in range(0, suffix, chunk):
        end = min(start + chunk, suffix)
        kv_lens = np.array([32 + end], np.int32)
        plan = make_plan(16, np.array([0, end - start], np.int32), kv_lens, whole.plan.page_table)
        out = backend.attend(whole.q[start:end], whole.storage, 1, plan, scale=0.125)
        assert relative_error(out, want[start:end]) < 1e-5


@every_backend
def test_rows_of_a_fused_projection_need_no_copy(name: str):
    step = make(Case((40, 9), (3, 1), heads=4, kv_heads=2, kv_dtype="fp32", fp32=True, seed=fresh_seed()))
    fused = torch.randn(4, (4 + 2 + 2) * 64)
    fused[:, : 4 * 64] = step.q.flatten(1)
    view = fused[:, : 4 * 64].unflatten(1, (4, 64))
    assert not view.is_contiguous()
    backend = BACKENDS[name]()
    want = backend.attend(step.q, step.storage, 1, step.plan, scale=0.125)
    assert torch.equal(backend.attend(view, step.storage, 1, step.plan, scale=0.125), want)
    transposed = step.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(backend.attend(transposed, step.storage, 1, step.plan, scale=0.125), want)


@every_backend
def test_a_padding_sequence_of_length_zero_gives_zero_and_no_nan(name: str):
    # B02: 0 / 0 in a padding row must not become a NaN that is written to a shared page.
    spec = KVSpec(1, 2, 64)
    storage = PageStorage(spec, 4, 16)
    storage.pages.fill_(float("nan"))
    table = np.array([[2], [0]], np.int32)
    plan = make_plan(16, np.array([0, 1, 2], np.int32), np.array([1, 0], np.int32), table)
    assert plan.slots.tolist() == [32, -1]
    backend = BACKENDS[name]()
    k = torch.randn(2, 2, 64)
    backend.append(storage, 0, k, k, plan)
    lse = torch.zeros(2, 4)
    out = backend.attend(torch.randn(2, 4, 64), storage, 0, plan, scale=1.0, lse=lse)
    assert torch.equal(out[0], k[0].repeat_interleave(2, 0))
    assert not out[1].any() and lse[1].eq(float("-inf")).all() and lse[0].isfinite().all()
    assert storage.pages[[0, 1, 3]].isnan().all()


@every_backend
def test_a_step_without_rows_gives_no_rows(name: str):
    storage = PageStorage(KVSpec(1, 2, 64), 2, 16)
    plan = make_plan(16, np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int32))
    backend = BACKENDS[name]()
    backend.append(storage, 0, torch.empty(0, 2, 64), torch.empty(0, 2, 64), plan)
    assert backend.attend(torch.empty(0, 4, 64), storage, 0, plan, scale=1.0).shape == (0, 4, 64)
