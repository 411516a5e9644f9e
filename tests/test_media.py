"""Media spans and the ids that stand for them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from sampling_oracle import int32

from paged import media
from paged.draw import edit
from paged.errors import InvalidRequest
from paged.media import MediaIds, MediaSpan, check_spans, holds_media, is_inside, span_start
from paged.sampling import SamplingParams


def rows(n: int, seed: int = 0, width: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, width)).astype(np.float32)


# MediaSpan ----------------------------------------------------------------------------------------------------------


def test_a_span_keeps_a_copy_that_nobody_can_change() -> None:
    values = rows(4)
    span = MediaSpan(5, values)
    values[:] = 0
    assert np.array_equal(span.embeddings, rows(4))
    assert (span.num_tokens, span.end) == (4, 9)
    with pytest.raises(ValueError, match="read-only"):
        span.embeddings[0] = 1


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
def test_what_counts_is_the_values_in_fp32_not_how_they_came(kind) -> None:
    values = np.arange(6).reshape(2, 3).astype(kind)
    want = MediaSpan(0, np.arange(6, dtype=np.float32).reshape(2, 3)).digest
    assert MediaSpan(0, values).digest == want
    assert MediaSpan(7, np.asfortranarray(values)).digest == want
    assert MediaSpan(0, torch.from_numpy(values).requires_grad_()).digest == want
    assert MediaSpan(0, torch.from_numpy(values).to(torch.bfloat16)).digest == want


def test_another_value_or_shape_is_another_content() -> None:
    base = rows(4)
    other = base.copy()
    other[3, 2] = np.nextafter(other[3, 2], np.float32(9))
    spans = [MediaSpan(0, values) for values in (base, other, base[:3], base.reshape(3, 4), base.reshape(2, 6))]
    assert len({span.digest for span in spans}) == 5


def test_an_id_of_the_callers_stands_for_the_content() -> None:
    assert MediaSpan(0, rows(4, 1), "cat").digest == MediaSpan(3, rows(4, 2), "cat").digest
    digests = [
        MediaSpan(0, rows(n), content).digest
        for n, content in ((4, None), (4, "cat"), (4, b"cat"), (4, "dog"), (5, "cat"), (4, ""), (4, "\udc80"))
    ]
    assert len(set(digests)) == 7


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ((0, [[1, 2]]), TypeError, "must be floats .*int64"),
        ((0, np.zeros(3)), InvalidRequest, r"must be \[num_tokens, hidden_size\], got shape \(3,\)"),
        ((0, np.zeros((0, 3))), InvalidRequest, r"got shape \(0, 3\)"),
        ((0, np.zeros((3, 0))), InvalidRequest, r"got shape \(3, 0\)"),
        ((0, [[1.0, float("nan")]]), InvalidRequest, "finite"),
        ((0, [[1.0, float("inf")]]), InvalidRequest, "finite"),
        ((0, [[1e300]]), InvalidRequest, "finite"),
        ((1.0, [[1.0]]), TypeError, "start must be an integer"),
        ((True, [[1.0]]), TypeError, "start must be an integer"),
        ((0, [[1.0]], 7), TypeError, "content_id must be a str, bytes or None, got int"),
    ],
    ids=str,
)
def test_a_span_that_cannot_be_is_refused(args, error, match: str) -> None:
    with pytest.raises(error, match=match):
        MediaSpan(*args)


def test_the_rows_of_a_chunk_are_those_in_both() -> None:
    span = MediaSpan(10, rows(5))
    for first, last, at, want in ((0, 10, 10, []), (0, 12, 10, [0, 1]), (11, 13, 11, [1, 2]), (14, 20, 14, [4])):
        got, values = span.rows(first, last)
        assert got == at and np.array_equal(values, rows(5)[want])
    assert len(span.rows(15, 20)[1]) == 0 and np.array_equal(span.rows(0, 99)[1], rows(5))


def test_spans_are_put_in_order_and_must_fit() -> None:
    spans = [MediaSpan(6, rows(2)), MediaSpan(0, rows(3)), MediaSpan(3, rows(3))]
    assert [span.start for span in check_spans(spans, 8, 3, "m")] == [0, 3, 6]
    assert check_spans([], 8, 0, "m") == ()
    for bad, num_prompt, size, match in (
        (spans, 7, 3, "within the 7 tokens of the prompt, got positions 6 to 7"),
        ([MediaSpan(-1, rows(3))], 7, 3, "got positions -1 to 1"),
        ([MediaSpan(0, rows(3)), MediaSpan(2, rows(1))], 7, 3, "must not overlap, got one from 2"),
        (spans, 8, 4, "must have 4 values a token, got 3"),
        (spans, 8, 0, "m takes token ids alone"),
    ):
        with pytest.raises(InvalidRequest, match=match):
            check_spans(bad, num_prompt, size, "m")
    for wrong in (spans[0], [rows(3)], "ab", None):
        with pytest.raises(TypeError, match="sequence of MediaSpan"):
            check_spans(wrong, 8, 3, "m")


# MediaIds -----------------------------------------------------------------------------------------------------------


def test_each_content_has_ids_of_its_own_wherever_it_stands() -> None:
    ids, tokens = MediaIds(), int32(*range(10))
    one, two = MediaSpan(2, rows(3, 1)), MediaSpan(2, rows(3, 2))
    first = ids.keyed(tokens, [one])
    assert first.tolist() == [0, 1, -5, -6, -6, 5, 6, 7, 8, 9]
    assert ids.keyed(tokens, [two]).tolist() == [0, 1, -7, -8, -8, 5, 6, 7, 8, 9]
    both = ids.keyed(tokens, [MediaSpan(0, rows(3, 1)), MediaSpan(3, rows(3, 2)), MediaSpan(6, rows(3, 1))])
    assert both.tolist() == [-5, -6, -6, -7, -8, -8, -5, -6, -6, 9]
    assert tokens.tolist() == list(range(10))
    assert ids.keyed(tokens, []) is tokens


def test_the_first_position_alone_tells_two_contents_apart() -> None:
    """As it must where a span begins on the last position of a page."""
    ids = MediaIds()
    heads = {int(ids.keyed(int32(0), [MediaSpan(0, rows(1, seed))])[0]) for seed in range(100)}
    assert len(heads) == 100


def test_asking_without_new_remembers_nothing_and_unknown_contents_match_nothing() -> None:
    ids, span = MediaIds(), MediaSpan(0, rows(2, 1))
    assert ids.keyed(int32(0, 0), [span], new=False).tolist() == [-3, -4]
    assert ids.keyed(int32(0, 0), [span]).tolist() == [-5, -6]
    assert ids.keyed(int32(0, 0), [span], new=False).tolist() == [-5, -6]


def test_a_content_that_was_forgotten_gets_new_ids_and_no_ids_come_twice(monkeypatch) -> None:
    monkeypatch.setattr(media, "_REMEMBERED", 3)
    ids, seen = MediaIds(), {}
    spans = [MediaSpan(0, rows(1, seed)) for seed in range(6)]
    for i in (0, 1, 2, 0, 3, 1, 0, 4, 5, 2, 3):
        head = int(ids.keyed(int32(0), [spans[i]])[0])
        assert seen.setdefault(head, i) == i
        assert len(ids._numbers) <= 3
    order = [int(ids.keyed(int32(0), [spans[i]])[0]) for i in (2, 3)]
    assert order == [-3 - 2 * n for n in (8, 9)]  # known again: the last ones that came


def test_the_last_ids_fit_int32_and_then_a_sentence_says_so() -> None:
    ids = MediaIds()
    ids._next = media._MOST
    assert ids.keyed(int32(0, 0), [MediaSpan(0, rows(2))]).tolist() == [-(2**31) + 5, -(2**31) + 4]
    with pytest.raises(InvalidRequest, match="different media; make a new engine"):
        ids.keyed(int32(0, 0), [MediaSpan(0, rows(2, 1))])


def test_threads_agree_on_the_ids() -> None:
    ids, found = MediaIds(), []
    spans = [MediaSpan(0, rows(1, seed)) for seed in range(50)]

    def ask() -> None:
        found.append([int(ids.keyed(int32(0), [span])[0]) for span in spans])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one == found[0] for one in found) and len(set(found[0])) == 50


def test_positions_inside_a_span_are_told_from_its_first_and_from_tokens() -> None:
    tokens = MediaIds().keyed(int32(*range(9)), [MediaSpan(1, rows(3, 1)), MediaSpan(4, rows(3, 1))])
    assert [is_inside(token) for token in tokens] == [False, False, True, True, False, True, True, False, False]
    assert [span_start(tokens, at) for at in (2, 3, 5, 6)] == [1, 1, 4, 4]
    unknown = MediaIds().keyed(int32(0, 1, 2), [MediaSpan(0, rows(3))], new=False)
    assert is_inside(unknown[1]) and span_start(unknown, 2) == 0
    assert not any(is_inside(token) for token in (-1, -2, 0, 5))
    assert holds_media(np.stack([tokens[:2], tokens[7:], int32(-1, -1)])).tolist() == [True, False, False]


def test_a_penalty_over_a_prompt_with_media_touches_no_token_for_it() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    row = edit(np.ones(8, np.float32), params, int32(0, -5, -6, 1), prompt_len=4)
    assert row.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
