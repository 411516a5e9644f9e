"""build_plan: which rows a step computes, who gets a token, and that the plan owns its arrays."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import ids, span
from driver import Driver

from paged.kv.pages import PagePool
from paged.sampling import SamplingParams
from scheduler.request import Request
from scheduler.slots import Slots
from scheduler.step import StepPlan, build_plan


def three_slots(num_groups: int = 1) -> Slots:
    """Requests of 9, 5 and 6 known tokens, of which 4, 4 and 0 are computed; pages of four."""
    pool = PagePool(30, 4)
    slots = Slots(4, 40, pool, num_groups)
    for name, first, known, computed in (("a", 10, 9, 4), ("b", 30, 5, 4), ("c", 50, 6, 0)):
        request = Request(name, ids(*span(first, known)), SamplingParams(), 0, (), 40)
        request.known = request.prompt
        pages = pool.alloc(-(-known // 4) * num_groups).reshape(num_groups, -1)
        request.slot = slots.place(request, pages, computed)
    return slots


def test_a_mixed_step_is_one_ragged_batch() -> None:
    plan = build_plan(three_slots(), ids(0, 1, 2), ids(3, 1, 6), 4)
    assert plan.batch.tokens.tolist() == [14, 15, 16, 34, *span(50, 6)]
    assert plan.batch.q_indptr.tolist() == [0, 3, 4, 10]
    assert plan.batch.kv_lens.tolist() == [7, 5, 6]
    assert plan.num_rows == 10


def test_only_slots_whose_last_known_token_is_computed_get_a_new_one() -> None:
    plan = build_plan(three_slots(), ids(0, 1, 2), ids(3, 1, 6), 4)
    assert plan.sample_slots.tolist() == [1, 2]
    assert plan.positions.tolist() == [5, 6]
    assert plan.batch.logit_rows.tolist() == [3, 9]
    whole = build_plan(three_slots(), ids(0), ids(5), 4)
    assert (whole.sample_slots.tolist(), whole.positions.tolist(), whole.batch.logit_rows.tolist()) == ([0], [9], [4])


def test_decodes_alone_give_the_same_plan_as_the_general_way() -> None:
    slots = three_slots()
    slots.computed[:3] = slots.known[:3] - 1
    plan = build_plan(slots, ids(2, 0, 1), ids(1, 1, 1), 4)
    assert plan.batch.tokens.tolist() == [55, 18, 34]
    assert plan.batch.q_indptr.tolist() == [0, 1, 2, 3]
    assert plan.batch.kv_lens.tolist() == [6, 9, 5]
    assert plan.sample_slots.tolist() == [2, 0, 1]
    assert plan.batch.logit_rows.tolist() == [0, 1, 2]
    assert plan.positions.tolist() == [6, 9, 5]


def test_the_tables_hold_the_pages_of_each_group_and_no_more_columns_than_needed() -> None:
    slots = three_slots(2)
    plan = build_plan(slots, ids(1, 2), ids(1, 2), 4)
    assert plan.batch.page_tables.shape == (2, 2, 2)
    for group in range(2):
        assert plan.batch.page_tables[group, 0].tolist() == slots.pages(1)[group].tolist()
        assert plan.batch.page_tables[group, 1, 0] == slots.pages(2)[group, 0]
    assert plan.batch.page_tables.flags.c_contiguous


@pytest.mark.parametrize("num_tokens", [(1, 1, 1), (3, 1, 6)])
def test_every_array_has_the_type_that_kernels_read(num_tokens: tuple[int, int, int]) -> None:
    slots = three_slots()
    if num_tokens == (1, 1, 1):
        slots.computed[:3] = slots.known[:3] - 1
    plan = build_plan(slots, ids(0, 1, 2), ids(*num_tokens), 4)
    batch = plan.batch
    for array in (batch.tokens, batch.q_indptr, batch.kv_lens, batch.page_tables, batch.logit_rows, plan.positions):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous


def arrays_of(plan: StepPlan) -> list[np.ndarray]:
    batch = plan.batch
    return [
        plan.slots,
        plan.num_tokens,
        plan.sample_slots,
        plan.positions,
        batch.tokens,
        batch.q_indptr,
        batch.kv_lens,
        batch.page_tables,
        batch.logit_rows,
    ]


def test_a_plan_keeps_its_values_while_the_scheduler_goes_on() -> None:
    driver = Driver(20, 4, max_num_batched_tokens=16)
    for i in range(4):
        driver.submit(f"r{i}", span(20 * i, 7 + i), 12)
    kept: list[tuple[StepPlan, list[np.ndarray]]] = []
    while driver.scheduler.has_work:
        plan = driver.step()
        assert plan is not None
        kept.append((plan, [array.copy() for array in arrays_of(plan)]))
    for plan, copies in kept:
        for array, copy in zip(arrays_of(plan), copies, strict=True):
            assert np.array_equal(array, copy)
    state = driver.scheduler.state
    for plan, _ in kept:
        for array in arrays_of(plan):
            for own in (state.tokens, state.known, state.computed, state.page_table, state.num_pages):
                assert not np.shares_memory(array, own)
