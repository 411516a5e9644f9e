"""PageLookup: the native one and the plain one agree on every operation, and tokens decide."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import ids
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged._native import PageLookup as NativeLookup
from paged.prefix.cache import PrefixCache
from paged.prefix.lookup import PlainLookup, make_lookup

MAX_NODES = 400


class Lookups(RuleBasedStateMachine):
    """Nodes come and go leaf by leaf, as an index has them; every match of both is compared."""

    @initialize(page_size=st.sampled_from([1, 2, 3, 4, 5, 7, 16]), seed=st.integers(0, 2**64 - 1))
    def start(self, page_size: int, seed: int) -> None:
        self.size = page_size
        self.both = (PlainLookup(page_size), NativeLookup(page_size, seed))
        self.tokens = np.zeros((MAX_NODES, page_size), np.int32)
        self.parent = np.full(MAX_NODES, -1, np.int32)
        self.live: dict[int, tuple[int, tuple[int, ...]]] = {}  # node -> parent, tokens

    def page(self, number: int) -> np.ndarray:
        """One of few pages, which differ in one token only."""
        page = np.full(self.size, 3, np.int32)
        page[number % self.size] = number
        return page

    @rule(choice=st.integers(-3, 30), number=st.integers(0, 5))
    def insert(self, choice: int, number: int) -> None:
        parent = sorted(self.live)[choice % len(self.live)] if choice >= 0 and self.live else min(choice, -1)
        self.enter([(parent, number)])

    @rule(start=st.integers(-3, -1), numbers=st.lists(st.integers(0, 5), min_size=1, max_size=40))
    def insert_chain(self, start: int, numbers: list[int]) -> None:
        pairs, parent = [], start
        free = iter(node for node in range(MAX_NODES) if node not in self.live)
        for number in numbers:
            pairs.append((parent, number))
            parent = next(free, 0)
        self.enter(pairs)

    def enter(self, pairs: list[tuple[int, int]]) -> None:
        nodes, parents, pages = [], [], []
        taken = set(self.live.values())
        free = iter(node for node in range(MAX_NODES) if node not in self.live)
        for parent, number in pairs:
            page, node = self.page(number), next(free, None)
            if (
                node is None
                or (parent, tuple(page.tolist())) in taken
                or (parent >= 0 and parent not in (*self.live, *nodes))
            ):
                break
            taken.add((parent, tuple(page.tolist())))
            nodes.append(node)
            parents.append(parent)
            pages.append(page)
        for node, parent, page in zip(nodes, parents, pages, strict=True):
            self.live[node] = parent, tuple(page.tolist())
            self.tokens[node], self.parent[node] = page, parent
        for lookup in self.both:
            if len(nodes) == 1:
                lookup.insert(nodes[0], parents[0], pages[0])
            elif nodes:
                lookup.insert_all(ids(*nodes), ids(*parents), np.stack(pages))

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 1000))
    def erase(self, choice: int) -> None:
        above = {parent for parent, _ in self.live.values()}
        leaves = sorted(set(self.live) - above)
        node = leaves[choice % len(leaves)]
        del self.live[node]
        assert [lookup.erase(node) for lookup in self.both] == [True, True]
        assert [lookup.erase(node) for lookup in self.both] == [False, False]

    @rule(start=st.integers(-3, -1), numbers=st.lists(st.integers(0, 5), max_size=70))
    def match(self, start: int, numbers: list[int]) -> None:
        tokens = np.concatenate([self.page(number) for number in numbers] or [np.zeros(0, np.int32)])
        found = [x.match(start, tokens, len(numbers), self.tokens, self.parent).tolist() for x in self.both]
        assert found[0] == found[1]
        if found[0]:
            end = len(found[0])
            rest = [
                x.match(found[0][0], tokens[self.size :], end - 1, self.tokens, self.parent).tolist() for x in self.both
            ]
            assert rest == [found[0][1:]] * 2

    @rule(really=st.sampled_from([False] * 9 + [True]))
    def clear(self, really: bool) -> None:
        if really:
            self.live.clear()
            for lookup in self.both:
                lookup.clear()

    @invariant()
    def every_node_is_found(self) -> None:
        if not hasattr(self, "live"):
            return
        assert [len(lookup) for lookup in self.both] == [len(self.live)] * 2
        for node, (parent, page) in self.live.items():
            for lookup in self.both:
                assert lookup.match(parent, ids(*page), 1, self.tokens, self.parent).tolist() == [node]


Lookups.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLookups = Lookups.TestCase


@pytest.fixture(params=["native", "plain"])
def lookup(request):
    return NativeLookup(2, 7) if request.param == "native" else PlainLookup(2)


def test_tokens_and_parents_are_compared_whatever_the_hash_says() -> None:
    native = NativeLookup(2, 7)
    native.insert(0, -1, ids(1, 2))
    tokens, parent = np.zeros((1, 2), np.int32), ids(-1)
    tokens[0] = 1, 2
    assert native.match(-1, ids(1, 2), 1, tokens, parent).tolist() == [0]
    assert native.match(-1, ids(1, 2), 1, tokens + 1, parent).tolist() == []  # the node holds other tokens
    assert native.match(-1, ids(1, 2), 1, tokens, ids(5)).tolist() == []  # or stands below another one


def test_a_match_of_thousands_of_pages_ends_where_they_do(lookup) -> None:
    pages = np.arange(20_000, dtype=np.int32).reshape(-1, 2)
    nodes = np.arange(len(pages), dtype=np.int32)
    lookup.insert_all(nodes, nodes - 1, pages)
    for end in (0, 1, 31, 32, 33, 64, 9_999, 10_000):
        prompt = pages.ravel().copy()
        if end < len(pages):
            prompt[2 * end] = -5
        found = lookup.match(-1, prompt, len(pages), pages, nodes - 1)
        assert found.dtype == np.int32 and found.tolist() == list(range(end))
    assert lookup.match(-1, pages.ravel(), 7, pages, nodes - 1).tolist() == list(range(7))


def test_what_is_erased_leaves_no_gap_in_front_of_others(lookup) -> None:
    rng = np.random.default_rng(0)
    pages = rng.permutation(4000).astype(np.int32).reshape(-1, 2)
    nodes, roots = np.arange(2000, dtype=np.int32), np.full(2000, -1, np.int32)
    lookup.insert_all(nodes, roots, pages)
    gone = set(rng.choice(2000, 1500, replace=False).tolist())
    for node in gone:
        assert lookup.erase(node)
    for node in range(2000):
        found = lookup.match(-1, pages[node], 1, pages, roots).tolist()
        assert found == ([] if node in gone else [node])


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.insert(-1, -1, ids(1, 2)),
        lambda x: x.insert(0, -1, ids(1)),
        lambda x: x.insert_all(ids(0, 1), ids(-1), np.zeros((2, 2), np.int32)),
        lambda x: x.insert_all(ids(0), ids(-1), np.zeros((1, 3), np.int32)),
        lambda x: x.match(-1, ids(1, 2), 2, np.zeros((1, 2), np.int32), ids(-1)),
        lambda x: x.match(-1, ids(1, 2), -1, np.zeros((1, 2), np.int32), ids(-1)),
        lambda x: x.match(-1, ids(1, 2), 1, np.zeros((1, 3), np.int32), ids(-1)),
        lambda x: x.match(-1, ids(1, 2), 1, np.zeros((1, 2), np.int32), ids(-1, -1)),
        lambda x: NativeLookup(0, 1),
    ],
)
def test_arrays_that_do_not_fit_are_refused(call) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        call(NativeLookup(2, 7))


def test_an_array_of_another_type_is_refused_and_never_copied() -> None:
    with pytest.raises(TypeError):
        NativeLookup(2, 7).match(-1, np.zeros(2, np.int64), 1, np.zeros((1, 2), np.int32), ids(-1))


def test_the_index_uses_the_native_one_unless_no_native_code_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    from byhand import Hand

    cache: PrefixCache = Hand().cache
    assert isinstance(cache.index.lookup, NativeLookup)
    monkeypatch.setenv("PAGED_BACKEND", "reference")
    assert isinstance(make_lookup(4), PlainLookup)
    hand = Hand()
    hand.donate([*range(8)])
    assert isinstance(hand.cache.index.lookup, PlainLookup) and hand.cache.match_len([*range(9)]) == 8
