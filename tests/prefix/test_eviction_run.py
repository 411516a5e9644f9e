"""Chains leave the cache in one run, in the order in which their pages would leave one by one."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import Hand, span
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.kv.pages import PagePool
from paged.prefix import tree as tree_module
from paged.prefix.cache import PrefixCache
from paged.prefix.events import PageRemoved
from paged.prefix.eviction import POLICIES
from paged.prefix.eviction_run import run_up
from paged.prefix.retention import Retention

SIZE = 2


def cached(num_pages: int = 24, policy: str = "lru") -> tuple[PagePool, PrefixCache, list[object]]:
    pool = PagePool(num_pages, SIZE)
    cache = PrefixCache(pool, policy=policy)
    removed: list[object] = []
    cache.listen = lambda event: removed.append(event.key) if isinstance(event, PageRemoved) else None
    return pool, cache, removed


def donate(pool: PagePool, cache: PrefixCache, tokens: list[int]) -> None:
    """Compute a prompt and leave its pages behind; nothing where there is no room."""
    prompt = np.array([*tokens, 99], np.int32)
    cursor = cache.cursor()
    cache.seek(cursor, prompt, exact=False)
    pages = cache.take(cursor)
    missing = len(tokens) // SIZE - pages.shape[1]
    if missing > pool.num_available:
        pool.release(pages[0])
        return
    pages = np.concatenate([pages, pool.alloc(missing)[None]], axis=1)
    cache.publish(cursor, prompt, pages)
    pool.release(pages[0])


def test_a_chain_that_fell_idle_as_a_whole_is_one_run_from_its_end() -> None:
    pool, cache, _ = cached()
    donate(pool, cache, span(0, 10))
    leaf = cache.queue.pop()
    index = cache.index
    run = run_up(cache, leaf, 4)
    assert len(run) == 4
    assert [int(index.end[node]) for node in run] == [10, 8, 6, 4]


def test_a_run_stops_where_another_branch_stands_and_where_a_page_is_in_use() -> None:
    pool, cache, _ = cached()
    donate(pool, cache, span(0, 8))
    donate(pool, cache, [*span(0, 4), *span(50, 6)])
    leaf = cache.queue.pop()
    assert [int(cache.index.end[n]) for n in run_up(cache, leaf, 9)] == [8, 6]  # tokens 0 to 3 carry the other one
    cursor = cache.cursor()
    cache.seek(cursor, np.array([*span(0, 6), 99], np.int32), exact=False)
    pages = cache.take(cursor)
    assert [int(cache.index.end[n]) for n in run_up(cache, leaf, 9)] == [8]
    pool.release(pages[0])


def test_a_run_stops_where_another_leaf_goes_before_the_page_above() -> None:
    pool, cache, removed = cached()
    donate(pool, cache, span(0, 8))
    donate(pool, cache, span(50, 4))
    donate(pool, cache, span(0, 4))  # the first half is used again, after the other one
    leaf = cache.queue.pop()
    assert [int(cache.index.end[n]) for n in run_up(cache, leaf, 9)] == [8, 6]
    cache.queue.push(leaf)
    assert cache.evict(4) == 4
    assert cache.match_len(np.array([*span(0, 8), 9], np.int32)) == 4
    assert cache.match_len(np.array([*span(50, 4), 9], np.int32)) == 0
    assert len(removed) == 4


def test_no_more_goes_than_was_asked_for() -> None:
    pool, cache, removed = cached()
    donate(pool, cache, span(0, 20))
    assert cache.evict(3) == 3 and len(removed) == 3 and cache.held_pages == 7
    pool.alloc(pool.num_free + 2)
    assert cache.held_pages == 5
    cache.check()


def test_where_hints_of_retention_are_in_use_pages_go_one_by_one() -> None:
    h = Hand(32, SIZE)
    h.donate(span(0, 8))
    leaf = h.cache.queue.pop()
    assert len(run_up(h.cache, leaf, 9)) == 4
    h.cache.queue.retentions.mark(h.cache.index, np.array([leaf], np.int32), Retention("turn"), 1)
    assert run_up(h.cache, leaf, 9) == [leaf]


OPS = st.lists(
    st.tuples(st.sampled_from(["donate", "donate", "donate", "evict"]), st.integers(0, 3), st.integers(1, 9)),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(ops=OPS)
def test_runs_take_the_pages_that_one_by_one_would_go_in_the_same_order(policy: str, ops) -> None:
    def play(run_of) -> list[object]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tree_module, "run_up", run_of)
            pool, cache, removed = cached(policy=policy)
            for op, branch, n in ops:
                if op == "donate":
                    donate(pool, cache, [*span(0, 2 * min(n, branch)), *span(20 + 10 * branch, 2 * n)])
                else:
                    cache.evict(n)
                cache.check()
                pool.check()
            cache.evict(pool.num_pages)
            assert cache.held_pages == 0
            return removed

    def alone(tree, leaf: int, most: int) -> list[int]:
        tree.queue.gone(leaf)
        return [leaf]

    assert play(run_up) == play(alone)


def test_a_run_whose_pages_have_other_children_is_refused() -> None:
    pool, cache, _ = cached()
    donate(pool, cache, span(0, 8))
    donate(pool, cache, [*span(0, 4), *span(50, 4)])
    leaf = next(n for n in cache.queue.nodes() if cache.index.end[n] == 8)
    run = [leaf, int(cache.index.parent[leaf]), int(cache.index.parent[cache.index.parent[leaf]])]
    with pytest.raises(AssertionError, match="follow one branch"):
        cache.index.remove_run(run)
