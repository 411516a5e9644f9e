"""Intake: what is asked for beside a prompt, and one sentence for each thing that cannot be."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import EchoAfter, EchoLooped, EchoModel

from paged.errors import GeometryMismatch, InvalidRequest, LoopsMismatch, PromptTooLong
from paged.sampling import SamplingParams
from scheduler.engine import Engine
from scheduler.intake import make_request, tokens_of
from scheduler.request import PrefillStops


@pytest.fixture
def engine():
    with Engine(EchoLooped(), page_size=4, num_pages=100, max_num_seqs=4) as made:
        yield made


def ask(engine: Engine, prompt=(1, 2, 3), params: SamplingParams | None = None, **options):
    return make_request(engine, "r", list(prompt), params, options)


def test_a_request_has_the_view_of_its_depth_and_window(engine: Engine) -> None:
    assert ask(engine).view is engine.model.view(2)
    request = ask(engine, loops=4, cache_window=7, namespace="a", priority=3, request_id="mine")
    assert request.view is engine.model.view(4, 7)
    assert (request.id, request.namespace, request.priority) == ("mine", "a", 3)
    assert ask(engine).id == "r"


def test_the_limit_is_that_of_its_own_depth(engine: Engine) -> None:
    """100 pages of 4 tokens: 50 columns with two groups, 20 with five."""
    unlimited = SamplingParams(max_tokens=None)
    assert ask(engine, params=unlimited, loops=1).limit == 200
    assert ask(engine, params=unlimited, loops=4).limit == 80
    with pytest.raises(PromptTooLong, match="the prompt has 90 tokens and the whole pool holds 80"):
        ask(engine, [1] * 90, loops=4)
    assert ask(engine, [1] * 90, loops=3).num_prompt == 90


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"loops": 5}, ValueError, "loops must be between 1 and this model's 4, got 5"),
        ({"cache_window": -2}, ValueError, "cache_window must be 0"),
        ({"depth": 3}, TypeError, "a request takes .*loops, cache_window, .*prefix; got depth"),
        ({"request_id": 7}, TypeError, "request_id must be a str, got int"),
        ({"namespace": 5}, TypeError, "namespace must be a str, got int"),
        ({"namespace": None}, TypeError, "namespace must be a str, got NoneType"),
        ({"namespace": "\ud800"}, InvalidRequest, "namespace must be text that UTF-8 can encode"),
        ({"cache_window": 2.5}, TypeError, "cache_window must be an integer, got 2.5"),
        ({"stops": (8, 16)}, TypeError, "stops must be PrefillStops or None, got tuple"),
        ({"timeout_s": "5"}, TypeError, "timeout_s must be a number of seconds or None, got '5'"),
        ({"deadline_s": float("nan")}, InvalidRequest, "deadline_s must be 0 or more seconds, got nan"),
        ({"prefix": "p"}, TypeError, r"prefix must be a PrefixHandle from build_prefix\(\), got str"),
    ],
)
def test_options_that_cannot_be_are_refused(engine: Engine, options: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        ask(engine, **options)
    assert not engine.has_work


@pytest.mark.parametrize("policy", ["fcfs", "longest_prefix", "fair_share"])
def test_a_namespace_that_has_no_key_never_reaches_a_step(policy: str) -> None:
    """The policy "longest_prefix" makes the keys of all that wait: one that cannot be made ended every later step."""
    with Engine(EchoModel(), page_size=4, num_pages=20, policy=policy) as engine:
        for namespace in ("\ud800", 5):
            with pytest.raises((InvalidRequest, TypeError), match="namespace must be"):
                engine.submit([1, 2, 3], namespace=namespace)
            with pytest.raises((InvalidRequest, TypeError), match="namespace must be"):
                engine.prefix_match_len([1, 2, 3], namespace)
            with pytest.raises((InvalidRequest, TypeError), match="namespace must be"):
                engine.build_prefix([1, 2, 3], namespace=namespace)
        [output] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        assert output.finish_reason == "length"
        engine.check()


@pytest.mark.parametrize(("marks", "error"), [((-1,), InvalidRequest), ((0, 1.5), TypeError), ((0, 0, "a"), TypeError)])
def test_stops_are_numbers_of_tokens(marks: tuple, error: type) -> None:
    with pytest.raises(error, match=r"PrefillStops.* must be"):
        PrefillStops(*marks)


def test_only_a_looped_model_takes_a_depth() -> None:
    with Engine(EchoModel(), page_size=4, num_pages=20) as engine, pytest.raises(ValueError, match="does not loop"):
        ask(engine, loops=2)


def test_a_model_that_knows_no_cache_window_refuses_one(engine: Engine) -> None:
    engine.model.windows_cache = False
    with pytest.raises(ValueError, match="echo does not take a cache_window, got 3"):
        ask(engine, cache_window=3)


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ([], InvalidRequest, "the prompt is empty"),
        ([1, 97], InvalidRequest, "between 0 and 96, got 97"),
        ([-1, 5], InvalidRequest, "between 0 and 96, got -1"),
        ("text", InvalidRequest, "has no tokenizer"),
    ],
)
def test_prompts_that_cannot_be_are_refused(prompt, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        tokens_of(EchoModel(), prompt)


def test_the_callers_buffer_may_change(engine: Engine) -> None:
    buffer = np.array([1, 2, 3], np.int32)
    request = make_request(engine, "r", buffer, None, {})
    buffer[:] = 9
    assert request.prompt.tolist() == [1, 2, 3]


# Prefixes ---------------------------------------------------------------------------------------------------------


def test_a_prefix_must_be_what_the_request_would_compute(engine: Engine) -> None:
    prefix = engine.build_prefix([1, 2, 3], loops=3, cache_window=6, namespace="a")
    fits = {"loops": 3, "cache_window": 6, "namespace": "a", "prefix": prefix}
    assert ask(engine, [1, 2, 3, 4], **fits).prefix is prefix
    assert ask(engine, [1, 2, 3], **fits).prefix is prefix
    with pytest.raises(LoopsMismatch, match="built at 3 loops, the call asks for 2"):
        ask(engine, [1, 2, 3, 4], **{**fits, "loops": None})
    with pytest.raises(LoopsMismatch, match="built with 6, the call asks for 0"):
        ask(engine, [1, 2, 3, 4], **{**fits, "cache_window": 0})
    with pytest.raises(InvalidRequest, match="belongs to namespace 'a', the request to ''"):
        ask(engine, [1, 2, 3, 4], **{**fits, "namespace": ""})
    for prompt in ([1, 2, 4, 4], [1, 2]):
        with pytest.raises(InvalidRequest, match="does not start with the 3 tokens of the prefix"):
            ask(engine, prompt, **fits)
    with (
        Engine(EchoLooped(), page_size=4, num_pages=100) as other,
        pytest.raises(GeometryMismatch, match="another engine"),
    ):
        ask(other, [1, 2, 3, 4], **fits)


@pytest.mark.parametrize("kind", [EchoModel, EchoLooped, EchoAfter])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("cache_window", [0, 4])
def test_outputs_are_the_same_with_a_prefix_and_without(kind, prefix_cache: bool, cache_window: int) -> None:
    model = kind()
    with Engine(model, page_size=4, num_pages=300, prefix_cache=prefix_cache) as engine:
        prefix = engine.build_prefix([1, 2, 3, 4, 5, 6, 7], cache_window=cache_window)
        for tail in ([], [9], [9, 8, 7, 6]):
            prompt = [1, 2, 3, 4, 5, 6, 7, *tail]
            for params in (SamplingParams(max_tokens=6), SamplingParams(max_tokens=6, logprobs=1)):
                (out,) = engine.generate([prompt], params, prefix=prefix, cache_window=cache_window)
                assert out.token_ids == model.greedy(prompt, 6, None, cache_window)
                engine.check()
        before = model.num_rows
        (out,) = engine.generate(
            [[1, 2, 3, 4, 5, 6, 7]], SamplingParams(max_tokens=1), prefix=prefix, cache_window=cache_window
        )
        assert model.num_rows == before, "the first token comes without a forward"
