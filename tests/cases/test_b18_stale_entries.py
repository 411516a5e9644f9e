"""Stale entries, holes and partial pages in a chain."""

from __future__ import annotations

from byhand import Hand, span
from driver import Driver


def test_a_page_that_was_taken_again_does_not_answer_for_its_old_tokens() -> None:
    driver = Driver(5, 16)
    x, y = span(0, 64), span(30, 64)
    for name, prompt in (("x", x), ("y", y), ("x again", x), ("y again", y)):
        driver.solo(name, prompt, 4)
        driver.expect_all_exact()
    assert driver.cache.stats.evicted_pages >= 8


def test_a_chain_whose_first_page_is_gone_matches_nothing() -> None:
    hand = Hand(8, 4)
    hand.donate(span(0, 12))
    cursor = hand.cache.cursor()
    hand.cache.seek(cursor, hand.cache.index.tokens[:3].ravel())
    assert hand.cache.index.lookup.erase(int(cursor.nodes[0]))
    assert hand.cache.match_len(span(0, 13)) == 0


def test_a_partial_page_makes_no_entry() -> None:
    hand = Hand(4, 64)
    assert hand.donate(span(0, 63)) == 0
    assert hand.cache.held_pages == 0
    assert hand.donate(span(0, 64)) == 1
    assert [hand.cache.match_len(span(0, n)) for n in (63, 64, 65)] == [0, 0, 64]
