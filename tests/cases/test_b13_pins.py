"""Attaching pins exactly the pages that matched, and only as long as they are used."""

from __future__ import annotations

from byhand import Hand, span


def chain_of_three() -> Hand:
    hand = Hand(8, 4)
    hand.donate(span(0, 12))
    return hand


def test_only_what_matched_is_pinned() -> None:
    hand = chain_of_three()
    session = hand.session()
    assert hand.cache.attach(session, [*span(0, 8), 50]) == 8
    assert hand.pool.refs[:3].tolist() == [2, 2, 1]
    before = hand.pool.storage.pages[:2].numpy().tobytes()  # bytes: what nobody wrote may be NaN
    assert hand.cache.evict(1000) == 1
    assert hand.pages_of(span(0, 12)) == [0, 1]
    assert hand.pool.storage.pages[:2].numpy().tobytes() == before
    hand.expect_exact(session, [*span(0, 8), 50], session.eval([50]))
    hand.check()


def test_after_the_release_everything_can_go() -> None:
    hand = chain_of_three()
    session = hand.ask([*span(0, 8), 50])
    hand.cache.evict(1000)
    session.release()
    assert hand.cache.evict(1000) == 2
    assert not hand.pool.refs.any()
    hand.check()


def test_a_thousand_attaches_leave_no_reference() -> None:
    hand = chain_of_three()
    for _ in range(1000):
        session = hand.session()
        assert hand.cache.attach(session, [*span(0, 8), 50]) == 8
        session.release()
    assert hand.pool.refs.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    hand.check()
    assert hand.cache.evict(1000) == 3
    assert not hand.pool.refs.any()
