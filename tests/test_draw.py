"""Random numbers, and what is done to one row of logits, each against a few lines of plain Python."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from paged import draw
from paged.draw import LOGPROB_FLOOR, edit, edits_logits, largest, mask, pick, token_logprob, uniforms
from paged.sampling import SamplingParams

INF = math.inf
NEAR = 3e-6  # weights are fp32: what comes nearer to a border than this may fall on either side
WORD = 2**64 - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def splitmix64(state: int, count: int) -> list[int]:
    return [mix((state + (i + 1) * 0x9E3779B97F4A7C15) & WORD) for i in range(count)]


def uniform_of(seed: int, position: int) -> float:
    return float(uniforms(np.array([seed], np.uint64), np.array([position], np.int32))[0])


# Randomness


def test_the_generator_gives_the_published_numbers() -> None:
    assert splitmix64(1234567, 5) == [
        *(6457827717110365317, 3203168211198807973, 9817491932198370423),
        *(4593380528125082431, 16408922859458223821),
    ]


@settings(deadline=None)
@given(st.integers(0, WORD), st.integers(0, 2**31 - 1))
@example(0, 0)
@example(WORD, 2**31 - 1)
def test_a_number_is_the_top_53_bits_of_the_seeds_stream_at_the_position(seed: int, position: int) -> None:
    bits = mix((mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) & WORD)
    assert uniform_of(seed, position) == (bits >> 11) / 2**53 < 1.0


def test_neither_neighbours_nor_order_change_a_number() -> None:
    seeds = np.array([7, 2**63, 0, 7, WORD], np.uint64)
    positions = np.array([3, 0, 9, 4, 2**31 - 1], np.int32)
    together = uniforms(seeds, positions)
    assert together.tolist() == [uniform_of(s, p) for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)]
    assert uniforms(seeds[::-1], positions[::-1]).tolist() == together[::-1].tolist()
    assert uniforms(seeds[:0], positions[:0]).shape == (0,)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("kind", ["positions of one seed", "seeds at one position", "low bits"])
def test_numbers_are_even_and_nearby_ones_unrelated(kind: str) -> None:
    n = 1 << 16
    steps = np.arange(n)
    if kind == "seeds at one position":
        u = uniforms(steps.astype(np.uint64), np.full(n, 5, np.int32))
    else:
        u = uniforms(np.full(n, 42, np.uint64), steps.astype(np.int32))
    if kind == "low bits":
        u = (u * 2**20) % 1.0
    # 63 and 255 degrees of freedom; the seeds are fixed, so this either holds always or never (chance 1e-4).
    assert chi_square(np.bincount((u * 64).astype(int), minlength=64), np.full(64, n / 64)) < 115
    pairs = (u[:-1] * 16).astype(int) * 16 + (u[1:] * 16).astype(int)
    assert chi_square(np.bincount(pairs, minlength=256), np.full(256, (n - 1) / 256)) < 345
    assert abs(float(np.corrcoef(u[:-1], u[1:])[0, 1])) < 0.015


# Bias and penalties

LOGITS = np.array([2.0, -1.0, 0.5, 1.0], np.float32)
KNOWN = np.array([0, 1, 1, 3], np.int32)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (
            {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25},
            [1.0, -3.0, 0.5, -0.25],
        ),
        ({"repetition_penalty": 2.0}, [1.0, -2.0, 0.5, 0.5]),
        ({"repetition_penalty": 0.5}, [4.0, -0.5, 0.5, 2.0]),
        ({"presence_penalty": 0.5}, [2.0, -1.5, 0.5, 0.5]),
        ({"frequency_penalty": 0.25}, [2.0, -1.5, 0.5, 0.75]),
        ({"presence_penalty": -1.0, "frequency_penalty": 0.5}, [2.0, -1.0, 0.5, 1.5]),
        ({"logit_bias": {2: 4.0, 0: -8.0}}, [-6.0, -1.0, 4.5, 1.0]),
        ({"logit_bias": {1: 3.0}, "repetition_penalty": 2.0}, [1.0, 1.0, 0.5, 0.5]),
        ({}, [2.0, -1.0, 0.5, 1.0]),
    ],
)
def test_bias_then_repetition_over_all_then_presence_and_frequency_over_output(
    params: dict[str, object], expected: list[float]
) -> None:
    p = SamplingParams(**params)  # type: ignore[arg-type]
    before = LOGITS.copy()
    assert edit(LOGITS, p, KNOWN, prompt_len=1).tolist() == expected
    assert np.array_equal(LOGITS, before)
    assert edits_logits(p) is bool(params)


def test_a_prompt_without_output_feels_no_presence_or_frequency() -> None:
    p = SamplingParams(repetition_penalty=2.0, presence_penalty=5.0, frequency_penalty=5.0)
    assert edit(LOGITS, p, KNOWN, prompt_len=4).tolist() == [1.0, -2.0, 0.5, 0.5]
    assert edit(LOGITS, p, KNOWN[:0], prompt_len=0).tolist() == LOGITS.tolist()


def test_minus_infinity_stays_through_every_penalty() -> None:
    p = SamplingParams(logit_bias={0: 100.0}, repetition_penalty=2.0, presence_penalty=-5.0, frequency_penalty=-5.0)
    row = np.array([-INF, 0.0, 1.0, 1.0], np.float32)
    assert edit(row, p, np.array([0, 0], np.int32), prompt_len=1)[0] == -INF


@pytest.mark.parametrize(
    ("row", "ends", "expected"),
    [
        ([1.0, 2.0, 3.0], [2], [1.0, 2.0, -INF]),
        ([1.0, 2.0, 3.0], [0, 2], [-INF, 2.0, -INF]),
        ([1.0, 2.0, 3.0], [0, 1, 2], [1.0, 2.0, 3.0]),
        ([-INF, 2.0, -INF], [1], [-INF, 2.0, -INF]),
        ([-INF, 2.0, 3.0], [1], [-INF, -INF, 3.0]),
    ],
)
def test_end_ids_are_masked_unless_nothing_else_is_left(
    row: list[float], ends: list[int], expected: list[float]
) -> None:
    values = np.array(row)
    mask(values, np.array(ends, np.int64))
    assert values.tolist() == expected


# What is kept

VALUES = st.lists(st.integers(-6, 6).map(lambda i: i / 2) | st.just(-INF), min_size=1, max_size=30)


@settings(deadline=None)
@given(VALUES, st.integers(1, 40))
@example([1.0, 1.0, 1.0], 2)
@example([-INF, -INF, 0.0], 2)
def test_the_largest_are_kept_and_of_equal_ones_the_first(values: list[float], k: int) -> None:
    expected = sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])
    for dtype in (np.float32, np.float64):
        assert largest(np.array(values, dtype), k).tolist() == expected


def nucleus(weights: list[float], top_p: float) -> tuple[list[int], float]:
    """The kept ids, and how far the nearest cumulative share is from top_p."""
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    total, mass, margin, kept = math.fsum(weights), 0.0, 1.0, []
    for i in order:
        if kept and mass >= top_p * total:
            break
        kept.append(i)
        mass += weights[i]
        margin = min(margin, abs(mass / total - top_p))
    return sorted(kept), margin


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.floats(0, 1, exclude_max=True), st.integers(1, 9))
def test_top_p_keeps_the_smallest_set_that_is_heavy_enough(raw: list[int], top_p: float, head: int) -> None:
    logits = np.array([-i / 4 for i in raw], np.float32)
    weights = np.exp(logits)
    expected, margin = nucleus(weights.tolist(), top_p)
    assume(margin > NEAR)
    usual = draw._HEAD
    draw._HEAD = head  # how many are sorted at first changes nothing
    try:
        assert draw._nucleus(logits, weights, top_p).tolist() == expected
    finally:
        draw._HEAD = usual


@pytest.mark.parametrize("kind", ["spread", "ties", "few finite", "equal", "ascending", "descending"])
@pytest.mark.parametrize("size", [200, 4096, 5001])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_largest_of_many_are_those_of_sorting_them(kind: str, size: int, dtype: type) -> None:
    rng = np.random.default_rng(size)
    values = {
        "spread": rng.normal(size=size),
        "ties": rng.integers(0, 40, size),
        "few finite": np.where(rng.random(size) < 0.004, rng.normal(size=size), -np.inf),
        "equal": np.zeros(size),
        "ascending": np.arange(size),
        "descending": -np.arange(size),
    }[kind].astype(dtype)
    order = np.argsort(-values, kind="stable")
    for k in (1, 2, 7, 40, 41, 256, size // 4, size - 1, size, size + 1):
        assert np.array_equal(largest(values, k), np.sort(order[:k]))


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.999, 1 - 2**-53])
@pytest.mark.parametrize("flat", [False, True])
def test_top_p_over_a_vocabulary_larger_than_what_it_sorts_at_first(top_p: float, flat: bool) -> None:
    logits = np.random.default_rng(5).normal(0, 0.01 if flat else 6, 5000).astype(np.float32)
    weights = np.exp(logits)
    kept = draw._nucleus(logits, weights, top_p)
    assert kept.tolist() == nucleus(weights.tolist(), top_p)[0]


def test_top_p_zero_keeps_the_first_maximum() -> None:
    logits = np.array([0.0, 3.0, 3.0], np.float32)
    assert draw._nucleus(logits, np.exp(logits), 0.0).tolist() == [1]


# The draw

ALMOST_ONE = 1.0 - 2.0**-53


def first_beyond(weights: list[float], u: float) -> tuple[int, float]:
    """The first index whose cumulative share exceeds u, and the distance of u to the nearest share."""
    total, mass, found, margin = math.fsum(weights), 0.0, -1, 1.0
    for i, weight in enumerate(weights):
        mass += weight
        margin = min(margin, abs(mass / total - u))
        if found < 0 and mass / total > u:
            found = i
    return found, margin


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-9, 0.1, 0.25, 1.0]), min_size=1, max_size=40).filter(any),
    st.integers(1, 30),
    st.floats(0, ALMOST_ONE),
)
def test_the_draw_is_the_first_index_whose_cumulative_share_exceeds_u(
    weights: list[float], repeats: int, u: float
) -> None:
    weights = weights * repeats  # up to 1200: several blocks
    expected, margin = first_beyond(weights, u)
    assume(margin > NEAR)
    assert draw._inverse_cdf(np.array(weights, np.float32), u) == expected


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 511, 512, 513, 5000])
def test_the_ends_of_the_range_pick_the_first_and_the_last_that_has_weight(size: int) -> None:
    weights = np.random.default_rng(size).random(size, np.float32) + 1e-3
    assert draw._inverse_cdf(weights, 0.0) == 0
    assert draw._inverse_cdf(weights, ALMOST_ONE) == size - 1
    padded = np.concatenate([np.zeros(300, np.float32), weights, np.zeros(700, np.float32)])
    assert draw._inverse_cdf(padded, 0.0) == 300
    assert draw._inverse_cdf(padded, ALMOST_ONE) == 300 + size - 1


def test_no_number_of_the_range_picks_what_has_no_weight() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        weights = np.exp(rng.normal(0, 8, 1000).astype(np.float32)) * (rng.random(1000) < 0.02)
        weights[500] = 1.0
        ends = np.cumsum(weights, dtype=np.float64)
        edges = (ends / ends[-1])[np.flatnonzero(weights)]
        for u in np.clip(np.concatenate([edges, np.nextafter(edges, 0), np.nextafter(edges, 1)]), 0, ALMOST_ONE):
            assert weights[draw._inverse_cdf(weights, float(u))] > 0


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 3}, [1, 3, 4]),  # of 3, 4 and 5, which tie, the first two
        ({"top_k": 6}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2**30}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.0}, [1]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 1.0}, [1]),
        ({"min_p": 0.3}, [1, 3, 4, 5]),
        ({"top_k": 3, "min_p": 1.0}, [1]),
        # Shares of e, 1, 1, 1 are 0.475 and thrice 0.175: top_p counts in what top_k has left.
        ({"top_k": 4, "top_p": 0.47}, [1]),
        ({"top_k": 4, "top_p": 0.48}, [1, 3]),
        ({"top_p": 0.9, "min_p": 0.36}, [1, 3, 4, 5]),
        ({"temperature": 1e4, "top_k": 2}, [1, 3]),
        ({"temperature": 1e-5}, [1]),
        ({"temperature": 5e-324}, [1]),
    ],
)
def test_only_what_the_filters_keep_can_be_drawn(params: dict[str, float], kept: list[int]) -> None:
    logits = np.array([-3.0, 1.0, -2.0, 0.0, 0.0, 0.0], np.float32)
    p = SamplingParams(**{"temperature": 1.0, **params})  # type: ignore[arg-type]
    drawn = {pick(logits, p, u) for u in [*np.linspace(0, 1, 501)[:-1].tolist(), ALMOST_ONE]}
    assert sorted(drawn) == kept


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.25}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 50.0, "top_k": 3}, [1, 3, 4]),
        ({"top_p": 0.7}, [1, 3]),
        ({"min_p": 0.2}, [1, 3, 4]),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.01}, [1, 3, 4]),
    ],
)
def test_each_kept_id_has_exactly_its_share_of_the_range_in_order_of_ids(
    params: dict[str, float], kept: list[int]
) -> None:
    logits = np.array([-3.0, 1.0, -2.0, 0.25, -0.5, -1.0], np.float32)
    p = SamplingParams(**{"temperature": 1.0, **params})  # type: ignore[arg-type]
    weights = [math.exp(float(logits[i]) / p.temperature) for i in kept]
    for n in range(1, len(kept)):
        border = math.fsum(weights[:n]) / math.fsum(weights)
        assert pick(logits, p, border - NEAR) == kept[n - 1]
        assert pick(logits, p, border + NEAR) == kept[n]


@pytest.mark.parametrize("position", [0, 3, 6])
@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 1e4}])
def test_the_only_finite_logit_is_drawn(position: int, params: dict[str, float]) -> None:
    logits = np.full(7, -INF, np.float32)
    logits[position] = -50.0
    p = SamplingParams(**{"temperature": 1.0, **params})  # type: ignore[arg-type]
    assert {pick(logits, p, u) for u in (0.0, 0.5, ALMOST_ONE)} == {position}


def test_logits_of_any_finite_size_are_drawn_without_a_warning() -> None:
    big = float(np.finfo(np.float32).max)
    logits = np.array([-big, big, big, 0.0, -INF], np.float32)
    for temperature in (1e-6, 1.0, 1e308):
        drawn = {pick(logits, SamplingParams(temperature=temperature), u) for u in (0.0, 0.49, 0.51, ALMOST_ONE)}
        assert drawn <= {0, 1, 2, 3} and (temperature > 1 or drawn == {1, 2})


# Log probabilities


def test_log_probabilities_are_those_of_the_softmax() -> None:
    logits = np.array([1.0, 3.0, 2.0, 3.0], np.float32)
    total = math.log(math.fsum(math.exp(x) for x in logits.tolist()))
    found = token_logprob(logits, 2, 3)
    assert found.token_id == 2 and found.logprob == pytest.approx(2.0 - total, abs=1e-6)
    assert [i for i, _ in found.top] == [1, 3, 2]  # of equal ones the lowest id first
    assert [p for _, p in found.top] == pytest.approx([3 - total, 3 - total, 2 - total], abs=1e-6)
    assert token_logprob(logits, 2, 0).top == ()
    assert [i for i, _ in token_logprob(logits, 0, 4).top] == [1, 3, 2, 0]


def test_of_many_equal_ones_the_lowest_ids_are_reported_in_order() -> None:
    logits = np.random.default_rng(4).integers(0, 4, 1000).astype(np.float32)
    order = sorted(range(1000), key=lambda i: (-logits[i], i))
    for num_top in (1, 30, 600, 1000):
        assert [i for i, _ in token_logprob(logits, 0, num_top).top] == order[:num_top]


def test_log_probabilities_sum_to_one_over_a_large_vocabulary() -> None:
    logits = np.random.default_rng(3).normal(0, 5, 3000).astype(np.float32)
    found = token_logprob(logits, 0, 3000)
    assert math.fsum(math.exp(p) for _, p in found.top) == pytest.approx(1.0, abs=1e-6)
    assert [p for _, p in found.top] == sorted((p for _, p in found.top), reverse=True)


def test_log_probabilities_are_valid_json_whatever_the_logits() -> None:
    big = float(np.finfo(np.float32).max)
    for row in ([0.0, -INF, -INF], [big, -big, 0.0], [-big, -INF, -big], [0.0, -20000.0, -9000.0]):
        found = token_logprob(np.array(row, np.float32), 1, 3)
        data = json.loads(json.dumps(dataclasses.asdict(found), allow_nan=False))
        values = [data["logprob"], *(p for _, p in data["top"])]
        assert all(LOGPROB_FLOOR <= value <= 0.0 for value in values)
        assert type(found.token_id) is int and all(type(i) is int and type(p) is float for i, p in found.top)
    assert token_logprob(np.array([0.0, -20000.0], np.float32), 1, 0).logprob == LOGPROB_FLOOR == -9999.0
