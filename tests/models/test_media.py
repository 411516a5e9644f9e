"""Embeddings in place of tokens, in real models: those of tokens give the bits of these tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from feeder import Feeder, random_tokens

from paged.media import MediaSpan
from paged.models.registry import load_model
from scheduler import Engine, SamplingParams

NAMES = ["tiny:llama", "tiny:hybrid", "tiny:looped"]
PARAMS = SamplingParams(max_tokens=6, logprobs=5)


def embeddings(model, tokens: list[int]) -> np.ndarray:
    return model._embed[torch.tensor(tokens)].float().numpy()


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_media_give_the_bits_of_the_tokens_that_they_stand_for(name: str) -> None:
    model = load_model(name)
    tokens = random_tokens(20, model.vocab_size)
    want = Feeder(model).step({"a": tokens, "b": tokens[:7]})
    feeder = Feeder(model)
    keyed = [*tokens[:5], *[-5, -6, -6, -6], *tokens[9:]]
    batch = feeder.batch({"a": keyed, "b": [*tokens[:6], -7]})
    batch.media = [(5, embeddings(model, tokens[5:9])), (26, embeddings(model, tokens[6:7]))]
    got = model.forward(batch, feeder.storage)
    assert torch.equal(got, torch.cat([want["a"], want["b"]]))


@pytest.mark.parametrize("name", NAMES)
def test_an_id_of_media_without_its_embedding_is_an_error(name: str) -> None:
    model = load_model(name)
    feeder = Feeder(model)
    with pytest.raises((IndexError, RuntimeError)):
        model.forward(feeder.batch({"a": [1, -5, 2]}), feeder.storage)


def same_tokens_same_output(model, prompt: list[int], start: int, end: int) -> None:
    engine = Engine(model, num_pages=256, page_size=16, max_num_seqs=4, max_num_batched_tokens=24)
    [want] = Engine(model, num_pages=256).generate([prompt], PARAMS)
    given = [*prompt[:start], *[0] * (end - start), *prompt[end:]]
    values = embeddings(model, prompt[start:end])
    for cached in (0, len(prompt) - 1):
        [output] = engine.generate([given], PARAMS, media=[MediaSpan(start, values)])
        assert (output.token_ids, output.logprobs) == (want.token_ids, want.logprobs)
        assert output.num_cached_tokens == cached
    other = values.copy()
    other[-1] += 0.5
    for content in (other, -values):
        [output] = engine.generate([given], PARAMS, media=[MediaSpan(start, content)])
        assert output.logprobs != want.logprobs
        assert output.num_cached_tokens <= start
    engine.check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("start", "end"), [(0, 20), (13, 40), (30, 31)])
def test_an_engine_gives_the_output_of_the_tokens_and_caches_by_content(name: str, start: int, end: int) -> None:
    model = load_model(name)
    same_tokens_same_output(model, random_tokens(60, model.vocab_size, seed=4), start, end)


@pytest.mark.slow
def test_so_does_smollm2(smollm2) -> None:
    prompt = smollm2.tokenizer.encode(
        "The picture shows a small boat on a wide river, and behind it a town. In one word:"
    )
    same_tokens_same_output(smollm2, prompt.tolist(), 3, 12)
