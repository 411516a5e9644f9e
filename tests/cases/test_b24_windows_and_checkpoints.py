"""B24: a window model matches nothing whose rows are gone, and a checkpoint exactly at the match point is used."""

from __future__ import annotations

import pytest
import torch
from byhand import Hand, span
from driver import Driver
from fakes import EchoHybrid

from paged.models.config import ModelConfig
from paged.models.llama import LlamaModel
from paged.models.tiny import random_tensors, tiny_hf_settings
from paged.prefix.cache import PrefixCache
from paged.session import Session


def mistral(window: int) -> LlamaModel:
    config = ModelConfig.from_hf(tiny_hf_settings("mistral", sliding_window=window))
    return LlamaModel(config, random_tensors(config, seed=1).__getitem__)


def cold(model: LlamaModel, tokens) -> torch.Tensor:
    logits = Session(model, model.create_kv_pool(64, 16)).eval(tokens)
    assert logits is not None
    return logits


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("shared", [16, 32, 64, 80, 100])
def test_prompts_that_share_part_of_a_windowed_history(shared: int, partial: bool) -> None:
    model = mistral(32)
    pool = model.create_kv_pool(64, 16)
    cache = PrefixCache(pool, partial=partial)
    donor = Session(model, pool)
    history = [t % 96 for t in span(3, 80)]
    donor.eval(history)
    cache.insert(donor, history)
    for _ in range(40):
        history.append(donor.sample())
        donor.eval(history[-1:])
        cache.insert(donor, history)
    donor.release()
    prompt = [*history[:shared], 7, 8, 9, 10, 11]
    session = Session(model, pool)
    matched = cache.attach(session, prompt)
    assert matched <= shared
    if partial:
        assert matched == {16: 0, 32: 0, 64: 0, 80: 80, 100: 100}[shared]  # what 80 tokens at once had left behind
    logits = session.eval(prompt[matched:])
    session.check()
    cache.check()
    pool.check()
    assert torch.equal(logits, cold(model, prompt))


@pytest.mark.parametrize("length", [7, 8, 9, 10])
def test_lengths_around_the_window(length: int) -> None:
    model = mistral(8)
    pool = model.create_kv_pool(64, 1)
    session = Session(model, pool)
    tokens = span(5, length)
    for token in tokens:
        logits = session.eval([token])
        session.check()
    assert torch.equal(logits, cold(model, tokens))
    assert pool.num_live == min(length, 7)  # the next token sees itself and seven more


def test_a_checkpoint_exactly_at_the_match_point_is_used() -> None:
    d = Driver(64, 16, model=EchoHybrid(97))
    d.solo("a", span(0, 49), 1)  # leaves one at 48
    d.solo("b", [*span(0, 48), *span(60, 20)], 3)
    assert d.requests["b"].num_cached_tokens == 48
    d.expect_all_exact()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("length", [4, 8, 9])
def test_a_window_of_one_token_leaves_a_checkpoint_without_pages_at_the_end_of_a_page(
    page_size: int, length: int, tmp_path
) -> None:
    """The next token sees itself alone there, so that the state is all that goes on."""
    h = Hand(12, page_size, kind=EchoHybrid)
    h.donate(span(0, length), cache_window=1)
    pages = 0 if length % page_size == 0 else 1
    assert h.cache.held_pages == pages and len(h.cache.chains()) == 1
    h.cache.save(tmp_path / "cache")
    for _ in range(2):
        assert h.cache.match_len(span(0, length + 3), cache_window=1) == length
        h.ask(span(0, length + 3), cache_window=1).release()
        pin = h.cache.pin(span(0, length), cache_window=1)
        assert (pin.num_tokens, len(pin.pages)) == (length, pages)
        h.check()
        h.cache.release()
        h.check()
        assert h.pool.num_free == 12 and h.cache.load(tmp_path / "cache") == pages
