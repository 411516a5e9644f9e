"""A prompt that can never fit is refused at once; the others do not notice."""

from __future__ import annotations

import pytest
from byhand import span
from driver import Driver
from fakes import EchoModel

from paged.errors import InvalidRequest, PromptTooLong
from scheduler.engine import Engine
from scheduler.policy import POLICIES


def engine(policy: str = "fcfs") -> Driver:
    return Driver(49, 16, model=EchoModel(max_seq_len=2048), policy=policy)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_it_is_an_error_at_submit_that_names_both_numbers(policy: str) -> None:
    driver = engine(policy)
    for i in range(5):
        driver.submit(f"short{i}", span(i, 20), 5)
        with pytest.raises(PromptTooLong, match="1002 tokens and the whole pool holds 784") as caught:
            driver.submit(f"long{i}", [1] * 1002, 5)
        assert isinstance(caught.value, InvalidRequest) and isinstance(caught.value, ValueError)
    driver.run(max_steps=50)
    driver.expect_all_exact()
    assert [driver.requests[f"short{i}"].finish_reason for i in range(5)] == ["length"] * 5


@pytest.mark.parametrize("prompt", [783, 784, 785])
def test_the_border_leaves_room_for_one_token(prompt: int) -> None:
    driver = engine()
    if prompt < 784:
        assert len(driver.solo("a", [1] * prompt, 5)) == 1
        driver.expect_all_exact()
    else:
        with pytest.raises(PromptTooLong, match=f"{prompt} tokens .* 784"):
            driver.submit("a", [1] * prompt, 5)


def test_a_prompt_that_fits_with_more_tokens_than_fit_ends_with_length() -> None:
    driver = engine()
    out = driver.solo("a", [1] * 700, 200)
    assert len(out) == 84
    assert driver.requests["a"].finish_reason == "length"
    driver.expect_all_exact()


def test_an_engine_tells_it_before_and_refuses_it_with_the_same_words() -> None:
    with Engine(EchoModel(max_seq_len=2048), page_size=16, num_pages=49) as e:
        told = e.admit([1] * 1002)
        with pytest.raises(PromptTooLong) as refused:
            e.submit([1] * 1002)
        assert str(refused.value) == told.reason and "1002" in told.reason and "784" in told.reason
        assert e.admit([1] * 700).accepted and not e.has_work
