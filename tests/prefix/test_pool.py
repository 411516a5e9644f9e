"""PrefixPool and PrefixHandle: exact keys, the longest match, what goes first, and pages that are shared."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from byhand import Hand, expect_check_fails, span
from fakes import EchoHybrid, EchoLooped, EchoModel

from paged.prefix.handles import PrefixHandle
from paged.prefix.pool import PrefixPool
from paged.sampling import SamplingParams

KINDS = {"attention": EchoModel, "hybrid": EchoHybrid}


@pytest.fixture(params=KINDS)
def hand(request) -> Hand:
    return Hand(200, 4, kind=KINDS[request.param])


def handle(h: Hand, tokens, namespace: str = "", loops: int | None = None, cache_window: int = 0, **options):
    session = h.session(namespace, loops, cache_window)
    session.eval(tokens)
    made = PrefixHandle(session, **options)
    session.release()
    return made


def filled(h: Hand, *prefixes, **options) -> PrefixPool:
    pool = PrefixPool(**options)
    for tokens in prefixes:
        assert pool.register(handle(h, tokens)) == len(tokens)
        pool.check()
    return pool


def lengths(pool: PrefixPool) -> list[int]:
    return [entry.num_tokens for entry in pool.entries()]


# Handles ----------------------------------------------------------------------------------------------------------


def test_a_prompt_that_equals_the_prefix_needs_no_forward(hand: Hand) -> None:
    made = handle(hand, span(0, 10))
    before = hand.model.num_forwards
    session = made.open()
    assert session.n_past == 10
    assert session.sample(SamplingParams()) == int(hand.model.oracle(span(0, 10)).argmax())
    assert hand.model.num_forwards == before


def test_what_is_opened_goes_on_alone_and_the_handle_stays_as_it_was(hand: Hand) -> None:
    made = handle(hand, span(0, 10))
    pages = made.page_ids.tolist()
    first, second = made.open(), made.open()
    for session, token in ((first, 500), (second, 600)):
        hand.expect_exact(session, [*span(0, 10), token], session.eval([token]))
        session.check()
    assert made.page_ids.tolist() == pages
    assert first.table.rows[0, :2].tolist() == second.table.rows[0, :2].tolist() == pages[:2]
    assert first.table.rows[0, 2] != second.table.rows[0, 2]
    made.check()
    third = made.open()
    hand.expect_exact(third, [*span(0, 10), 7], third.eval([7]))


def test_pages_go_back_with_the_last_that_uses_them(hand: Hand) -> None:
    made = handle(hand, span(0, 10))
    session = made.open()
    del made
    assert hand.pool.num_live == 3
    session.release()
    assert hand.pool.num_live == 0
    hand.check()


def test_a_handle_keeps_its_pages_whatever_the_cache_evicts() -> None:
    h = Hand(20, 4)
    session = h.session()
    session.eval(span(0, 10))
    h.cache.insert(session, span(0, 10))
    made = PrefixHandle(session)
    session.release()
    assert h.cache.evict(99) == 0
    again = made.open()
    h.expect_exact(again, [*span(0, 10), 3], again.eval([3]))


def test_the_callers_buffer_may_change(hand: Hand) -> None:
    tokens = np.arange(10, dtype=np.int32)
    made = handle(hand, tokens)
    pool = PrefixPool()
    pool.register(made)
    tokens[:] = 5
    assert pool.match_len(span(0, 12)) == 10
    with pytest.raises(ValueError, match="read-only"):
        made.tokens[0] = 1


def test_a_session_that_evaluated_nothing_makes_no_handle(hand: Hand) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PrefixHandle(hand.session())


def test_check_notices_a_handle_that_moved(hand: Hand) -> None:
    made = handle(hand, span(0, 10))
    made._session.eval([5])
    expect_check_fails(made, "has moved")


# Keys and matches -------------------------------------------------------------------------------------------------


def test_an_empty_pool_holds_and_finds_nothing() -> None:
    pool = PrefixPool()
    assert (pool.capacity, pool.size(), pool.total_cached_tokens(), pool.entries()) == (16, 0, 0, [])
    assert pool.match(span(0, 5)) is None
    pool.check()


def test_the_longest_entry_that_opens_the_prompt_wins(hand: Hand) -> None:
    pool = filled(hand, span(0, 3), span(0, 9), [*span(0, 6), 80], [*span(0, 9), 90, 91], span(50, 20))
    for n, want in ((1, 0), (2, 0), (3, 3), (8, 3), (9, 9), (10, 9), (30, 9)):
        assert pool.match_len(span(0, n)) == want
    assert pool.match_len([*span(0, 9), 90, 91]) == 11
    assert pool.match_len([*span(0, 9), 90, 92]) == 9
    assert pool.match_len([*span(0, 6), 80, 1]) == 7
    assert pool.match_len([*span(0, 6), 81]) == 3
    assert pool.match_len([51, *span(51, 19)]) == 0


def test_one_differing_id_is_no_match(hand: Hand) -> None:
    pool = filled(hand, span(0, 100))
    assert pool.match_len(span(0, 200)) == 100
    for at in (0, 50, 99):
        prompt = span(0, 200)
        prompt[at] = 900
        assert pool.match_len(prompt) == 0


def test_loops_window_and_namespace_are_part_of_the_key(hand: Hand) -> None:
    pool, looped = PrefixPool(), Hand(200, 4, kind=EchoLooped)
    pool.register(handle(looped, span(0, 4), loops=3))
    pool.register(handle(hand, span(0, 5)))
    pool.register(handle(hand, span(0, 6), cache_window=8))
    pool.register(handle(hand, span(0, 7), "a"))
    assert pool.size() == 4
    prompt = span(0, 20)
    assert pool.match_len(prompt, cache_window=9) == pool.match_len(prompt, namespace="b") == 0
    assert pool.match_len(prompt, loops=2) == pool.match_len(prompt, loops=4) == 0
    assert pool.match_len(prompt, loops=3) == 4
    assert pool.match_len(prompt) == 5
    assert pool.match_len(prompt, cache_window=8) == 6
    assert pool.match_len(prompt, namespace="a") == 7
    pool.check()


def test_the_same_key_twice_is_one_entry(hand: Hand) -> None:
    pool = filled(hand, span(0, 5), span(0, 5))
    assert (pool.size(), pool.total_cached_tokens()) == (1, 5)
    pool.register(handle(hand, span(0, 5), cache_window=2))
    assert (pool.size(), pool.total_cached_tokens()) == (2, 10)


def test_matching_counts_hits_and_match_len_does_not(hand: Hand) -> None:
    pool = filled(hand, span(0, 5))
    entry = pool.match(span(0, 9))
    assert entry is not None and (entry.num_hits, entry.num_tokens) == (1, 5)
    for _ in range(100):
        pool.match_len(span(0, 9))
    assert entry.num_hits == 1
    session = entry.handle.open()
    hand.expect_exact(session, span(0, 9), session.eval(span(5, 4)))


def test_random_prompts_match_as_a_plain_scan_says(hand: Hand) -> None:
    rng = np.random.default_rng(2)
    prefixes = {tuple(rng.integers(0, 3, int(rng.integers(1, 9))).tolist()) for _ in range(60)}
    pool = filled(hand, *map(list, prefixes), capacity=100)
    for _ in range(400):
        prompt = tuple(rng.integers(0, 3, int(rng.integers(0, 12))).tolist())
        want = max((len(p) for p in prefixes if prompt[: len(p)] == p), default=0)
        assert pool.match_len(list(prompt)) == want


# Room -------------------------------------------------------------------------------------------------------------


def test_a_capacity_of_0_holds_one(hand: Hand) -> None:
    pool = filled(hand, span(0, 5), span(50, 3), capacity=0)
    assert pool.capacity == 1
    assert lengths(pool) == [3]  # a newcomer is never its own victim


def test_the_shortest_goes_first(hand: Hand) -> None:
    pool = filled(hand, span(0, 5), span(20, 10), span(40, 7), capacity=2)
    assert lengths(pool) == [10, 7]
    assert (pool.total_cached_tokens(), pool.num_evicted) == (17, 1)


def test_the_least_recently_used_goes_first(hand: Hand) -> None:
    pool = filled(hand, span(0, 5), span(20, 10), span(40, 7), capacity=3, eviction="lru")
    pool.match(span(0, 6))
    pool.register(handle(hand, span(20, 10)))
    pool.register(handle(hand, span(60, 2)))
    assert lengths(pool) == [10, 5, 2]  # 7 was neither hit nor registered again


def test_what_saved_least_per_byte_goes_first(hand: Hand) -> None:
    pool = filled(hand, span(0, 8), span(20, 8), span(40, 8), capacity=3, eviction="cost")
    for first in (0, 0, 40):
        pool.match(span(first, 9))
    pool.register(handle(hand, span(60, 8)))
    assert pool.match_len(span(20, 9)) == 0
    assert [pool.match_len(span(first, 9)) for first in (0, 40, 60)] == [8, 8, 8]


def test_tokens_and_bytes_bound_the_pool_too(hand: Hand) -> None:
    pool = filled(hand, span(0, 5), span(20, 10), span(40, 7), max_tokens=17)
    assert lengths(pool) == [10, 7]
    one = handle(hand, span(0, 5)).num_bytes
    pool = filled(hand, span(0, 5), span(20, 5), span(40, 5), max_bytes=2 * one)
    assert pool.size() == 2
    pool = filled(hand, span(0, 5), span(20, 40), max_tokens=10)
    assert lengths(pool) == [40]  # alone, and over the bound


def test_what_is_evicted_gives_its_pages_back_once_nobody_uses_it(hand: Hand) -> None:
    pool = filled(hand, span(0, 5), capacity=1)
    entry = pool.match(span(0, 5))
    session = entry.handle.open()
    del entry
    filled_more = handle(hand, span(50, 8))
    pool.register(filled_more)
    del filled_more
    hand.expect_exact(session, [*span(0, 5), 1], session.eval([1]))
    session.release()
    assert hand.pool.num_live == 2
    pool.clear()
    assert hand.pool.num_live == 0
    hand.check()


def test_remove_takes_one_entry_by_its_id(hand: Hand) -> None:
    pool = filled(hand, span(0, 5), span(20, 6))
    [six, five] = pool.entries()
    assert pool.remove(five.id) and not pool.remove(five.id)
    assert pool.entries() == [six]
    pool.check()


def test_shared_rows_count_once_among_the_unique_ones() -> None:
    h = Hand(200, 4)
    pool = PrefixPool()
    first = handle(h, span(0, 8))
    session = first.open()
    session.eval(span(8, 6))
    pool.register(first)
    pool.register(PrefixHandle(session))
    assert pool.total_cached_tokens() == 22
    assert pool.unique_cached_tokens() == 14


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"capacity": -1}, "0 or more, got -1"),
        ({"max_tokens": -2}, "0 or more"),
        ({"max_bytes": -2}, "0 or more"),
        ({"eviction": "oldest"}, "cost, lru, shortest, got 'oldest'"),
    ],
)
def test_bad_options_are_refused(options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PrefixPool(**options)


@pytest.mark.parametrize("name", ["capacity", "max_tokens", "max_bytes"])
def test_bounds_that_are_no_integers_are_refused(name: str) -> None:
    for bound in (2.5, "3", None):
        with pytest.raises(TypeError, match=f"{name} must be an integer, got {bound!r}"):
            PrefixPool(**{name: bound})


def test_threads_may_register_and_match_at_once() -> None:
    h = Hand(400, 4)
    handles = [handle(h, span(10 * i, 8)) for i in range(32)]
    pool, wrong = PrefixPool(capacity=8, eviction="lru"), []

    def work(mine: list[PrefixHandle]) -> None:
        for _ in range(30):
            for one in mine:
                pool.register(one)
                found = pool.match(one.tokens)
                if found is not None and found.tokens.tolist() != one.tokens.tolist():
                    wrong.append(found)

    threads = [threading.Thread(target=work, args=(handles[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and pool.size() == 8
    pool.check()


def test_check_notices_too_many_entries_and_a_wrong_order(hand: Hand) -> None:
    pool = filled(hand, span(0, 5), span(20, 6))
    pool.capacity = 1
    expect_check_fails(pool, "more than its bounds")
    pool.capacity = 4
    pool._entries._lists[0].reverse()
    expect_check_fails(pool, "out of order")


def test_what_older_weights_computed_gives_way_to_the_same_prefix_of_the_new_ones(hand: Hand) -> None:
    pool = filled(hand, span(0, 6))
    hand.pool.fingerprint = hand.model.fingerprint = "changed"
    fresh = handle(hand, span(0, 6))
    assert pool.register(fresh) == 6
    found = pool.match(span(0, 8))
    assert found is not None and found.handle is fresh
    found.handle.open().release()
    pool.check()


def test_room_is_made_only_where_one_more_would_push_one_out(hand: Hand) -> None:
    pool = filled(hand, span(0, 10), span(100, 6), capacity=3)
    assert not pool.make_room() and pool.num_evicted == 0
    pool.register(handle(hand, span(200, 8)))
    assert pool.make_room() and lengths(pool) == [10, 8] and pool.num_evicted == 1
    pool.check()
    assert not PrefixPool(capacity=1).make_room()
