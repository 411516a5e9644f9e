"""Making room: eviction order, pins, the page budget, and check() of the cache."""

from __future__ import annotations

import pytest
from byhand import Hand, expect_check_fails, span

from paged.errors import OutOfPages
from paged.prefix.cache import PrefixCache

# Evicting ---------------------------------------------------------------------------------------------------------


def test_evict_gives_back_as_many_as_asked_for_and_no_more() -> None:
    hand = Hand(10, 4)
    hand.donate(span(0, 24))
    assert hand.cache.evict(0) == 0
    assert hand.cache.evict(2) == 2
    assert hand.pages_of(span(0, 24)) == [0, 1, 2, 3]
    assert hand.cache.evict(100) == 4
    assert hand.cache.evict(1) == 0
    assert hand.pool.num_free == 10
    hand.check()


def test_a_chain_goes_from_its_deepest_page_to_its_root() -> None:
    hand = Hand(10, 4)
    hand.donate(span(0, 16))
    for left in (3, 2, 1, 0):
        assert hand.cache.evict(1) == 1
        assert hand.pages_of(span(0, 16)) == list(range(left))
        hand.check()


def test_of_two_chains_the_one_that_fell_idle_first_goes_whole_before_the_other() -> None:
    hand = Hand(10, 4)
    one, two = hand.ask(span(0, 8)), hand.ask(span(50, 8))
    hand.cache.insert(one, span(0, 8))
    hand.cache.insert(two, span(50, 8))
    two.release()  # though it came later
    one.release()
    seen = []
    for _ in range(4):
        hand.cache.evict(1)
        seen.append((hand.cache.match_len(span(0, 9)), hand.cache.match_len(span(50, 9))))
    assert seen == [(8, 4), (8, 0), (4, 0), (0, 0)]


def test_a_shared_opening_stands_until_its_last_branch_went() -> None:
    hand = Hand(12, 4)
    hand.donate([*span(0, 8), *span(40, 4)])
    hand.donate([*span(0, 8), *span(60, 4)])
    assert hand.cache.evict(2) == 2  # the leaves of both branches, the older first
    assert hand.pages_of(span(0, 8)) == [0, 1]
    assert hand.cache.evict(1) == 1
    assert hand.pages_of(span(0, 8)) == [0]
    hand.check()


def test_a_page_in_use_blocks_its_ancestors_but_nothing_else() -> None:
    hand = Hand(12, 4)
    hand.donate(span(0, 12))
    hand.donate([*span(0, 4), *span(70, 8)])
    user = hand.session()
    assert hand.cache.attach(user, span(0, 9)) == 8
    assert hand.cache.evict(100) == 3  # page 2 of the first chain, pages 1 and 2 of the branch
    assert hand.pages_of(span(0, 12)) == [0, 1]
    hand.check()
    user.release()
    assert hand.cache.evict(100) == 2
    hand.check()


def test_a_leaf_with_one_group_in_use_stays() -> None:
    hand = Hand(12, 4, num_groups=2)
    hand.donate(span(0, 4))
    pages = hand.cache.index.pages[0].copy()
    hand.pool.share(pages[:1])
    assert hand.cache.evict(10) == 0
    hand.pool.release(pages[:1])
    hand.check()
    assert hand.cache.evict(1) == 2  # a page of each group goes at once
    assert hand.pool.num_free == 12


def test_children_that_come_while_a_leaf_is_queued_keep_it() -> None:
    hand = Hand(12, 4)
    hand.donate(span(0, 4))  # an idle leaf, queued
    session = hand.ask(span(0, 8))
    hand.cache.insert(session, span(0, 8))
    assert hand.cache.evict(10) == 0
    session.release()
    hand.check()
    assert hand.cache.evict(1) == 1
    assert hand.pages_of(span(0, 8)) == [0]


def test_eviction_for_an_allocation_takes_only_what_is_missing() -> None:
    hand = Hand(6, 4)
    hand.donate(span(0, 16))
    hand.pool.alloc(4)
    assert hand.cache.held_pages == 2
    assert hand.cache.stats.evicted_pages == 2
    with pytest.raises(OutOfPages):
        hand.pool.alloc(3)
    assert hand.cache.held_pages == 2
    hand.check()


def test_a_policy_decides_which_leaf_goes() -> None:
    class Shortest:
        name = "shortest chain"

        def rank(self, index, node: int) -> float:
            depth = 0
            while node >= 0:
                node, depth = int(index.parent[node]), depth + 1
            return float(depth)

    hand = Hand(12, 4)
    hand.cache.release()
    hand.cache = PrefixCache(hand.pool, policy=Shortest())
    hand.donate(span(0, 12))
    hand.donate(span(60, 4))
    assert hand.cache.evict(1) == 1
    assert hand.cache.match_len(span(60, 5)) == 0
    assert hand.cache.match_len(span(0, 13)) == 12


# A budget of pages ------------------------------------------------------------------------------------------------


def test_a_donation_past_the_bound_gives_up_its_own_tail() -> None:
    hand = Hand(10, 4, max_pages=2)
    session = hand.ask(span(0, 12))
    assert hand.cache.insert(session, span(0, 12)) == 3
    assert hand.cache.held_pages == 2
    assert hand.cache.stats.evicted_pages == 1
    assert hand.pool.refs[:3].tolist() == [2, 2, 1]  # the session goes on using the page that is cached no more
    assert hand.cache.match_len(span(0, 13)) == 8
    hand.check()


def test_idle_pages_of_others_go_before_the_newcomers_tail() -> None:
    hand = Hand(10, 4, max_pages=3)
    hand.donate(span(0, 8))
    hand.donate(span(50, 8))
    assert hand.pages_of(span(0, 8)) == [0]
    assert len(hand.pages_of(span(50, 8))) == 2
    hand.check()


def test_pages_in_use_are_no_victims_so_the_newcomer_yields() -> None:
    hand = Hand(12, 4, max_pages=2)
    user = hand.ask(span(0, 8))
    hand.cache.insert(user, span(0, 8))
    late = hand.ask(span(50, 12))
    hand.cache.insert(late, span(50, 12))
    assert hand.cache.match_len(span(0, 9)) == 8
    assert hand.cache.match_len(span(50, 13)) == 0
    assert hand.cache.held_pages == 2
    hand.check()


def test_a_trimmed_donation_below_a_cached_opening_leaves_the_opening() -> None:
    hand = Hand(12, 4, max_pages=2)
    hand.donate(span(0, 8))
    other = hand.session()
    other.eval(span(0, 16))  # its own copies: the cached ones stay idle
    hand.cache.insert(other, span(0, 16))
    assert other.table.rows[0, :2].tolist() == hand.pages_of(span(0, 8)) == [0, 1]
    assert hand.cache.held_pages == 2
    hand.check()
    hand.expect_exact(other, [*span(0, 16), 3], other.eval([3]))


def test_a_bound_below_one_page_of_every_group_keeps_nothing() -> None:
    hand = Hand(12, 4, num_groups=2, max_pages=1)
    hand.donate(span(0, 8))
    assert hand.cache.held_pages == 0
    assert hand.pool.num_free == 12


def test_a_bound_that_no_group_count_divides_is_rounded_down() -> None:
    hand = Hand(24, 4, num_groups=2, max_pages=5)
    hand.donate(span(0, 16))
    assert hand.cache.held_pages == 4
    hand.check()


@pytest.mark.parametrize("max_pages", [1, 2, 3, 7])
def test_the_bound_holds_after_every_donation(max_pages: int) -> None:
    hand = Hand(16, 4, max_pages=max_pages)
    for start in range(0, 200, 7):
        hand.donate(span(start % 30, 4 + start % 17))
        assert hand.cache.held_pages <= max_pages


# Counters ---------------------------------------------------------------------------------------------------------


def test_queries_and_hits_are_counted_in_tokens_and_pages() -> None:
    hand = Hand(20, 4)
    hand.donate(span(0, 12))
    hand.ask([*span(0, 8), *span(90, 3)])
    hand.ask(span(60, 3))
    stats = hand.cache.stats
    assert (stats.num_queries, stats.query_tokens) == (3, 12 + 11 + 3)
    assert (stats.hit_tokens, stats.hit_pages) == (8, 2)
    assert (stats.inserted_pages, stats.merged_pages, stats.evicted_pages, stats.num_collisions) == (3, 0, 0, 0)


def test_chains_tell_who_brought_what_and_who_was_hit() -> None:
    hand = Hand(20, 4)
    hand.donate(span(0, 8), preview="opening")
    hand.donate([*span(0, 8), *span(50, 4)], preview="first chat")
    hand.donate([*span(0, 8), *span(70, 8)], preview="second chat")
    for _ in range(3):
        hand.ask([*span(0, 8), *span(70, 6)]).release()
    hand.ask([*span(0, 8), 1]).release()
    chains = hand.cache.chains()
    assert [(c.preview, c.num_tokens, c.num_pages, c.num_hits) for c in chains] == [
        ("opening", 8, 2, 3),  # both later donations and the last prompt ended there
        ("first chat", 4, 1, 0),
        ("second chat", 8, 2, 3),
    ]
    assert chains[0].born_at <= chains[1].born_at
    assert chains[1].last_hit_at == 0 and chains[2].last_hit_at >= chains[2].born_at


def test_a_chain_that_lost_every_page_is_listed_no_more() -> None:
    hand = Hand(20, 4)
    hand.donate(span(0, 8), preview="old")
    hand.donate(span(50, 8), preview="new")
    hand.cache.evict(1)
    assert [(c.preview, c.num_tokens, c.num_pages) for c in hand.cache.chains()] == [("old", 8, 1), ("new", 8, 2)]
    hand.cache.evict(1)
    assert [c.preview for c in hand.cache.chains()] == ["new"]


def test_collisions_are_counted_once_for_each_page_that_stays_uncached() -> None:
    hand = Hand(20, 4, hash_page=lambda parent, tokens: 7)
    hand.donate(span(0, 4))
    assert hand.cache.stats.num_collisions == 0
    for n in (1, 2):
        hand.donate(span(50, 4))
        assert hand.cache.stats.num_collisions == n
    assert hand.cache.stats.inserted_pages == 1
    cursor, session = hand.cache.cursor(), hand.ask(span(70, 12))
    for pages in (1, 2, 3):  # a running request that collided once tries no more
        hand.cache.publish(cursor, session.tokens, session.table.rows[:, :pages])
    assert cursor.closed
    assert hand.cache.stats.num_collisions == 3


# check() ----------------------------------------------------------------------------------------------------------


def flag_too_many(cache: PrefixCache) -> None:
    cache.pool.held[9] = True


def flag_missing(cache: PrefixCache) -> None:
    cache.pool.held[0] = False


def leaf_not_queued(cache: PrefixCache) -> None:
    cache.queue.clear()


def leaf_entry_is_stale(cache: PrefixCache) -> None:
    cache.queue._entry[1] += 1


def chain_counts_too_much(cache: PrefixCache) -> None:
    cache._chains[1].num_pages += 1


def chain_is_forgotten(cache: PrefixCache) -> None:
    cache._chains.clear()


def chain_without_pages(cache: PrefixCache) -> None:
    cursor = cache.cursor()
    cache._begin_chain(cursor)
    cache._count(cursor, 0, 0, "nothing")


def bound_is_broken(cache: PrefixCache) -> None:
    cache.max_pages = 1


def child_in_use_alone(cache: PrefixCache) -> None:
    cache.pool.share(cache.index.pages[1])


def index_is_broken(cache: PrefixCache) -> None:
    cache.index.children[0] += 1


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (flag_too_many, "held flags"),
        (flag_missing, "held flags"),
        (leaf_not_queued, "idle leaf cannot be evicted"),
        (leaf_entry_is_stale, "idle leaf cannot be evicted"),
        (chain_counts_too_much, "live pages are wrong"),
        (chain_is_forgotten, "live pages are wrong"),
        (chain_without_pages, "live pages are wrong"),
        (bound_is_broken, "more pages are held than max_pages"),
        (child_in_use_alone, "a page is in use and its parent is not"),
        (index_is_broken, "children count"),
    ],
)
def test_check_notices(corrupt, message: str) -> None:
    hand = Hand(10, 4)
    hand.donate(span(0, 8))
    hand.check()
    corrupt(hand.cache)
    expect_check_fails(hand.cache, message)


def test_check_does_not_ask_for_pages_in_use_to_be_evictable() -> None:
    hand = Hand(10, 4)
    session = hand.ask(span(0, 8))
    hand.cache.insert(session, span(0, 8))
    hand.cache.queue.clear()
    hand.check()
    assert hand.cache.evict(5) == 0
    session.release()
    hand.check()
    assert sorted(hand.pool.alloc(10).tolist()) == span(0, 10)
