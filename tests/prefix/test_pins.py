"""Pins: what is pinned is never evicted; a budget, a time to live and priorities say who may pin."""

from __future__ import annotations

import pytest
from byhand import Hand, expect_check_fails, span
from fakes import EchoHybrid

from paged.errors import OutOfPages

ONE, TWO, THREE = span(0, 8), span(100, 8), span(200, 8)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def hand(num_pages: int = 12, budget: int | None = None, **options) -> tuple[Hand, Clock]:
    h, clock = Hand(num_pages, 4, max_pinned_pages=budget, **options), Clock()
    h.cache.pins.clock = clock
    for tokens in (ONE, TWO, THREE):
        h.donate(tokens)
    return h, clock


def test_a_pinned_prefix_stands_while_everything_else_goes() -> None:
    h, _ = hand()
    pin = h.cache.pin(TWO)
    assert (pin.num_tokens, len(pin.pages), len(h.cache.pins)) == (8, 2, 1)
    assert h.cache.evict(99) == 4
    assert h.cache.match_len([*TWO, 1]) == 8
    assert h.pool.num_available == 10
    h.check()
    assert h.cache.unpin(pin)
    assert h.cache.evict(99) == 2
    h.check()


def test_a_pin_holds_every_page_of_the_tokens_and_no_other() -> None:
    h, _ = hand()
    h.donate([*ONE, *span(50, 4)])
    h.cache.pin([*ONE[:4], 9])
    h.cache.evict(99)
    assert h.cache.match_len([*ONE, 1]) == 4
    h.check()


def test_an_unpinned_pin_ends_once() -> None:
    h, _ = hand()
    pin = h.cache.pin(ONE)
    assert h.cache.unpin(pin) and not h.cache.unpin(pin)
    assert h.pool.num_live == 0


def test_pins_that_overlap_count_their_pages_once() -> None:
    h, _ = hand(budget=2)
    first, second = h.cache.pin(ONE), h.cache.pin(ONE)
    assert h.cache.pins.num_pages == 2
    h.cache.unpin(first)
    assert h.cache.evict(99) == 4
    h.cache.unpin(second)
    assert h.cache.evict(99) == 2


def test_nothing_cached_is_nothing_to_pin() -> None:
    h, _ = hand()
    for tokens in ([7, 7, 7, 7, 7], ONE[:3], []):
        with pytest.raises(ValueError, match="nothing of these tokens is cached"):
            h.cache.pin(tokens)
    with pytest.raises(ValueError, match="nothing"):
        h.cache.pin(ONE, "other")
    with pytest.raises(ValueError, match="ttl_s must be above 0"):
        h.cache.pin(ONE, ttl_s=0)
    h.check()
    assert h.pool.num_live == 0


def test_over_the_budget_a_pin_is_refused_and_nothing_changes() -> None:
    h, _ = hand(budget=3)
    h.cache.pin(ONE)
    with pytest.raises(OutOfPages, match="1 over the budget of 3 pinned pages"):
        h.cache.pin(TWO)
    assert len(h.cache.pins) == 1
    assert h.pool.num_live == 2
    h.check()


def test_a_higher_priority_displaces_the_lowest_and_oldest_first() -> None:
    h, _ = hand(budget=4)
    low, mid = h.cache.pin(ONE, priority=1), h.cache.pin(TWO, priority=2)
    with pytest.raises(OutOfPages):
        h.cache.pin(THREE, priority=1)  # equal is not lower
    h.cache.pin(THREE, priority=2)
    assert not h.cache.unpin(low)
    assert {p.num_tokens for p in h.cache.pins} == {8} and len(h.cache.pins) == 2
    h.cache.evict(99)
    assert [h.cache.match_len([*t, 1]) for t in (ONE, TWO, THREE)] == [0, 8, 8]
    assert h.cache.unpin(mid)
    h.check()


def test_a_pin_that_displacing_cannot_help_displaces_nobody() -> None:
    h, _ = hand(budget=3)
    h.cache.pin(ONE[:4], priority=1)
    h.cache.pin(TWO[:4], priority=9)
    h.donate(span(300, 12))
    with pytest.raises(OutOfPages):
        h.cache.pin(span(300, 12), priority=5)
    assert len(h.cache.pins) == 2


def test_a_pin_ends_with_its_time() -> None:
    h, clock = hand()
    h.cache.pin(ONE, ttl_s=10)
    h.cache.pin(TWO, ttl_s=20)
    clock.now += 9.9
    assert h.cache.evict(99) == 2
    clock.now += 0.1
    assert h.cache.evict(99) == 2
    clock.now += 10
    assert h.cache.pins.expire() == 1
    assert h.pool.num_live == 0
    h.check()


def test_an_expired_pin_makes_room_when_pages_run_short() -> None:
    h, clock = hand(6)
    h.cache.pin(ONE, ttl_s=5)
    with pytest.raises(OutOfPages):
        h.pool.alloc(5)
    clock.now += 5
    assert len(h.pool.alloc(5)) == 5
    h.check()


def test_an_expired_pin_makes_room_in_the_budget() -> None:
    h, clock = hand(budget=2)
    h.cache.pin(ONE, ttl_s=5, priority=9)
    clock.now += 5
    h.cache.pin(TWO)
    assert len(h.cache.pins) == 1


def test_the_budget_is_half_of_the_pool_unless_said() -> None:
    assert Hand(12, 4).cache.pins.max_pages == 6


def test_release_and_drop_end_pins() -> None:
    h, _ = hand()
    h.donate(ONE, "a")
    h.cache.pin(ONE)
    h.cache.pin(ONE, "a")
    h.cache.drop("a")
    assert [p.namespace for p in h.cache.pins] == [""]
    h.cache.release()
    assert not len(h.cache.pins)
    assert h.pool.num_free == 12
    h.check()


def test_a_checkpoint_can_be_pinned() -> None:
    h = Hand(12, 4, kind=EchoHybrid, max_states=2)
    for tokens in (span(0, 6), span(100, 6), span(200, 6)):
        h.donate(tokens)
        if tokens[0] == 0:
            pin = h.cache.pin(tokens)
        h.check()
    assert [h.cache.match_len([*t, 1]) for t in (span(0, 6), span(100, 6), span(200, 6))] == [6, 0, 6]
    assert h.cache.evict(99) == 2
    assert h.cache.match_len([*span(0, 6), 1]) == 6
    assert h.cache.unpin(pin)
    assert h.cache.evict(99) == 2
    assert h.pool.num_free == 12
    h.check()


def test_check_notices_a_pinned_page_without_a_reference() -> None:
    h, _ = hand()
    pin = h.cache.pin(ONE)
    h.pool.refs[pin.pages] = 0
    expect_check_fails(h.cache.pins, "fewer references than pins")


def test_check_notices_more_pages_than_the_budget() -> None:
    h, _ = hand()
    h.cache.pin(ONE)
    h.cache.pins.max_pages = 1
    expect_check_fails(h.cache.pins, "the budget is 1")


def test_a_pin_of_another_cache_ends_nothing_here() -> None:
    """Both caches count their pins from 1: the number of one is that of another pin in the other."""
    (ours, _), (other, _) = hand(), hand()
    mine = ours.cache.pin(ONE)
    theirs = other.cache.pin([*TWO, *THREE])
    assert theirs.id == mine.id
    assert not ours.cache.unpin(theirs)
    assert list(ours.cache.pins) == [mine]
    assert ours.pool.num_live == 2
    for h in (ours, other):
        h.check()


@pytest.mark.parametrize("priority", ["high", None, 1.5, True])
def test_a_priority_that_is_no_integer_is_refused_before_it_meets_another(priority) -> None:
    h, _ = hand()
    with pytest.raises(TypeError, match="priority must be an integer, got"):
        h.cache.pin(ONE, priority=priority)
    assert not len(h.cache.pins) and h.pool.num_live == 0
    h.cache.pin(ONE, priority=1)
    h.check()


def test_a_time_to_live_that_is_no_number_is_refused() -> None:
    h, _ = hand()
    with pytest.raises(ValueError, match="ttl_s must be above 0, or None for no end, got nan"):
        h.cache.pin(ONE, ttl_s=float("nan"))  # nothing is ever later than that: it would never end
    assert not len(h.cache.pins)


def test_a_preview_that_could_not_be_saved_is_refused_before_anything_is_kept() -> None:
    h, _ = hand()
    session = h.session()
    session.eval(THREE)
    for preview, error in ((5, TypeError), ("\ud800", ValueError)):
        with pytest.raises(error, match="preview must be"):
            h.cache.pin(ONE, preview=preview)
        with pytest.raises(error, match="preview must be"):
            h.cache.insert(session, THREE, preview=preview)
    assert len(h.cache.pins) == 0
    h.check()
