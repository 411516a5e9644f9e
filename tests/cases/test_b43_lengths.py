"""Length borders: the limit is on prompt and output together."""

from __future__ import annotations

import pytest
from byhand import span
from driver import Driver
from fakes import EchoModel
from token_api import opened

from paged import PrefixPool
from paged.errors import InvalidRequest, PromptTooLong
from scheduler import Model


def limited() -> Driver:
    return Driver(8, 16, model=EchoModel(max_seq_len=64))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "generated"),
    [(63, 1, 1), (60, 10, 4), (1, 63, 63), (1, 64, 63), (1, None, 63), (63, 5, 1)],
)
def test_a_request_ends_with_length_at_the_limit(prompt: int, max_tokens: int | None, generated: int) -> None:
    driver = limited()
    out = driver.solo("a", span(0, prompt), max_tokens)
    assert len(out) == generated
    assert driver.requests["a"].finish_reason == "length"
    driver.expect_all_exact()


@pytest.mark.parametrize("max_tokens", [1, None])
def test_a_prompt_as_long_as_the_limit_is_refused_and_the_message_shows_the_limit(max_tokens: int | None) -> None:
    with pytest.raises(PromptTooLong, match="64 tokens and max_seq_len is 64"):
        limited().submit("a", span(0, 64), max_tokens)


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_no_token_at_all_is_a_value_error(max_tokens: int) -> None:
    driver = limited()
    with pytest.raises(ValueError, match="max_tokens"):
        driver.submit("a", [1], max_tokens)
    assert not driver.scheduler.has_work


def test_an_empty_prompt_is_refused() -> None:
    driver = limited()
    with pytest.raises(InvalidRequest, match="at least one prompt token"):
        driver.submit("a", [], 5)
    assert not driver.scheduler.has_work


# The token-level API: prompt and max_tokens together, as the seeds want it -----------------------------------------


def verbs(api: Model, prompt: list[int]) -> dict:
    """Every way to ask for `n` tokens behind a prompt."""
    pool, empty = PrefixPool(), PrefixPool()
    api.register_prefix(pool, prompt)
    prefix = api.build_prefix_cache(prompt)
    return {
        "generate": lambda n: api.generate(prompt, max_tokens=n),
        "stream": lambda n: prompt + list(api.generate_stream(prompt, max_tokens=n)),
        "beams": lambda n: api.generate(prompt, max_tokens=n, num_beams=2),
        "a pool": lambda n: api.generate_with_pool(pool, prompt, max_tokens=n, temperature=0.0),
        "an empty pool": lambda n: api.generate_with_pool(empty, prompt, max_tokens=n, temperature=0.0),
        "a handle": lambda n: api.generate_from_prefix_cache(prefix, max_tokens=n),
    }


@pytest.mark.parametrize(("prompt", "max_tokens"), [(63, 1), (1, 63), (60, 4), (32, 32)])
def test_what_fits_exactly_runs_whole_from_every_start(prompt: int, max_tokens: int) -> None:
    with opened(EchoModel(97, max_seq_len=64), num_pages=64) as api:
        for name, call in verbs(api, span(0, prompt)).items():
            out = call(max_tokens)
            assert len(out) == 64, name
            if name != "beams":
                assert out == span(0, prompt) + api.engine.model.greedy(span(0, prompt), max_tokens), name


@pytest.mark.parametrize(("prompt", "max_tokens"), [(64, 1), (63, 2), (60, 10), (1, 64)])
def test_one_token_more_is_a_runtime_error_that_shows_the_limit(prompt: int, max_tokens: int) -> None:
    with opened(EchoModel(97, max_seq_len=64), num_pages=64) as api:
        for call in verbs(api, span(0, prompt)).values():
            with pytest.raises(RuntimeError, match=f"make {prompt + max_tokens}, and max_seq_len is 64"):
                call(max_tokens)


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_fewer_than_one_token_is_a_value_error_of_every_verb(max_tokens: int) -> None:
    with opened(EchoModel(97, max_seq_len=64), num_pages=64) as api:
        for call in verbs(api, span(0, 10)).values():
            with pytest.raises(ValueError, match="max_tokens"):
                call(max_tokens)


def test_no_max_tokens_is_up_to_the_limit_from_every_start() -> None:
    with opened(EchoModel(97, max_seq_len=64), num_pages=64) as api:
        for name, call in verbs(api, span(0, 10)).items():
            assert len(call(None)) == 64, name
