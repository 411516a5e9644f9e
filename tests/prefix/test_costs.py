"""Costs as counts: what is hashed, looked up and popped. No clock is read."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from byhand import Hand, ids, span

from paged.prefix.hashing import page_hash


class CountingHash:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, parent, tokens):
        self.calls += 1
        return page_hash(parent, tokens)


class CountingDict(dict):
    gets = 0

    def get(self, *args):
        self.gets += 1
        return super().get(*args)


def counted(num_pages: int = 64, max_pages: int = 0) -> tuple[Hand, CountingHash]:
    hashes = CountingHash()
    hand = Hand(num_pages, 4, max_pages=max_pages, hash_page=hashes, vocab_size=4000)
    return hand, hashes


def test_a_second_seek_with_the_same_cursor_hashes_and_looks_up_nothing_more() -> None:
    hand, hashes = counted()
    hand.donate(span(0, 40))
    cursor, prompt = hand.cache.cursor(), ids(*span(0, 401))
    hashes.calls = 0
    assert hand.cache.seek(cursor, prompt) == 40
    assert hashes.calls == 100
    hand.cache.index.by_key = table = CountingDict(hand.cache.index.by_key)
    for _ in range(50):
        assert hand.cache.seek(cursor, prompt) == 40
    assert hashes.calls == 100
    assert table.gets == 50  # the one key behind the match, each time
    assert hand.cache.seek(cursor, prompt[:41]) == 40
    assert table.gets == 50  # nothing lies behind it


@pytest.mark.parametrize(("cached", "most"), [(0, 16), (20, 48), (200, 240), (1600, 400)])
def test_asking_how_much_is_cached_hashes_little_more_than_that(cached: int, most: int) -> None:
    hand, hashes = counted(num_pages=500)
    if cached:
        hand.donate(span(0, cached))
    hashes.calls = 0
    assert hand.cache.match_len(span(0, 1601)) == cached
    assert cached // 4 <= hashes.calls <= most


def test_a_prompt_that_grew_hashes_only_its_new_pages() -> None:
    hand, hashes = counted()
    cursor, tokens = hand.cache.cursor(), ids(*span(0, 401))
    for n in range(1, 402, 10):
        hand.cache.seek(cursor, tokens[:n])
    assert hashes.calls == 100


def test_publishing_page_by_page_hashes_each_page_once() -> None:
    hand, hashes = counted()
    pages = hand.pool.alloc(50)
    cursor, tokens = hand.cache.cursor(), ids(*span(0, 200))
    for n in range(1, 51):
        hand.cache.publish(cursor, tokens, pages[None, :n])
    assert hashes.calls == 50
    assert hand.cache.held_pages == 50


def test_publishing_a_page_looks_up_one_key_however_deep_it_lies() -> None:
    hand, _ = counted(300)
    pages = hand.pool.alloc(300)
    cursor, tokens = hand.cache.cursor(), ids(*span(0, 1200))
    hand.cache.publish(cursor, tokens, pages[None, :299])
    hand.cache.index.by_key = table = CountingDict(hand.cache.index.by_key)
    hand.cache.publish(cursor, tokens, pages[None])
    assert table.gets == 1
    hand.cache.publish(cursor, tokens, pages[None])
    assert table.gets == 1


def test_a_match_hashes_the_prompt_once_and_reads_no_token_twice() -> None:
    hand, hashes = counted()
    hand.donate(span(0, 40))
    hashes.calls = 0
    hand.ask([*span(0, 40), 1])
    assert hashes.calls == 10


@pytest.mark.parametrize("n", [1, 10, 60])
def test_evicting_n_pages_pops_n_entries_and_the_stale_ones(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hand, _ = counted(128)
    for start in range(0, 800, 40):
        hand.donate(span(start, 20))
    for _ in range(7):
        hand.ask([*span(0, 20), 3999]).release()  # each turn leaves one stale entry
    pops = 0
    real = heapq.heappop

    def spy(heap):
        nonlocal pops
        pops += 1
        return real(heap)

    monkeypatch.setattr(heapq, "heappop", spy)
    assert hand.cache.evict(n) == n
    assert n <= pops <= n + 7
    hand.check()


def test_the_queue_stays_small_over_a_thousand_attaches() -> None:
    hand, _ = counted()
    hand.donate(span(0, 8))
    for _ in range(1000):
        session = hand.session()
        hand.cache.attach(session, span(0, 9))
        session.release()
    assert len(hand.cache.queue._heap) <= 2 * 2 + 65
    assert hand.pool.refs[:2].tolist() == [1, 1]
    assert hand.cache.evict(2) == 2
    hand.check()


def test_an_allocation_copies_no_more_than_it_names() -> None:
    hand, _ = counted(4096)
    touched = 0

    class Watched(np.ndarray):
        def __setitem__(self, key, value):
            nonlocal touched
            touched += np.size(key) if not isinstance(key, slice) else len(range(*key.indices(len(self))))
            super().__setitem__(key, value)

    hand.pool.refs = hand.pool.refs.view(Watched)
    hand.pool._free = hand.pool._free.view(Watched)
    pages = hand.pool.alloc(3)
    hand.pool.share(pages)
    hand.pool.release(pages)
    hand.pool.release(pages)
    assert touched == 3 * 4 + 3
