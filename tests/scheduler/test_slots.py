"""Slots: the arrays of running requests."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import expect_check_fails, ids, span

from paged.kv.pages import PagePool
from paged.sampling import SamplingParams
from scheduler.request import Request
from scheduler.slots import Slots


def request(name: str, prompt, max_tokens: int = 8, end_ids: tuple[int, ...] = (), min_tokens: int = 0) -> Request:
    tokens = ids(*prompt)
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    made = Request(name, tokens, params, 0, end_ids, len(tokens) + max_tokens)
    made.known = tokens
    return made


def slots_with(num_groups: int = 1, *requests: Request) -> tuple[Slots, PagePool]:
    pool = PagePool(20, 4)
    slots = Slots(3, 40, pool, num_groups)
    for one in requests:
        columns = -(-len(one.known) // 4)
        one.slot = slots.place(one, pool.alloc(columns * num_groups).reshape(num_groups, -1), 0)
    return slots, pool


def test_a_placed_request_fills_its_row() -> None:
    pool = PagePool(20, 4)
    slots = Slots(3, 40, pool, 2)
    one = request("a", span(5, 6), 8, (2, 11), min_tokens=3)
    slot = slots.place(one, pool.alloc(4).reshape(2, 2), 4)
    assert slots.tokens[slot, :6].tolist() == span(5, 6)
    row = [
        int(getattr(slots, name)[slot]) for name in ("prompt_len", "known", "computed", "limit", "min_known", "work")
    ]
    assert row == [6, 6, 4, 14, 9, 0]
    assert slots.end_ids[slot].tolist() == [2, 11]
    assert slots.pages(slot).tolist() == [[0, 1], [2, 3]]
    assert slots.num_pages[slot] == 2
    assert slots.requests[slot] is one


def test_running_slots_stand_in_order_of_admission() -> None:
    slots, _ = slots_with(1, request("a", [1]), request("b", [2]), request("c", [3]))
    assert slots.running.tolist() == [0, 1, 2]
    slots.vacate(1)
    again = request("d", [4])
    again.slot = slots.place(again, slots.pool.alloc(1)[None], 0)
    assert slots.running.tolist() == [0, 2, 1]
    assert (slots.num_running, slots.num_free) == (3, 0)
    slots.check()


def test_a_vacated_slot_gives_back_its_pages_and_its_tokens() -> None:
    slots, pool = slots_with(1, request("a", span(0, 9)))
    assert pool.num_free == 17
    known = slots.vacate(0)
    assert known.tolist() == span(0, 9)
    slots.tokens[0] = 0
    assert known.tolist() == span(0, 9)  # a copy
    assert (pool.num_free, slots.num_running, slots.num_free) == (20, 0, 3)
    slots.check()


def test_a_reused_slot_keeps_nothing_of_its_last_request() -> None:
    slots, pool = slots_with(1, request("a", span(0, 9), 8, (7, 8, 9), min_tokens=5))
    slots.work[0] = 12
    slots.vacate(0)
    later = request("b", [1, 2], 3)
    later.slot = slots.place(later, pool.alloc(1)[None], 0)
    assert later.slot == 0
    assert slots.end_ids[0].tolist() == [-1, -1, -1]
    assert (slots.work[0], slots.min_known[0], slots.limit[0], slots.known[0]) == (0, 2, 5, 2)
    slots.check()


def test_end_ids_widen_for_the_request_that_has_most() -> None:
    slots, _ = slots_with(1, request("a", [1], end_ids=(2,)), request("b", [1], end_ids=(3, 4, 5)), request("c", [1]))
    assert slots.end_ids.tolist() == [[2, -1, -1], [3, 4, 5], [-1, -1, -1]]


def test_columns_cover_the_longest_sequence() -> None:
    slots = Slots(2, 41, PagePool(4, 4), 3)
    assert slots.page_table.shape == (3, 2, 11)
    assert slots.tokens.shape == (2, 41)


# check() ----------------------------------------------------------------------------------------------------------


def slot_in_both(slots: Slots) -> None:
    slots._free.append(0)


def slot_in_neither(slots: Slots) -> None:
    slots._free.pop()


def slot_runs_twice(slots: Slots) -> None:
    slots.running = np.append(slots.running, np.int32(0))


def all_is_computed(slots: Slots) -> None:
    slots.computed[0] = slots.known[0]


def more_is_known_than_fits(slots: Slots) -> None:
    slots.known[0] = 41


def computed_is_negative(slots: Slots) -> None:
    slots.computed[0] = -1


def page_stands_twice(slots: Slots) -> None:
    slots.page_table[0, 0, 1] = slots.page_table[0, 0, 0]


def page_is_freed(slots: Slots) -> None:
    slots.pool.release(slots.pages(0)[0, :1])


def page_is_missing(slots: Slots) -> None:
    slots.num_pages[0] -= 2


def page_too_many(slots: Slots) -> None:
    slots.page_table[0, 0, 3] = slots.pool.alloc(1)[0]
    slots.num_pages[0] += 1


def request_is_elsewhere(slots: Slots) -> None:
    requests = slots.requests
    requests[0], requests[1] = requests[1], requests[0]


def request_is_missing(slots: Slots) -> None:
    slots.requests[0] = None


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (slot_in_both, "partition"),
        (slot_in_neither, "partition"),
        (slot_runs_twice, "partition"),
        (all_is_computed, "slot 0: 9 of 9 computed"),
        (more_is_known_than_fits, "slot 0: 0 of 41 computed"),
        (computed_is_negative, "slot 0: -1 of 9"),
        (page_stands_twice, "twice in slot 0"),
        (page_is_freed, "slot 0 holds a freed page"),
        (page_is_missing, "do not cover"),
        (page_too_many, "do not cover"),
        (request_is_elsewhere, "slot 0 and its request disagree"),
        (request_is_missing, "slot 0 and its request disagree"),
    ],
)
def test_check_notices(corrupt, message: str) -> None:
    slots, _ = slots_with(1, request("a", span(0, 9)), request("b", span(50, 2)))
    slots.check()
    corrupt(slots)
    expect_check_fails(slots, message)
