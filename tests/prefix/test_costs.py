"""Costs as counts: what is hashed, looked up and popped. No clock is read."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from byhand import CountingLookup, Hand, ids, span

from paged.prefix.hashing import page_hash


class CountingHash:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, parent, tokens):
        self.calls += 1
        return page_hash(parent, tokens)


def counted(num_pages: int = 64, max_pages: int = 0) -> tuple[Hand, CountingHash]:
    hashes = CountingHash()
    hand = Hand(num_pages, 4, max_pages=max_pages, hash_page=hashes, vocab_size=4000)
    return hand, hashes


def test_a_second_seek_with_the_same_cursor_looks_up_only_what_lies_behind_the_match() -> None:
    hand, hashes = counted()
    hand.donate(span(0, 40))
    cursor, prompt = hand.cache.cursor(), ids(*span(0, 401))
    hashes.calls = 0
    hand.cache.index.lookup = lookup = CountingLookup(hand.cache.index.lookup)
    assert hand.cache.seek(cursor, prompt) == 40
    assert (lookup.calls, lookup.pages) == (1, 100)
    for _ in range(50):
        assert hand.cache.seek(cursor, prompt) == 40
    assert (lookup.calls, lookup.pages) == (51, 100 + 50 * 90)  # a call that ends at its first page
    assert hand.cache.seek(cursor, prompt[:41]) == 40
    assert lookup.calls == 51  # nothing lies behind it
    assert hashes.calls == 0


@pytest.mark.parametrize("cached", [0, 20, 200, 1600])
def test_asking_how_much_is_cached_is_one_call_and_makes_no_key(cached: int) -> None:
    hand, hashes = counted(num_pages=500)
    if cached:
        hand.donate(span(0, cached))
    hashes.calls = 0
    hand.cache.index.lookup = lookup = CountingLookup(hand.cache.index.lookup)
    assert hand.cache.match_len(span(0, 1601)) == cached
    assert (lookup.calls, hashes.calls) == (1 if cached else 0, 0)


def test_keys_of_a_prompt_that_grew_are_made_once_each() -> None:
    hand, hashes = counted()
    cursor, tokens = hand.cache.cursor(), ids(*span(0, 400))
    for n in range(0, 101, 10):
        assert len(cursor.keys_to(tokens, n)) == n
    assert hashes.calls == 100


def test_keys_of_cached_pages_are_read_and_not_made() -> None:
    hand, hashes = counted()
    hand.donate(span(0, 40))
    cursor, tokens = hand.cache.cursor(), ids(*span(0, 60))
    hand.cache.seek(cursor, tokens)
    hashes.calls = 0
    keys = cursor.keys_to(tokens, 12)
    assert hashes.calls == 2
    assert keys == hand.cache.cursor().keys_to(tokens, 12)


def test_publishing_page_by_page_hashes_each_page_once() -> None:
    hand, hashes = counted()
    pages = hand.pool.alloc(50)
    cursor, tokens = hand.cache.cursor(), ids(*span(0, 200))
    for n in range(1, 51):
        hand.cache.publish(cursor, tokens, pages[None, :n])
    assert hashes.calls == 50
    assert hand.cache.held_pages == 50


def test_publishing_a_page_looks_up_one_page_however_deep_it_lies() -> None:
    hand, _ = counted(300)
    pages = hand.pool.alloc(300)
    cursor, tokens = hand.cache.cursor(), ids(*span(0, 1200))
    hand.cache.publish(cursor, tokens, pages[None, :299])
    hand.cache.index.lookup = lookup = CountingLookup(hand.cache.index.lookup)
    hand.cache.publish(cursor, tokens, pages[None])
    assert (lookup.calls, lookup.pages) == (1, 1)
    hand.cache.publish(cursor, tokens, pages[None])
    assert lookup.calls == 1


def test_an_attach_makes_no_key() -> None:
    hand, hashes = counted()
    hand.donate(span(0, 40))
    hashes.calls = 0
    hand.ask([*span(0, 40), 1])
    assert hashes.calls == 0


@pytest.mark.parametrize("n", [1, 10, 60])
def test_evicting_n_pages_pops_one_entry_a_chain_and_the_stale_ones(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    chains = -(-n // 5)  # a prompt of five pages leaves in one run
    assert chains <= pops <= chains + 7
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
