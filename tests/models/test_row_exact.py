"""Promise 1 for the models: a row's logits are the same bits whatever else is in the batch and however it was cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from feeder import Feeder, random_tokens

from paged.errors import NativeMissing
from paged.models import linear, llama
from paged.models.config import ModelConfig, RopeScaling
from paged.models.llama import LlamaModel
from paged.models.tiny import TINY_LLAMA, random_tensors, tiny_hf_settings
from paged.ops.dispatch import get_backend

LENGTH = 150  # ten pages of 16; two full key tiles of 64 and a part of a third

# The last has 528 = 16.5 * 32 gate columns: with 63 rows and more, a plain silu is cut inside a vector.
CONFIGS = {
    "llama": TINY_LLAMA,
    "odd sizes, biases": ModelConfig.from_hf(
        tiny_hf_settings(
            hidden_size=44, intermediate_size=53, attention_bias=True, mlp_bias=True, max_position_embeddings=512
        )
    ),
    "qwen3, mixed windows": ModelConfig.from_hf(
        tiny_hf_settings(
            "qwen3",
            max_position_embeddings=512,
            use_sliding_window=True,
            sliding_window=70,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
    "wide": ModelConfig("llama", 96, 64, 1, 4, 2, 16, 528, rope_scaling=RopeScaling("linear", 2.0)),
}


# The reference backend sums in float64 and rounds once: equal bits there are the rule, not a promise, so that a few
# of these show that the model alone is exact. The native backend promises them.
SETTINGS = [(name, "cpu", threads) for name in CONFIGS for threads in (1, 2)]
SETTINGS += [("wide", "cpu", 3), ("llama", "reference", 1), ("qwen3, mixed windows", "reference", 1)]


@pytest.fixture(params=SETTINGS, ids=lambda p: f"{p[0]}-{p[1]}-{p[2]}")
def model(request, monkeypatch):
    name, backend, threads = request.param
    try:
        get_backend(name=backend)
    except NativeMissing as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PAGED_BACKEND", backend)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield LlamaModel(CONFIGS[name], random_tensors(CONFIGS[name], seed=1).__getitem__)
    torch.set_num_threads(before)


def chunked(model, tokens, chunk: int, page_size: int = 16, seed: int = 0, kv_dtype: str = "auto") -> torch.Tensor:
    return Feeder(model, page_size, seed=seed, kv_dtype=kv_dtype).feed("a", tokens, chunk)


def in_company(model, tokens, chunk: int, kv_dtype: str = "auto") -> torch.Tensor:
    """The same rows while other sequences start, run and pause around them, before and after it in the batch."""
    feeder, rng, pieces = Feeder(model, 16, seed=5, kv_dtype=kv_dtype), np.random.default_rng(2), []
    for start in range(0, len(tokens), chunk):
        rows = {f"before {i}": random_tokens(int(rng.integers(1, 40)), model.vocab_size, i) for i in range(2)}
        rows["a"] = tokens[start : start + chunk]
        rows |= {f"after {i}": random_tokens(int(rng.integers(1, 9)), model.vocab_size, i) for i in range(3)}
        if start % 2:
            rows = dict(reversed(rows.items()))
        pieces.append(feeder.step(rows)["a"])
        for name in [name for name, length in feeder.lengths.items() if length > 150]:
            feeder.drop(name)
    return torch.cat(pieces)


def test_logits_do_not_depend_on_chunks_neighbours_or_pages(model):
    tokens = random_tokens(LENGTH, model.vocab_size)
    want = chunked(model, tokens, 0)
    assert want.isfinite().all()
    one_by_one = torch.get_num_threads() == 1  # threads of small steps mostly wait for each other
    for chunk in (1, 7, 64) if one_by_one else (30, 64):
        assert torch.equal(chunked(model, tokens, chunk), want), f"chunks of {chunk}"
    for page_size, seed in ((1, 1), (16, 3), (64, 4)):
        assert torch.equal(chunked(model, tokens, 50, page_size, seed), want), f"pages of {page_size}"
    for chunk in (1, 13, 100) if one_by_one else (25, 100):
        assert torch.equal(in_company(model, tokens, chunk), want), f"chunks of {chunk} among others"


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("threads", [1, 2])
def test_logits_over_records_do_not_depend_on_chunks_neighbours_or_pages(kv_dtype: str, threads: int, monkeypatch):
    monkeypatch.setenv("PAGED_BACKEND", "cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        config = CONFIGS["llama"]
        model = LlamaModel(config, random_tensors(config, seed=1).__getitem__)
        tokens = random_tokens(LENGTH, model.vocab_size)
        want = chunked(model, tokens, 0, kv_dtype=kv_dtype)
        assert want.isfinite().all() and not torch.equal(want, chunked(model, tokens, 0))
        for chunk, page_size, seed in ((1, 16, 0), (7, 1, 1), (64, 16, 3), (50, 64, 4)):
            assert torch.equal(chunked(model, tokens, chunk, page_size, seed, kv_dtype), want), (chunk, page_size)
        for chunk in (13, 100):
            assert torch.equal(in_company(model, tokens, chunk, kv_dtype), want), f"chunks of {chunk} among others"
    finally:
        torch.set_num_threads(before)


def test_the_last_row_alone_has_the_bits_it_has_among_all_rows(model):
    tokens = random_tokens(LENGTH, model.vocab_size)
    want = chunked(model, tokens, 0)
    feeder = Feeder(model)
    feeder.step({"a": tokens[:-1]}, wanted="last")
    assert torch.equal(feeder.step({"a": tokens[-1:]}, wanted="last")["a"], want[-1:])


# Each part of the model, broken on purpose, must be found by the test above.


def plain_silu_mul(gate_up, out):
    width = out.shape[1]
    return torch.mul(torch.nn.functional.silu(gate_up[:, :width]), gate_up[:, width:], out=out)


def packed_for_one_row(weight):
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)


def test_a_plain_silu_is_found(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    cuts = (63, 65, 67, 71)
    try:
        config = CONFIGS["wide"]
        model = LlamaModel(config, random_tensors(config, seed=1).__getitem__)
        tokens = random_tokens(LENGTH, model.vocab_size)
        want = chunked(model, tokens, 50)
        assert all(torch.equal(chunked(model, tokens, n), want) for n in cuts)
        monkeypatch.setattr(llama, "silu_mul", plain_silu_mul)
        if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
            pytest.skip("this processor's exp may round the same in vectors and outside")
        want = chunked(model, tokens, 50)
        assert not all(torch.equal(chunked(model, tokens, n), want) for n in cuts)
    finally:
        torch.set_num_threads(before)


def test_products_that_pack_for_one_row_are_found(monkeypatch):
    monkeypatch.setattr(linear, "_modes", {})
    monkeypatch.setattr(linear, "_pack", packed_for_one_row)
    monkeypatch.setattr(linear, "_choose_mode", lambda weight, packed: linear.RowMode("packed", 1))
    model = LlamaModel(TINY_LLAMA, random_tensors(TINY_LLAMA).__getitem__)
    if not model._head._weight.is_mkldnn:
        pytest.skip("torch has no oneDNN here")
    tokens = random_tokens(20, model.vocab_size)
    if torch.equal(chunked(model, tokens, 1), chunked(model, tokens, 0)):
        pytest.skip("this processor sums a single row as it sums many")
