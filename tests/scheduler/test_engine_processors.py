"""Logits processors of requests in an engine: each sees its own request, and fails alone."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import span
from fakes import EchoModel

from paged import RequestFailed
from scheduler import Engine, Model, SamplingParams


def engine_of(**kwargs) -> Engine:
    kwargs.setdefault("num_pages", 64)
    return Engine(EchoModel(), max_num_seqs=8, **kwargs)


def odd_only(tokens, logits) -> None:
    logits[::2] = -np.inf


def follow(tokens, logits):
    """Whatever the model says: the last token plus the number of tokens."""
    row = np.zeros(len(logits), np.float32)
    row[(int(tokens[-1]) + len(tokens)) % len(logits)] = 1.0
    return row


def followed(prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append((tokens[-1] + len(tokens)) % 97)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("settings", [{}, {"num_pages": 9}, {"max_num_batched_tokens": 8}], ids=str)
def test_it_gets_the_tokens_of_its_own_request_at_each_step(settings: dict) -> None:
    engine = engine_of(**settings)
    prompts = [span(5 * i, 20 + i) for i in range(6)]
    params = [SamplingParams(max_tokens=25, logits_processors=[follow] if i % 2 else []) for i in range(6)]
    outputs = engine.generate(prompts, params)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.token_ids == (followed(prompt, 25) if i % 2 else engine.model.greedy(prompt, 25))
    assert engine.stats()["num_preemptions"] > 0 or "num_pages" not in settings
    engine.check()


def test_sampling_draws_among_what_it_leaves() -> None:
    engine = engine_of()
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, logits_processors=[odd_only], n=2)
    [output] = engine.generate([span(0, 10)], params)
    for sample in output.samples:
        assert all(token % 2 for token in sample.token_ids) and len(sample.token_ids) == 30


@pytest.mark.parametrize("fails_at", [0, 1, 5])
def test_a_failure_ends_its_request_alone_and_its_prompt_stays_cached(fails_at: int) -> None:
    def picky(tokens, logits) -> None:
        if len(tokens) >= 20 + fails_at:
            raise LookupError(f"not after {len(tokens)} tokens")

    engine = engine_of()
    prompts = [span(0, 20), span(30, 20), span(60, 20)]
    other = SamplingParams(max_tokens=12, temperature=1.0, seed=5, logits_processors=[odd_only])
    alone = engine_of().generate([prompts[2]], other)[0].token_ids
    failing = SamplingParams(max_tokens=12, logits_processors=[picky])
    outputs = engine.generate(prompts, [failing, SamplingParams(max_tokens=12), other])
    assert outputs[0].finish_reason == "error"
    assert "ProcessorFailed: the logits processor " in outputs[0].error
    assert f"picky failed: LookupError: 'not after {20 + fails_at} tokens'".replace("'", "") in outputs[0].error
    assert outputs[0].token_ids == engine.model.greedy(prompts[0], 12)[:fails_at]
    assert outputs[1].token_ids == engine.model.greedy(prompts[1], 12)
    assert outputs[2].token_ids == alone
    assert engine.prefix_match_len(prompts[0]) >= 16
    engine.check()
    assert engine.pool.num_live == 0


def test_many_failures_in_one_step_each_keep_their_own_sentence() -> None:
    def failing(i: int):
        def fail(tokens, logits):
            raise ValueError(f"number {i}")

        return fail

    engine = engine_of()
    params = [SamplingParams(logits_processors=[failing(i)] if i != 4 else [], max_tokens=3) for i in range(8)]
    outputs = engine.generate([span(i, 10) for i in range(8)], params)
    for i, output in enumerate(outputs):
        assert output.finish_reason == ("length" if i == 4 else "error")
        assert i == 4 or output.error.endswith(f"failed: ValueError: number {i}")
    engine.check()


def test_a_prefix_that_is_the_whole_prompt_asks_it_too() -> None:
    engine = engine_of()
    prompt = span(0, 20)
    params = SamplingParams(max_tokens=5, logits_processors=[follow])
    [output] = engine.generate([prompt], params, prefix=engine.build_prefix(prompt))
    assert output.token_ids == followed(prompt, 5)

    def fail(tokens, logits):
        raise ValueError("no")

    [output] = engine.generate([prompt], SamplingParams(logits_processors=[fail]), prefix=engine.build_prefix(prompt))
    assert output.finish_reason == "error" and "fail failed: ValueError: no" in output.error


def test_the_token_level_api_takes_them_but_not_with_beams() -> None:
    with Model(EchoModel(), max_seq_len=256, num_pages=64) as api:
        call = {"max_tokens": 5, "logits_processors": [follow]}
        assert api.generate(span(0, 10), **call) == span(0, 10) + followed(span(0, 10), 5)
        with pytest.raises(ValueError, match="num_beams and logits_processors"):
            api.generate(span(0, 10), num_beams=2, **call)
        with pytest.raises(RequestFailed, match="the logits processor"):
            api.generate(span(0, 10), logits_processors=[lambda tokens, logits: 1])
