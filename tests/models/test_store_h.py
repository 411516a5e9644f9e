"""store-h: pages that keep the input of each attention block, and K and V projected again when they are read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from paged.errors import UnsupportedShape
from paged.kv.storage import PageStorage
from paged.models.base import LanguageModel
from paged.models.config import LoopConfig
from paged.models.registry import build_model
from paged.models.tiny import TINY_LLAMA, TINY_LOOPED, random_tensors
from paged.prefix.cache import PrefixCache
from paged.session import Session
from scheduler import Engine, SamplingParams

CONFIGS = {
    "plain": replace(TINY_LLAMA, num_kv_heads=4),
    "norms": replace(TINY_LLAMA, num_kv_heads=4, qk_norm=True, attention_bias=True),
    "windows": replace(
        TINY_LLAMA,
        num_kv_heads=4,
        num_layers=4,
        sliding_window=9,
        layer_types=("sliding_attention", "full_attention") * 2,
    ),
    "looped": replace(TINY_LOOPED, num_kv_heads=4),
    "behind": replace(TINY_LOOPED, num_kv_heads=4, num_layers=3, loop=LoopConfig((1, 2), num_loops=3, max_loops=6)),
}
DTYPES = ("fp32", "fp16", "bf16", "int8", "int4")


@pytest.fixture(scope="module", params=CONFIGS)
def model(request) -> LanguageModel:
    return build_model(CONFIGS[request.param], random_tensors(CONFIGS[request.param]).__getitem__)


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 512, n).astype(np.int32)


def logits(model: LanguageModel, kv_dtype: str, chunks: tuple[int, ...], page_size: int = 8, **options) -> torch.Tensor:
    session = Session(model, model.create_kv_pool(800, page_size, kv_dtype), **options)
    start, prompt = 0, tokens(70)
    for end in (*chunks, 70):
        out = session.eval(prompt[start:end])
        start = end
    session.check()
    return out


def test_kept_without_loss_the_logits_are_those_of_k_and_v_bit_for_bit(model: LanguageModel) -> None:
    assert torch.equal(logits(model, "fp32-h", (30,)), logits(model, "fp32", (30,)))
    assert torch.equal(logits(model, "fp32-h", (30,), cache_window=11), logits(model, "fp32", (30,), cache_window=11))


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_chunks_and_page_sizes_change_no_bit(model: LanguageModel, kv_dtype: str) -> None:
    want = logits(model, f"{kv_dtype}-h", ())
    for chunks, page_size in (((1, 2, 40), 8), ((69,), 16), ((33,), 1)):
        assert torch.equal(logits(model, f"{kv_dtype}-h", chunks, page_size), want)


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_a_page_takes_half_the_bytes(kv_dtype: str) -> None:
    model = build_model(CONFIGS["plain"], random_tensors(CONFIGS["plain"]).__getitem__)
    whole, half = (model.create_kv_pool(4, 16, name).storage for name in (kv_dtype, f"{kv_dtype}-h"))
    assert half.page_bytes <= 0.53 * whole.page_bytes
    assert half.kv_dtype == f"{kv_dtype}-h" and half.codec is whole.codec
    half.check()


@pytest.mark.parametrize("kv_dtype", ["fp32-h", "int8-h", "int4-h"])
def test_a_batch_over_cached_prefixes_gives_what_each_request_gives_alone(model: LanguageModel, kv_dtype: str) -> None:
    prompts = [np.concatenate([tokens(20), tokens(5 + 3 * i, i)]) for i in range(4)]
    params = [SamplingParams(max_tokens=6), SamplingParams(max_tokens=6, temperature=0.9, seed=3)] * 2
    with Engine(model, kv_dtype=kv_dtype, num_pages=2000, page_size=8) as engine:
        together = [output.token_ids for output in engine.generate(prompts, params)]
        again = [output.token_ids for output in engine.generate(prompts, params)]
        assert engine.stats()["cached_tokens"] > 100
        engine.check()
    for prompt, one, want in zip(prompts, params, together, strict=True):
        with Engine(model, kv_dtype=kv_dtype, num_pages=2000, page_size=8, prefix_cache=False) as alone:
            assert alone.generate(prompt, one)[0].token_ids == want
    assert again == together


def test_a_saved_cache_is_taken_in_by_one_that_keeps_the_same_and_by_no_other(tmp_path) -> None:
    model = build_model(CONFIGS["plain"], random_tensors(CONFIGS["plain"]).__getitem__)

    def cache(kv_dtype: str) -> PrefixCache:
        return PrefixCache(model.create_kv_pool(40, 8, kv_dtype))

    first, prompt = cache("int8-h"), tokens(40)
    session = Session(model, first.pool)
    session.eval(prompt)
    first.insert(session, prompt)
    assert first.save(tmp_path / "x") == 5
    second = cache("int8-h")
    assert second.load(tmp_path / "x") == 5
    other = Session(model, second.pool)
    assert second.attach(other, prompt) == 32
    assert torch.equal(other.eval(prompt[32:]), Session(model, cache("int8-h").pool).eval(prompt))
    for name in ("int8", "fp32-h"):
        with pytest.raises(RuntimeError, match="int8-h"):
            cache(name).load(tmp_path / "x")


def test_where_query_heads_share_k_and_v_it_is_refused_with_both_sizes() -> None:
    model = build_model(TINY_LLAMA, random_tensors(TINY_LLAMA).__getitem__)
    with pytest.raises(UnsupportedShape, match=r"would keep 64 values .*, and K and V are 64: .*use int8"):
        model.create_kv_pool(4, 8, "int8-h")


def test_a_model_that_cannot_keep_its_inputs_says_so() -> None:
    with pytest.raises(UnsupportedShape, match="cannot keep the inputs"):
        PageStorage(TINY_SPEC, 4, 8, "fp32-h")
    with pytest.raises(UnsupportedShape, match="multiple of 16"):
        PageStorage(TINY_SPEC, 4, 8, "fp32-h", input_size=24)
    with pytest.raises(ValueError, match="kv_dtype must be one of"):
        PageStorage(TINY_SPEC, 4, 8, "fp31-h", input_size=16)


TINY_SPEC = build_model(CONFIGS["plain"], random_tensors(CONFIGS["plain"]).__getitem__).spec


@pytest.mark.slow
@pytest.mark.parametrize(("kv_dtype", "most"), [("fp32-h", 0.0), ("int8-h", 0.01), ("int4-h", 0.2)])
def test_real_weights_whose_heads_share_nothing_keep_their_tokens(kv_dtype: str, most: float, smollm2) -> None:
    """SmolLM2 with its shared K and V repeated for each head: the same function, of a shape that store-h serves."""
    shared = smollm2.config.num_kv_heads

    def read(name: str) -> torch.Tensor:
        values = smollm2.tensor(name)
        if name.split(".")[-2] in ("k_proj", "v_proj"):
            values = (
                values.unflatten(0, (shared, -1)).repeat_interleave(smollm2.config.num_heads // shared, 0).flatten(0, 1)
            )
        return values

    model = build_model(replace(smollm2.config, num_kv_heads=smollm2.config.num_heads), read)
    prompt = smollm2.tokenizer.encode("The keeper of the lighthouse wrote in the log every hour, and nobody else was.")

    def last(model: LanguageModel, name: str) -> torch.Tensor:
        session = Session(model, model.create_kv_pool(8, 16, name))
        session.eval(prompt[:7])
        out = session.eval(prompt[7:])
        assert out is not None
        return torch.log_softmax(out, -1)

    want, got = last(model, "fp32"), last(model, kv_dtype)
    assert float((want - last(smollm2, "fp32")).abs().max()) < 1e-3
    divergence = float((want.exp() * (want - got)).sum())
    assert torch.equal(want, got) if not most else divergence < most, divergence
