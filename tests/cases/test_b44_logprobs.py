"""Log probabilities of a prompt that is cached, asked for twice; and as JSON, which has no infinity."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from paged import load_model
from scheduler import Engine, SamplingParams

transformers = pytest.importorskip("transformers")

PROMPT = np.random.default_rng(44).integers(0, 512, 33).tolist()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(load_model("tiny:llama"), page_size=16, num_pages=32)


def test_both_calls_give_33_entries_with_equal_values(engine: Engine) -> None:
    engine.generate([PROMPT], SamplingParams(max_tokens=2))  # the prompt is cached
    calls = [engine.generate([PROMPT], SamplingParams(max_tokens=2, prompt_logprobs=k))[0] for k in (1, 1, 2)]
    for call in calls:
        assert len(call.prompt_logprobs) == 33 and call.prompt_logprobs[0] is None
        assert call.num_cached_tokens == 0 and call.token_ids == calls[0].token_ids
    assert calls[0].prompt_logprobs == calls[1].prompt_logprobs
    values = [[entry.logprob for entry in call.prompt_logprobs[1:]] for call in calls]
    assert values[0] == values[2]
    for one, two in zip(calls[0].prompt_logprobs[1:], calls[2].prompt_logprobs[1:], strict=True):
        assert one.top == two.top[:1] and len(two.top) == 2
    engine.check()


def test_the_json_of_an_output_is_valid(engine: Engine) -> None:
    params = SamplingParams(max_tokens=3, prompt_logprobs=1, logprobs=5, top_k=1, logit_bias={3: -1e30})
    [output] = engine.generate([PROMPT], params)
    assert json.loads(json.dumps(dataclasses.asdict(output), allow_nan=False))["num_prompt_tokens"] == 33
