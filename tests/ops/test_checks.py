"""What no kernel computes is refused with a sentence that names the limit; never a silent wrong answer (B08)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_cases import Case, make
from op_backends import BACKENDS, every_backend, every_isa, native

from paged.errors import UnsupportedShape
from paged.kv.storage import PageStorage
from paged.ops.plan import AttendPlan, make_plan
from paged.spec import KVSpec

STEP = make(Case((20, 33), (1, 3), heads=4, kv_heads=2, kv_dtype="fp32", fp32=True))


def attend(name: str, q: torch.Tensor = STEP.q, plan: AttendPlan | None = None, **options: object) -> torch.Tensor:
    plan = replace(plan or STEP.plan, handle=None)
    return BACKENDS[name]().attend(q, STEP.storage, 1, plan, **{"scale": 1.0, **options})  # pyright: ignore


@every_backend
@pytest.mark.parametrize("heads", [1, 3, 33])
def test_query_heads_must_be_a_multiple_of_kv_heads(name: str, heads: int):
    with pytest.raises(UnsupportedShape, match=f"multiple of the 2 kv heads, got {heads}"):
        attend(name, torch.randn(4, heads, 64))


@every_backend
@pytest.mark.parametrize("shape", [(3, 4, 64), (4, 4, 32), (4, 256), (1, 4, 4, 64)])
def test_the_query_must_have_the_rows_and_head_size_of_the_step(name: str, shape: tuple[int, ...]):
    with pytest.raises(UnsupportedShape, match=r"q must be \[4 rows, q_heads, head_dim 64\]"):
        attend(name, torch.randn(shape))


@every_backend
@pytest.mark.parametrize("field", ["q_indptr", "kv_lens", "page_table", "slots"])
def test_arrays_of_another_dtype_are_refused_not_reinterpreted(name: str, field: str):
    other = np.int32 if field == "slots" else np.int64
    with pytest.raises(TypeError, match=f"plan.{field} must be an int"):
        attend(name, plan=replace(STEP.plan, **{field: getattr(STEP.plan, field).astype(other)}))


@every_backend
@pytest.mark.parametrize(
    "change, text",
    [
        ({"q_indptr": np.array([0, 1, 5], np.int32)}, "q_indptr"),
        ({"q_indptr": np.array([0, 5, 4], np.int32)}, "q_indptr"),
        ({"q_indptr": np.array([1, 1, 4], np.int32)}, "q_indptr"),
        ({"q_indptr": np.array([0, 4], np.int32)}, "q_indptr"),
        ({"kv_lens": np.array([20, 2], np.int32)}, "new rows"),
        ({"kv_lens": np.array([20, 330], np.int32)}, "columns"),
        ({"page_table": STEP.plan.page_table[:1].copy()}, "page table"),
        ({"page_table": np.asfortranarray(STEP.plan.page_table)}, "C-contiguous"),
        ({"page_table": np.full_like(STEP.plan.page_table, 99)}, "page id"),
        ({"page_table": np.full_like(STEP.plan.page_table, -1)}, "page id"),
    ],
)
def test_a_plan_that_is_not_sound_is_refused(name: str, change: dict[str, np.ndarray], text: str):
    with pytest.raises(ValueError, match=text):
        attend(name, plan=replace(STEP.plan, **change))


@every_backend
def test_layer_window_softcap_and_lse_are_checked(name: str):
    with pytest.raises(ValueError, match="window"):
        attend(name, window=-1)
    with pytest.raises(ValueError, match="softcap"):
        attend(name, softcap=float("nan"))
    with pytest.raises(UnsupportedShape, match=r"lse must be contiguous \[4, 4\]"):
        attend(name, lse=torch.empty(4, 3))
    with pytest.raises(TypeError, match="lse must be fp32"):
        attend(name, lse=torch.empty(4, 4, dtype=torch.float64))
    with pytest.raises(TypeError, match="floating-point"):
        attend(name, torch.ones(4, 4, 64, dtype=torch.int32))
    for layer in (-1, 2):
        with pytest.raises(UnsupportedShape, match="layer must be between 0 and 1"):
            BACKENDS[name]().attend(STEP.q, STEP.storage, layer, STEP.plan, scale=1.0)


@every_backend
def test_page_sizes_of_plan_and_storage_must_agree(name: str):
    plan = make_plan(8, STEP.plan.q_indptr, STEP.plan.kv_lens, np.zeros((2, 5), np.int32))
    with pytest.raises(UnsupportedShape, match="page_size 8"):
        attend(name, plan=plan)
    with pytest.raises(UnsupportedShape, match="page_size 8"):
        BACKENDS[name]().append(STEP.storage, 1, torch.ones(4, 2, 64), torch.ones(4, 2, 64), plan)


@every_backend
def test_rows_of_another_dtype_are_not_appended(name: str):
    backend = BACKENDS[name]()
    with pytest.raises(TypeError, match="k must be fp32 or the stored"):
        backend.append(STEP.storage, 1, torch.ones(4, 2, 64).half(), torch.ones(4, 2, 64), STEP.plan)
    with pytest.raises(UnsupportedShape, match="v must be"):
        backend.append(STEP.storage, 1, torch.ones(4, 2, 64), torch.ones(4, 1, 64), STEP.plan)


@every_isa
@pytest.mark.parametrize("head_dim", [4, 20, 100, 264, 512])
def test_the_native_backend_names_its_head_sizes(isa: str, head_dim: int):
    backend = native(isa)
    storage = PageStorage(KVSpec(1, 1, head_dim), 2, 4)
    plan = make_plan(4, np.array([0, 1], np.int32), np.array([1], np.int32), np.zeros((1, 1), np.int32))
    with pytest.raises(UnsupportedShape, match=f"multiple of 8 and at most 256, got {head_dim}"):
        backend.attend(torch.ones(1, 1, head_dim), storage, 0, plan, scale=1.0)


@every_isa
def test_the_native_backend_names_its_query_types(isa: str):
    with pytest.raises(TypeError, match="q must be fp32, fp16 or bf16"):
        native(isa).attend(STEP.q.double(), STEP.storage, 1, STEP.plan, scale=1.0)
