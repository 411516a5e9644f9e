"""Proposers: what followed the last place where the text was as it is now."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.proposer import PromptLookup, get_proposer


def look(tokens: list[int], most: int = 4, **grams: int) -> list[int]:
    return PromptLookup(**grams).propose(np.array(tokens, np.int32), most).tolist()


def test_what_followed_the_same_tokens_is_proposed() -> None:
    assert look([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5, 9]
    assert look([1, 2, 3, 4, 5, 9, 1, 2], most=2) == [3, 4]


def test_nothing_is_proposed_where_the_end_never_stood_before() -> None:
    assert look([1, 2, 3, 4]) == []
    assert look([1]) == []
    assert look([5, 1, 2, 3, 6, 3]) == []  # one token alike is fewer than two


def test_one_token_is_enough_where_that_was_asked_for() -> None:
    assert look([5, 1, 2, 3, 6, 3], least_ngram=1) == [6, 3]


def test_of_several_places_the_longest_run_wins_and_then_the_latest() -> None:
    assert look([7, 1, 2, 30, 8, 1, 2, 40, 9, 1, 2], most=1) == [40]
    assert look([7, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2], most=1) == [30]


def test_a_run_may_reach_into_its_own_place() -> None:
    assert look([1, 1, 1, 1, 1], most=4) == [1]  # of the latest place only one token is known behind it
    assert look([1, 2, 1, 2, 1, 2], most=4) == [1, 2]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_it_agrees_with_a_plain_search(tokens: list[int], a: int, b: int, most: int) -> None:
    least, most_ngram = min(a, b), max(a, b)
    expected: list[int] = []
    for n in range(most_ngram, least - 1, -1):
        ends = [i for i in range(n, len(tokens)) if tokens[i - n : i] == tokens[len(tokens) - n :]]
        if ends and n <= len(tokens):
            expected = tokens[ends[-1] : ends[-1] + most]
            break
    assert look(tokens, most, most_ngram=most_ngram, least_ngram=least) == expected


def test_names_and_sizes_are_checked() -> None:
    assert isinstance(get_proposer("prompt_lookup"), PromptLookup)
    assert get_proposer(None) is None
    own = PromptLookup(3, 3)
    assert get_proposer(own) is own
    with pytest.raises(ValueError, match=r"one of prompt_lookup, got 'magic'"):
        get_proposer("magic")
    for grams in ((1, 2), (2, 0)):
        with pytest.raises(ValueError, match=r"1 <= least_ngram <= most_ngram"):
            PromptLookup(*grams)


def test_nothing_is_proposed_from_a_media_span_on() -> None:
    tokens = np.array([1, 2, 3, -5, -6, 4, 1, 2], np.int32)
    assert PromptLookup().propose(tokens, 4).tolist() == [3]
    assert PromptLookup().propose(np.array([1, 2, -5, 4, 1, 2], np.int32), 4).tolist() == []
