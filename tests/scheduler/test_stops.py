"""StopSequences against a plain search of the whole output."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.stops import StopSequences, texts_and_ids


def run(stops: list[list[int]], tokens: list[int]) -> tuple[list[int], bool, int]:
    """What comes out, whether a sequence ended it, and how many tokens were taken in."""
    one, out = StopSequences(stops), list[int]()
    for taken, token in enumerate(tokens, 1):
        out += one.push(token)
        if one.ended:
            return out, True, taken
    return out + one.flush(), False, len(tokens)


def plainly(stops: list[list[int]], tokens: list[int]) -> tuple[list[int], bool, int]:
    """The first token at which some sequence is complete; the longest that ends there is left out."""
    for end in range(1, len(tokens) + 1):
        found = [stop for stop in stops if tokens[max(0, end - len(stop)) : end] == stop]
        if found:
            return tokens[: end - max(map(len, found))], True, end
    return tokens, False, len(tokens)


few = st.integers(0, 2)
sequences = st.lists(st.lists(few, min_size=1, max_size=4), max_size=4)


@given(sequences, st.lists(few, max_size=30))
def test_it_ends_where_a_sequence_is_first_complete_and_leaves_out_the_longest(stops, tokens) -> None:
    assert run(stops, tokens) == plainly(stops, tokens)


@given(sequences, st.lists(few, max_size=30))
def test_a_token_is_held_back_only_while_it_may_belong_to_a_sequence(stops, tokens) -> None:
    one, out = StopSequences(stops), list[int]()
    for i, token in enumerate(tokens):
        out += one.push(token)
        if one.ended:
            return
        held = tokens[len(out) : i + 1]
        assert out == tokens[: len(out)]
        assert not held or any(stop[: len(held)] == held for stop in stops)


@pytest.mark.parametrize(
    ("stops", "tokens", "out"),
    [
        ([[1, 1, 2]], [1, 1, 1, 2, 5], [1]),  # the sequence begins again within itself
        ([[3]], [3, 4], []),
        ([[4, 5], [5]], [1, 4, 5], [1]),  # both end there
        ([[2, 3, 4], [3]], [1, 2, 3, 4], [1, 2]),  # the shorter is complete first
        ([[7, 8]], [1, 7], [1, 7]),  # half a sequence at the end
        ([], [1, 2], [1, 2]),
    ],
)
def test_examples(stops, tokens, out) -> None:
    assert run(stops, tokens)[0] == out


def test_flushing_twice_gives_nothing_twice() -> None:
    one = StopSequences([[1, 2]])
    assert one.push(1) == [] and one.flush() == [1] and one.flush() == []


def test_arrays_of_any_kind_are_sequences() -> None:

    one = StopSequences([np.array([1, 2], np.int64), (3,)])
    assert one.push(1) == [] and one.push(2) == [] and one.ended


def test_a_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token id"):
        StopSequences([[1], []])


def test_strings_and_ids_are_told_apart_whatever_holds_them() -> None:
    ids = np.array([[1, 2], [3, 4]])
    assert texts_and_ids(["a", [5], "b", (6, 7), ids[0]], 10) == (["a", "b"], ((5,), (6, 7), (1, 2)))
    assert texts_and_ids("ab", 10) == (["ab"], ())
    assert texts_and_ids(ids, 10) == ([], ((1, 2), (3, 4)))  # type: ignore[arg-type]
    assert texts_and_ids((), 10) == ([], ())
