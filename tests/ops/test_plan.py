"""make_plan and check_plan: positions and slots follow from lengths and page tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paged.errors import UnsupportedShape
from paged.ops.plan import AttendPlan, check_plan, make_plan


def ints(*values: object) -> np.ndarray:
    return np.array(values, np.int32)


def plan() -> AttendPlan:
    return make_plan(4, ints(0, 3, 4, 4), ints(5, 9, 2), ints([7, 2, 0], [1, 3, 4], [5, 0, 0]))


def test_rows_end_at_the_length_of_their_sequence():
    p = plan()
    assert p.positions.tolist() == [2, 3, 4, 8] and p.positions.dtype == np.int32
    assert p.slots.tolist() == [7 * 4 + 2, 7 * 4 + 3, 2 * 4, 4 * 4] and p.slots.dtype == np.int64
    assert (p.num_seqs, p.num_rows, p.handle) == (3, 4, None)
    check_plan(p, 8)


def test_slots_are_64_bits_wide():
    p = make_plan(2**20, ints(0, 1), ints(5), ints([2**12]))
    assert p.slots.tolist() == [2**32 + 4]


def test_rows_without_a_position_or_a_page_are_not_stored():
    p = make_plan(4, ints(0, 1, 2), ints(0, 3), ints([6], [-1]))
    assert p.positions.tolist() == [-1, 2] and p.slots.tolist() == [-1, -1]
    check_plan(p, 8)


def test_an_empty_step_is_sound():
    p = make_plan(4, ints(0), np.zeros(0, np.int32), np.zeros((0, 3), np.int32))
    assert p.num_rows == 0
    check_plan(p, 1)


@pytest.mark.parametrize("name", ["q_indptr", "kv_lens", "page_table", "positions"])
@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.float32])
def test_other_dtypes_are_refused(name: str, dtype: type):
    p = plan()
    with pytest.raises(TypeError, match=f"plan.{name} must be an int32 array, got {np.dtype(dtype).name}"):
        check_plan(replace(p, **{name: getattr(p, name).astype(dtype)}), 8)


def test_lists_are_refused():
    with pytest.raises(TypeError, match=r"plan\.kv_lens must be an int32 array"):
        check_plan(replace(plan(), kv_lens=[5, 9, 2]), 8)  # pyright: ignore


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"page_table": np.asfortranarray(plan().page_table)}, UnsupportedShape, "C-contiguous"),
        ({"slots": plan().slots[:3].copy()}, UnsupportedShape, "slots"),
        ({"page_table": plan().page_table[:2].copy()}, UnsupportedShape, "page table"),
        ({"page_table": plan().page_table[0].copy()}, UnsupportedShape, "page table"),
        ({"q_indptr": ints(0, 3, 4)}, UnsupportedShape, "q_indptr"),
        ({"q_indptr": ints(0, 3, 2, 4)}, UnsupportedShape, "rise from 0"),
        ({"q_indptr": ints(0, 3, 4, 5)}, UnsupportedShape, "rise from 0"),
        ({"kv_lens": ints(2, 9, 2)}, UnsupportedShape, "sequence 0 has 3 new rows but a length of only 2"),
        ({"kv_lens": ints(5, 13, 2)}, UnsupportedShape, "13 positions need 4 pages"),
        ({"page_table": ints([7, 8, 0], [1, 3, 4], [5, 0, 0])}, ValueError, "below 8, got 8"),
        ({"slots": np.array([0, 1, 2, 32])}, ValueError, "below 32"),
        ({"slots": np.array([0, 1, 2, -2])}, ValueError, "slots must be -1"),
    ],
)
def test_what_is_wrong_is_named(change: dict, error: type, text: str):
    with pytest.raises(error, match=text):
        check_plan(replace(plan(), **change), 8)


def test_page_ids_past_the_length_do_not_matter():
    p = plan()
    p.page_table[0, 2] = 99
    p.page_table[2, 1:] = -5
    check_plan(p, 8)
