"""EvictionQueue: idle leaves by rank, and entries that were overtaken."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import span
from fakes import EchoModel

from paged.prefix.eviction import LRU, get_policy
from paged.prefix.eviction_queue import EvictionQueue
from paged.prefix.hashing import page_hash
from paged.prefix.index import PrefixIndex
from scheduler import Engine, SamplingParams


def queue_of(n: int, policy=None) -> tuple[PrefixIndex, EvictionQueue]:
    """An index with `n` leaves (nodes 0..n-1, used at ticks 0..n-1) and an empty queue over it."""
    index = PrefixIndex(1, 1, page_hash)
    index._allocate(n)
    index.birth[:] = range(1, n + 1)
    index.last_use[:] = range(n)
    index.by_key = {i: i for i in range(n)}
    return index, EvictionQueue(index, policy or LRU())


def drain(queue: EvictionQueue) -> list[int]:
    """Every node that comes out, in order."""
    out = []
    while (node := queue.pop()) is not None:
        out.append(node)
    return out


def test_the_least_recently_used_leaf_comes_first_whatever_the_order_of_arrival() -> None:
    _, queue = queue_of(5)
    for node in (3, 0, 4, 1, 2):
        queue.push(node)
    assert drain(queue) == [0, 1, 2, 3, 4]


def test_equal_ranks_come_in_order_of_arrival() -> None:
    index, queue = queue_of(4)
    index.last_use[:] = 9
    for node in (2, 0, 3, 1):
        queue.push(node)
    assert drain(queue) == [2, 0, 3, 1]


def test_a_page_that_fell_idle_again_has_its_new_rank_only() -> None:
    index, queue = queue_of(3)
    for node in range(3):
        queue.push(node)
    index.last_use[0] = 50
    queue.push(0)
    assert drain(queue) == [1, 2, 0]


def test_a_page_that_is_gone_or_was_replaced_does_not_come_out() -> None:
    index, queue = queue_of(3)
    for node in range(3):
        queue.push(node)
    index.birth[0] = -1
    index.birth[1] = 99  # another page in the same place
    assert drain(queue) == [2]
    queue.push(1)
    assert drain(queue) == [1]


def test_an_empty_queue_gives_none() -> None:
    _, queue = queue_of(2)
    assert queue.pop() is None
    queue.push(1)
    queue.clear()
    assert queue.pop() is None


def test_stale_entries_stay_bounded_however_often_a_page_comes_and_goes() -> None:
    index, queue = queue_of(10)
    for turn in range(1000):
        index.last_use[turn % 10] = turn
        queue.push(turn % 10)
        assert len(queue._heap) <= 2 * 10 + 64 + 1
    assert drain(queue) == list(range(10))


def test_another_policy_ranks_as_it_likes() -> None:
    class Newest:
        name = "newest"

        def rank(self, index: PrefixIndex, node: int) -> float:
            return -float(index.last_use[node])

    _, queue = queue_of(4, Newest())
    for node in range(4):
        queue.push(node)
    assert drain(queue) == [3, 2, 1, 0]


def test_policies_are_named_or_given() -> None:
    assert get_policy("lru").name == "lru"
    mine = LRU()
    assert get_policy(mine) is mine
    for none in (None, 5, object()):  # one without a rank would fail as the first page falls idle
        with pytest.raises(TypeError, match=r"must be a name, or have a name and rank\(\), got "):
            get_policy(none)
    with pytest.raises(ValueError, match="must be one of gdsf, lfu_da, lru, shortest, got 'shortest-first'"):
        get_policy("shortest-first")


class Failing(LRU):
    """It cannot rank node 1, and what it says of node 2 has no place in an order."""

    def rank(self, index, node):
        if node == 1:
            raise RuntimeError("no rank")
        return float("nan") if node == 2 else super().rank(index, node)


class Deaf(LRU):
    def entered(self, index, nodes):
        raise RuntimeError("not now")

    attached = idle = gone = entered


def test_what_a_policy_cannot_rank_goes_first_and_is_counted() -> None:
    _, queue = queue_of(5, Failing())
    for node in range(5):
        queue.push(node)
    assert drain(queue) == [1, 2, 0, 3, 4]
    assert queue.stats.policy_errors == 2


def test_a_policy_that_fails_to_listen_is_counted_and_changes_nothing() -> None:
    _, queue = queue_of(3, Deaf())
    nodes = np.arange(3, dtype=np.int32)
    queue.entered(nodes.tolist())
    queue.attached(nodes)
    queue.idle(nodes)
    for node in range(3):
        queue.push(node)
    queue.gone(0)
    assert drain(queue) == [0, 1, 2]
    assert queue.stats.policy_errors == 4


@pytest.mark.parametrize("policy", [Failing(), Deaf()], ids=["rank", "hooks"])
def test_an_engine_with_a_policy_that_fails_keeps_its_accounts(policy: LRU) -> None:
    engine = Engine(EchoModel(), num_pages=12, page_size=4, eviction=policy)
    for i in range(8):
        [output] = engine.generate([span(10 * i, 18)], SamplingParams(max_tokens=6))
        assert output.token_ids == engine.model.greedy(span(10 * i, 18), 6)
        engine.check()
    assert engine.stats()["policy_errors"] > 0
    assert engine.stats()["evicted_pages"] > 0
