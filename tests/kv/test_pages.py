"""PagePool: which page is whose, on pools small enough to name every id."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from byhand import expect_check_fails, ids
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.errors import OutOfPages, UnsupportedShape
from paged.kv.pages import MAX_PAGES, PagePool


def counts(pool: PagePool) -> tuple[int, int, int]:
    """(free, live, cached only)"""
    return pool.num_free, pool.num_live, pool.num_cached_only


# Taking and giving back -------------------------------------------------------------------------------------------


def test_a_fresh_pool_hands_out_the_lowest_ids_in_order() -> None:
    pool = PagePool(10)
    assert pool.alloc(3).tolist() == [0, 1, 2]
    assert pool.alloc(1).tolist() == [3]
    assert pool.alloc(0).tolist() == []
    assert counts(pool) == (6, 4, 0)
    assert pool.refs.tolist() == [1] * 4 + [0] * 6
    pool.check()


def test_freed_pages_come_back_last_in_first_out_before_untouched_ones() -> None:
    pool = PagePool(6)
    pool.alloc(4)
    pool.release(ids(1))
    pool.release(ids(3))
    assert [int(pool.alloc(1)[0]) for _ in range(4)] == [3, 1, 4, 5]


def test_popping_n_at_once_gives_what_n_pops_give() -> None:
    one, many = PagePool(8), PagePool(8)
    for pool in (one, many):
        pool.alloc(8)
        pool.release(ids(5, 0, 7, 2))
    assert many.alloc(4).tolist() == [int(one.alloc(1)[0]) for _ in range(4)] == [2, 7, 0, 5]


def test_a_drained_pool_refills_to_the_same_set() -> None:
    pool = PagePool(5)
    for _ in range(3):
        taken = pool.alloc(5)
        assert sorted(taken.tolist()) == [0, 1, 2, 3, 4]
        pool.check()
        pool.release(taken)
        pool.check()
    assert counts(pool) == (5, 0, 0)


def test_usage_is_exactly_0_when_idle_and_exactly_1_when_full() -> None:
    pool = PagePool(7)
    assert pool.usage == 0.0
    taken = pool.alloc(7)
    assert pool.usage == 1.0
    pool.release(taken)
    assert pool.usage == 0.0


def test_usage_does_not_count_what_only_the_cache_holds() -> None:
    pool = PagePool(4)
    taken = pool.alloc(2)
    pool.hold(taken)
    assert pool.usage == 0.5
    pool.release(taken)
    assert pool.usage == 0.0
    assert counts(pool) == (2, 0, 2)


def test_asking_for_too_many_takes_nothing_and_names_both_numbers() -> None:
    pool = PagePool(4)
    pool.alloc(3)
    with pytest.raises(OutOfPages, match=r"2 pages were asked for, 1 of 4"):
        pool.alloc(2)
    assert counts(pool) == (1, 3, 0)
    assert pool.alloc(1).tolist() == [3]


def test_asking_for_fewer_than_no_pages_is_refused() -> None:
    pool = PagePool(4)
    with pytest.raises(ValueError, match="0 or more, got -1"):
        pool.alloc(-1)
    assert pool.num_free == 4


# References -------------------------------------------------------------------------------------------------------


def test_a_shared_page_is_free_only_after_its_last_holder_left() -> None:
    pool = PagePool(3)
    page = pool.alloc(1)
    pool.share(page)
    pool.share(page)
    for left in (2, 1):
        pool.release(page)
        assert pool.refs[page[0]] == left
        assert pool.num_free == 2
    pool.release(page)
    assert counts(pool) == (3, 0, 0)


def test_a_free_page_cannot_be_shared() -> None:
    pool = PagePool(3)
    taken = pool.alloc(1)
    with pytest.raises(ValueError, match="page 2 is free"):
        pool.share(ids(0, 2))
    assert pool.refs[taken[0]] == 1
    pool.check()


def test_a_page_released_once_too_often_is_refused_and_nothing_changes() -> None:
    pool = PagePool(3)
    pool.alloc(2)
    pool.release(ids(1))
    with pytest.raises(ValueError, match="page 1 was released more often"):
        pool.release(ids(0, 1))
    assert pool.refs.tolist() == [1, 0, 0]
    pool.check()


def test_a_held_page_moves_between_live_and_cached_only() -> None:
    pool = PagePool(3)
    page = pool.alloc(1)
    pool.hold(page)
    assert counts(pool) == (2, 1, 0)
    pool.release(page)
    assert counts(pool) == (2, 0, 1)
    pool.share(page)
    assert counts(pool) == (2, 1, 0)
    pool.check()
    pool.unhold(page)
    assert counts(pool) == (2, 1, 0)
    pool.release(page)
    assert counts(pool) == (3, 0, 0)


def test_giving_up_an_idle_held_page_frees_it() -> None:
    pool = PagePool(3)
    page = pool.alloc(1)
    pool.hold(page)
    pool.release(page)
    pool.unhold(page)
    assert counts(pool) == (3, 0, 0)
    pool.check()


@pytest.mark.parametrize("which", ["free", "held already"])
def test_the_cache_can_hold_only_live_pages_and_each_once(which: str) -> None:
    pool = PagePool(3)
    page = pool.alloc(1)
    pool.hold(page)
    with pytest.raises(ValueError, match="only live pages, and each of them once"):
        pool.hold(ids(2) if which == "free" else page)
    assert pool.refs.tolist() == [2, 0, 0]


def test_the_cache_cannot_give_up_what_it_does_not_hold() -> None:
    pool = PagePool(3)
    page = pool.alloc(1)
    with pytest.raises(ValueError, match="does not hold"):
        pool.unhold(page)
    assert pool.refs[page[0]] == 1


def test_on_idle_hears_of_exactly_the_held_pages_that_lost_their_last_user() -> None:
    pool = PagePool(4)
    heard: list[list[int]] = []
    pool.on_idle = lambda pages: heard.append(pages.tolist())
    a, b = pool.alloc(2), pool.alloc(2)
    pool.hold(a)
    pool.share(a[:1])
    pool.release(np.concatenate([a, b]))
    assert heard == [[1]]
    pool.release(a[:1])
    assert heard == [[1], [0]]


# Evicting and growing ---------------------------------------------------------------------------------------------


def idle_pool(n: int, max_pages: int | None = None) -> tuple[PagePool, list[int]]:
    """A pool whose `n` pages only a cache holds; its reclaim gives them up from the highest id on."""
    pool = PagePool(n, max_pages=max_pages)
    held = pool.alloc(n)
    pool.hold(held)
    pool.release(held)
    asked: list[int] = []

    def reclaim(wanted: int) -> None:
        asked.append(wanted)
        pool.unhold(np.flatnonzero(pool.held).astype(np.int32)[::-1][:wanted])

    pool.reclaim = reclaim
    return pool, asked


def test_too_few_free_pages_make_the_cache_give_up_just_the_missing_ones() -> None:
    pool, asked = idle_pool(5)
    assert pool.alloc(2).tolist() == [3, 4]
    assert pool.alloc(1).tolist() == [2]
    assert asked == [2, 1]
    assert counts(pool) == (0, 3, 2)
    pool.check()


def test_what_cannot_be_had_evicts_nothing() -> None:
    pool, asked = idle_pool(5)
    pool.alloc(1)
    with pytest.raises(OutOfPages):
        pool.alloc(5)
    assert asked == [1, 0]  # the second time only to let what is pinned expire
    assert counts(pool) == (0, 1, 4)


def test_a_cache_that_gives_up_less_than_it_has_ends_in_out_of_pages() -> None:
    pool, _ = idle_pool(3)
    pool.reclaim = lambda n: pool.unhold(ids(2))
    with pytest.raises(OutOfPages, match="3 pages were asked for, 1 are free and no more could be evicted"):
        pool.alloc(3)
    assert counts(pool) == (1, 0, 2)
    pool.check()


def test_a_growing_pool_doubles_before_it_evicts() -> None:
    pool, asked = idle_pool(4, max_pages=12)
    assert pool.num_available == 12
    assert pool.alloc(1).tolist() == [4]
    assert (pool.num_pages, asked) == (8, [])
    pool.check()
    assert pool.alloc(5).tolist() == [5, 6, 7, 8, 9]
    assert (pool.num_pages, asked) == (12, [])
    assert pool.alloc(3).tolist() == [3, 10, 11]
    assert (pool.num_pages, asked) == (12, [1])
    assert counts(pool) == (0, 9, 3)
    pool.check()


def test_growing_by_more_than_double_takes_what_is_missing() -> None:
    pool = PagePool(2, max_pages=100)
    pool.alloc(1)
    assert pool.alloc(50).tolist() == list(range(1, 51))
    assert pool.num_pages == 51
    pool.check()


def test_pages_freed_before_growth_go_out_before_the_new_ones() -> None:
    pool = PagePool(3, max_pages=6)
    pool.alloc(3)
    pool.release(ids(1))
    assert pool.alloc(3).tolist() == [1, 3, 4]


def test_a_pool_at_its_bound_grows_no_further() -> None:
    pool = PagePool(2, max_pages=3)
    pool.alloc(3)
    with pytest.raises(OutOfPages):
        pool.alloc(1)
    assert (pool.num_pages, pool.num_available) == (3, 0)


# Limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_pages": 0}, "num_pages must be between 1 and"),
        ({"num_pages": MAX_PAGES + 1}, str(MAX_PAGES)),
        ({"num_pages": 4, "page_size": 0}, "page_size must be at least 1 token, got 0"),
        ({"num_pages": 4, "max_pages": MAX_PAGES + 1}, "max_pages must be at most"),
    ],
)
def test_sizes_that_no_pool_can_have_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(UnsupportedShape, match=message):
        PagePool(**arguments)


@pytest.mark.parametrize("name", ["num_pages", "page_size"])
def test_sizes_that_are_no_integers_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an integer, got 2.5"):
        PagePool(**{"num_pages": 4, name: 2.5})


def test_a_page_can_be_as_small_as_one_token() -> None:
    pool = PagePool(2, page_size=1)
    assert pool.alloc(2).tolist() == [0, 1]


# Finalisers -------------------------------------------------------------------------------------------------------


def test_dropped_pages_are_back_at_the_next_look() -> None:
    pool = PagePool(3)
    pool.drop(pool.alloc(2))
    assert counts(pool) == (3, 0, 0)
    pool.drop(pool.alloc(3))
    assert sorted(pool.alloc(3).tolist()) == [0, 1, 2]
    pool.check()


def test_dropped_pages_are_used_before_the_pool_grows() -> None:
    pool = PagePool(3, max_pages=12)
    pool.drop(pool.alloc(3))
    pool.alloc(1)
    assert pool.num_pages == 3


def test_a_dropped_page_that_the_cache_holds_is_idle_at_the_next_look() -> None:
    pool = PagePool(3)
    page = pool.alloc(1)
    pool.hold(page)
    pool.drop(page)
    assert pool.num_cached_only == 1
    pool.check()


def test_a_drop_in_the_middle_of_a_release_loses_no_page() -> None:
    pool = PagePool(8)
    victim = [pool.alloc(3)]

    class Trap(np.ndarray):
        """A finaliser runs while the pool measures this array."""

        def __len__(self) -> int:
            if victim:
                pool.drop(victim.pop())
                gc.collect()
            return super().__len__()

    pool.release(pool.alloc(2).view(Trap))
    assert not victim
    pool.check()
    assert pool.num_free == 8


# check() ----------------------------------------------------------------------------------------------------------


def free_list_lacks_a_page(pool: PagePool) -> None:
    pool._num_free -= 1


def free_list_has_an_id_twice(pool: PagePool) -> None:
    pool._free[0] = pool._free[1]


def free_list_has_a_live_page(pool: PagePool) -> None:
    pool._free[0] = 0


def cached_count_is_high(pool: PagePool) -> None:
    pool._num_cached_only += 1


def cached_count_is_low(pool: PagePool) -> None:
    pool._num_cached_only -= 1


def held_page_has_no_reference(pool: PagePool) -> None:
    pool.held[int(pool._free[0])] = True


def reference_is_lost(pool: PagePool) -> None:
    pool.refs[0] = 0


def reference_is_negative(pool: PagePool) -> None:
    pool.refs[0] = -1


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (free_list_lacks_a_page, "disagree"),
        (free_list_has_an_id_twice, "twice in the free list"),
        (free_list_has_a_live_page, "still held"),
        (cached_count_is_high, "1 cached-only pages, counted 2"),
        (cached_count_is_low, "1 cached-only pages, counted 0"),
        (held_page_has_no_reference, "count is 0"),
        (reference_is_lost, "disagree"),
        (reference_is_negative, "do not add up"),
    ],
)
def test_check_notices(corrupt, message: str) -> None:
    pool = PagePool(6)
    pool.alloc(2)
    idle = pool.alloc(1)
    pool.hold(idle)
    pool.release(idle)
    pool.check()
    corrupt(pool)
    expect_check_fails(pool, message)


# Any order of calls -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("asrhud"), st.integers(0, 7)), max_size=60))
def test_any_order_of_calls_agrees_with_a_dictionary_of_holders(calls: list[tuple[str, int]]) -> None:
    pool = PagePool(6, max_pages=9)
    users: dict[int, int] = {}
    held: set[int] = set()
    for call, n in calls:
        live = [p for p, count in users.items() if count]
        if call == "a":
            if n > 9 - len(set(live) | held):
                continue  # reclaim is not set: only free and new pages count
            users.update({int(p): 1 for p in pool.alloc(n)})
        elif call == "u":
            if held:
                page = sorted(held)[n % len(held)]
                pool.unhold(ids(page))
                held.discard(page)
        elif live:
            page = live[n % len(live)]
            if call == "s":
                pool.share(ids(page))
                users[page] += 1
            elif call == "h" and page not in held:
                pool.hold(ids(page))
                held.add(page)
            elif call in "rd":
                (pool.release if call == "r" else pool.drop)(ids(page))
                users[page] -= 1
        pool.check()
        live = [p for p, count in users.items() if count]
        assert pool.num_live == len(live)
        assert pool.num_cached_only == len(held - set(live))
        for page in range(pool.num_pages):
            assert pool.refs[page] == users.get(page, 0) + (page in held)
