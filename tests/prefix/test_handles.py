"""PrefixHandle: opened at its own depth and at smaller ones, and what it refuses; pools that share depths."""

from __future__ import annotations

import pytest
from byhand import Hand, ids, span
from fakes import EchoAfter, EchoHybrid, EchoLooped, EchoModel

from paged.errors import GeometryMismatch, LoopsMismatch, OutOfPages
from paged.prefix.handles import PrefixHandle
from paged.prefix.pool import PrefixPool


def looped(num_pages: int = 100, kind: type[EchoModel] = EchoLooped) -> Hand:
    return Hand(num_pages, 4, kind=kind)


def handle(hand: Hand, tokens, loops: int | None = None, cache_window: int = 0, **options) -> PrefixHandle:
    session = hand.session("", loops, cache_window)
    session.eval(tokens)
    made = PrefixHandle(session, **options)
    session.release()
    return made


@pytest.mark.parametrize("length", [1, 4, 6, 9])
@pytest.mark.parametrize("loops", [1, 2, 3])
def test_a_smaller_depth_evaluates_the_last_token_alone(length: int, loops: int) -> None:
    hand = looped()
    made = handle(hand, span(0, length), 4, share_depths=True)
    before, pages = hand.model.num_rows, made.page_table.tolist()
    session = made.open(loops)
    assert hand.model.num_rows == before + 1
    hand.expect_exact(session, span(0, length), session.logits)
    hand.expect_exact(session, [*span(0, length), 70], session.eval([70]))
    session.check()
    made.check()
    assert made.page_table.tolist() == pages
    own = made.open()
    hand.expect_exact(own, span(0, length), own.logits)


def test_a_smaller_depth_shares_what_it_uses_and_gives_back_the_rest() -> None:
    hand = looped()
    made = handle(hand, span(0, 8), 4, share_depths=True)
    session = made.open(1)  # the page of the last token is evaluated again: a copy of its own
    assert session.table.rows[:2, 0].tolist() == made.page_table[:2, 0].tolist()
    assert not set(session.table.rows[:2, 1]) & set(made.page_ids)
    assert 100 - hand.pool.num_free == 10 + 2
    session.release()
    assert 100 - hand.pool.num_free == 10


def test_with_its_own_logits_nothing_is_evaluated() -> None:
    hand = looped()
    made = handle(hand, span(0, 6), 4, share_depths=True, own_logits=True)
    before = hand.model.num_rows
    session = made.open(2)
    assert hand.model.num_rows == before and session.view is hand.model.view(2)
    assert session.logits is made.logits
    hand.expect_exact(session, [*span(0, 6), 70], session.eval([70]))
    assert made.begins(hand.model.view(2)) and made.begins(made.view)


def test_a_handle_begins_at_its_own_depth_alone() -> None:
    hand = looped()
    made = handle(hand, span(0, 6), 4, share_depths=True)
    assert made.begins(hand.model.view(4)) and not made.begins(hand.model.view(3))


def test_other_depths_and_windows_are_refused_with_both_numbers() -> None:
    hand = looped()
    own = handle(hand, span(0, 6), 2)
    with pytest.raises(LoopsMismatch, match="built at 2 loops, the call asks for 1"):
        own.open(1)
    shared = handle(hand, span(0, 6), 2, share_depths=True)
    with pytest.raises(LoopsMismatch, match="built at 2 loops, the call asks for 3"):
        shared.open(3)
    windowed = handle(hand, span(0, 6), 2, 5)
    with pytest.raises(LoopsMismatch, match="cache_window mismatch: the prefix was built with 5, the call asks for 4"):
        windowed.require(hand.model.view(2, 4))
    windowed.require(hand.model.view(2, 5))
    hand.pool.fingerprint = "another"
    with pytest.raises(GeometryMismatch, match="the weights of the model have changed"):
        own.open()


@pytest.mark.parametrize(
    ("kind", "match"),
    [(EchoModel, "does not loop"), (EchoHybrid, "does not loop"), (EchoAfter, "layers follow the block")],
)
def test_only_where_the_last_layer_loops_can_depths_be_shared(kind, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        handle(looped(kind=kind), span(0, 6), share_depths=True)


def test_a_window_that_left_what_the_last_token_sees_allows_its_own_depth_alone() -> None:
    hand = looped()
    made = handle(hand, span(0, 7), 3, 4, share_depths=True)  # positions 4 to 6 are left; the last token sees 3 too
    free = hand.pool.num_free
    with pytest.raises(RuntimeError, match="position 6 sees pages that the window of this session has left"):
        made.open(2)
    assert hand.pool.num_free == free
    session = made.open()
    hand.expect_exact(session, span(0, 8), session.eval([7]))


def test_without_room_for_the_last_token_nothing_is_taken() -> None:
    hand = looped(10)
    made = handle(hand, span(0, 8), 4, share_depths=True)
    with pytest.raises(OutOfPages):
        made.open(1)
    assert hand.pool.num_free == 0 and (hand.pool.refs == 1).all()
    made.check()


# Pools of handles -------------------------------------------------------------------------------------------------


def test_a_pool_that_shares_depths_gives_the_longest_then_the_least_deep() -> None:
    hand = looped(300)
    pool = PrefixPool(share_depths=True)
    for tokens, loops in ((6, 4), (6, 3), (4, 1), (9, 2)):
        pool.register(handle(hand, span(0, tokens), loops, share_depths=True))
    prompt = ids(*span(0, 20))
    found = {loops: pool.match(prompt, loops) for loops in (1, 2, 3, 4)}
    assert {loops: (e.num_tokens, e.loops) for loops, e in found.items()} == {
        1: (9, 2),
        2: (9, 2),
        3: (6, 3),
        4: (6, 4),
    }
    assert pool.match_len(prompt[:8], 1) == 6 and pool.match(prompt[:8], 1).loops == 3
    assert pool.match_len(prompt, 5) == 0
    pool.check()
    pool.remove(found[3].id)
    assert pool.match_len(prompt, 3) == 6 and pool.match(prompt, 3).loops == 4
    pool.check()


def test_a_pool_of_its_own_depths_takes_no_other() -> None:
    pool = PrefixPool()
    pool.register(handle(looped(), span(0, 6), 4, share_depths=True))
    assert [pool.match_len(span(0, 9), loops) for loops in (1, 3, 4)] == [0, 0, 6]


def test_a_pool_that_shares_depths_refuses_a_handle_that_does_not() -> None:
    with pytest.raises(ValueError, match="build the prefix with share_depths=True"):
        PrefixPool(share_depths=True).register(handle(looped(), span(0, 6), 4))


def test_a_handle_says_whether_it_opens_at_a_depth() -> None:
    hand = looped()
    for window, opens in ((4, False), (3, True), (0, True)):
        made = handle(hand, span(0, 7), 3, window, share_depths=True)
        assert made.opens() and made.opens(3) and made.opens(2) is opens
        if opens:
            made.open(2).release()
