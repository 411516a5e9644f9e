"""Retention hints: what goes first, what is kept and for how long, and who may say so of a shared page."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from byhand import Hand, span
from evicting import TURN_S, Driver

from paged.prefix.eviction import POLICIES
from paged.prefix.retention import Retention, Retentions

NAMES = sorted(POLICIES)

# The hint ---------------------------------------------------------------------------------------------------------


def test_a_hint_is_written_in_four_ways() -> None:
    assert Retention.of(None) is None
    assert Retention.of("none") == Retention("none")
    assert Retention.of(3) == Retention(3, 0)
    mine = Retention("turn", priority=2)
    assert Retention.of(mine) is mine


@pytest.mark.parametrize("value", ["never", "", 0, -1.0, float("nan"), True])
def test_a_hint_that_means_nothing_is_a_value_error(value) -> None:
    with pytest.raises(ValueError, match='retain must be "none", "turn" or a number of seconds above 0, got'):
        Retention.of(value)


def test_a_hint_of_another_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="got list"):
        Retention.of([3])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the priority of a retention must be an int, got str"):
        Retention("turn", "high")  # type: ignore[arg-type]


def test_insert_refuses_a_bad_hint_before_anything_enters() -> None:
    hand = Hand(10, 4)
    session = hand.ask(span(0, 8))
    with pytest.raises(ValueError, match="retain must be"):
        hand.cache.insert(session, span(0, 8), retain="for ever")
    assert hand.cache.held_pages == 0


# The order --------------------------------------------------------------------------------------------------------


def order(driver: Driver) -> list[tuple[int, ...]]:
    """The prefixes in the order in which they go."""
    out = []
    while before := driver.cached():
        assert driver.cache.evict(1) == 1
        driver.check()
        out += before - driver.cached()
    return out


@pytest.mark.parametrize("policy", NAMES)
def test_what_is_over_goes_first_and_what_goes_on_goes_last(policy: str) -> None:
    driver = Driver(10, policy)
    driver.request([1], Retention("turn"))
    driver.request([2], Retention(5.0))
    driver.request([3])
    driver.request([4], Retention("none"))
    assert order(driver) == [(4,), (3,), (1,), (2,)]


@pytest.mark.parametrize("policy", NAMES)
def test_of_what_is_kept_low_priority_goes_first(policy: str) -> None:
    driver = Driver(10, policy)
    driver.request([1], Retention("turn", 2))
    driver.request([2], Retention(5.0, 1))
    driver.request([3], Retention("turn"))
    driver.request([4], Retention("turn", -1))
    driver.request([5])
    assert order(driver) == [(5,), (4,), (3,), (2,), (1,)]


def test_a_page_whose_time_is_over_counts_like_any_other() -> None:
    driver = Driver(10)
    driver.request([1], Retention(3.0, priority=9))
    driver.request([2])
    driver.now = 2.9
    driver.request([3])
    assert order(Driver(1)) == []
    driver.now = 3.0
    assert order(driver) == [(1,), (2,), (3,)]


def test_each_use_starts_the_time_anew_whoever_it_is() -> None:
    driver = Driver(10)
    driver.request([1], Retention(3.0))
    driver.now = 2.0
    driver.request([1])
    driver.request([2])
    driver.now = 4.9
    assert order(driver) == [(2,), (1,)]


def test_turn_keeps_for_the_time_of_a_turn() -> None:
    driver = Driver(10)
    assert Retentions().turn_s == 600.0
    driver.request([1], Retention("turn"))
    driver.now = 1.0
    driver.request([2], Retention("turn"))
    driver.request([3])
    driver.now = TURN_S
    assert order(driver) == [(1,), (3,), (2,)]


def test_kept_pages_go_where_nothing_else_is_left() -> None:
    driver = Driver(3)
    for chain in ([1], [2], [3]):
        driver.request(chain, Retention(float("inf"), 5))
    assert driver.request([7, 8]) == 0
    assert driver.cached() == {(3,), (7,), (7, 8)}
    driver.check()


# Shared pages -----------------------------------------------------------------------------------------------------


def test_none_ends_what_turn_had_kept_of_this_conversation() -> None:
    driver = Driver(10)
    driver.request([1, 2], Retention("turn"))
    driver.request([9])
    driver.request([1, 2, 3], Retention("none"))
    assert order(driver) == [(1, 2, 3), (1, 2), (1,), (9,)]


def test_none_leaves_what_another_conversation_stands_on() -> None:
    driver = Driver(10)
    driver.request([1, 2], Retention("turn"))
    driver.request([1, 5], Retention("turn"))
    driver.request([9])
    driver.request([1, 2, 3], Retention("none"))
    assert order(driver) == [(1, 2, 3), (1, 2), (9,), (1, 5), (1,)]


def test_none_says_nothing_of_an_opening_that_was_there_before() -> None:
    driver = Driver(10)
    driver.request([1])  # a system prompt, of which nothing was said
    driver.request([9])
    driver.request([1, 2], Retention("none"))
    assert order(driver) == [(1, 2), (9,), (1,)]


def test_a_page_that_comes_back_after_all_counts_like_any_other() -> None:
    driver = Driver(10)
    driver.request([9])
    driver.request([1], Retention("none"))
    driver.request([1])
    assert order(driver) == [(9,), (1,)]


def test_seconds_stand_until_other_seconds_replace_them() -> None:
    driver = Driver(10)
    driver.request([1], Retention(100.0, 1))
    driver.request([1], Retention("turn", 0))
    driver.request([1], Retention("none"))
    driver.request([2], Retention("turn"))
    driver.now = TURN_S + 1
    driver.request([3])
    assert order(driver) == [(2,), (3,), (1,)]
    driver.request([1], Retention(100.0))
    driver.request([1], Retention(1.0))
    driver.now += 2.0
    driver.request([2])
    assert order(driver) == [(1,), (2,)]


def test_a_new_page_inherits_no_hint_from_the_one_that_stood_there() -> None:
    driver = Driver(1)
    driver.request([1], Retention("none"))
    driver.request([2])
    driver.pool.max_pages = 3
    driver.request([3])
    assert order(driver) == [(2,), (3,)]


def test_a_pin_stands_whatever_the_hint_says() -> None:
    hand = Hand(10, 4)
    session = hand.ask(span(0, 8))
    hand.cache.insert(session, span(0, 8), retain="none")
    hand.cache.pin(span(0, 8))
    session.release()
    assert hand.cache.evict(5) == 0
    hand.check()


def test_a_donated_tail_is_marked_like_the_pages_above_it() -> None:
    hand = Hand(10, 4, partial=True)
    for first, retain in ((0, "none"), (100, None), (200, "turn")):
        session = hand.ask(span(first, 6))
        assert hand.cache.insert(session, span(first, 6), retain=retain) == 2
        session.release()
    hand.donate(span(300, 6))
    gone = []
    for _ in range(8):
        before = {first for first in (0, 100, 200, 300) if hand.cache.match_len(span(first, 7)) >= 4}
        hand.cache.evict(1)
        hand.check()
        gone += before - {first for first in (0, 100, 200, 300) if hand.cache.match_len(span(first, 7)) >= 4}
    assert gone == [0, 100, 300, 200]


def test_a_hint_on_a_cleared_cache_marks_nothing() -> None:
    hand = Hand(10, 4)
    session = hand.ask(span(0, 8))
    cursor = hand.cache.cursor()
    hand.cache.publish(cursor, np.array(span(0, 8), np.int32), session.table.rows)
    hand.cache.release()
    hand.donate(span(50, 8))
    hand.cache.retain(cursor, Retention("none"))
    assert not hand.cache.queue.retentions.used
    session.release()
    hand.check()


# Costs ------------------------------------------------------------------------------------------------------------


def comparisons(driver: Driver, num_pages: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Heap operations, and pages looked at, while `num_pages` pages are evicted."""
    calls = looked = 0
    real_pop, real_push, real_idle = heapq.heappop, heapq.heappush, driver.cache.idle

    def pop(heap):
        nonlocal calls
        calls += 1
        return real_pop(heap)

    def push(heap, entry):
        nonlocal calls
        calls += 1
        real_push(heap, entry)

    def idle(node: int) -> bool:
        nonlocal looked
        looked += 1
        return real_idle(node)

    with monkeypatch.context() as patch:
        patch.setattr(heapq, "heappop", pop)
        patch.setattr(heapq, "heappush", push)
        patch.setattr(driver.cache, "idle", idle)
        assert driver.cache.evict(num_pages) == num_pages
    return calls, looked


@pytest.mark.parametrize("hint", [None, Retention("turn"), Retention("none")])
@pytest.mark.parametrize("policy", NAMES)
def test_evicting_costs_the_same_in_a_cache_of_any_size(policy: str, hint, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for size in (100, 1000):
        driver = Driver(2 * size, policy)
        for n in range(size):
            driver.request([n, n], hint)
        counts.append(comparisons(driver, 20, monkeypatch))
    assert counts[0] == counts[1]
    assert max(counts[0]) <= 4 * 20


def test_every_expired_page_is_moved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(50)
    for n in range(50):
        driver.request([n], Retention(1.0))
    driver.now = 2.0
    assert comparisons(driver, 1, monkeypatch)[0] == 50 + 50 + 1
    assert comparisons(driver, 1, monkeypatch)[0] == 1


def test_entries_stay_bounded_however_often_a_kept_page_is_used() -> None:
    driver = Driver(3)
    for _ in range(500):
        driver.request([1, 2], Retention("turn"))
    assert len(driver.cache.queue._heap) <= 2 * 2 + 65
    assert len(driver.cache.queue._deadlines) <= 2 * 2 + 65
    driver.check()


def test_nothing_is_kept_of_hints_before_the_first_one() -> None:
    driver = Driver(10)
    for n in range(5):
        driver.request([n])
    assert not driver.cache.queue.retentions.used
