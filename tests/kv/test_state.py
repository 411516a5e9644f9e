"""StatePool: slots, positions, snapshots, and steps that cannot run from the wrong place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from byhand import expect_check_fails
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paged.errors import GeometryMismatch, StateMismatch
from paged.kv.state import UNKNOWN, StatePool, StateSnapshot
from paged.spec import StatePlane, StateSpec

SPEC = StateSpec((StatePlane("conv", (2, 3, 5), "bf16"), StatePlane("delta", (2, 4, 3, 7))))
HASH = StateSpec((StatePlane("hash", (1,), "int64"),))
PRIME = 2**61 - 1


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def step(pool: StatePool, *sequences: tuple[int, int, int], fill: float | None = None) -> np.ndarray:
    """One forward over (slot, first position, rows) that adds `fill` (default: the row count) to every value."""
    slots, starts, counts = (ints(*column) for column in zip(*sequences, strict=True))
    with pool.advance(slots, np.cumsum(ints(0, *counts)).astype(np.int32), starts + counts) as moved:
        for slot, count in zip(moved.tolist(), counts.tolist(), strict=True):
            for plane in pool.planes.values():
                if slot >= 0:
                    plane[slot] += count if fill is None else fill
    return moved


def values(pool: StatePool, slot: int) -> set[float]:
    return {float(v) for plane in pool.planes.values() for v in plane[slot].unique()}


# The spec


def test_the_bytes_of_a_spec_are_those_of_its_planes() -> None:
    assert [plane.num_bytes for plane in SPEC.planes] == [2 * 3 * 5 * 2, 2 * 4 * 3 * 7 * 4]
    assert SPEC.num_bytes == 60 + 672
    assert HASH.num_bytes == 8


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: StatePlane("", (1,)), "name must not be empty"),
        (lambda: StatePlane("x", (2, -1)), r"shape of x must be ints >= 0, got \(2, -1\)"),
        (lambda: StatePlane("x", (2, 1.5)), "shape of x must be ints"),  # type: ignore[arg-type]
        (lambda: StatePlane("x", (1,), "int4"), "dtype of x must be one of fp32, fp16, bf16, int64, got 'int4'"),
        (lambda: StateSpec(()), "at least one plane"),
        (lambda: StateSpec((StatePlane("x", (1,)), StatePlane("x", (2,)))), r"a name of its own, got \['x', 'x'\]"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(make, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_equal_specs_compare_equal_and_can_be_keys() -> None:
    again = StateSpec((StatePlane("conv", (2, 3, 5), "bf16"), StatePlane("delta", (2, 4, 3, 7), "fp32")))
    assert again == SPEC and len({again, SPEC, HASH}) == 2


# The pool


def test_a_fresh_pool_holds_empty_sequences() -> None:
    pool = StatePool(SPEC, 3)
    assert pool.num_slots == 3 and pool.positions.tolist() == [0, 0, 0]
    assert pool.planes["conv"].shape == (3, 2, 3, 5) and pool.planes["conv"].dtype == torch.bfloat16
    assert pool.planes["delta"].shape == (3, 2, 4, 3, 7) and pool.planes["delta"].dtype == torch.float32
    assert pool.num_bytes == 3 * SPEC.num_bytes == sum(p.numel() * p.element_size() for p in pool.planes.values())
    assert all(values(pool, slot) == {0.0} for slot in range(3))
    pool.check()


def test_a_plane_may_be_empty() -> None:
    pool = StatePool(StateSpec((StatePlane("conv", (2, 0, 5)), StatePlane("delta", (1,)))), 2)
    assert pool.planes["conv"].shape == (2, 2, 0, 5)
    step(pool, (1, 0, 4))
    assert pool.snapshot(1).num_bytes == 4
    pool.check()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int64"])
def test_planes_are_aligned_for_vectors(dtype: str) -> None:
    pool = StatePool(StateSpec((StatePlane("a", (3,), dtype), StatePlane("b", (5, 7), dtype))), 5)
    assert all(plane.data_ptr() % 64 == 0 and plane.is_contiguous() for plane in pool.planes.values())


@pytest.mark.parametrize("num_slots", [0, -2])
def test_a_pool_needs_a_slot(num_slots: int) -> None:
    with pytest.raises(ValueError, match=f"num_slots must be at least 1, got {num_slots}"):
        StatePool(SPEC, num_slots)


@pytest.mark.parametrize("slot", [-1, 3, 100])
@pytest.mark.parametrize("verb", ["reset", "snapshot", "restore", "copy from", "copy to"])
def test_a_slot_outside_the_pool_is_refused(verb: str, slot: int) -> None:
    pool = StatePool(SPEC, 3)
    calls = {
        "reset": lambda: pool.reset(slot),
        "snapshot": lambda: pool.snapshot(slot),
        "restore": lambda: pool.restore(slot, pool.snapshot(0)),
        "copy from": lambda: pool.copy(slot, 0),
        "copy to": lambda: pool.copy(0, slot),
    }
    with pytest.raises(ValueError, match=f"between 0 and 2, got {slot}"):
        calls[verb]()


# Steps


def test_a_step_moves_the_positions_of_its_slots_and_of_no_other() -> None:
    pool = StatePool(SPEC, 4)
    assert step(pool, (2, 0, 5), (0, 0, 1)).tolist() == [2, 0]
    assert pool.positions.tolist() == [1, 0, 5, 0]
    assert values(pool, 2) == {5.0} and values(pool, 0) == {1.0} and values(pool, 1) == {0.0}
    step(pool, (0, 1, 7), (2, 5, 1))
    assert pool.positions.tolist() == [8, 0, 6, 0]
    pool.check()


def test_a_sequence_that_starts_finds_zeros_whatever_its_slot_held() -> None:
    pool = StatePool(SPEC, 2)
    step(pool, (0, 0, 9), (1, 0, 4))
    step(pool, (0, 0, 2))
    assert values(pool, 0) == {2.0} and values(pool, 1) == {4.0}
    assert pool.positions.tolist() == [2, 4]


@pytest.mark.parametrize("start", [1, 4, 6, 500])
def test_rows_that_do_not_follow_the_state_are_refused_and_nothing_moves(start: int) -> None:
    pool = StatePool(SPEC, 3)
    step(pool, (1, 0, 5), (0, 0, 3))
    before = [pool.snapshot(slot) for slot in range(3)]
    with pytest.raises(StateMismatch, match=f"rows at position {start} need .* slot 1 is at position 5; restore"):
        step(pool, (2, 0, 8), (1, start, 1), (0, 3, 2))
    assert pool.positions.tolist() == [3, 5, 0]
    for slot, old in enumerate(before):
        assert all(torch.equal(plane[slot], old.tensors[name]) for name, plane in pool.planes.items())


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_step_in_a_slot_outside_the_pool_is_refused(slot: int) -> None:
    pool = StatePool(SPEC, 3)
    with pytest.raises(ValueError, match=f"between 0 and 2, got {slot}"):
        step(pool, (0, 0, 1), (slot, 0, 1))
    assert pool.positions.tolist() == [0, 0, 0]


def test_two_sequences_in_one_slot_are_refused() -> None:
    pool = StatePool(SPEC, 3)
    with pytest.raises(ValueError, match="two sequences of one step have state slot 2"):
        step(pool, (2, 0, 1), (0, 0, 1), (2, 0, 4))
    assert pool.positions.tolist() == [0, 0, 0]


def test_sequences_without_rows_and_padding_take_no_part() -> None:
    """A padding sequence has length 0 and one row at position -1; its slot may be anything, also another's."""
    pool = StatePool(SPEC, 2)
    step(pool, (0, 0, 3))
    slots, q_indptr, kv_lens = ints(-7, 0, 1, 0), ints(0, 1, 2, 2, 3), ints(0, 4, 9, 0)
    with pool.advance(slots, q_indptr, kv_lens) as moved:
        assert moved.tolist() == [-1, 0, -1, -1] and moved.dtype == np.int32
    assert pool.positions.tolist() == [4, 0]
    with pool.advance(slots[:0], ints(0), kv_lens[:0]) as moved:
        assert moved.tolist() == []


def test_a_forward_that_fails_leaves_its_slots_unknown_until_they_start_again() -> None:
    pool = StatePool(SPEC, 3)
    step(pool, (0, 0, 3), (1, 0, 4), (2, 0, 5))
    saved = pool.snapshot(1)
    with pytest.raises(ZeroDivisionError), pool.advance(ints(0, 1), ints(0, 1, 2), ints(4, 5)):
        pool.planes["delta"][0] = 99.0
        raise ZeroDivisionError
    assert pool.positions.tolist() == [UNKNOWN, UNKNOWN, 5]
    with pytest.raises(StateMismatch, match="slot 0 has no valid state since a forward failed; restore"):
        step(pool, (0, 3, 1))
    with pytest.raises(StateMismatch, match="slot 0 has no valid state since a forward failed; reset or restore"):
        pool.snapshot(0)
    step(pool, (0, 0, 2))
    pool.restore(1, saved)
    step(pool, (1, 4, 1))
    assert values(pool, 0) == {2.0} and values(pool, 1) == {5.0}
    assert pool.positions.tolist() == [2, 5, 5]


# One slot


def test_reset_empties_one_slot() -> None:
    pool = StatePool(SPEC, 2)
    step(pool, (0, 0, 3), (1, 0, 3))
    pool.reset(0)
    pool.reset(0)
    assert pool.positions.tolist() == [0, 3]
    assert values(pool, 0) == {0.0} and values(pool, 1) == {3.0}
    pool.check()


def test_a_copy_continues_on_its_own() -> None:
    pool = StatePool(SPEC, 3)
    step(pool, (0, 0, 3))
    pool.copy(0, 2)
    pool.copy(2, 2)
    step(pool, (0, 3, 4))
    assert values(pool, 2) == {3.0} and values(pool, 0) == {7.0}
    assert pool.positions.tolist() == [7, 0, 3]
    pool.copy(1, 0)
    assert values(pool, 0) == {0.0} and pool.positions.tolist() == [0, 0, 3]
    pool.check()


def test_a_snapshot_keeps_what_it_took_when_the_donor_moves_on() -> None:
    pool = StatePool(SPEC, 2)
    step(pool, (1, 0, 6))
    saved = pool.snapshot(1)
    assert saved.position == 6 and saved.num_bytes == SPEC.num_bytes and set(saved.tensors) == {"conv", "delta"}
    step(pool, (1, 6, 1))
    pool.reset(1)
    assert {float(v) for t in saved.tensors.values() for v in t.unique()} == {6.0}


def test_a_snapshot_can_be_restored_many_times_in_any_slot_of_any_pool_of_its_geometry() -> None:
    pool, other = StatePool(SPEC, 2), StatePool(SPEC, 5)
    step(pool, (1, 0, 6))
    saved = pool.snapshot(1)
    for target, slot in ((pool, 0), (pool, 1), (other, 4)):
        target.restore(slot, saved)
        step(target, (slot, 6, 2))
        assert values(target, slot) == {8.0} and target.positions[slot] == 8
    assert {float(v) for t in saved.tensors.values() for v in t.unique()} == {6.0}


def test_a_snapshot_of_an_empty_slot_is_an_empty_sequence() -> None:
    pool = StatePool(SPEC, 2)
    saved = pool.snapshot(0)
    step(pool, (1, 0, 3))
    pool.restore(1, saved)
    assert pool.positions.tolist() == [0, 0] and values(pool, 1) == {0.0}
    pool.check()


@pytest.mark.parametrize(
    "planes",
    [
        (StatePlane("conv", (2, 3, 5), "bf16"),),
        (StatePlane("conv", (2, 3, 5), "bf16"), StatePlane("delta", (2, 4, 7, 3))),
        (StatePlane("conv", (2, 3, 5), "fp16"), StatePlane("delta", (2, 4, 3, 7))),
        (StatePlane("conv", (2, 3, 5), "bf16"), StatePlane("gamma", (2, 4, 3, 7))),
        (*SPEC.planes, StatePlane("more", (1,))),
    ],
)
def test_a_snapshot_of_another_geometry_is_refused_and_the_slot_untouched(planes) -> None:
    pool, other = StatePool(SPEC, 2), StatePool(StateSpec(planes), 2)
    step(pool, (0, 0, 3))
    step(other, (0, 0, 8))
    with pytest.raises(GeometryMismatch, match=r"the snapshot has planes .*, and this pool conv \[2, 3, 5\] bfloat16"):
        pool.restore(0, other.snapshot(0))
    assert pool.positions.tolist() == [3, 0] and values(pool, 0) == {3.0}


def test_planes_in_another_order_are_the_same_geometry() -> None:
    pool, other = StatePool(SPEC, 1), StatePool(StateSpec(SPEC.planes[::-1]), 1)
    step(other, (0, 0, 8))
    pool.restore(0, other.snapshot(0))
    assert values(pool, 0) == {8.0} and pool.positions.tolist() == [8]


# Broken on purpose


def break_shape(pool: StatePool) -> None:
    pool.planes["delta"] = pool.planes["delta"][:, :, :, :, :6]


def break_dtype(pool: StatePool) -> None:
    pool.planes["conv"] = pool.planes["conv"].float()


def break_strides(pool: StatePool) -> None:
    pool.planes["conv"] = pool.planes["conv"].transpose(1, 2).contiguous().transpose(1, 2)


def break_names(pool: StatePool) -> None:
    pool.planes["spare"] = pool.planes["conv"]


def break_positions(pool: StatePool) -> None:
    pool.positions[1] = -2


def break_width(pool: StatePool) -> None:
    pool.positions = pool.positions.astype(np.int64)  # type: ignore[assignment]


def leave_a_value(pool: StatePool) -> None:
    pool.planes["delta"][2, 1, 3, 2, 6] = 1e-30


@pytest.mark.parametrize(
    ("harm", "match"),
    [
        (break_shape, "plane delta has shape"),
        (break_dtype, "plane conv has dtype torch.float32"),
        (break_strides, "plane conv is not contiguous"),
        (break_names, "planes are"),
        (break_positions, "a slot is at position -2"),
        (break_width, "positions are int64"),
        (leave_a_value, "slot 2 is at position 0 and its delta is not zero"),
    ],
)
def test_check_notices_what_is_broken(harm, match: str) -> None:
    pool = StatePool(SPEC, 3)
    step(pool, (1, 0, 4))
    pool.check()
    harm(pool)
    expect_check_fails(pool, match)


# Any order of verbs, against a list of tokens a slot


def digest(tokens: list[int]) -> int:
    value = 0
    for token in tokens:
        value = (31 * value + token) % PRIME
    return value


class SlotMachine(RuleBasedStateMachine):
    """The state of a slot is a hash of the tokens it took in, in their order."""

    SLOTS = 4
    slots = st.integers(0, SLOTS - 1)

    def __init__(self) -> None:
        super().__init__()
        self.pool = StatePool(HASH, self.SLOTS)
        self.tokens: list[list[int] | None] = [[] for _ in range(self.SLOTS)]
        self.saved: list[tuple[StateSnapshot, list[int]]] = []

    def forward(self, rows: dict[int, list[int]], fresh: bool, fails: bool) -> None:
        starts = [0 if fresh else len(self.tokens[slot] or []) for slot in rows]
        counts = [len(tokens) for tokens in rows.values()]
        q_indptr = np.cumsum([0, *counts]).astype(np.int32)
        with self.pool.advance(ints(*rows), q_indptr, ints(*starts) + ints(*counts)) as slots:
            for slot, tokens in zip(slots.tolist(), rows.values(), strict=True):
                for token in tokens:
                    plane = self.pool.planes["hash"]
                    plane[slot, 0] = (31 * int(plane[slot, 0]) + token) % PRIME
            if fails:
                raise ZeroDivisionError

    @rule(
        rows=st.dictionaries(slots, st.lists(st.integers(1, 2**31 - 1), min_size=0, max_size=5), min_size=1),
        fresh=st.booleans(),
        fails=st.sampled_from([False, False, False, True]),
    )
    def run(self, rows: dict[int, list[int]], fresh: bool, fails: bool) -> None:
        active = [slot for slot, tokens in rows.items() if tokens]
        if not fresh and any(self.tokens[slot] is None for slot in active):
            rows = {slot: tokens for slot, tokens in rows.items() if self.tokens[slot] is not None}
            if not rows:
                return
        try:
            self.forward(rows, fresh, fails)
        except ZeroDivisionError:
            assert fails
        for slot, tokens in rows.items():
            if tokens:
                before = [] if fresh else self.tokens[slot] or []
                self.tokens[slot] = None if fails else before + tokens

    @rule(slot=slots)
    def reset(self, slot: int) -> None:
        self.pool.reset(slot)
        self.tokens[slot] = []

    @rule(src=slots, dst=slots)
    def copy(self, src: int, dst: int) -> None:
        self.pool.copy(src, dst)
        self.tokens[dst] = self.tokens[src]

    @rule(slot=slots)
    def save(self, slot: int) -> None:
        tokens = self.tokens[slot]
        if tokens is not None:
            self.saved.append((self.pool.snapshot(slot), tokens))

    @rule(slot=slots, data=st.data())
    def restore(self, slot: int, data: st.DataObject) -> None:
        if self.saved:
            snapshot, tokens = data.draw(st.sampled_from(self.saved))
            self.pool.restore(slot, snapshot)
            self.tokens[slot] = tokens

    @invariant()
    def every_slot_holds_its_tokens(self) -> None:
        for slot, tokens in enumerate(self.tokens):
            if tokens is None:
                assert self.pool.positions[slot] == UNKNOWN
            else:
                assert self.pool.positions[slot] == len(tokens)
                assert int(self.pool.planes["hash"][slot, 0]) == digest(tokens)
        self.pool.check()


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
