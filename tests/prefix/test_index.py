"""PrefixIndex: the tree itself, with page ids made up and no pool behind them."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import expect_check_fails, ids, span

from paged.errors import CheckFailed
from paged.prefix.cursor import NO_NODE, Cursor
from paged.prefix.hashing import page_hash
from paged.prefix.index import PrefixIndex
from paged.spec import KVSpec

P = 2
VIEW = KVSpec(1, 1, 8).view()


def index(num_groups: int = 1, hash_page=page_hash) -> PrefixIndex:
    return PrefixIndex(P, num_groups, hash_page)


def enter(tree: PrefixIndex, tokens, pages, namespace: bytes = b"") -> Cursor:
    """Enter `tokens` page by page with the ids `pages`; pages that are there already are walked over."""
    array = ids(*tokens)
    cursor = tree.cursor(namespace, VIEW)
    tree.seek(cursor, array, len(array) // P)
    keys = cursor.keys_to(array, len(array) // P)
    for column in range(cursor.depth, len(array) // P):
        page = np.atleast_1d(np.asarray(pages[column], np.int32))
        tree.add(cursor, keys[column], array[column * P : (column + 1) * P], page)
    return cursor


def depth(tree: PrefixIndex, tokens, namespace: bytes = b"") -> int:
    """How many pages of `tokens` a new cursor finds."""
    array = ids(*tokens)
    return tree.seek(tree.cursor(namespace, VIEW), array, len(array) // P)


# Looking up -------------------------------------------------------------------------------------------------------


def test_an_empty_index_finds_nothing() -> None:
    tree = index()
    assert depth(tree, span(0, 10)) == 0
    assert len(tree) == 0
    tree.check()


def test_a_chain_is_found_as_deep_as_its_tokens_agree() -> None:
    tree = index()
    enter(tree, span(0, 8), [10, 11, 12, 13])
    assert len(tree) == 4
    for n in range(9):
        assert depth(tree, [*span(0, n), *span(90, 8 - n)]) == n // P
    tree.check()


def test_the_limit_bounds_what_is_found_and_a_cursor_can_be_taken_back() -> None:
    tree = index()
    enter(tree, span(0, 8), [10, 11, 12, 13])
    cursor, tokens = tree.cursor(b"", VIEW), ids(*span(0, 8))
    assert [tree.seek(cursor, tokens, limit) for limit in (4, 1, 0, 3)] == [4, 1, 0, 3]
    assert len(cursor.nodes) == len(cursor.births) == 3


def test_branches_share_their_opening() -> None:
    tree = index()
    enter(tree, [0, 1, 2, 3, 4, 5], [10, 11, 12])
    enter(tree, [0, 1, 2, 3, 8, 9], [10, 11, 20])
    enter(tree, [0, 1, 7, 7, 4, 5], [10, 30, 31])
    assert len(tree) == 6
    assert depth(tree, [0, 1, 2, 3, 8, 9, 4, 5]) == 3
    tree.check()


def test_the_same_page_below_another_parent_is_another_page() -> None:
    tree = index()
    enter(tree, [0, 1, 4, 5], [10, 11])
    assert depth(tree, [4, 5]) == 0
    assert depth(tree, [2, 3, 4, 5]) == 0


def test_namespaces_are_trees_of_their_own() -> None:
    tree = index()
    enter(tree, span(0, 4), [10, 11], b"a")
    assert depth(tree, span(0, 4), b"b") == depth(tree, span(0, 4)) == 0
    enter(tree, span(0, 4), [20, 21], b"b")
    assert depth(tree, span(0, 4), b"a") == depth(tree, span(0, 4), b"b") == 2
    assert len(tree) == 4
    tree.check()


def test_a_page_has_an_id_in_each_group() -> None:
    tree = index(num_groups=3)
    cursor = enter(tree, span(0, 4), [[1, 2, 3], [4, 5, 6]])
    assert tree.pages[cursor.nodes].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert tree.node_of_page[[1, 2, 3]].tolist() == [cursor.nodes[0]] * 3
    tree.check()


# Tokens decide ----------------------------------------------------------------------------------------------------


def test_a_key_that_other_tokens_have_leads_nowhere() -> None:
    tree = index(hash_page=lambda parent, tokens: 7)
    enter(tree, [0, 1], [10])
    assert depth(tree, [0, 1]) == 1
    assert depth(tree, [0, 2]) == 0
    assert depth(tree, [0, 1], b"another namespace") == 0
    assert depth(tree, [0, 1, 0, 1]) == 1  # the second page has the first one's key and tokens, but another parent


def test_a_corrupted_token_is_a_miss_from_there_on() -> None:
    tree = index()
    cursor = enter(tree, span(0, 8), [10, 11, 12, 13])
    tree.tokens[cursor.nodes[1], 0] += 1
    assert depth(tree, span(0, 8)) == 1


def test_a_missing_page_hides_those_behind_it() -> None:
    tree = index()
    cursor = enter(tree, span(0, 6), [10, 11, 12])
    assert tree.lookup.erase(int(cursor.nodes[0]))
    assert depth(tree, span(0, 6)) == 0
    expect_check_fails(tree, "not found by its parent")


def test_a_page_that_can_be_found_and_is_not_there_is_noticed() -> None:
    tree = index()
    enter(tree, span(0, 6), [10, 11, 12])
    tree.lookup.insert(9, 0, ids(7, 7))
    expect_check_fails(tree, "3 full pages, 4 can be found")


# Cursors in time --------------------------------------------------------------------------------------------------


def test_a_cursor_sees_what_was_added_below_it() -> None:
    tree, tokens = index(), ids(*span(0, 8))
    cursor = tree.cursor(b"", VIEW)
    assert tree.seek(cursor, tokens, 4) == 0
    enter(tree, span(0, 4), [10, 11])
    assert tree.seek(cursor, tokens, 4) == 2
    enter(tree, span(0, 8), [10, 11, 12, 13])
    assert tree.seek(cursor, tokens, 4) == 4


def test_a_cursor_notices_that_its_pages_went() -> None:
    tree, tokens = index(), ids(*span(0, 6))
    enter(tree, span(0, 6), [10, 11, 12])
    cursor = tree.cursor(b"", VIEW)
    assert tree.seek(cursor, tokens, 3) == 3
    tree.remove(cursor.nodes[2])
    tree.remove(cursor.nodes[1])
    assert tree.seek(cursor, tokens, 3) == 1


def test_a_cursor_is_not_fooled_by_a_new_page_in_an_old_place() -> None:
    tree, tokens = index(), ids(*span(0, 4))
    cursor = enter(tree, span(0, 4), [10, 11])
    old = cursor.nodes.tolist()
    tree.remove(old[1])
    other = enter(tree, [0, 1, 8, 9], [10, 12])
    assert other.nodes.tolist() == old  # the freed node was taken again
    assert tree.seek(cursor, tokens, 2) == 1


def test_the_keys_of_a_cursor_outlive_a_restart() -> None:
    tree, tokens = index(), ids(*span(0, 4))
    cursor = enter(tree, span(0, 4), [10, 11])
    keys = list(cursor.keys)
    cursor.closed = True
    cursor.restart()
    assert (cursor.depth, len(cursor.nodes), len(cursor.births), cursor.closed) == (0, 0, 0, False)
    assert cursor.keys == keys
    assert tree.seek(cursor, tokens, 2) == 2


# Removing ---------------------------------------------------------------------------------------------------------


def test_a_page_whose_child_stands_cannot_be_removed() -> None:
    tree = index()
    cursor = enter(tree, span(0, 4), [10, 11])
    with pytest.raises(CheckFailed, match="whose child stands"):
        tree.remove(cursor.nodes[0])
    assert depth(tree, span(0, 4)) == 2


def test_removing_returns_the_parent_and_below_zero_for_a_first_page() -> None:
    tree = index()
    cursor = enter(tree, span(0, 4), [10, 11])
    first, second = cursor.nodes.tolist()
    assert tree.remove(second) == first
    assert tree.node_of_page[11] == NO_NODE
    tree.check()
    assert tree.remove(first) < 0
    assert len(tree) == 0
    tree.check()


def test_a_namespace_that_emptied_can_come_back() -> None:
    tree = index()
    for page in (10, 20):
        cursor = enter(tree, span(0, 2), [page], b"a")
        tree.check()
        tree.remove(cursor.nodes[0])
        assert depth(tree, span(0, 2), b"a") == 0
        tree.check()
    assert (tree._roots, tree._root_children, tree._root_of) == ({}, {}, {})


def test_clearing_returns_every_page_and_ends_the_epoch() -> None:
    tree = index(num_groups=2)
    cursor = enter(tree, span(0, 4), [[1, 2], [3, 4]])
    other = enter(tree, span(50, 2), [[5, 6]], b"b")
    assert cursor.open and other.open
    assert sorted(tree.clear().tolist()) == [1, 2, 3, 4, 5, 6]
    assert not cursor.open and not other.open
    assert len(tree) == 0
    assert depth(tree, span(0, 4)) == 0
    tree.check()
    later = enter(tree, span(0, 4), [[1, 2], [3, 4]])
    assert later.open and later.nodes.tolist() == cursor.nodes.tolist()
    assert later.births.tolist() != cursor.births.tolist()
    tree.check()


def test_clearing_an_empty_index_twice_is_fine() -> None:
    tree = index()
    for _ in range(2):
        assert tree.clear().tolist() == []
        enter(tree, span(0, 2), [3])
        tree.check()
        tree.clear()


def test_the_index_grows_past_its_first_arrays() -> None:
    tree = index()
    tokens = span(0, 2 * 300)
    cursor = enter(tree, tokens, list(range(300)))
    assert len(tree) == 300
    assert depth(tree, tokens) == 300
    assert tree.pages[cursor.nodes, 0].tolist() == list(range(300))
    tree.check()
    room = len(tree.birth)
    tree.clear()
    enter(tree, span(0, 2 * (room + 1)), list(range(room + 1)))
    assert depth(tree, span(0, 2 * (room + 1))) == room + 1
    tree.check()


def test_a_page_id_far_above_the_others_is_no_problem() -> None:
    tree = index()
    enter(tree, span(0, 2), [100_000])
    assert tree.node_of_page[100_000] == 0
    tree.check()


# check() ----------------------------------------------------------------------------------------------------------


def rename(tree: PrefixIndex, nodes: list[int]) -> None:
    tree.by_key[b"another"] = tree.by_key.pop(tree.keys[nodes[1]])
    tree.keys[nodes[1]] = b"another"


CORRUPTIONS = {
    "a key that leads to another node": (lambda t, n: t.by_key.update({t.keys[n[1]]: n[0]}), "leads to another node"),
    "a key that leads nowhere": (lambda t, n: t.by_key.pop(t.keys[n[1]]), "live nodes"),
    "a node that is not live": (lambda t, n: t.birth.__setitem__(n[2], -1), "live nodes"),
    "a page that leads elsewhere": (lambda t, n: t.node_of_page.__setitem__(11, n[0]), "a page leads to another node"),
    "a key of other tokens": (lambda t, n: t.tokens.__setitem__((n[2], 0), 77), "not the hash"),
    "a key that is no hash": (rename, "not the hash"),
    "another parent": (lambda t, n: t.parent.__setitem__(n[2], n[0]), "not the hash"),
    "a parent that is gone": (lambda t, n: t.parent.__setitem__(n[2], 50), "parent of a cached page is not cached"),
    "a child older than its parent": (lambda t, n: t.birth.__setitem__(n[1], 0), "older than its parent"),
    "a children count too high": (lambda t, n: t.children.__setitem__(n[2], 1), "children count"),
    "a children count too low": (lambda t, n: t.children.__setitem__(n[0], 0), "children count"),
    "a namespace's count": (lambda t, n: t._root_children.update({-2: 5}), "count of first pages"),
    "a page id that stands twice": (lambda t, n: t.pages.__setitem__((n[2], 0), 10), "stands twice"),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_check_notices(what: str) -> None:
    tree = index()
    nodes = enter(tree, span(0, 6), [10, 11, 12]).nodes
    tree.check()
    corrupt, message = CORRUPTIONS[what]
    corrupt(tree, nodes)
    expect_check_fails(tree, message)
