"""SamplingParams: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged import PagedError
from paged.grammar import Grammar
from paged.sampling import GREEDY_BELOW, SamplingParams, draw_seed, sample_seed


def test_the_defaults_are_greedy_and_change_nothing() -> None:
    p = SamplingParams()
    assert p.greedy and p.max_tokens == 128 and p.temperature == 0.0
    assert (p.top_k, p.top_p, p.min_p) == (0, 1.0, 0.0)
    assert (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.0, 0.0, 0.0)
    assert p.seed is None and p.stop == () and p.stop_token_ids == () and p.include_stop is False
    assert p.min_tokens == 0 and p.ignore_eos is False and p.logprobs is None and p.logit_bias is None
    assert p.prompt_logprobs is None and p.logits_processors == () and p.n == 1 and p.grammar is None


def test_the_fields_stand_in_the_documented_order() -> None:
    assert [f.name for f in dataclasses.fields(SamplingParams)] == [
        *("max_tokens", "temperature", "top_k", "top_p", "min_p"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
        *("stop", "stop_token_ids", "include_stop", "min_tokens", "ignore_eos", "n"),
        *("logprobs", "prompt_logprobs", "logit_bias", "logits_processors", "grammar"),
    ]


ACCEPTED: list[tuple[str, Any, Any]] = [
    ("max_tokens", None, None),
    ("max_tokens", 1, 1),
    ("max_tokens", np.int32(7), 7),
    ("temperature", 0, 0.0),
    ("temperature", 1e-8, 1e-8),
    ("temperature", 1e4, 1e4),
    ("temperature", np.float32(0.5), 0.5),
    ("temperature", Fraction(1, 4), 0.25),
    ("top_k", -1, 0),
    ("top_k", 0, 0),
    ("top_k", 1, 1),
    ("top_k", 2**30, 2**30),
    ("top_p", 0, 0.0),
    ("top_p", 1e-9, 1e-9),
    ("top_p", 1, 1.0),
    ("min_p", 0, 0.0),
    ("min_p", 1, 1.0),
    ("repetition_penalty", 0.5, 0.5),
    ("repetition_penalty", 2, 2.0),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 1.5, 1.5),
    ("seed", None, None),
    ("seed", 0, 0),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("stop", "ab", ("ab",)),
    ("stop", ["ab"], ("ab",)),
    ("stop", ("b", "a", "b"), ("b", "a")),
    ("stop", [], ()),
    ("stop_token_ids", [5, 3, 5], (5, 3)),
    ("stop_token_ids", np.array([4, 2], np.int64), (4, 2)),
    ("stop_token_ids", range(2), (0, 1)),
    ("include_stop", True, True),
    ("min_tokens", 128, 128),
    ("ignore_eos", True, True),
    ("logprobs", 0, 0),
    ("logprobs", 20, 20),
    ("prompt_logprobs", 0, 0),
    ("prompt_logprobs", np.int64(3), 3),
    ("logit_bias", {3: -100, np.int64(4): 1.5}, {3: -100.0, 4: 1.5}),
    ("logit_bias", {}, None),
    ("logit_bias", None, None),
    ("n", np.int64(3), 3),
    ("logits_processors", [max, min], (max, min)),
    ("grammar", None, None),
    ("grammar", Grammar.regex("a+"), Grammar.regex("a+")),
]


@pytest.mark.parametrize(("name", "given", "kept"), ACCEPTED)
def test_a_good_value_is_kept_as_plain_python(name: str, given: Any, kept: Any) -> None:
    value = getattr(SamplingParams(**{name: given}), name)
    assert value == kept and type(value) is type(kept)


NAN, INF = math.nan, math.inf
REFUSED: list[tuple[str, Any, type[Exception]]] = [
    *((name, True, TypeError) for name in ("max_tokens", "top_k", "seed", "min_tokens", "logprobs")),
    *((name, 1.0, TypeError) for name in ("max_tokens", "top_k", "seed", "min_tokens", "logprobs")),
    *((name, "1", TypeError) for name in ("max_tokens", "top_k", "seed", "min_tokens", "logprobs")),
    *((name, None, TypeError) for name in ("top_k", "min_tokens")),
    *(("logits_processors", value, TypeError) for value in (None, max, "ab", b"ab", {"a": max}, [max, 3])),
    ("max_tokens", 0, ValueError),
    ("max_tokens", -1, ValueError),
    ("top_k", -2, ValueError),
    ("seed", -1, ValueError),
    ("seed", 2**64, ValueError),
    ("min_tokens", -1, ValueError),
    ("logprobs", -1, ValueError),
    *(
        (name, value, error)
        for name in (
            *("temperature", "top_p", "min_p"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        )
        for value, error in (
            (NAN, ValueError),
            (INF, ValueError),
            (-INF, ValueError),
            (np.float32("nan"), ValueError),
            (10**400, ValueError),
            (True, TypeError),
            ("0.5", TypeError),
            (None, TypeError),
            (1j, TypeError),
        )
    ),
    ("temperature", -0.1, ValueError),
    ("top_p", 1.5, ValueError),
    ("top_p", -1e-9, ValueError),
    ("min_p", 1.01, ValueError),
    ("min_p", -0.5, ValueError),
    ("repetition_penalty", 0.0, ValueError),
    ("repetition_penalty", -1.0, ValueError),
    ("stop", "", ValueError),
    ("stop", ["a", ""], ValueError),
    ("stop", ["a", 5], TypeError),
    ("stop", b"a", TypeError),
    ("stop", 5, TypeError),
    ("stop", None, TypeError),
    ("stop", {"a": 1}, TypeError),
    ("stop_token_ids", 5, TypeError),
    ("stop_token_ids", "5", TypeError),
    ("stop_token_ids", b"5", TypeError),
    ("stop_token_ids", [1, True], TypeError),
    ("stop_token_ids", [1.0], TypeError),
    ("stop_token_ids", [1, -1], ValueError),
    ("stop_token_ids", None, TypeError),
    ("include_stop", 1, TypeError),
    ("include_stop", None, TypeError),
    ("ignore_eos", "yes", TypeError),
    ("logit_bias", [(1, 2.0)], TypeError),
    ("logit_bias", {"1": 2.0}, TypeError),
    ("logit_bias", {True: 2.0}, TypeError),
    ("logit_bias", {-1: 2.0}, ValueError),
    ("logit_bias", {1: NAN}, ValueError),
    ("logit_bias", {1: -INF}, ValueError),
    ("logit_bias", {1: "2"}, TypeError),
    ("n", 0, ValueError),
    ("n", -1, ValueError),
    ("n", 16_385, ValueError),
    ("n", None, TypeError),
    ("n", True, TypeError),
    ("n", 2.0, TypeError),
    ("grammar", "a+", TypeError),
    ("grammar", {"type": "object"}, TypeError),
    ("grammar", Grammar, TypeError),
]


@pytest.mark.parametrize(("name", "value", "error"), REFUSED)
def test_a_bad_value_is_refused_in_one_sentence_that_names_the_field(
    name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"SamplingParams.{name}") and " must be " in message and ", got " in message
    assert "\n" not in message and len(message) < 200
    assert error is TypeError or isinstance(caught.value, PagedError)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"top_p": 1.5}, "SamplingParams.top_p must be a finite number >= 0 and <= 1, got 1.5"),
        ({"temperature": -1}, "SamplingParams.temperature must be a finite number >= 0, got -1"),
        ({"repetition_penalty": 0}, "SamplingParams.repetition_penalty must be a finite number > 0, got 0"),
        ({"presence_penalty": NAN}, "SamplingParams.presence_penalty must be a finite number, got nan"),
        ({"max_tokens": 0}, "SamplingParams.max_tokens must be an integer >= 1, got 0"),
        ({"seed": -1}, "SamplingParams.seed must be an integer from 0 to 18446744073709551615, got -1"),
        ({"stop_token_ids": [7, -3]}, "SamplingParams.stop_token_ids[1] must be an integer >= 0, got -3"),
        ({"logit_bias": {5: INF}}, "SamplingParams.logit_bias[5] must be a finite number, got inf"),
        (
            {"max_tokens": 2, "min_tokens": 3},
            "SamplingParams.min_tokens must be at most max_tokens, got min_tokens 3 and max_tokens 2",
        ),
    ],
)
def test_the_message_says_what_was_expected_and_what_was_found(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**params)
    assert str(caught.value) == message


def test_a_long_value_does_not_fill_the_message() -> None:
    with pytest.raises(TypeError) as caught:
        SamplingParams(logit_bias=list(range(10**5)))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_min_tokens_may_reach_max_tokens_and_exceed_an_open_limit() -> None:
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6
    with pytest.raises(ValueError, match="min_tokens"):
        SamplingParams(min_tokens=129)  # max_tokens is 128 unless said


@pytest.mark.parametrize("name", ["best_of", "top_K", "max_new_tokens"])
def test_an_unknown_parameter_is_an_error_not_silence(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 2})


def test_parameters_are_given_by_name_and_never_change() -> None:
    with pytest.raises(TypeError):
        SamplingParams(16)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 3  # type: ignore[misc]


def test_the_callers_containers_are_copied() -> None:
    bias, stops, ids = {1: 2.0}, ["a"], np.array([3])
    p = SamplingParams(logit_bias=bias, stop=stops, stop_token_ids=ids)  # type: ignore[arg-type]
    bias[1], ids[0] = 9.0, 9
    stops.append("b")
    assert p.logit_bias == {1: 2.0} and p.stop == ("a",) and p.stop_token_ids == (3,)


def test_equal_parameters_are_equal_hashable_and_survive_pickling() -> None:
    p = SamplingParams(stop="ab", top_k=-1, logit_bias={1: 2}, seed=7)
    q = SamplingParams(stop=["ab"], top_k=0, logit_bias={1: 2.0}, seed=7)
    assert p == q and hash(p) == hash(q) and len({p, q}) == 1
    assert pickle.loads(pickle.dumps(p)) == p and copy.deepcopy(p) == p
    assert dataclasses.replace(p, seed=8) != p
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(p, top_p=2.0)


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        ({}, True),
        ({"temperature": 1e-8}, True),
        ({"temperature": GREEDY_BELOW}, False),
        ({"temperature": 1.0}, False),
        ({"temperature": 1.0, "top_k": 1}, True),
        ({"temperature": 1.0, "top_k": 2}, False),
    ],
)
def test_a_vanishing_temperature_and_top_k_1_count_as_greedy(params: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**params).greedy is greedy


@pytest.mark.parametrize(
    ("params", "ends"),
    [
        ({}, (2, 11)),
        ({"stop_token_ids": [5]}, (2, 5, 11)),
        ({"stop_token_ids": [11, 5], "ignore_eos": True}, (5, 11)),
        ({"ignore_eos": True}, ()),
    ],
)
def test_end_ids_are_the_models_and_the_requests_own(params: dict[str, Any], ends: tuple[int, ...]) -> None:
    assert SamplingParams(**params).end_ids((11, 2)) == ends


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {100: 5}}, "SamplingParams.logit_bias must hold token ids from 0 to 99, got 100"),
        ({"stop_token_ids": [10**9]}, "SamplingParams.stop_token_ids must hold token ids from 0 to 99, got 1000000000"),
        ({"logprobs": 10**6}, "SamplingParams.logprobs must be at most the 100 tokens of the vocabulary, got 1000000"),
    ],
)
def test_what_lies_outside_the_vocabulary_is_refused(params: dict[str, Any], message: str) -> None:
    p = SamplingParams(**params)
    with pytest.raises(PagedError) as caught:
        p.validate_for(100)
    assert str(caught.value) == message and isinstance(caught.value, ValueError)


def test_the_edge_of_the_vocabulary_is_inside_and_top_k_may_exceed_it() -> None:
    p = SamplingParams(logit_bias={99: 1, 0: 1}, stop_token_ids=[0, 99], logprobs=100, top_k=101)
    p.validate_for(100)
    with pytest.raises(ValueError):
        p.validate_for(99)


def test_drawn_seeds_are_64_bits_and_never_alike() -> None:
    seeds = [draw_seed() for _ in range(1000)]
    assert len(set(seeds)) == 1000 and all(0 <= s < 2**64 for s in seeds)
    assert any(s >= 2**63 for s in seeds) and any(s < 2**63 for s in seeds)
    assert SamplingParams(seed=seeds[0]).seed == seeds[0]


def test_the_parameters_of_one_sample_differ_from_those_of_all_in_n_and_seed_alone() -> None:
    p = SamplingParams(n=3, seed=7, temperature=0.5, stop="x", logit_bias={1: 2.0}, grammar=Grammar.json())
    assert p.sample(0) == dataclasses.replace(p, n=1)
    for i in (1, 2):
        assert p.sample(i) == dataclasses.replace(p, n=1, seed=sample_seed(7, i))
    assert dataclasses.replace(p, seed=None).sample(2).seed is None  # each draws its own
    for outside in (-1, 3):
        with pytest.raises(IndexError, match="from 0 to 2"):
            p.sample(outside)


@given(st.integers(0, 2**64 - 1), st.integers(1, 1000), st.integers(1, 1000))
def test_seeds_of_samples_are_64_bits_and_unlike_each_other(seed: int, i: int, j: int) -> None:
    assert sample_seed(seed, 0) == seed
    assert 0 <= sample_seed(seed, i) < 2**64
    assert (sample_seed(seed, i) == sample_seed(seed, j)) == (i == j)


def test_samples_of_near_seeds_share_no_seed() -> None:
    seeds = {sample_seed(seed, i) for seed in range(100) for i in range(100)}
    assert len(seeds) == 10_000


def test_the_module_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, paged.sampling; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
