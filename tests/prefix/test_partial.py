"""Exact matches (`partial=True`): the page where a prompt leaves the cache is copied, and donations keep tails."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import Hand, ids, span

from paged.errors import OutOfPages
from paged.ops.dispatch import get_backend

A = [*span(0, 10), 500, 501]  # three pages of 4


def hand(num_pages: int = 12, **options) -> Hand:
    return Hand(num_pages, 4, partial=True, **options)


def blob(h: Hand, page: int) -> np.ndarray:
    return h.pool.storage.pages[page].numpy().copy()


# Matching ---------------------------------------------------------------------------------------------------------


def test_a_prompt_matches_to_the_token_where_it_leaves_the_cache() -> None:
    h = hand()
    h.donate(A)
    for n in range(13):
        assert h.cache.match_len([*A[:n], 900, 901]) == n
    assert h.cache.match_len(A) == 11  # one token is always left to compute


def test_without_partial_only_whole_pages_match() -> None:
    h = Hand(12, 4)
    h.donate(A)
    assert [h.cache.match_len([*A[:n], 900, 901]) for n in range(13)] == [0] * 4 + [4] * 4 + [8] * 4 + [12]


def test_match_len_says_what_attach_gives() -> None:
    for n in range(13):
        h = hand()
        h.donate(A)
        prompt = [*A[:n], 900, 901]
        session = h.session()
        assert h.cache.match_len(prompt) == h.cache.attach(session, prompt) == session.n_past == n
        h.expect_exact(session, prompt, session.eval(prompt[n:]))
        session.check()
        h.check()


def test_the_shared_pages_are_joined_and_the_divergent_one_is_copied() -> None:
    h = hand()
    h.donate(A)
    assert h.pages_of(A) == [0, 1, 2]
    before = blob(h, 2)
    session = h.ask([*A[:10], 700, 701, 702])
    assert session.table.rows[0, :2].tolist() == [0, 1]
    own = session.table.rows[0, 2]
    assert own not in (0, 1, 2)
    assert h.pool.refs[[0, 1, 2, own]].tolist() == [2, 2, 1, 1]
    assert np.array_equal(blob(h, 2), before, equal_nan=True)


def test_a_prompt_sent_again_computes_one_token() -> None:
    h = hand()
    prompt = span(0, 12)
    h.donate(prompt)
    before = blob(h, 2)
    session = h.session()
    assert h.cache.attach(session, prompt) == 11
    h.expect_exact(session, prompt, session.eval(prompt[11:]))
    assert np.array_equal(blob(h, 2), before, equal_nan=True)


def test_two_prompts_may_copy_one_page_at_once() -> None:
    h = hand()
    h.donate(A)
    one, two = h.session(), h.session()
    assert h.cache.attach(one, [*A[:9], 800]) == 9
    assert h.cache.attach(two, [*A[:11], 801]) == 11
    h.expect_exact(one, [*A[:9], 800], one.eval([800]))
    h.expect_exact(two, [*A[:11], 801], two.eval([801]))
    h.check()


def test_of_many_branches_the_one_that_shares_most_is_copied() -> None:
    h = hand(40)
    base = span(0, 4)
    for tail in ([1, 2, 3, 4], [1, 2, 9, 9], [1, 8, 8, 8], [0, 2, 3, 4], [700, 2, 3, 4]):
        h.donate([*base, *tail])
    for tail, rows in (([1, 2, 3, 7], 3), ([1, 2, 9, 7], 3), ([1, 2, 0, 0], 2), ([1, 8, 7], 2), ([0], 0), ([5], 0)):
        assert h.cache.match_len([*base, *tail, 996]) == 4 + min(rows, len(tail)) + (tail == [0])
    h.check()


def test_another_namespace_gives_no_row() -> None:
    h = hand()
    h.donate(A, "a")
    assert h.cache.match_len([*A[:7], 9], "b") == 0
    assert h.cache.match_len([*A[:7], 9], "a") == 7


def test_rows_below_another_prefix_are_not_taken() -> None:
    h = hand()
    h.donate([*span(0, 4), *span(50, 4)])
    h.donate([*span(10, 4), *span(60, 4)])
    assert h.cache.match_len([*span(10, 4), *span(50, 4), 1]) == 4


def test_a_match_touches_nothing() -> None:
    h = hand()
    h.donate(A)
    before = (h.pool.refs.tolist(), h.cache.index.last_use.tolist(), h.cache.stats)
    for _ in range(100):
        h.cache.match_len([*A[:10], 900])
    assert (h.pool.refs.tolist(), h.cache.index.last_use.tolist(), h.cache.stats) == before


# The tails of donations -------------------------------------------------------------------------------------------


def test_a_donation_keeps_its_partial_page_and_the_donor_goes_on_in_a_copy() -> None:
    h = hand()
    session = h.session()
    session.eval(span(0, 6))
    assert h.cache.insert(session, span(0, 6)) == 2
    assert h.pool.refs[:2].tolist() == [2, 2]
    logits = session.eval([77])
    assert session.table.rows[0].tolist() == [0, 2]
    h.expect_exact(session, [*span(0, 6), 77], logits)
    assert h.cache.match_len([*span(0, 6), 99]) == 6
    h.check()


def test_the_next_turn_attaches_all_of_the_last_one() -> None:
    h = hand(20)
    h.donate(span(0, 14))
    session = h.session()
    assert h.cache.attach(session, span(0, 20)) == 14
    h.expect_exact(session, span(0, 20), session.eval(span(14, 6)))


def test_a_tail_goes_when_a_longer_history_has_its_rows() -> None:
    h = hand(20)
    h.donate(span(0, 6))
    assert (h.cache.held_pages, len(h.cache.index)) == (2, 2)
    h.donate(span(0, 7))  # a longer tail in the place of the shorter
    assert h.cache.held_pages == 2
    h.donate(span(0, 8))  # the whole page in the place of the tail
    assert h.cache.held_pages == 2
    assert h.cache.match_len([*span(0, 8), 9]) == 8
    h.check()


def test_a_shorter_history_adds_nothing_to_a_longer_one() -> None:
    h = hand(20)
    h.donate(span(0, 11))
    for n in (9, 10, 11):
        assert h.donate(span(0, n)) == 0
    assert h.cache.held_pages == 3


def test_tails_that_part_stand_beside_each_other() -> None:
    h = hand(20)
    h.donate([*span(0, 4), 7, 8])
    h.donate([*span(0, 4), 7, 9])
    assert h.cache.held_pages == 3
    assert h.cache.match_len([*span(0, 4), 7, 8, 1]) == h.cache.match_len([*span(0, 4), 7, 9, 1]) == 6
    h.check()


def test_a_tail_in_use_elsewhere_is_left_alone() -> None:
    h = hand(20)
    session = h.session()
    session.eval(span(0, 6))
    h.cache.insert(session, span(0, 6))
    h.donate(span(0, 8))
    assert h.cache.held_pages == 3  # the session still sits on the tail
    session.release()
    h.check()
    assert h.cache.evict(99) == 3


def test_only_what_was_evaluated_to_its_end_leaves_a_tail() -> None:
    h = hand()
    session = h.session()
    session.eval(span(0, 7))
    assert h.cache.insert(session, span(0, 6)) == 1
    h.check()


def test_tails_go_first_when_room_is_needed() -> None:
    h = hand(3)
    h.donate(span(0, 10))
    h.pool.alloc(1)
    assert h.cache.match_len([*span(0, 10), 5]) == 8
    h.check()


def test_a_bound_holds_with_tails() -> None:
    h = hand(20, max_pages=2)
    h.donate(span(0, 7))
    assert h.cache.held_pages == 2
    h.donate(span(50, 7))
    assert h.cache.held_pages == 2
    session = h.session()
    session.eval(span(0, 11))
    h.cache.insert(session, span(0, 11))
    assert h.cache.held_pages == 2
    h.check()


# Room and faults --------------------------------------------------------------------------------------------------


def test_no_room_for_the_copy_changes_nothing() -> None:
    h = hand(3)
    h.donate(A)
    keep = h.session()
    h.cache.attach(keep, [*A, 5])  # all three pages are in use
    session = h.session()
    refs = h.pool.refs.tolist()
    with pytest.raises(OutOfPages):
        h.cache.attach(session, [*A[:10], 700])
    assert (session.n_past, session.table.num_pages, h.pool.refs.tolist()) == (0, 0, refs)
    h.check()


def test_making_room_for_the_copy_never_takes_its_source() -> None:
    h = hand(4)
    h.donate(A)
    h.donate([900, 901, 902, 903])
    session = h.session()
    assert h.cache.attach(session, [*A[:10], 700]) == 10  # the other chain went
    h.expect_exact(session, [*A[:10], 700], session.eval([700]))
    assert h.cache.match_len([900, 901, 902, 903, 1]) == 0
    h.check()


def test_a_copy_that_fails_leaks_no_page(monkeypatch) -> None:
    h = hand()
    h.donate(A)

    def broken(*_args) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(type(get_backend("cpu")), "copy_pages", broken)
    with pytest.raises(RuntimeError, match="device"):
        h.cache.attach(h.session(), [*A[:10], 700])
    monkeypatch.undo()
    h.check()
    assert h.pool.num_live == 0


def test_partial_hits_are_counted() -> None:
    h = hand()
    h.donate(A)
    h.ask([*A[:10], 700]).release()
    h.ask([*A[:8], 700]).release()
    stats = h.cache.stats
    assert (stats.num_queries, stats.partial_hits, stats.hit_tokens, stats.hit_pages) == (3, 1, 18, 4)


def test_every_group_is_copied() -> None:
    h = hand(12, num_groups=2)
    h.donate(span(0, 8))
    session = h.ask([*span(0, 6), 700])
    assert session.table.rows.shape == (2, 2)
    h.check()


def test_siblings_are_those_of_the_index_after_any_eviction() -> None:
    h = hand(60)
    rng = np.random.default_rng(3)
    for _ in range(120):
        h.donate(rng.integers(0, 3, int(rng.integers(1, 15))).tolist())
        h.cache.evict(int(rng.integers(0, 3)))
        h.check()


def test_check_notices_a_child_out_of_order() -> None:
    h = hand()
    h.donate(A)
    h.cache.index.siblings._of.clear()
    with pytest.raises(AssertionError, match="sorted children"):
        h.cache.check()


def test_a_collision_never_gives_rows_of_other_tokens() -> None:
    h = Hand(20, 4, partial=True, hash_page=lambda parent, tokens: 7)
    h.donate(span(0, 6))
    h.donate(span(50, 6))
    for prompt in (span(0, 9), span(50, 9), [*span(0, 3), 60, 61]):
        session = h.ask(prompt)
        session.release()
        h.check()
    assert h.cache.stats.num_collisions > 0


def test_the_closest_page_of_an_empty_rest_is_none() -> None:
    h = hand()
    h.donate(A)
    cursor = h.cache.cursor()
    h.cache.seek(cursor, ids(*A[:5]))
    assert (cursor.near, cursor.rows) == (-1, 0)


# What peers' tests check -------------------------------------------------------------------------------------------


def test_at_one_token_a_page_histories_share_exactly_their_common_tokens() -> None:
    h = Hand(40, 1)
    assert h.donate(span(0, 10)) == 10
    assert h.donate([*span(0, 5), 70, 71, 72]) == 3
    assert h.donate([*span(0, 5), 70, 71, 72]) == 0
    assert h.cache.held_pages == 13
    assert h.cache.match_len([*span(0, 5), 90, 91]) == 5


def test_ids_that_stand_for_a_picture_match_only_at_their_place_and_only_for_that_picture() -> None:
    h = hand(40)
    picture, other = [800, 801, 802, 803], [810, 811, 812, 813]
    h.donate([1, 2, *picture, 3, 4])
    assert h.cache.match_len([1, 2, *picture, 3, 9]) == 7
    assert h.cache.match_len([1, 2, *other, 3, 9]) == 2
    assert h.cache.match_len([1, *picture, 3, 9]) == 1
