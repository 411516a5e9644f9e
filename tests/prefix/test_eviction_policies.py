"""The eviction policies over a real cache: exact pages on tiny pools, and a plain oracle for any order of prompts."""

from __future__ import annotations

import numpy as np
import pytest
from evicting import Driver, Oracle, make_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.prefix.eviction import GDSF, LFUDA, POLICIES, LearningPolicy
from paged.prefix.hashing import page_hash
from paged.prefix.index import PrefixIndex
from paged.prefix.retention import Retention

NAMES = sorted(POLICIES)

# Exact pages ------------------------------------------------------------------------------------------------------


def after(policy: str, capacity: int, *chains) -> set[tuple[int, ...]]:
    """What a cache of `capacity` pages holds after these prompts."""
    driver = Driver(capacity, policy)
    for chain in chains:
        driver.request(chain)
        driver.check()
    return driver.cached()


def test_lru_lets_the_page_go_that_was_used_longest_ago() -> None:
    assert after("lru", 3, [1], [2], [3], [1], [4]) == {(3,), (1,), (4,)}


def test_lfu_keeps_what_was_used_often_where_lru_lets_it_go() -> None:
    prompts = [1], [1], [1], [2], [3], [4]
    assert after("lru", 3, *prompts) == {(2,), (3,), (4,)}
    assert after("lfu_da", 3, *prompts) == {(1,), (3,), (4,)}


def test_lfu_forgets_what_was_popular_once() -> None:
    once_popular = [[1]] * 4
    singles = [[n] for n in range(2, 12)]
    assert (1,) in after("lfu_da", 2, *once_popular, *singles[:3])
    assert (1,) not in after("lfu_da", 2, *once_popular, *singles)


def test_gdsf_keeps_the_long_prompt_where_lfu_lets_it_go() -> None:
    prompts = [1, 1, 1], [2], [3]
    assert (1, 1, 1) not in after("lfu_da", 4, *prompts)
    assert (1, 1, 1) in after("gdsf", 4, *prompts)


def test_shortest_lets_the_shortest_prefix_go_however_recent() -> None:
    assert after("shortest", 5, [1, 1, 1], [2, 2], [3]) == {(1,), (1, 1), (1, 1, 1), (2,), (3,)}
    assert after("shortest", 6, [1, 1, 1], [2, 2], [3], [4, 4]) == {(1,), (1, 1), (1, 1, 1), (2,), (4,), (4, 4)}


def test_of_equals_the_one_that_fell_idle_first_goes() -> None:
    for policy in ("lfu_da", "gdsf", "shortest"):
        assert after(policy, 3, [1], [2], [3], [4]) == {(2,), (3,), (4,)}, policy


def test_only_leaves_go_whatever_their_rank() -> None:
    for policy in NAMES:
        driver = Driver(4, policy)
        for chain in ([1, 2, 3], [1, 2, 3], [7]):
            driver.request(chain)
        for _ in range(4):
            driver.cache.evict(1)
            driver.check()
            assert all(prefix[:-1] in driver.cached() for prefix in driver.cached() if len(prefix) > 1), policy
        assert driver.cached() == set()


def test_the_ids_that_come_free_are_those_of_the_pages_that_went() -> None:
    for policy, gone in (("lru", 0), ("lfu_da", 1), ("gdsf", 1)):
        driver = Driver(3, policy)
        for chain in ([1], [1], [2], [3]):  # pages 0, 1 and 2
            driver.request(chain)
        assert driver.pool.alloc(1).tolist() == [gone], policy
    driver = Driver(4, "shortest")
    driver.request([1, 1, 1])  # 0, 1, 2
    driver.request([2])  # 3
    assert driver.pool.alloc(2).tolist() == [2, 3]  # the last freed is handed out first


# Worth ------------------------------------------------------------------------------------------------------------


def test_age_is_the_greatest_worth_that_went_and_never_falls() -> None:
    driver = Driver(2, "lfu_da")
    policy = driver.cache.queue.policy
    assert isinstance(policy, LFUDA)
    ages = []
    for chain in ([1], [1], [2], [3], [4], [5], [1], [6]):
        driver.request(chain)
        ages.append(policy.age)
    assert ages == sorted(ages)
    assert ages[:5] == [0.0, 0.0, 0.0, 1.0, 2.0]


def test_dropping_a_namespace_does_not_age_the_cache() -> None:
    driver = Driver(4, "lfu_da")
    for chain in ([1], [1], [2]):
        driver.request(chain)
    driver.cache.drop("")
    assert driver.cache.queue.policy.age == 0.0  # type: ignore[attr-defined]
    driver.check()


def test_a_new_page_inherits_nothing_from_the_one_that_stood_there() -> None:
    driver = Driver(1, "lfu_da")
    for chain in ([1], [1], [1], [2]):
        driver.request(chain)
    policy = driver.cache.queue.policy
    assert isinstance(policy, LFUDA)
    (node,) = driver.cache.index.by_key.values()
    assert policy.uses[node] == 1
    assert policy.worth[node] == 3.0 + 1


def test_a_row_costs_twice_as_much_where_attention_costs_as_much_as_the_weights() -> None:
    index = PrefixIndex(4, 1, page_hash)
    index.rows[:4], index.end[:4] = [4, 4, 4, 1], [4, 104, 204, 105]
    weight = GDSF(even_at=102).weight(index, np.arange(4, dtype=np.int32))
    assert weight.tolist() == pytest.approx([1 + 2 / 102, 2.0, 1 + 202 / 102, 0.25 * (1 + 104.5 / 102)])


def test_end_is_the_length_of_the_prefix() -> None:
    driver = Driver(10)
    driver.request([5, 6, 7])
    driver.request([5, 8])
    index = driver.cache.index
    ends = {int(index.tokens[n, 0]): int(index.end[n]) for n in index.by_key.values()}
    assert ends == {5: 1, 6: 2, 7: 3, 8: 2}


def test_gdsf_refuses_a_position_that_is_none() -> None:
    with pytest.raises(ValueError, match="even_at must be a position of 1 or more, got 0"):
        GDSF(0)


def test_only_the_policies_that_count_uses_hear_of_them() -> None:
    assert {name for name in NAMES if isinstance(make_policy(name), LearningPolicy)} == {"gdsf", "lfu_da"}


# Any order of prompts ---------------------------------------------------------------------------------------------

chains = st.lists(st.integers(0, 2), min_size=1, max_size=5)
retentions = st.one_of(
    st.none(),
    st.none(),
    st.builds(Retention, st.sampled_from(["none", "turn", "turn", 3.0, 30.0]), st.integers(0, 2)),
)


@pytest.mark.parametrize("policy", NAMES)
@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(5, 14), prompts=st.lists(chains, max_size=40))
def test_a_cache_does_what_the_oracle_does(policy: str, capacity: int, prompts: list[list[int]]) -> None:
    driver, oracle = Driver(capacity, policy), Oracle(capacity, policy)
    for chain in prompts:
        assert driver.request(chain) == oracle.request(chain)
        assert driver.cached() == set(oracle.entries)
        driver.check()


@pytest.mark.parametrize("policy", NAMES)
@settings(max_examples=150, deadline=None)
@given(
    capacity=st.integers(5, 14),
    prompts=st.lists(st.tuples(chains, retentions, st.sampled_from([0.0, 1.0, 4.0, 11.0])), max_size=40),
)
def test_a_cache_with_hints_does_what_the_oracle_does(policy: str, capacity: int, prompts) -> None:
    driver, oracle = Driver(capacity, policy), Oracle(capacity, policy)
    for chain, retention, later in prompts:
        driver.now = oracle.now = driver.now + later
        assert driver.request(chain, retention) == oracle.request(chain, retention)
        assert driver.cached() == set(oracle.entries)
        driver.check()
