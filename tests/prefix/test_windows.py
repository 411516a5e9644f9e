"""Sliding windows: pages that no query sees any more go back, and a match needs only what its window shows."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import Hand, expect_check_fails, ids, span
from driver import Driver
from fakes import EchoModel

from paged.kv.page_table import PageTable
from paged.kv.pages import PagePool
from paged.prefix.index import NO_PAGE


def hand(window: int = 4, page_size: int = 2, num_pages: int = 40, **options) -> Hand:
    return Hand(num_pages, page_size, windows=(window,), **options)


def keep(h: Hand, tokens) -> None:
    """Donate `tokens` page by page, so that every page is cached before the window has left it."""
    session, size = h.session(), h.pool.page_size
    for start in range(0, len(tokens), size):
        session.eval(tokens[start : start + size])
        h.cache.insert(session, session.tokens.tolist())
    session.release()
    h.check()


def hollow(h: Hand, tokens, present: list[int]) -> None:
    """Leave of the cached pages of `tokens` only those marked in `present`."""
    cursor = h.cache.cursor()
    h.cache.index.seek(cursor, ids(*tokens), len(present))
    for node, there in zip(cursor.nodes, present, strict=True):
        if not there and h.cache.index.pages[node, 0] >= 0:
            pages = h.cache.index.hollow(node, np.array([0], np.int32))
            h.cache.uncount(node, pages)
            h.pool.unhold(pages)


# Giving back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("computed", "gone"), [(4, 0), (5, 1), (6, 1), (7, 2), (8, 2), (9, 3), (11, 4)])
def test_a_session_gives_back_the_pages_that_left_its_window(computed: int, gone: int) -> None:
    h = hand()
    session = h.session()
    for token in span(0, computed):
        session.eval([token])
        session.check()
    rows = session.table.rows[0].tolist()
    assert rows[:gone] == [NO_PAGE] * gone and min(rows[gone:]) >= 0
    assert h.pool.num_live == len(rows) - gone
    h.check()


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_what_went_back_changes_no_logit(chunk: int) -> None:
    h = hand(5, 2)
    session, tokens = h.session(), span(0, 33)
    for start in range(0, 33, chunk):
        logits = session.eval(tokens[start : start + chunk])
        h.expect_exact(session, tokens[: start + chunk], logits)
    assert h.pool.num_live == 3  # positions 28 to 32
    h.check()


def test_of_pages_that_leave_together_the_deeper_is_released_first() -> None:
    pool = PagePool(8, 2)
    table = PageTable(pool)
    table.ensure(0, 8)
    table.leave(7, (4,))
    assert table.rows.tolist() == [[-1, -1, 2, 3]]
    assert pool.alloc(2).tolist() == [0, 1]  # last in, first out
    table.check()


def test_only_the_windowed_group_gives_back() -> None:
    pool = PagePool(12, 2)
    table = PageTable(pool, 2)
    table.ensure(0, 8)
    table.leave(8, (0, 4))
    assert (table.rows[0] >= 0).all()
    assert (table.rows[1] < 0).tolist() == [True, True, False, False]
    table.leave(8, (0, 4))
    fork = table.fork()
    fork.check()
    fork.release()
    table.release()
    assert not pool.refs.any()


def test_check_notices_a_hole_behind_the_window() -> None:
    pool = PagePool(8, 2)
    table = PageTable(pool)
    table.ensure(0, 8)
    table._rows[0, 1] = -1
    expect_check_fails(table, "before one in front")


def test_a_page_that_a_fork_still_sees_stays_alive() -> None:
    h = hand()
    session = h.session()
    session.eval(span(0, 6))
    fork = session.fork()
    session.eval(span(50, 8))
    h.expect_exact(fork, [*span(0, 6), 7], fork.eval([7]))
    session.check()
    fork.check()


# Matching ---------------------------------------------------------------------------------------------------------


def test_a_hit_needs_what_its_window_shows_and_reads_nothing_before() -> None:
    h = hand()
    tokens = span(0, 23)
    keep(h, tokens)
    hollow(h, tokens, [1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0])
    session = h.session()
    assert h.cache.match_len(tokens) == h.cache.attach(session, tokens) == 16
    assert (session.table.rows[0] >= 0).tolist() == [False] * 6 + [True] * 2
    h.expect_exact(session, tokens, session.eval(tokens[16:]))
    h.check()


@pytest.mark.parametrize(
    ("present", "matched"),
    [
        ([1, 1, 1, 1], 8),
        ([0, 0, 1, 1], 8),
        ([0, 1, 1, 0], 6),
        ([1, 0, 1, 0], 2),
        ([0, 1, 0, 1], 0),
        ([1, 1, 0, 1], 4),
        ([0, 0, 0, 0], 0),
    ],
)
def test_the_deepest_place_whose_window_is_whole(present: list[int], matched: int) -> None:
    h = hand()
    tokens = span(0, 9)
    keep(h, tokens)
    hollow(h, tokens, present)
    assert h.cache.match_len(tokens) == matched
    h.ask(tokens).release()
    h.check()


def test_a_donation_fills_what_the_cache_had_given_up() -> None:
    h = hand()
    tokens = span(0, 9)
    keep(h, tokens)
    hollow(h, tokens, [0, 0, 0, 0])
    assert h.cache.held_pages == 0
    session = h.session()
    session.eval(tokens)
    h.cache.insert(session, tokens)
    assert h.cache.held_pages == 1  # of the two that the session still had, the full one
    assert h.cache.match_len([*tokens, 1]) == 0
    session.check()
    h.check()


@pytest.mark.parametrize("n", range(5, 14))
def test_an_exact_donation_at_the_end_serves_the_next_turn_though_most_pages_went_back(n: int) -> None:
    h = hand(partial=True)
    tokens = span(0, n)
    h.donate(tokens)
    assert h.cache.held_pages == -(-n // 2) - (n - 3) // 2
    session = h.session()
    matched = h.cache.attach(session, [*tokens, 900, 901])
    assert matched == n
    session.check()
    h.expect_exact(session, [*tokens, 900, 901], session.eval([900, 901]))
    h.check()


def test_full_pages_and_windowed_ones_are_matched_together() -> None:
    h = Hand(60, 2, windows=(0, 4))
    tokens = span(0, 21)
    keep(h, tokens)
    session = h.session()
    assert h.cache.attach(session, tokens) == 20
    assert (session.table.rows >= 0).sum(axis=1).tolist() == [10, 2]
    h.expect_exact(session, [*tokens], session.eval(tokens[20:]))
    h.check()


def test_an_idle_page_behind_a_window_goes_alone_and_its_node_stays() -> None:
    h = Hand(30, 2, windows=(0, 4))
    tokens = span(0, 17)
    session = h.session()
    for token in tokens:
        session.eval([token])
        h.cache.insert(session, session.tokens.tolist())
        h.check()
    held, live = h.cache.held_pages, h.pool.num_live
    assert h.cache.evict(3) == 3
    assert (h.cache.held_pages, h.pool.num_live) == (held - 3, live)
    assert len(h.cache.index) == 8
    assert h.cache.match_len([*tokens, 1]) == 16
    h.check()
    session.release()
    assert h.cache.evict(99) == held - 3
    assert h.pool.num_free == 30


def test_every_idle_page_can_be_had_while_a_sequence_runs() -> None:
    h = Hand(24, 2, windows=(0, 4))
    session = h.session()
    for token in span(0, 13):
        session.eval([token])
        h.cache.insert(session, session.tokens.tolist())
    available = h.pool.num_available
    h.pool.alloc(available)
    h.check()
    h.expect_exact(session, [*span(0, 13), 1], session.eval([1]))


def test_explain_tells_of_a_window_that_is_not_whole() -> None:
    h = hand()
    tokens = span(0, 9)
    keep(h, tokens)
    hollow(h, tokens, [1, 1, 0, 1])
    why = h.cache.explain(tokens)
    assert (why.matched, why.reason) == (4, "outside the window")
    assert "8 tokens are cached" in why.message


# In the scheduler -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [0, 1, 3])
@pytest.mark.parametrize("windows", [(5,), (0, 5), (3, 0, 9)], ids=str)
def test_the_scheduler_gives_back_and_every_token_stays_right(windows: tuple[int, ...], chunk: int) -> None:
    model = EchoModel(97, windows=windows)
    driver = Driver(200 * len(windows), 2, model=model, partial=True, max_chunk_tokens=chunk, max_num_batched_tokens=16)
    for i in range(6):
        driver.submit(f"a{i}", [*span(0, 12), *span(20 * i % 80, i)], 20)
    driver.run()
    for i in range(6):
        driver.submit(f"b{i}", [*span(0, 12), *span(20 * i % 80, i), 5], 9)
    driver.run()
    driver.expect_all_exact()
    assert driver.requests["b3"].num_cached_tokens == 15
    driver.cache.release()
    assert driver.pool.num_free == driver.pool.num_pages


def test_a_long_answer_of_a_windowed_model_lives_in_a_few_pages() -> None:
    driver = Driver(40, 2, model=EchoModel(97, windows=(4,)), cache=False)
    driver.submit("a", [1, 2, 3], 60)
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        most = max(most, driver.pool.num_live)
    assert most == 2  # between two steps; while one runs, a third
    driver.expect_all_exact()


def test_preempted_requests_of_a_windowed_model_resume_from_what_is_left() -> None:
    driver = Driver(40, 2, model=EchoModel(97, windows=(4,)), partial=True)
    driver.submit("a", span(0, 11), 20)
    for _ in range(6):
        driver.step()
    driver.preempt("a")
    driver.run()
    assert driver.requests["a"].num_reattached_tokens == 16
    driver.expect_all_exact()
