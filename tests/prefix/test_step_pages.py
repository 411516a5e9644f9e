"""One more page for many sequences at once: what it enters is what publishing one by one enters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from byhand import Hand, ids, span
from fakes import EchoLooped
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.kv.pages import PagePool
from paged.prefix.cache import PrefixCache
from paged.prefix.cursor import Cursor
from paged.prefix.step_pages import publish_next

P = 2


class Tree:
    """A cache over pages without storage, and sequences that grow page by page."""

    def __init__(self, prompts: Sequence[Sequence[int]], at_once: bool, **options) -> None:
        self.pool = PagePool(200, P)
        self.cache = PrefixCache(self.pool, **options)
        self.at_once = at_once
        self.tokens = [ids(*prompt) for prompt in prompts]
        self.cursors: list[Cursor] = [self.cache.cursor() for _ in prompts]
        self.pages = [self.pool.alloc(len(prompt) // P)[None] for prompt in prompts]
        self.left: list[int] = []
        self.pool.holders.add(self)

    def exchange(self, column: int, groups, old, new):
        """As a holder of pages: see PageTable."""
        here = [pages for pages in self.pages if column < pages.shape[1] and pages[0, column] == old[0]]
        for pages in here:
            pages[0, column] = new[0]
        return np.array([len(here)])

    def grow(self, column: int) -> None:
        """Every sequence that has a page there has just filled it."""
        alive = [i for i, tokens in enumerate(self.tokens) if len(tokens) >= (column + 1) * P]
        left = alive
        if self.at_once and alive:
            cursors = [self.cursors[i] for i in alive]
            tokens = np.stack([self.tokens[i][column * P : (column + 1) * P] for i in alive])
            pages = np.stack([self.pages[i][:, column] for i in alive], axis=1)
            left = [alive[k] for k in publish_next(self.cache, cursors, ids(*[column] * len(alive)), tokens, pages)]
            self.left += left
        for i in left:
            self.cache.publish(self.cursors[i], self.tokens[i], self.pages[i][:, : column + 1])
        self.pool.check()
        self.cache.check()

    def tokens_cached(self) -> list[int]:
        return [self.cache.match_len([*tokens.tolist(), 99]) for tokens in self.tokens]


def shape(tree: Tree) -> tuple:
    """The cached prefixes, and how many pages and tokens there are."""
    index, prefixes = tree.cache.index, set[tuple[int, ...]]()
    for node in np.flatnonzero(index.birth >= 0).tolist():
        at, tokens = node, list[int]()
        while at >= 0:
            tokens = index.tokens[at, : index.rows[at]].tolist() + tokens
            at = int(index.parent[at])
        prefixes.add(tuple(tokens))
    chains = tree.cache.chains()
    totals = sum(chain.num_tokens for chain in chains), sum(chain.num_pages for chain in chains)
    return prefixes, totals, tree.cache.held_pages, tree.cache.stats.inserted_pages


prompts = st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=9), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(prompts=prompts, bound=st.sampled_from([0, 0, 0, 5]), partial=st.booleans())
def test_any_sequences_leave_the_tree_that_publishing_one_by_one_leaves(
    prompts: list[list[int]], bound: int, partial: bool
) -> None:
    one, other = (Tree(prompts, at_once, max_pages=bound, partial=partial) for at_once in (False, True))
    for column in range(5):
        one.grow(column)
        other.grow(column)
        if not bound:
            assert one.tokens_cached() == other.tokens_cached()
    if not bound:
        assert shape(one) == shape(other)


def test_sequences_that_go_on_alone_need_no_other_call() -> None:
    tree = Tree([span(10 * i, 8) for i in range(1, 6)], at_once=True)
    tree.grow(0)
    assert tree.left == [0, 1, 2, 3, 4]  # first pages have siblings
    tree.left.clear()
    for column in (1, 2, 3):
        tree.grow(column)
    assert not tree.left
    assert tree.cache.held_pages == 20 and len(tree.cache.chains()) == 5
    assert tree.tokens_cached() == [8] * 5


def test_the_second_of_two_equal_pages_is_merged_with_the_first() -> None:
    tree = Tree([[1, 2, 3, 4, 5, 6]] * 3, at_once=True)
    for column in range(3):
        tree.grow(column)
    assert tree.cache.held_pages == 3
    assert [pages.tolist() for pages in tree.pages] == [tree.pages[0].tolist()] * 3


def test_a_parent_that_was_dropped_takes_no_more_pages() -> None:
    tree = Tree([span(0, 8), span(20, 8)], at_once=True)
    tree.grow(0)
    tree.grow(1)
    tree.cache.release()
    tree.grow(2)
    assert tree.cache.held_pages == 0 and not tree.cache.chains()


def test_a_listener_hears_of_every_page() -> None:
    tree, heard = Tree([span(0, 8), span(20, 8)], at_once=True), []
    tree.cache.listen = heard.append
    for column in range(4):
        tree.grow(column)
    assert sum(len(event.keys) for event in heard) == 8


def test_a_page_held_for_another_namespace_is_left_alone() -> None:
    tree = Tree([span(0, 4), span(20, 4)], at_once=True)
    tree.grow(0)
    tree.pool.hold(tree.pages[0][0, 1:2])
    left = publish_next(
        tree.cache,
        tree.cursors,
        ids(1, 1),
        np.stack([tokens[2:] for tokens in tree.tokens]),
        np.stack([pages[:, 1] for pages in tree.pages], axis=1),
    )
    assert left == [0] and tree.cache.held_pages == 3
    tree.pool.unhold(tree.pages[0][0, 1:2])


@pytest.mark.parametrize("loops", [1, 3])
def test_groups_that_a_sequence_does_not_use_stay_without_a_page(loops: int) -> None:
    hand = Hand(60, P, model=EchoLooped(97))
    session = hand.session(loops=loops)
    session.eval(span(0, 6))
    cursor = hand.cache.cursor("", session.view)
    tokens, pages = session.tokens, session.table.rows
    hand.cache.publish(cursor, tokens, pages[:, :1])
    assert publish_next(hand.cache, [cursor], ids(1), tokens[None, 2:4], pages[:, 1:2]) == []
    assert hand.cache.held_pages == 2 * (1 + loops)
    hand.check()
    assert hand.cache.match_len(span(0, 6), loops=loops) == 4
    assert hand.cache.match_len(span(0, 6), loops=4) == 0
