"""Events: every page that comes or goes is told, and replaying them rebuilds the index."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import Hand, expect_check_fails, span

from paged.prefix.events import PageMirror, PageRemoved, PagesCleared, PagesStored
from paged.prefix.hashing import page_hash, root_hash


def listening(num_pages: int = 40, page_size: int = 4, **options) -> tuple[Hand, list]:
    h, events = Hand(num_pages, page_size, **options), []
    h.cache.listen = events.append
    return h, events


def index_of(h: Hand) -> dict:
    """What the index holds: key -> (namespace, parent key, tokens)."""
    index, found = h.cache.index, {}
    for node in np.flatnonzero(index.birth >= 0).tolist():
        parent, top = int(index.parent[node]), node
        while int(index.parent[top]) >= 0:
            top = int(index.parent[top])
        tokens = tuple(index.tokens[node, : index.rows[node]].tolist())
        above = index.keys[parent] if parent >= 0 else None
        found[index.keys[node]] = (index._root_of[int(index.parent[top])], above, tokens)
    return found


def mirrored(mirror: PageMirror) -> dict:
    mirror.check()
    return {key: (page.namespace, page.parent, page.tokens) for key, page in mirror.pages.items()}


def test_two_stored_pages_are_one_event_with_two_keys_the_parent_and_all_token_ids() -> None:
    h, events = listening(page_size=16)
    h.donate(span(0, 16))
    h.donate(span(0, 48))
    root = root_hash(h.cache.namespace_key())
    first = page_hash(root, np.arange(16, dtype="<i4").tobytes())
    second = page_hash(first, np.arange(16, 32, dtype="<i4").tobytes())
    third = page_hash(second, np.arange(32, 48, dtype="<i4").tobytes())
    assert len(events) == 2
    assert (events[0].parent, events[0].keys) == (None, (first,))
    assert (events[1].parent, events[1].keys, events[1].tokens.tolist()) == (first, (second, third), span(16, 32))


def test_an_eviction_tells_each_key_the_deepest_first() -> None:
    h, events = listening()
    h.donate(span(0, 12))
    keys = events[0].keys
    events.clear()
    h.cache.evict(2)
    assert events == [PageRemoved(keys[2]), PageRemoved(keys[1])]


def test_a_reset_tells_that_all_is_gone_and_a_drop_which_namespace() -> None:
    h, events = listening()
    h.donate(span(0, 4), "a")
    h.donate(span(0, 4), "b")
    events.clear()
    h.cache.drop("a")
    h.cache.release()
    assert events == [PagesCleared(h.cache.namespace_key("a")), PagesCleared(None)]


def test_what_is_only_found_or_attached_is_no_event() -> None:
    h, events = listening()
    h.donate(span(0, 12))
    events.clear()
    h.ask([*span(0, 12), 5]).release()
    h.donate(span(0, 12))
    h.cache.match_len(span(0, 12))
    assert events == []


def test_a_tail_is_a_page_with_fewer_tokens_until_a_longer_one_takes_its_place() -> None:
    h, events = listening(partial=True)
    h.donate(span(0, 6))
    assert [e.tokens.tolist() for e in events] == [span(0, 4), span(4, 2)]
    tail = events[1].keys[0]
    h.donate(span(0, 8))
    assert events[2] == PageRemoved(tail)
    assert isinstance(events[3], PagesStored) and events[3].tokens.tolist() == span(4, 4)


@pytest.mark.parametrize("options", [{}, {"partial": True}, {"max_pages": 5}, {"windows": (0, 6), "partial": True}])
def test_replaying_the_events_rebuilds_the_index(options: dict) -> None:
    h, events = listening(num_pages=24, **options)
    mirror = PageMirror(4)
    rng = np.random.default_rng(7)
    for i in range(150):
        tokens = rng.integers(0, 3, int(rng.integers(1, 20))).tolist()
        h.donate(tokens, "ab"[i % 2])
        if i % 7 == 0:
            h.cache.evict(int(rng.integers(0, 4)))
        if i % 40 == 39:
            h.cache.drop("a")
        if i % 90 == 89:
            h.cache.release()
        for event in events:
            mirror.apply(event)
        events.clear()
        assert mirrored(mirror) == index_of(h)


def test_a_log_may_be_replayed_later() -> None:
    h, events = listening()
    h.donate(span(0, 12))
    h.cache.evict(1)
    h.donate([*span(0, 4), *span(70, 5)])
    mirror = PageMirror(4)
    for event in events:
        mirror.apply(event)
    assert mirrored(mirror) == index_of(h)


def test_what_a_file_brings_is_told_too(tmp_path) -> None:
    h, _ = listening(partial=True)
    for tokens in (span(0, 14), [*span(0, 4), *span(70, 6)]):
        h.donate(tokens)
    h.cache.save(tmp_path / "cache")
    other, events = listening(partial=True)
    other.donate(span(0, 4))
    other.cache.load(tmp_path / "cache")
    mirror = PageMirror(4)
    for event in events:
        mirror.apply(event)
    assert mirrored(mirror) == index_of(other)
    assert len(mirror.pages) == 6


def test_the_tokens_of_an_event_are_a_copy() -> None:
    h, events = listening()
    session = h.session()
    session.eval(span(0, 8))
    h.cache.insert(session, span(0, 8))
    session.release()
    session.eval(span(50, 8))
    assert events[0].tokens.tolist() == span(0, 8)


def test_check_notices_a_page_whose_parent_was_never_told() -> None:
    h, events = listening()
    h.donate(span(0, 4))
    h.donate(span(0, 8))
    mirror = PageMirror(4)
    mirror.apply(events[1])
    expect_check_fails(mirror, "whose parent is not there")
