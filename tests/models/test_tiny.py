"""The tiny models: the same everywhere, and worth generating with."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from feeder import random_tokens

from paged.models.config import ModelConfig
from paged.models.fingerprint import fingerprint_of, tensor_digest
from paged.models.registry import load_model
from paged.models.tiny import TINY_LLAMA, random_tensors, tiny_hf_settings
from paged.session import Session


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny:llama")


def greedy(model, prompt, count: int) -> tuple[list[int], list[float]]:
    """Tokens, and by how much each beat the next best."""
    session = Session(model, model.create_kv_pool(num_pages=32))
    logits, tokens, margins = session.eval(prompt), [], []
    for _ in range(count):
        best = logits.topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        logits = session.eval(tokens[-1:])
    session.release()
    return tokens, margins


def test_it_has_the_shape_it_says(tiny):
    assert tiny.name == "tiny:llama" and tiny.vocab_size == 512 and tiny.max_seq_len == 4096
    assert (tiny.spec.layers, tiny.spec.num_kv_heads, tiny.spec.head_dim) == (2, 2, 16)
    info = tiny.extra_info()
    assert info["num_layers"] == 2 and info["dtype"] == "float32" and info["row_mode"]
    assert info["num_parameters"] == sum(t.numel() for _, t in tiny.named_tensors())


def test_its_weights_are_the_same_in_every_process(tiny):
    code = "from paged import load_model; print(load_model('tiny:llama').fingerprint)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == tiny.fingerprint


def test_its_weights_are_these():
    """Fixed for good: stored prefix chains and expected outputs elsewhere are made with them."""
    tensors = random_tensors(TINY_LLAMA)
    assert fingerprint_of({}, {n: tensor_digest(t) for n, t in tensors.items()}) == WEIGHTS


WEIGHTS = "3cc291371a98f558abaa77bed2e70e39"


def test_global_generators_are_neither_used_nor_changed():
    np.random.seed(3)
    torch.manual_seed(3)
    before = np.random.get_state()[1].copy(), torch.random.get_rng_state()
    first = random_tensors(TINY_LLAMA)
    assert (np.random.get_state()[1] == before[0]).all() and torch.equal(torch.random.get_rng_state(), before[1])
    second = random_tensors(TINY_LLAMA)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], random_tensors(TINY_LLAMA, seed=1)["lm_head.weight"])


@pytest.mark.parametrize("seed", range(6))
def test_greedy_text_wanders_over_the_vocabulary(tiny, seed):
    tokens, margins = greedy(tiny, random_tokens(10, 512, seed), 40)
    assert len(set(tokens)) >= 25
    assert np.median(margins) > 0.2


def test_different_prompts_continue_differently(tiny):
    outputs = {tuple(greedy(tiny, random_tokens(12, 512, seed), 8)[0]) for seed in range(12)}
    assert len(outputs) == 12


def test_an_early_token_changes_late_logits(tiny):
    """Attention reaches back: else no test with this model could see a wrong page."""
    prompt = random_tokens(60, 512)
    session = Session(tiny, tiny.create_kv_pool(num_pages=32))
    want = session.eval(prompt).clone()
    for position in (0, 20, 40):
        changed = list(prompt)
        changed[position] = (changed[position] + 1) % 512
        other = Session(tiny, session.pool).eval(changed)
        assert (other - want).abs().max() > 0.01


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_settings_of_each_family_are_read_by_the_config(family):
    config = ModelConfig.from_hf(tiny_hf_settings(family))
    assert config.family == family and config.head_dim == 16 and config.qk_norm == (family == "qwen3")
    assert config.attention_bias == (family == "qwen2") and config.sliding_window == 0
    assert ModelConfig.from_hf(tiny_hf_settings(family, vocab_size=7)).vocab_size == 7


# Digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_digest_depends_on_dtype_shape_and_every_value(dtype):
    base = torch.arange(12, dtype=dtype).reshape(3, 4)
    digests = {tensor_digest(base), tensor_digest(base.reshape(4, 3)), tensor_digest(base.reshape(12))}
    for index in range(12):
        changed = base.clone()
        changed.view(-1)[index] = 99
        digests.add(tensor_digest(changed))
    digests |= {tensor_digest(base.to(other)) for other in (torch.float64, torch.int32)}
    assert len(digests) == 17 and all(len(d) == 16 for d in digests)


def test_a_digest_does_not_depend_on_strides():
    base = torch.arange(12.0).reshape(3, 4)
    assert tensor_digest(base.t().contiguous().t()) == tensor_digest(base)
    assert tensor_digest(torch.empty(0, 4)) != tensor_digest(torch.empty(4, 0))


def test_a_fingerprint_depends_on_names_and_not_on_their_order():
    a, b = tensor_digest(torch.zeros(1)), tensor_digest(torch.ones(1))
    assert fingerprint_of({"x": 1}, {"p": a, "q": b}) == fingerprint_of({"x": 1}, {"q": b, "p": a})
    others = [({"x": 2}, {"p": a, "q": b}), ({"x": 1}, {"p": b, "q": a}), ({"x": 1}, {"p": a}), ({}, {})]
    assert len({fingerprint_of(*o) for o in [*others, ({"x": 1}, {"p": a, "q": b})]}) == 5
