"""Promise 1: the same logits, bit for bit on the CPU in fp32, however a request was computed.

Twelve prompts run alone, batched, chunked, cold and warm, preempted, planned a step ahead, with guesses to verify, and
on shuffled page ids. Every row of logits that a token was drawn from is kept and compared with `torch.equal`. A second
set mixes cache windows and, where the model loops, depths in one batch.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paged import load_model
from paged.models.config import ModelConfig
from paged.models.llama import LlamaModel
from paged.models.looped import LoopedModel
from paged.models.tiny import random_tensors, tiny_hf_settings
from scheduler import Engine, SamplingParams, SchedulerConfig

MAX_TOKENS = 6
Logits = dict[tuple[str, int], torch.Tensor]


class Knows:
    """Guesses the greedy tokens of requests that ran before, but for one position in four."""

    def __init__(self, prompts: list[np.ndarray], logits: Logits) -> None:
        self.texts = []
        for i, prompt in enumerate(prompts):
            ends = range(len(prompt), len(prompt) + MAX_TOKENS)
            tokens = [int(logits[str(i), at].argmax()) for at in ends]
            self.texts.append([*prompt.tolist(), *tokens])

    def propose(self, tokens: np.ndarray, most: int) -> list[int]:
        n, known = len(tokens), tokens.tolist()
        text = next((text for text in self.texts if text[:n] == known), known)
        return [0 if (n + i) % 4 == 3 else token for i, token in enumerate(text[n : n + most])]


def record(engine: Engine) -> Logits:
    """Keep a copy of every row of logits by (request id, position of the token drawn from it). With guesses the last
    one of a position counts: what was drawn behind a wrong guess is drawn again."""
    seen: Logits = {}
    guesses = engine.scheduler.drafter is not None
    sample = engine.sampler.sample

    def recording(logits, slots, positions, history, known):
        for row, slot, position in zip(logits, slots.tolist(), positions.tolist(), strict=True):
            key = (engine.scheduler.state.requests[slot].id, position)
            assert guesses or key not in seen, "a token was drawn twice"
            seen[key] = row.clone()
        return sample(logits, slots, positions, history, known)

    engine.sampler.sample = recording  # type: ignore[method-assign]
    return seen


def prompts_of(vocab_size: int) -> list[np.ndarray]:
    """Twelve prompts of 1 to 90 tokens; half of them share 40 tokens."""
    rng = np.random.default_rng(11)
    head = rng.integers(0, vocab_size, 40)
    lengths = (1, 2, 15, 16, 17, 33, 5, 8, 24, 31, 40, 50)
    out = []
    for i, n in enumerate(lengths):
        own = rng.integers(0, vocab_size, n)
        out.append((np.concatenate([head, own]) if i >= 6 else own).astype(np.int32))
    return out


def mixed(model, i: int) -> dict:
    """The depth and the cache window of request i where each has its own."""
    loops = {"loops": (1, 4, 2, 8, 3)[i % 5]} if model.max_loops else {}
    return {**loops, "cache_window": (0, 5, 33, 0, 1, 17, 5)[i % 7]}


def plain(model, i: int) -> dict:
    """Nothing special."""
    return {}


def run(model, prompts, *, ask=plain, warm=False, preempt=False, shuffle=False, guess=None, **limits) -> Logits:
    """All prompts as one batch under the given limits, with greedy and seeded requests mixed."""
    config = SchedulerConfig(**{"max_num_seqs": 16, "max_num_batched_tokens": 1024, **limits})
    pages = 256 * (10 if model.max_loops else 1)  # of each prompt in up to ten groups
    with Engine(model, num_pages=pages, config=config, proposer=guess) as engine:
        if shuffle:
            np.random.default_rng(5).shuffle(engine.pool._free)
        if warm:
            for i, prompt in enumerate(prompts):
                engine.generate([prompt], SamplingParams(max_tokens=1), **ask(model, i))
        seen = record(engine)
        for i, prompt in enumerate(prompts):
            hot = {"temperature": 0.9, "seed": i} if i % 2 else {}
            params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **hot)
            engine.submit(prompt, params, request_id=str(i), **ask(model, i))
        steps = 0
        while engine.has_work:
            engine.step()
            engine.check()
            steps += 1
            if preempt and steps in (2, 4, 5):
                for slot in engine.scheduler.state.running[::2].tolist():
                    engine.scheduler.preempt(engine.scheduler.state.requests[slot])
        if warm:
            assert engine.stats()["hit_tokens"] > 0
        if preempt:
            assert engine.stats()["num_preemptions"] > 3
        if guess:
            assert 0 < engine.stats()["accepted_tokens"] < engine.stats()["drafted_tokens"]
        return seen


def alone(model, prompts, ask=plain) -> Logits:
    seen: Logits = {}
    for i, prompt in enumerate(prompts):
        hot = {"temperature": 0.9, "seed": i} if i % 2 else {}
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **hot)
        with Engine(model, num_pages=64, prefix_cache=False) as engine:
            one = record(engine)
            engine.submit(prompt, params, request_id=str(i), **ask(model, i))
            while engine.has_work:
                engine.step()
        seen.update(one)
    return seen


WAYS = {
    "batched": {},
    "chunk 1": {"max_chunk_tokens": 1},
    "chunk 7": {"max_chunk_tokens": 7},
    "chunk 64": {"max_chunk_tokens": 64},
    "budget 20": {"max_num_batched_tokens": 20},
    "warm": {"warm": True},
    "warm, chunk 7": {"warm": True, "max_chunk_tokens": 7},
    "preempted": {"preempt": True},
    "preempted, chunk 7": {"preempt": True, "max_chunk_tokens": 7},
    "planned ahead": {"plan_ahead": True},
    "planned ahead, warm, budget 20": {"plan_ahead": True, "warm": True, "max_num_batched_tokens": 20},
    "shuffled pages": {"shuffle": True},
    "shuffled, warm, preempted": {"shuffle": True, "warm": True, "preempt": True},
}


def compare(got: Logits, want: Logits) -> None:
    assert want and got.keys() == want.keys()
    for key, row in want.items():
        assert torch.isfinite(row).all()
        assert torch.equal(got[key], row), f"request {key[0]}, position {key[1]}: {(got[key] - row).abs().max()}"


WINDOWED = ModelConfig.from_hf(
    tiny_hf_settings(
        "qwen3",
        use_sliding_window=True,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
)
TINY = {
    "llama": lambda: load_model("tiny:llama"),
    "hybrid": lambda: load_model("tiny:hybrid"),
    "windows": lambda: LlamaModel(WINDOWED, random_tensors(WINDOWED, seed=2).__getitem__),
}


@pytest.fixture(scope="module", params=TINY)
def tiny(request):
    model = TINY[request.param]()
    prompts = prompts_of(model.vocab_size)
    return model, prompts, alone(model, prompts)


@pytest.fixture(scope="module")
def real(smollm2):
    prompts = prompts_of(smollm2.vocab_size)
    return smollm2, prompts, alone(smollm2, prompts)


LOOPED_LAYERS = ModelConfig.from_hf(tiny_hf_settings("llama", num_hidden_layers=4)).with_loop((1, 3), 2, 8)
MIXED = TINY | {
    "looped": lambda: load_model("tiny:looped"),
    "looped, layers after": lambda: LoopedModel(LOOPED_LAYERS, random_tensors(LOOPED_LAYERS, seed=4).__getitem__),
}


@pytest.fixture(scope="module", params=MIXED)
def tiny_mixed(request):
    model = MIXED[request.param]()
    prompts = prompts_of(model.vocab_size)
    return model, prompts, alone(model, prompts, mixed)


@pytest.mark.parametrize(
    "way", ["batched", "chunk 7", "warm, chunk 7", "preempted, chunk 7", "shuffled, warm, preempted"]
)
def test_depths_and_cache_windows_mix_without_changing_a_bit(tiny_mixed, way: str) -> None:
    model, prompts, want = tiny_mixed
    compare(run(model, prompts, ask=mixed, **WAYS[way]), want)


@pytest.mark.slow
def test_the_real_model_with_looping_layers_mixes_depths_and_cache_windows(smollm2) -> None:
    model = load_model("smollm2", loop_layers=(13, 16), loops=2, max_loops=8)
    prompts = prompts_of(model.vocab_size)[:7]
    want = alone(model, prompts, mixed)
    for way in ("batched", "warm, chunk 7", "shuffled, warm, preempted"):
        compare(run(model, prompts, ask=mixed, **WAYS[way]), want)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_tiny_models_logits_have_the_same_bits(tiny, way: str) -> None:
    model, prompts, want = tiny
    compare(run(model, prompts, **WAYS[way]), want)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_real_models_logits_have_the_same_bits(real, way: str) -> None:
    model, prompts, want = real
    compare(run(model, prompts, **WAYS[way]), want)


@pytest.mark.parametrize("way", ["batched", "warm, chunk 7", "shuffled pages"])
def test_rows_that_verify_guesses_have_the_same_bits_in_the_tiny_models(tiny, way: str) -> None:
    model, prompts, want = tiny
    if model.state_spec is not None:
        pytest.skip("a recurrent state cannot take guesses back")
    compare(run(model, prompts, guess=Knows(prompts, want), **WAYS[way]), want)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["batched", "warm, chunk 7"])
def test_rows_that_verify_guesses_have_the_same_bits_in_the_real_model(real, way: str) -> None:
    model, prompts, want = real
    compare(run(model, prompts, guess=Knows(prompts, want), **WAYS[way]), want)


def test_the_comparison_finds_one_changed_bit(tiny) -> None:
    _, _, want = tiny
    key = next(iter(want))
    got = {k: v.clone() for k, v in want.items()}
    got[key].view(torch.int32)[0] ^= 1
    with pytest.raises(AssertionError, match="request"):
        compare(got, want)
