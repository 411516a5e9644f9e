"""Prefixes of every depth and cache window in one cache: what serves whom, what goes alone, and what is said of it."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import Hand, ids, span
from fakes import EchoAfter, EchoLooped
from saving import nodes_of


def looped(num_pages: int = 60, kind=EchoLooped, **options) -> Hand:
    return Hand(num_pages, 4, kind=kind, **options)


def pages(hand: Hand, tokens, loops: int | None = None) -> list[list[int]]:
    """The pages of each node that `tokens` start with; -1 where it has none."""
    cursor = hand.cache.cursor("", hand.model.view(loops))
    hand.cache.index.seek(cursor, ids(*tokens), len(tokens) // 4)
    return hand.cache.index.pages[cursor.nodes].tolist()


def matched(hand: Hand, tokens, loops: int | None = None, cache_window: int = 0, namespace: str = "") -> int:
    return hand.cache.match_len(tokens, namespace, loops, cache_window)


# Depths share one tree --------------------------------------------------------------------------------------------


def test_what_was_computed_deep_serves_a_shallow_sequence() -> None:
    hand = looped()
    assert hand.donate(span(0, 8), loops=4) == 10
    assert pages(hand, span(0, 8)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    session = hand.ask(span(0, 9), loops=1)
    assert session.n_past == 9 and hand.cache.stats.hit_tokens == 8
    assert (session.table.rows[:2, :2] == np.array(pages(hand, span(0, 8))).T[:2]).all()
    assert (session.table.rows[2:] == -1).all()


def test_a_deeper_sequence_adds_its_pages_to_the_nodes_that_are_there() -> None:
    hand = looped()
    assert hand.donate(span(0, 8), loops=1) == 4
    shallow = pages(hand, span(0, 8))
    assert [row[2:] for row in shallow] == [[-1] * 3] * 2
    assert matched(hand, span(0, 9), 1) == 8
    assert matched(hand, span(0, 9), 2) == matched(hand, span(0, 9), 4) == 0
    assert hand.donate(span(0, 8), loops=3) == 4, "the pages of two more iterations"
    deep = pages(hand, span(0, 8))
    assert [row[:2] for row in deep] == [row[:2] for row in shallow]
    assert all(page >= 0 for row in deep for page in row[:4]) and [row[4] for row in deep] == [-1, -1]
    assert hand.cache.stats.merged_pages == 4 and len(hand.cache.index) == 2
    assert [matched(hand, span(0, 9), loops) for loops in (1, 2, 3, 4)] == [8, 8, 8, 0]
    hand.ask(span(0, 9), loops=3)


def test_a_deep_match_ends_where_the_deep_pages_end() -> None:
    hand = looped()
    hand.donate(span(0, 12), loops=1)
    hand.donate(span(0, 8), loops=2)
    assert matched(hand, span(0, 13), 1) == 12 and matched(hand, span(0, 13), 2) == 8
    hand.ask(span(0, 13), loops=2)


def test_tails_of_both_depths_are_kept() -> None:
    hand = looped(partial=True)
    hand.donate(span(0, 6), loops=1)
    assert (matched(hand, span(0, 9), 1), matched(hand, span(0, 9), 2)) == (6, 0)
    hand.donate(span(0, 6), loops=2)
    assert (matched(hand, span(0, 9), 1), matched(hand, span(0, 9), 2)) == (6, 6)
    assert len(hand.cache.index) == 2, "the same two nodes"
    for loops in (1, 2):
        hand.ask(span(0, 9), loops=loops).release()
    hand.donate(span(0, 8), loops=1)
    assert matched(hand, span(0, 9), 1) == 8
    assert len(hand.cache.index) == 3, "a shallow page has not all that the tail has"
    hand.donate(span(0, 8), loops=2)
    assert matched(hand, span(0, 9), 2) == 8


def test_deep_pages_may_go_alone() -> None:
    hand = looped(28)
    hand.donate(span(0, 12), loops=4)  # 15 pages
    session = hand.ask(span(0, 13), loops=1)  # uses the first two groups of each
    assert hand.pool.num_cached_only == 9
    assert hand.cache.evict(9) == 9
    hand.check()
    assert all(row[2:] == [-1] * 3 and min(row[:2]) >= 0 for row in pages(hand, span(0, 12)))
    assert (matched(hand, span(0, 13), 1), matched(hand, span(0, 13), 2)) == (12, 0)
    assert hand.cache.evict(1) == 0, "the rest is in use"
    session.release()
    assert hand.cache.evict(99) == 6


def test_a_page_in_use_at_depth_stays_when_others_go() -> None:
    hand = looped(40)
    hand.donate(span(0, 8), loops=4)
    session = hand.ask(span(0, 9), loops=2)
    hand.cache.evict(99)
    assert matched(hand, span(0, 9), 2) == 8 and matched(hand, span(0, 9), 3) == 0
    session.release()
    hand.cache.evict(99)
    assert hand.pool.num_free == 40


def test_explain_says_too_shallow() -> None:
    hand = looped()
    hand.donate(span(0, 12), loops=1)
    hand.donate(span(0, 4), loops=2)
    told = hand.cache.explain(span(0, 20), loops=2)
    assert (told.matched, told.reason) == (4, "too shallow")
    assert told.message == "12 tokens are cached, 4 of them at a depth of 2 loops"
    assert hand.cache.explain(span(0, 20), loops=1).reason == "never cached"


def test_where_layers_follow_the_block_each_depth_is_for_itself() -> None:
    hand = looped(kind=EchoAfter)
    hand.donate(span(0, 8), loops=4)
    assert [matched(hand, span(0, 9), loops) for loops in (1, 2, 3, 4)] == [0, 0, 0, 8]
    assert hand.cache.explain(span(0, 9), loops=2).reason == "other namespace"
    hand.donate(span(0, 8), loops=2)
    assert len(hand.cache.index) == 4
    for loops in (1, 2, 4):
        hand.ask(span(0, 9), loops=loops).release()


# Cache windows ----------------------------------------------------------------------------------------------------


def test_a_cache_window_is_a_namespace_of_its_own() -> None:
    hand = Hand(40)
    hand.donate(span(0, 8))
    hand.donate(span(0, 8), cache_window=6)
    assert (matched(hand, span(0, 9)), matched(hand, span(0, 9), cache_window=6)) == (8, 8)
    assert matched(hand, span(0, 9), cache_window=5) == 0
    assert hand.cache.explain(span(0, 9), cache_window=5).reason == "other namespace"
    hand.ask(span(0, 9), cache_window=6)


def test_only_what_the_window_reaches_is_attached() -> None:
    hand = Hand(40)
    session = hand.session(cache_window=5)
    session.eval(span(0, 4))
    hand.cache.insert(session, span(0, 4))  # before it leaves that page
    session.eval(span(4, 8))
    hand.cache.insert(session, span(0, 12))
    session.release()
    warm = hand.ask(span(0, 13), cache_window=5)
    assert hand.cache.stats.hit_tokens == 12
    assert warm.table.rows[0, 0] == -1 and (warm.table.rows[0, 2:] >= 0).all()


def test_a_tail_is_not_entered_under_places_that_just_went_for_room() -> None:
    """A page that only a window left is idle: making room for its own tail may take the place it would stand on."""
    hand = Hand(40, max_pages=1, partial=True)
    session = hand.session(cache_window=2)
    session.eval(span(0, 6))
    hand.cache.insert(session, span(0, 6))
    hand.check()
    session.eval(span(6, 8))
    hand.cache.insert(session, span(0, 14))
    hand.check()


# All of a namespace -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [EchoLooped, EchoAfter])
def test_dropping_a_namespace_drops_its_depths_and_windows(kind) -> None:
    hand = looped(200, kind=kind)
    for namespace in ("", "a"):
        for loops, window in ((1, 0), (4, 0), (2, 6)):
            hand.donate(span(0, 8), namespace, loops=loops, cache_window=window)
    held = hand.cache.held_pages
    assert hand.cache.drop("a") == held // 2
    for loops, window in ((1, 0), (4, 0), (2, 6)):
        assert matched(hand, span(0, 9), loops, window, "a") == 0
        assert matched(hand, span(0, 9), loops, window) == 8
    hand.check()


def test_a_pin_keeps_what_is_cached_at_any_depth() -> None:
    hand = looped(60)
    hand.donate(span(0, 8), loops=3)
    pin = hand.cache.pin(span(0, 8), loops=1)
    assert sorted(pin.pages.tolist()) == sorted(page for row in pages(hand, span(0, 8)) for page in row if page >= 0)
    hand.cache.evict(99)
    assert matched(hand, span(0, 9), 3) == 8
    with pytest.raises(ValueError, match="nothing of these tokens is cached"):
        hand.cache.pin(span(0, 8), cache_window=5)
    hand.cache.unpin(pin)
    hand.cache.evict(99)
    assert hand.pool.num_free == 60


@pytest.mark.parametrize("kind", [EchoLooped, EchoAfter])
def test_all_depths_and_windows_are_saved_and_loaded(kind, tmp_path) -> None:
    hand, other = looped(200, kind, partial=True), looped(200, kind, partial=True)
    for loops, window in ((1, 0), (4, 0), (2, 6), (3, 1)):
        hand.donate(span(0, 10 + loops), loops=loops, cache_window=window)
    assert hand.cache.save(tmp_path / "x") == hand.cache.held_pages == other.cache.load(tmp_path / "x")
    other.check()
    assert nodes_of(other.cache) == nodes_of(hand.cache)
    for loops in (1, 2, 3, 4):
        for window in (0, 1, 6):
            prompt = span(0, 20)
            assert matched(other, prompt, loops, window) == matched(hand, prompt, loops, window)
            other.ask(prompt, loops=loops, cache_window=window).release()
    assert matched(hand, span(0, 20), 4) == 14


def test_loading_adds_the_deep_pages_to_shallow_nodes(tmp_path) -> None:
    hand, other = looped(), looped()
    hand.donate(span(0, 8), loops=4)
    other.donate(span(0, 8), loops=1)
    hand.cache.save(tmp_path / "x")
    assert other.cache.load(tmp_path / "x") == 6
    other.check()
    assert len(other.cache.index) == 2 and matched(other, span(0, 9), 4) == 8
    other.ask(span(0, 9), loops=4)
