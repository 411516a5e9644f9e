"""PrefixCache by hand: what matches, what is attached, what a donation brings. Exact page ids on tiny pools."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import Hand, growing_pool, ids, span
from fakes import EchoHybrid, EchoModel

from paged.errors import GeometryMismatch, OutOfPages, SessionInUse
from paged.kv.pages import PagePool
from paged.prefix.cache import PrefixCache
from paged.prefix.hashing import page_hash
from paged.session import Session

# Cold, then warm: ten pages of sixteen ----------------------------------------------------------------------------


def test_a_cold_prompt_of_55_takes_four_pages_and_three_get_keys() -> None:
    hand = Hand(10, 16)
    session = hand.ask(span(0, 55))
    assert hand.cache.stats.hit_tokens == 0
    assert session.table.rows.tolist() == [[0, 1, 2, 3]]
    assert hand.pool.refs.tolist() == [1] * 4 + [0] * 6
    assert hand.cache.insert(session, span(0, 55)) == 3
    assert hand.pages_of(span(0, 55)) == [0, 1, 2]
    assert hand.pool.refs.tolist() == [2, 2, 2, 1] + [0] * 6


def test_a_second_prompt_that_shares_48_attaches_three_pages_and_takes_one() -> None:
    hand = Hand(10, 16)
    first = hand.ask(span(0, 55))
    hand.cache.insert(first, first.tokens)
    second = hand.ask([*span(0, 48), *span(500, 5)])
    assert second.table.rows.tolist() == [[0, 1, 2, 4]]
    assert hand.pool.refs.tolist() == [3, 3, 3, 1, 1] + [0] * 5  # two sessions and the cache
    assert hand.pool.num_free == 5


def test_pages_go_out_again_keyless_first_then_untouched_then_cached_ones_deepest_first() -> None:
    hand = Hand(10, 16)
    first = hand.ask(span(0, 55))
    hand.cache.insert(first, first.tokens)
    second = hand.ask([*span(0, 48), *span(500, 5)])
    first.release()
    second.release()
    assert (hand.pool.num_free, hand.pool.num_cached_only, hand.pool.num_live) == (7, 3, 0)
    assert [int(hand.pool.alloc(1)[0]) for _ in range(10)] == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]
    hand.check()
    assert hand.cache.match_len(span(0, 55)) == 0


def test_a_long_new_prompt_drains_the_pool_and_the_old_one_is_gone() -> None:
    hand = Hand(10, 16)
    hand.donate(span(0, 55))
    session = hand.ask(span(200, 160))
    assert sorted(session.table.rows[0].tolist()) == list(range(10))
    assert hand.cache.match_len(span(0, 55)) == 0
    assert hand.cache.stats.evicted_pages == 3
    hand.check()


def test_a_recycled_page_answers_for_its_old_tokens_no_more() -> None:
    hand = Hand(2, 16)
    hand.donate(span(0, 32))
    assert hand.cache.match_len(span(0, 33)) == 32
    session = hand.ask(span(100, 15))  # not even a full page
    assert session.table.rows.tolist() == [[1]]
    assert hand.pages_of(span(0, 32)) == [0]
    assert hand.cache.match_len(span(0, 33)) == 16
    hand.cache.insert(session, session.tokens)
    assert hand.cache.held_pages == 1
    hand.check()


def test_a_hit_is_never_evicted_to_make_room_for_the_one_who_hit_it() -> None:
    hand = Hand(2, 4)
    hand.donate(span(0, 4))
    hand.donate(span(50, 4))
    session = hand.ask([*span(0, 4), 9])  # hits A, the older one, and needs one more page
    assert session.table.rows.tolist() == [[0, 1]]
    assert hand.pages_of(span(0, 4)) == [0]
    assert hand.pages_of(span(50, 4)) == []
    hand.check()


def test_a_prompt_that_does_not_fit_leaves_its_hit_cached() -> None:
    hand = Hand(4, 4)
    hand.donate(span(0, 8))
    with pytest.raises(OutOfPages):
        hand.ask([*span(0, 8), *span(50, 9)])
    hand.check()  # the failed session is gone and so are its references
    assert hand.pool.refs.tolist() == [1, 1, 0, 0]
    assert hand.cache.match_len(span(0, 9)) == 8


# How much matches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "matched"),
    [(64, 48), (65, 64), (16, 0), (17, 16), (1, 0), (15, 0), (31, 16), (32, 16), (33, 32), (63, 48)],
)
def test_a_match_is_whole_pages_and_one_token_short_of_the_prompt(length: int, matched: int) -> None:
    hand = Hand(10, 16)
    hand.donate(span(0, 65))
    assert hand.cache.match_len(span(0, length)) == matched
    session = hand.session()
    assert hand.cache.attach(session, span(0, length)) == session.n_past == matched
    assert session.table.num_pages == matched // 16
    session.check()


def test_pages_of_one_token_match_all_but_the_last_token() -> None:
    hand = Hand(40, 1)
    hand.donate(span(0, 12))
    assert [hand.cache.match_len(span(0, n)) for n in (1, 2, 7, 12, 13)] == [0, 1, 6, 11, 12]


def test_an_empty_prompt_matches_nothing() -> None:
    hand = Hand()
    hand.donate(span(0, 8))
    assert hand.cache.match_len([]) == 0
    assert hand.cache.attach(hand.session(), []) == 0


def test_a_first_page_that_differs_matches_nothing_and_attaches_nothing() -> None:
    hand = Hand()
    hand.donate(span(0, 8))
    session = hand.session()
    assert hand.cache.attach(session, [7, *span(1, 11)]) == 0
    assert (session.n_past, session.table.num_pages) == (0, 0)


def test_twelve_tokens_that_share_eight_attach_eight() -> None:
    hand = Hand()
    hand.donate(span(0, 8))
    assert hand.cache.attach(hand.session(), [*span(0, 8), *span(90, 4)]) == 8
    assert hand.cache.attach(hand.session(), span(0, 8)) == 4


def test_the_same_page_after_another_first_page_does_not_match() -> None:
    hand = Hand()
    hand.donate([*span(0, 4), *span(80, 4)])
    hand.donate(span(40, 4))
    assert hand.cache.match_len([*span(40, 4), *span(80, 4), 1]) == 4


def test_match_len_is_what_attach_would_attach_right_then() -> None:
    hand = Hand(6, 4)
    for tokens in ([*span(0, 8)], [*span(0, 4), *span(60, 4)], [*span(90, 12)], [*span(0, 8), *span(30, 8)]):
        want = hand.cache.match_len(tokens)
        session = hand.session()
        assert hand.cache.attach(session, tokens) == want
        session.eval(tokens[want:])
        hand.cache.insert(session, tokens)
        session.release()


def test_a_thousand_questions_change_nothing() -> None:
    hand = Hand(8, 4)
    hand.donate(span(0, 8))  # the oldest: first to go
    hand.donate(span(50, 8))
    before = (hand.pool.refs.tolist(), hand.cache.stats, hand.cache.index.tick, hand.cache.index.last_use.tolist())
    for _ in range(1000):
        assert hand.cache.match_len([*span(0, 8), 1]) == 8
    after = (hand.pool.refs.tolist(), hand.cache.stats, hand.cache.index.tick, hand.cache.index.last_use.tolist())
    assert before == after
    assert hand.cache.chains()[0].num_hits == 0
    hand.pool.alloc(5)  # one page must go: still the oldest chain's deepest
    assert hand.cache.match_len([*span(0, 8), 1]) == 4
    assert hand.cache.match_len([*span(50, 8), 1]) == 8


def test_attaching_touches_so_the_other_chain_goes_first() -> None:
    hand = Hand(8, 4)
    hand.donate(span(0, 8))
    hand.donate(span(50, 8))
    hand.ask([*span(0, 8), 1]).release()
    hand.pool.alloc(5)
    assert hand.cache.match_len([*span(0, 8), 1]) == 8
    assert hand.cache.match_len([*span(50, 8), 1]) == 4


# Namespaces -------------------------------------------------------------------------------------------------------


def test_a_namespace_sees_only_its_own_pages() -> None:
    hand = Hand(20, 4)
    hand.donate(span(0, 8), "a")
    assert hand.cache.match_len(span(0, 9), "b") == hand.cache.match_len(span(0, 9)) == 0
    hand.donate(span(0, 8), "b")
    assert hand.cache.match_len(span(0, 9), "a") == hand.cache.match_len(span(0, 9), "b") == 8
    assert hand.cache.held_pages == 4
    assert not set(hand.pages_of(span(0, 8), "a")) & set(hand.pages_of(span(0, 8), "b"))


def test_an_adapter_and_a_salt_of_one_name_are_two_namespaces() -> None:
    hand = Hand(20, 4)
    roots = {
        hand.cache.cursor(salt, **fields).namespace
        for salt in ("", "x")
        for fields in ({}, {"adapter": "x"}, {"adapter": "x", "path": "1"}, {"adapter": "x", "path": "2"})
    }
    assert len(roots) == 8


@pytest.mark.parametrize("what", ["fingerprint", "fp16", "int8", "int4"])
def test_another_model_or_codec_is_another_namespace(what: str) -> None:
    model = EchoModel()
    pools = [model.create_kv_pool(8, 4), model.create_kv_pool(8, 4, kv_dtype="fp32" if what == "fingerprint" else what)]
    if what == "fingerprint":
        pools[1].fingerprint = "other weights"
    roots = {PrefixCache(pool).cursor("salt").namespace for pool in pools}
    assert len(roots) == 2


# Donations --------------------------------------------------------------------------------------------------------


def test_a_donated_page_has_the_session_and_the_cache_as_holders() -> None:
    hand = Hand()
    session = hand.ask(span(0, 8))
    assert hand.cache.insert(session, span(0, 8)) == 2
    assert hand.cache.held_pages == 2
    assert hand.pool.refs[:2].tolist() == [2, 2]
    session.release()
    assert hand.pool.refs[:2].tolist() == [1, 1]
    hand.cache.release()
    assert (hand.pool.num_free, hand.pool.refs.any()) == (10, False)


@pytest.mark.parametrize(("donated", "pages"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (10, 2)])
def test_only_full_pages_of_what_was_donated_are_kept(donated: int, pages: int) -> None:
    hand = Hand()
    session = hand.ask(span(0, 10))
    assert hand.cache.insert(session, span(0, donated)) == pages
    assert hand.cache.held_pages == pages
    hand.check()


def test_tokens_beyond_what_was_evaluated_are_not_donated() -> None:
    hand = Hand()
    session = hand.ask(span(0, 6))
    assert hand.cache.insert(session, span(0, 12)) == 1
    assert hand.cache.match_len(span(0, 13)) == 4


def test_donating_other_tokens_than_were_evaluated_is_refused() -> None:
    hand = Hand()
    session = hand.ask(span(0, 8))
    with pytest.raises(ValueError, match="not the ones that the session evaluated"):
        hand.cache.insert(session, span(1, 8))
    assert hand.cache.held_pages == 0
    hand.check()


def test_donating_the_same_history_again_adds_nothing() -> None:
    hand = Hand()
    session = hand.ask(span(0, 8))
    assert hand.cache.insert(session, span(0, 8), preview="first") == 2
    assert hand.cache.insert(session, span(0, 8), preview="second") == 0
    assert hand.cache.held_pages == 2
    assert hand.pool.refs[:2].tolist() == [2, 2]
    assert hand.cache.stats.merged_pages == 0
    assert [(c.preview, c.num_tokens, c.num_pages) for c in hand.cache.chains()] == [("first", 8, 2)]


def test_a_partly_cached_donation_counts_only_what_it_brought() -> None:
    hand = Hand()
    hand.donate(span(0, 8), preview="short")
    assert hand.donate(span(0, 16), preview="long") == 2
    assert [(c.preview, c.num_tokens, c.num_pages) for c in hand.cache.chains()] == [("short", 8, 2), ("long", 8, 2)]
    assert hand.cache.match_len(span(0, 17)) == 16


def test_with_pages_of_one_token_branches_add_only_their_own_tokens() -> None:
    hand = Hand(40, 1)
    base = span(0, 10)
    assert hand.donate(base) == 10
    assert hand.donate([*base[:5], *span(50, 3)]) == 3
    assert hand.cache.held_pages == 13
    assert hand.cache.match_len([*base[:5], 99]) == 5
    assert hand.donate([*base[:5], *span(50, 3)]) == 0


def test_two_sessions_with_equal_pages_end_up_on_one() -> None:
    hand = Hand()
    twins = [hand.session(), hand.session()]
    for twin in twins:
        twin.eval(span(0, 9))
    assert [t.table.rows.tolist() for t in twins] == [[[0, 1, 2]], [[3, 4, 5]]]
    assert [hand.cache.insert(t, span(0, 9)) for t in twins] == [2, 0]
    assert [t.table.rows.tolist() for t in twins] == [[[0, 1, 2]], [[0, 1, 5]]]
    assert hand.pool.refs.tolist() == [3, 3, 1, 0, 0, 1, 0, 0, 0, 0]
    assert hand.cache.stats.merged_pages == 2
    for twin in twins:
        hand.expect_exact(twin, [*span(0, 9), 77], twin.eval([77]))
    hand.check()


def test_a_fork_goes_on_with_the_pages_that_its_donor_goes_on_with() -> None:
    hand = Hand()
    hand.donate(span(0, 8))
    session = hand.session()
    session.eval(span(0, 9))
    fork = session.fork()
    hand.cache.insert(session, span(0, 9))
    assert (session.table.rows.tolist(), fork.table.rows.tolist()) == ([[0, 1, 4]], [[0, 1, 4]])
    hand.expect_exact(fork, [*span(0, 9), 5], fork.eval([5]))
    hand.expect_exact(session, [*span(0, 9), 6], session.eval([6]))
    fork.release()
    session.release()
    assert hand.pool.num_live == 0
    hand.check()


# Warm equals cold -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [[], span(300, 7)], ids=["the same prompt", "another end"])
def test_a_warm_prompt_gives_the_bytes_of_a_cold_one(tail: list[int]) -> None:
    hand = Hand(20, 8)
    prompt = [*span(0, 21 - len(tail)), *tail]
    hand.donate(span(0, 21))
    warm, cold = hand.session(), Hand(20, 8).session()
    matched = hand.cache.attach(warm, prompt)
    assert matched == (8 if tail else 16)
    a, b = warm.eval(prompt[matched:]), cold.eval(prompt)
    for _ in range(9):
        assert a is not None and b is not None
        assert a.numpy().tobytes() == b.numpy().tobytes()
        token = int(a.argmax())
        a, b = warm.eval([token]), cold.eval([token])


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_every_group_of_a_match_is_attached(num_groups: int) -> None:
    hand = Hand(30, 4, num_groups)
    hand.donate(span(0, 9))
    session = hand.ask([*span(0, 8), 55, 56])
    assert session.table.rows.shape == (num_groups, 3)
    assert hand.cache.held_pages == 2 * num_groups
    assert hand.cache.stats.hit_pages == 2 * num_groups
    assert hand.cache.stats.hit_tokens == 8
    hand.check()


# Collisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", [1, 4])
def test_colliding_keys_never_serve_other_tokens(buckets: int) -> None:
    hand = Hand(40, 4, hash_page=lambda parent, tokens: hash((parent, tokens)) % buckets, vocab_size=7)
    rng = np.random.default_rng(buckets)
    prompts = [rng.integers(0, 3, rng.integers(1, 25)).tolist() for _ in range(40)]
    for prompt in prompts:
        hand.donate(prompt)  # every logit is compared with the model's own
    assert hand.cache.stats.num_collisions > 0
    assert hand.cache.held_pages <= buckets
    assert hand.pool.num_live == 0


def test_a_corrupted_token_is_a_miss_that_takes_nothing() -> None:
    hand = Hand()
    hand.donate(span(0, 8))
    hand.cache.index.tokens[0, 2] += 1
    session = hand.session()
    assert hand.cache.attach(session, span(0, 9)) == 0
    assert (session.n_past, session.table.num_pages) == (0, 0)
    assert hand.pool.refs[:2].tolist() == [1, 1]


# Refusals ---------------------------------------------------------------------------------------------------------


def test_attaching_to_a_session_with_context_is_refused_and_leaves_it_alone() -> None:
    hand = Hand()
    hand.donate(span(0, 8))
    session = hand.session()
    session.eval([1])
    with pytest.raises(SessionInUse, match="holds 1 tokens and 1 pages"):
        hand.cache.attach(session, span(0, 9))
    assert session.tokens.tolist() == [1]
    session.release()
    session.table.ensure(0, 4)
    with pytest.raises(SessionInUse, match="holds 0 tokens and 1 pages"):
        hand.cache.attach(session, span(0, 9))
    session.release()
    assert hand.cache.attach(session, span(0, 9)) == 8


def test_a_session_of_another_pool_is_refused() -> None:
    hand, other = Hand(), Hand()
    stranger = other.ask(span(0, 8))
    for call in (hand.cache.insert, hand.cache.attach):
        with pytest.raises(GeometryMismatch, match="not paged out of this cache's pool"):
            call(stranger, span(0, 8))
    assert other.pool.num_live == 2


def test_one_pool_serves_one_cache_at_a_time() -> None:
    hand = Hand()
    hand.donate(span(0, 8))
    with pytest.raises(GeometryMismatch, match="already serves a prefix cache"):
        PrefixCache(hand.pool)
    hand.cache.release()
    later = PrefixCache(hand.pool)
    session = hand.session()
    session.eval(span(0, 8))
    with pytest.raises(GeometryMismatch, match="serves another prefix cache"):
        hand.cache.insert(session, span(0, 8))
    assert later.insert(session, span(0, 8)) == 2
    later.check()
    hand.pool.check()


def test_a_pool_without_storage_can_be_served_too() -> None:
    pool = PagePool(4, 4)
    cache = PrefixCache(pool)
    pages, tokens = pool.alloc(2), ids(*span(0, 8))
    cache.publish(cache.cursor(), tokens, pages[None])
    assert cache.match_len(span(0, 9)) == 8
    pool.release(pages)
    assert pool.alloc(4).tolist() == [0, 1, 2, 3]
    cache.check()


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="max_pages must be 0"):
        PrefixCache(PagePool(4), max_pages=-1)
    with pytest.raises(ValueError, match="max_pinned_pages must be 0 or more, got -1"):
        PrefixCache(PagePool(4), max_pinned_pages=-1)


@pytest.mark.parametrize("name", ["max_pages", "max_states", "max_state_bytes", "max_pinned_pages"])
def test_a_bound_that_is_no_integer_is_refused(name: str) -> None:
    for bound in (2.5, "many"):
        with pytest.raises(TypeError, match=f"{name} must be an integer, got {bound!r}"):
            PrefixCache(PagePool(4), **{name: bound})


# Letting go of everything -----------------------------------------------------------------------------------------


def test_after_release_nothing_matches_and_sessions_go_on() -> None:
    hand = Hand()
    hand.donate(span(0, 8))
    session = hand.ask([*span(0, 8), 5])
    hand.cache.release()
    assert (hand.cache.held_pages, hand.cache.chains()) == (0, [])
    assert hand.cache.match_len(span(0, 9)) == 0
    assert hand.pool.num_live == 3
    hand.check()
    hand.expect_exact(session, [*span(0, 8), 5, 6], session.eval([6]))
    hand.cache.release()
    session.release()
    assert hand.pool.num_free == 10
    assert hand.donate(span(0, 8)) == 2  # the cache can be used again


def test_a_cursor_of_before_the_release_publishes_nothing() -> None:
    hand = Hand()
    session = hand.ask(span(0, 12))
    cursor = hand.cache.cursor()
    hand.cache.publish(cursor, session.tokens, session.table.rows[:, :1])
    hand.cache.release()
    assert hand.cache.publish(cursor, session.tokens, session.table.rows[:, :3]) == 0
    fresh = hand.cache.cursor()
    hand.cache.release()
    assert hand.cache.publish(fresh, session.tokens, session.table.rows[:, :3]) == 0
    assert hand.cache.held_pages == 0
    hand.check()


def test_pages_below_an_evicted_parent_are_not_published() -> None:
    hand = Hand()
    session = hand.ask(span(0, 8))
    cursor = hand.cache.cursor()
    hand.cache.publish(cursor, session.tokens, session.table.rows[:, :1])
    session.release()
    assert hand.cache.evict(1) == 1
    page = hand.pool.alloc(2)
    assert hand.cache.publish(cursor, ids(*span(0, 8)), page[None]) == 0
    assert cursor.closed and not cursor.open
    hand.check()


def test_a_chain_that_was_evicted_can_be_brought_again_by_the_same_cursor() -> None:
    hand = Hand()
    cursor, tokens = hand.cache.cursor(), ids(*span(0, 8))
    for _ in range(3):
        pages = hand.pool.alloc(2)
        assert hand.cache.publish(cursor, tokens, pages[None], "again") == 0
        assert [c.num_pages for c in hand.cache.chains()] == [2]
        hand.check()
        hand.pool.release(pages)
        hand.cache.evict(2)
        assert hand.cache.chains() == []
        cursor.restart()


def test_a_cache_follows_its_pool_as_it_grows() -> None:
    model = EchoModel(997, num_groups=2)
    pool = growing_pool(model, 4, 64)
    cache = PrefixCache(pool)
    for start in range(0, 600, 60):
        session = Session(model, pool)
        session.eval(span(start, 24))
        cache.insert(session, span(start, 24))
        session.release()
        pool.check()
        cache.check()
    assert pool.num_pages == 64
    assert cache.match_len(span(540, 25)) == 24
    session = Session(model, pool)
    matched = cache.attach(session, span(540, 25))
    assert np.array_equal(session.eval(span(540, 25)[matched:]).numpy(), model.oracle(span(540, 25)))


def test_hash_functions_are_called_with_the_parents_key_and_the_pages_bytes() -> None:
    calls = []

    def spy(parent, tokens):
        calls.append((parent, tokens))
        return page_hash(parent, tokens)

    hand = Hand(10, 4, hash_page=spy)
    session = hand.ask(span(0, 8))
    calls.clear()
    hand.cache.insert(session, span(0, 8))
    root = hand.cache.cursor().root
    assert calls == [
        (root, ids(0, 1, 2, 3).tobytes()),
        (page_hash(root, ids(0, 1, 2, 3).tobytes()), ids(4, 5, 6, 7).tobytes()),
    ]


def test_who_shares_what_is_donated_shares_its_prefix_with_the_cache() -> None:
    """Else a page could be idle that nothing can evict, since somebody uses one that stands on it."""
    hand = Hand(6)
    hand.donate(span(0, 4))  # page 0
    session = hand.session()
    session.eval(span(0, 8))  # pages 1 and 2, computed again
    fork = session.fork()
    assert hand.cache.insert(session, span(0, 8)) == 1
    assert session.table.rows.tolist() == fork.table.rows.tolist() == [[0, 2]]
    session.release()
    hand.check()
    assert hand.pool.num_available == 4 and len(hand.pool.alloc(4)) == 4


def test_a_cache_whose_pool_serves_another_one_since_keeps_no_checkpoint() -> None:
    """Nobody would evict its pages: the pool asks the other cache."""
    old = Hand(10, 4, kind=EchoHybrid)
    new = PrefixCache(old.pool)
    session = old.ask(span(0, 8))
    with pytest.raises(GeometryMismatch, match="its pool serves another prefix cache since"):
        old.cache.insert(session, span(0, 8))
    session.release()
    new.check()
    assert old.pool.num_free == 10
