"""Slots: the arrays of running requests."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import expect_check_fails, ids, span

from paged.kv.pages import PagePool
from paged.sampling import SamplingParams
from paged.spec import KVSpec, LoopGroups
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


def test_a_placement_that_fails_costs_no_slot() -> None:
    slots, pool = slots_with()
    with pytest.raises(ValueError, match="broadcast"):
        slots.place(request("a", span(0, 50)), pool.alloc(1)[None], 0)  # a row has 40
    assert (slots.num_running, slots.num_free) == (0, 3)
    slots.check()


def test_more_tokens_before_an_end_than_a_row_can_count() -> None:
    slots, pool = slots_with()
    one = request("a", [1], max_tokens=8)
    one.params = SamplingParams(max_tokens=None, min_tokens=2**70)
    assert int(slots.min_known[slots.place(one, pool.alloc(1)[None], 0)]) == one.limit == 9


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


# Depths and cache windows -----------------------------------------------------------------------------------------

LOOPED = KVSpec(1, 1, 8, 4, (0,) * 4, LoopGroups(1, 3, 2))


def looped_slots(*views: tuple[int, int], length: int = 6) -> tuple[Slots, PagePool]:
    """A slot for each depth and cache window, with pages for `length` tokens, of which all but one are computed."""
    pool = PagePool(40, 4)
    slots = Slots(3, 40, pool, 4)
    for i, (loops, window) in enumerate(views):
        one = request("abc"[i], span(0, length))
        one.view = LOOPED.view(loops, window)
        pages = np.full((4, -(-length // 4)), -1, np.int32)
        pages[one.view.groups] = pool.alloc(len(one.view.groups) * pages.shape[1]).reshape(-1, pages.shape[1])
        one.slot = slots.place(one, pages, length - 1)
    return slots, pool


def test_a_slot_knows_its_depth_its_window_and_its_groups() -> None:
    slots, _ = looped_slots((1, 0), (3, 5))
    assert slots.loops.tolist() == [1, 3, 0] and slots.cache_window.tolist() == [0, 5, 0]
    assert slots.uses[:, :2].T.tolist() == [[True, True, False, False], [True] * 4]
    assert slots.windows[:, :2].T.tolist() == [[0] * 4, [5] * 4]
    assert slots.left[:, :2].tolist() == [[0, 0]] * 4, "a group that is not in use was not left"
    slots.check()


def test_slots_of_several_depths_are_extended_at_once() -> None:
    slots, pool = looped_slots((2, 0), (1, 0), length=4)  # pages 0 to 2, and 3 and 4
    slots.extend(ids(0, 1))
    assert slots.pages(0).tolist() == [[0, 5], [1, 7], [2, 9], [-1, -1]]
    assert slots.pages(1).tolist() == [[3, 6], [4, 8], [-1, -1], [-1, -1]]
    assert slots.num_pages[:2].tolist() == [2, 2] and pool.num_free == 30


def test_each_slot_leaves_what_its_own_window_has_passed() -> None:
    slots, pool = looped_slots((1, 3), (1, 0), (3, 9), length=12)  # 11 are computed
    before = pool.num_free
    slots.leave(slots.running)
    assert [(slots.pages(slot)[:2] < 0).sum(axis=1).tolist() for slot in (0, 1, 2)] == [[2, 2], [0, 0], [0, 0]]
    assert pool.num_free == before + 4
    assert slots.left.T.tolist() == [[2, 2, 0, 0], [0] * 4, [0] * 4]
    slots.check()
    slots.leave(slots.running)
    assert pool.num_free == before + 4


def test_a_slot_leaves_nothing_that_its_next_token_sees() -> None:
    for computed, gone in ((8, 0), (9, 0), (10, 1), (13, 1), (14, 2)):  # a window of 7: the next sees computed - 6 on
        slots, _ = looped_slots((1, 7), length=computed + 1)
        slots.leave(slots.running)
        assert slots.left[0, 0] == gone, computed


def test_a_page_that_was_computed_twice_is_exchanged_in_every_slot() -> None:
    slots, pool = looped_slots((2, 0), (2, 0))
    pool.share(slots.page_ids(0))
    pool.release(slots.page_ids(1))
    slots.page_table[:, 1, :2] = slots.page_table[:, 0, :2]  # both sit on the same pages
    new = pool.alloc(3)
    pool.exchange(1, slots.pages(0)[:, 1].copy(), np.array([*new, -1], np.int32))
    assert slots.pages(0)[:, 1].tolist() == slots.pages(1)[:, 1].tolist() == [*new, -1]
    assert pool.refs[new].tolist() == [3, 3, 3], "the two slots and whoever took them"
    assert slots.pages(0)[:, 0].tolist() == [0, 2, 4, -1]
    refs = np.zeros(40, np.int32)
    slots.count(refs)
    assert refs[new].tolist() == [2, 2, 2] and refs[[0, 2, 4]].tolist() == [2, 2, 2]


def test_check_notices_a_page_of_a_deeper_iteration() -> None:
    slots, pool = looped_slots((1, 0))
    slots.page_table[3, 0, 0] = pool.alloc(1)[0]
    expect_check_fails(slots, "pages of a group that it does not use")
