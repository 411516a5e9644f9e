"""One physical page is never counted twice."""

from __future__ import annotations

import numpy as np
from byhand import Hand, span


def distinct_pages(hand: Hand) -> int:
    index = hand.cache.index
    pages = index.pages[np.flatnonzero(index.birth >= 0)].ravel()
    assert len(np.unique(pages)) == len(pages)
    return len(pages)


def expect_sums(hand: Hand, live_only: int) -> None:
    hand.check()
    pool = hand.pool
    assert hand.cache.held_pages == distinct_pages(hand) == int(pool.held.sum())
    assert int((pool.held & (pool.refs > 1)).sum()) + live_only == pool.num_live
    assert pool.num_free + pool.num_live + pool.num_cached_only == pool.num_pages


def test_a_growing_request_that_is_donated_after_every_chunk() -> None:
    hand = Hand(16, 16)
    session = hand.session()
    for length in (16, 32, 48, 56, 64):
        session.eval(span(session.n_past, length - session.n_past))
        hand.cache.insert(session, span(0, length))
        assert hand.cache.held_pages == length // 16
        expect_sums(hand, live_only=length % 16 > 0)
    assert hand.cache.insert(session, span(0, 64)) == 0
    assert [(c.num_tokens, c.num_pages) for c in hand.cache.chains()] == [(16, 1)] * 3 + [(16, 1)]
    other = hand.session()
    other.eval(span(0, 64))
    expect_sums(hand, live_only=4)
    assert hand.cache.insert(other, span(0, 64)) == 0
    expect_sums(hand, live_only=0)
    assert sum(c.num_tokens for c in hand.cache.chains()) == 64 == hand.cache.held_pages * 16
    session.release()
    other.release()
    expect_sums(hand, live_only=0)
    assert (hand.pool.num_live, hand.pool.num_cached_only) == (0, 4)
