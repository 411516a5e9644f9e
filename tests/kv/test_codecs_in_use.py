"""int8 and int4 through everything that handles pages: pools, prefix cache, files, engine, and the model's quality."""

from __future__ import annotations

import math
import pydoc_data.topics as topics
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from feeder import Feeder, random_tokens

from paged import PrefixCache, Session, load_model
from paged.errors import GeometryMismatch
from paged.kv.storage import PageStorage
from paged.models.base import LanguageModel
from scheduler import Engine, SamplingParams

every_codec = pytest.mark.parametrize("kv_dtype", ["int8", "int4"])


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_model("tiny:llama")


def answer(model: LanguageModel, pool, tokens: list[int], cache: PrefixCache | None = None) -> torch.Tensor:
    session = Session(model, pool)
    start = cache.attach(session, tokens) if cache is not None else 0
    logits = session.eval(tokens[start:])
    assert logits is not None
    if cache is not None:
        cache.insert(session, tokens)
    session.release()
    return logits


@every_codec
def test_a_pool_by_bytes_has_as_many_pages_as_fit(model: LanguageModel, kv_dtype: str) -> None:
    one = PageStorage(model.spec, 1, 16, kv_dtype).page_bytes
    assert one < PageStorage(model.spec, 1, 16, "bf16").page_bytes
    pool = model.create_kv_pool(kv_dtype=kv_dtype, num_bytes=5 * one + one // 2)
    assert pool.num_pages == 5
    pool.check()


@every_codec
def test_a_pool_that_grows_keeps_what_its_pages_hold(model: LanguageModel, kv_dtype: str) -> None:
    tokens = random_tokens(40, model.vocab_size)
    want = answer(model, model.create_kv_pool(8, kv_dtype=kv_dtype), tokens)
    pool = model.create_kv_pool(2, kv_dtype=kv_dtype)
    pool.max_pages = 8
    session = Session(model, pool)
    session.eval(tokens[:20])
    assert torch.equal(session.eval(tokens[20:]), want)
    pool.check()


@every_codec
@pytest.mark.parametrize("partial", [False, True])
def test_attached_pages_give_the_bits_of_computed_ones(model: LanguageModel, kv_dtype: str, partial: bool) -> None:
    pool = model.create_kv_pool(64, kv_dtype=kv_dtype)
    cache = PrefixCache(pool, partial=partial)
    tokens = random_tokens(100, model.vocab_size)
    other = tokens[:70] + random_tokens(20, model.vocab_size, 1)  # leaves in the middle of the fifth page
    want, want_other = answer(model, pool, tokens), answer(model, pool, other)
    assert torch.equal(answer(model, pool, tokens, cache), want)
    assert cache.match_len(other) == (70 if partial else 64)
    assert torch.equal(answer(model, pool, other, cache), want_other)
    assert torch.equal(answer(model, pool, tokens, cache), want)
    cache.check()


@every_codec
def test_a_forked_session_writes_into_a_copy_of_the_last_page(model: LanguageModel, kv_dtype: str) -> None:
    pool = model.create_kv_pool(16, kv_dtype=kv_dtype)
    tokens, tails = random_tokens(21, model.vocab_size), [random_tokens(9, model.vocab_size, i) for i in (1, 2)]
    session = Session(model, pool)
    session.eval(tokens)
    fork = session.fork()
    got = [s.eval(tail) for s, tail in zip((session, fork), tails, strict=True)]
    fresh = model.create_kv_pool(16, kv_dtype=kv_dtype)
    for logits, tail in zip(got, tails, strict=True):
        assert torch.equal(logits, answer(model, fresh, tokens + tail))


@every_codec
def test_a_saved_cache_serves_in_another_pool_of_its_codec_and_in_no_other(model, kv_dtype: str, tmp_path) -> None:
    tokens = random_tokens(50, model.vocab_size)
    pool = model.create_kv_pool(16, kv_dtype=kv_dtype)
    cache = PrefixCache(pool)
    want = answer(model, pool, tokens, cache)
    assert cache.save(tmp_path / "cache") == 3
    again = model.create_kv_pool(16, kv_dtype=kv_dtype)
    loaded = PrefixCache(again)
    assert loaded.load(tmp_path / "cache") == 3 and loaded.match_len(tokens) == 48
    assert torch.equal(answer(model, again, tokens, loaded), want)
    for name in {"fp32", "int8", "int4"} - {kv_dtype}:
        with pytest.raises(GeometryMismatch, match="codec"):
            PrefixCache(model.create_kv_pool(16, kv_dtype=name)).load(tmp_path / "cache")


@every_codec
@pytest.mark.parametrize("source", ["tiny:llama", "tiny:hybrid", "tiny:looped"])
def test_the_engine_gives_the_same_tokens_however_the_work_is_cut(source: str, kv_dtype: str) -> None:
    model = load_model(source)
    head = random_tokens(40, model.vocab_size)
    prompts = [head + random_tokens(n, model.vocab_size, n) for n in (3, 17, 30, 5)]
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    seen = []
    for options in (
        {"prefix_cache": False},
        {"prefix_cache": True},
        {"prefix_cache": True, "page_size": 4, "max_num_batched_tokens": 13},
        {"prefix_cache": True, "num_pages": 8 * model.spec.num_groups, "max_num_seqs": 2},
    ):
        with Engine(model, kv_dtype=kv_dtype, max_seq_len=128, **options) as engine:
            seen.append([o.token_ids for o in engine.generate(prompts, params)])
            seen.append([o.token_ids for o in engine.generate(prompts, params)])  # again, from the cache
            engine.check()
    assert all(tokens == seen[0] for tokens in seen)


def test_the_engine_says_what_a_token_costs_in_each_codec(model: LanguageModel) -> None:
    from scheduler.info import engine_info

    costs = {}
    for kv_dtype in ("bf16", "int8", "int4"):
        with Engine(model, kv_dtype=kv_dtype, num_pages=8) as engine:
            info = engine_info(engine)
            assert info["kv_dtype"] == kv_dtype
            costs[kv_dtype] = info["bytes_per_token"]
    assert costs["int4"] < costs["int8"] < costs["bf16"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()  # on a busy machine two mostly wait for each other
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def perplexity(model: LanguageModel, tokens: list[int], kv_dtype: str) -> float:
    logits = Feeder(model, num_pages=80, kv_dtype=kv_dtype).feed("a", tokens, 256)
    chosen = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(tokens[1:])[:, None])
    return math.exp(-float(chosen.double().mean()))


@pytest.mark.slow
def test_smollm2_reads_python_s_manual_nearly_as_well(one_thread: None) -> None:
    model = load_model("smollm2")
    assert model.tokenizer is not None
    text = "\n\n".join(topics.topics[name] for name in ("compound", "typesseq", "objects"))
    tokens = np.asarray(model.tokenizer.encode(text))[:800].tolist()
    exact = perplexity(model, tokens, "fp32")
    assert abs(perplexity(model, tokens, "int8") / exact - 1) < 0.01
    assert perplexity(model, tokens, "int4") / exact - 1 < 0.05
