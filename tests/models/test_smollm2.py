"""SmolLM2-135M, real weights: against transformers with the same weights, and bit for bit against itself."""

from __future__ import annotations

import gc

import pytest
import torch
from feeder import Feeder, random_tokens

pytestmark = pytest.mark.slow

NEW_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "To make bread you need",
    "The three laws of motion are",
    "1, 2, 3, 5, 8, 13,",
    "Q: What is the largest planet?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at",
    "L'hiver, les oiseaux",
]


@pytest.fixture(scope="module")
def generated(smollm2):
    """(prompt ids, our greedy tokens, our logits [64, vocab]) for each prompt, all of them decoded in one batch."""
    prompts = {str(i): smollm2.tokenizer.encode(text).tolist() for i, text in enumerate(PROMPTS)}
    feeder, rows = Feeder(smollm2, 16, num_pages=128), prompts
    tokens, logits = {name: [] for name in prompts}, {name: [] for name in prompts}
    for _ in range(NEW_TOKENS):
        last = feeder.step(rows, wanted="last")
        rows = {name: [int(row.argmax())] for name, row in last.items()}
        for name in prompts:
            tokens[name] += rows[name]
            logits[name].append(last[name])
    return [(prompts[name], tokens[name], torch.cat(logits[name])) for name in prompts]


@pytest.fixture(scope="module")
def oracle(smollm2):
    """transformers' LlamaForCausalLM with the weights that our model computes with."""
    transformers = pytest.importorskip("transformers")
    config = smollm2.config
    settings = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_embeddings,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(settings)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(settings)
    missing, unexpected = model.load_state_dict(dict(smollm2.named_tensors()), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    yield model.eval()
    gc.collect()


def test_the_config_is_that_of_smollm2(smollm2):
    config = smollm2.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert config.tie_embeddings and config.max_seq_len == 8192 and smollm2.vocab_size == 49152
    assert smollm2.extra_info()["num_parameters"] == 134_515_008
    assert smollm2.eos_token_ids and smollm2.tokenizer is not None and smollm2.chat is not None


def test_greedy_tokens_and_logits_are_those_of_transformers(generated, oracle):
    """One forward of the oracle over prompt and answer: where each token is its arg-max, greedy gives these tokens."""
    for prompt, tokens, logits in generated:
        with torch.inference_mode():
            want = oracle(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert want.argmax(-1).tolist() == tokens
        assert (want - logits).abs().max() < 1e-3


def test_the_answers_are_text(smollm2, generated):
    first = smollm2.tokenizer.decode(generated[0][1])
    assert "Paris" in first
    assert all(len(set(tokens)) > 5 for _, tokens, _ in generated)


def test_a_sequence_decoded_alone_gives_the_bits_it_gave_in_the_batch(smollm2, generated):
    for prompt, tokens, logits in generated[:2]:
        feeder = Feeder(smollm2, 4, num_pages=64, seed=3)
        got = [feeder.feed("a", prompt, 5)[-1:]]
        got += [feeder.step({"a": [token]})["a"] for token in tokens[:15]]
        assert torch.equal(torch.cat(got), logits[:16])


@pytest.mark.parametrize("threads", [1, 2])
def test_prefill_gives_the_same_bits_in_every_cut(smollm2, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tokens = random_tokens(130, smollm2.vocab_size)
        want = Feeder(smollm2).feed("a", tokens)
        for chunk in (64, 33):
            assert torch.equal(Feeder(smollm2, 4).feed("a", tokens, chunk), want)
        feeder = Feeder(smollm2)
        feeder.step({"a": tokens[:-1], "b": tokens[:77]}, wanted="last")
        assert torch.equal(feeder.step({"b": tokens[:1], "a": tokens[-1:]})["a"], want[-1:])
    finally:
        torch.set_num_threads(before)
