"""Length borders: the limit is on prompt and output together."""

from __future__ import annotations

import pytest
from byhand import span
from driver import Driver
from fakes import EchoModel

from paged.errors import InvalidRequest, PromptTooLong


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
