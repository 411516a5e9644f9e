"""A cache in a file: what is saved is what was there, and what is loaded serves as if it had been computed here."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from byhand import Hand, growing_pool, ids, span
from fakes import EchoHybrid, EchoModel
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from saving import checkpoints_of, contents, everything, nodes_of

from paged.errors import GeometryMismatch
from paged.kv.pages import PagePool
from paged.prefix.cache import PrefixCache
from paged.prefix.hashing import page_hash
from paged.session import Session

SETTINGS = settings(max_examples=40, deadline=None)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.safetensors"


def idle(hand: Hand) -> None:
    """Only the cache holds anything, and all of it can be evicted."""
    hand.check()
    assert hand.pool.num_live == 0
    assert hand.pool.num_cached_only == hand.cache.held_pages
    hand.cache.evict(10**6)
    assert hand.pool.num_free == hand.pool.num_pages
    hand.check()


def three_donations(hand: Hand) -> None:
    hand.donate(span(0, 12), preview="first")
    hand.donate([*span(0, 8), *span(50, 5)], preview="second")
    hand.donate(span(0, 9), "tenant")


# All of it --------------------------------------------------------------------------------------------------------


def test_the_pages_of_three_donations_are_there_again(path) -> None:
    hand, other = Hand(), Hand()
    three_donations(hand)
    assert hand.cache.save(path) == 6
    assert other.cache.load(path) == 6
    other.check()
    assert contents(other.cache) == contents(hand.cache)
    assert other.pages_of(span(0, 12)) == [0, 1, 2]
    assert other.cache.match_len(span(0, 13)) == 12
    assert other.cache.match_len(span(0, 13), "tenant") == 8
    assert other.cache.match_len(span(0, 13), "another") == 0
    before = other.model.num_rows
    other.ask([*span(0, 8), *span(50, 5)]).release()
    assert other.model.num_rows - before == 1
    idle(other)


def test_a_second_load_brings_nothing_new_and_changes_nothing(path) -> None:
    hand, other = Hand(), Hand()
    three_donations(hand)
    hand.cache.save(path)
    other.cache.load(path)
    before = everything(other.cache)
    assert other.cache.load(path) == 0
    assert everything(other.cache) == before


def test_a_file_loaded_into_the_cache_that_it_came_from_brings_nothing(path) -> None:
    hand = Hand()
    three_donations(hand)
    hand.cache.save(path)
    before = everything(hand.cache)
    assert hand.cache.load(path) == 0
    assert everything(hand.cache) == before


def test_saving_changes_nothing(path) -> None:
    hand = Hand()
    three_donations(hand)
    before = everything(hand.cache)
    hand.cache.save(path)
    assert everything(hand.cache) == before


def test_two_saves_of_one_cache_give_the_same_bytes_and_so_does_a_save_of_what_was_loaded(path) -> None:
    hand, other = Hand(), Hand()
    three_donations(hand)
    hand.cache.save(path)
    first = path.read_bytes()
    hand.cache.save(path)
    assert path.read_bytes() == first
    other.cache.load(path)
    other.cache.save(path)
    assert path.read_bytes() == first


def test_an_empty_cache_gives_a_file_without_pages(path) -> None:
    for kind in (EchoModel, EchoHybrid):
        hand = Hand(kind=kind)
        assert hand.cache.save(path) == 0
        assert hand.cache.load(path) == 0
        hand.check()


def test_the_file_is_one_that_the_safetensors_library_reads(path) -> None:
    hand = Hand()
    three_donations(hand)
    hand.cache.save(path)
    file = safe_open(path, framework="pt")
    pages = file.get_tensor("pages")
    assert tuple(pages.shape) == (6, 1, 2, 1, 4, 8) and pages.dtype == torch.float32
    assert file.get_tensor("node_parent").tolist() == [-1, 0, 1, 1, -2, 4]
    assert file.get_tensor("node_pages").ravel().tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(pages[2], hand.pool.storage.pages[hand.pages_of(span(0, 12))[2]])


@SETTINGS
@given(
    page_size=st.sampled_from([1, 2, 4]),
    groups=st.sampled_from([(0,), (0, 0), (3,), (5, 0), (0, 2, 6)]),
    partial=st.booleans(),
    prompts=st.lists(st.tuples(st.sampled_from(["", "a"]), st.integers(0, 12), st.integers(0, 3)), max_size=8),
    data=st.data(),
)
def test_whatever_was_donated_matches_and_continues_as_before(
    tmp_path_factory, page_size, groups, partial, prompts, data
):
    path = tmp_path_factory.mktemp("saved") / "x"
    opening = [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 1, 2, 3]
    hand, other = (Hand(40 * len(groups), page_size, vocab_size=4, windows=groups, partial=partial) for _ in range(2))
    for namespace, shared, last in prompts:
        hand.donate([*opening[:shared], last], namespace)
    hand.cache.evict(data.draw(st.integers(0, 6)))
    assert hand.cache.save(path) == hand.cache.held_pages
    assert other.cache.load(path) == hand.cache.held_pages
    other.check()
    assert contents(other.cache) == contents(hand.cache)
    for namespace in ("", "a", "b"):
        for shared in range(len(opening) + 1):
            prompt = [*opening[:shared], data.draw(st.integers(0, 3)), 1]
            assert other.cache.match_len(prompt, namespace) == hand.cache.match_len(prompt, namespace)
            other.ask(prompt, namespace).release()
            other.check()
    idle(other)


@SETTINGS
@given(
    page_size=st.sampled_from([1, 2, 4]),
    groups=st.sampled_from([(0,), (0, 0), (3,), (5, 0)]),
    prompts=st.lists(
        st.tuples(st.sampled_from(["", "a"]), st.integers(1, 12), st.integers(0, 3), st.booleans()), max_size=8
    ),
    data=st.data(),
)
def test_whatever_checkpoints_were_kept_match_and_continue_as_before(
    tmp_path_factory, page_size, groups, prompts, data
):
    path = tmp_path_factory.mktemp("saved") / "x"
    turns = [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 1, 2, 3]
    hand, other = (Hand(90 * len(groups), page_size, vocab_size=4, windows=groups, kind=EchoHybrid) for _ in range(2))
    for namespace, shared, last, opening in prompts:
        tokens = [*turns[:shared], last]
        session = hand.ask(tokens, namespace)
        hand.cache.insert(session, tokens, f"{shared} {last}", opening)
        session.release()
    assert hand.cache.save(path) == hand.cache.held_pages
    assert other.cache.load(path) == hand.cache.held_pages
    other.check()
    assert contents(other.cache) == contents(hand.cache)
    assert other.cache.checkpoints.num_bytes == hand.cache.checkpoints.num_bytes
    for namespace in ("", "a", "b"):
        for shared in range(len(turns) + 1):
            prompt = [*turns[:shared], data.draw(st.integers(0, 3)), 1]
            assert other.cache.match_len(prompt, namespace) == hand.cache.match_len(prompt, namespace)
            other.ask(prompt, namespace).release()
            other.check()
    idle(other)
