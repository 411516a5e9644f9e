"""LlamaModel against transformers on the same random weights, through saved checkpoints and our own loader."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from feeder import Feeder, random_tokens

from paged.models.config import ModelConfig
from paged.models.registry import load_model
from paged.models.tiny import random_tensors, tiny_hf_settings
from scheduler import Engine, SamplingParams

transformers = pytest.importorskip("transformers")

LENGTH = 45  # more than two pages of 16, more than the longest window below
BOUND = 1e-4

rope = partial(dict, rope_theta=10000.0)
CASES = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama as many kv heads": ("llama", {"num_key_value_heads": 4}),
    "llama 9:3 heads, odd sizes": (
        "llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 45, "intermediate_size": 53},
    ),
    "llama one layer": ("llama", {"num_hidden_layers": 1}),
    "llama other theta": ("llama", {"rope_parameters": rope(rope_type="default", rope_theta=500.0)}),
    "llama linear": ("llama", {"rope_parameters": rope(rope_type="linear", factor=4.0)}),
    "llama llama3": (
        "llama",
        {
            "rope_parameters": rope(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            )
        },
    ),
    "llama yarn": (
        "llama",
        {"rope_parameters": rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)},
    ),
    "llama yarn untruncated": (
        "llama",
        {"rope_parameters": rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=32, truncate=False)},
    ),
    "mistral": ("mistral", {}),
    "mistral window 8": ("mistral", {"sliding_window": 8}),
    "mistral window 17": ("mistral", {"sliding_window": 17}),
    "mistral window 1": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 mixed windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 tied, biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 mixed windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def oracle_of(settings: dict, tensors: dict[str, torch.Tensor]):
    """transformers' model with these weights, in plain attention."""
    config = transformers.AutoConfig.for_model(**{k: v for k, v in settings.items() if k != "architectures"})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(our model, tokens, transformers' logits [LENGTH, vocab])."""
    family, changes = CASES[request.param]
    settings = tiny_hf_settings(family, **changes)
    tensors = random_tensors(ModelConfig.from_hf(settings), seed=3)
    oracle = oracle_of(settings, tensors)
    folder = tmp_path_factory.mktemp("checkpoint")
    oracle.save_pretrained(folder)
    tokens = random_tokens(LENGTH, settings["vocab_size"])
    with torch.inference_mode():
        want = oracle(torch.tensor([tokens])).logits[0]
    return load_model(folder), tokens, want


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [0, 7, 1], ids=["whole", "chunks", "decode"])
def test_logits_are_those_of_transformers(case, page_size, chunk):
    model, tokens, want = case
    got = Feeder(model, page_size, seed=page_size).feed("a", tokens, chunk)
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert (got - want).abs().max() < BOUND
    assert want.std() > 0.5, "the weights are too small to tell a right model from a wrong one"


def test_prompt_log_probabilities_are_the_log_softmax_of_transformers(case):
    model, tokens, want = case
    want = want.double().log_softmax(-1)
    engine = Engine(model, page_size=4, num_pages=64, max_num_seqs=2, max_num_batched_tokens=16)
    for _ in range(2):
        [output] = engine.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=3))
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == LENGTH
        for position, entry in enumerate(output.prompt_logprobs[1:], 1):
            row = want[position - 1]
            assert entry.token_id == tokens[position]
            assert entry.logprob == pytest.approx(float(row[tokens[position]]), abs=1e-4)
            assert [value for _, value in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_sequences_in_one_batch_do_not_see_each_other(case):
    model, tokens, want = case
    feeder = Feeder(model, 4)
    other = random_tokens(30, model.vocab_size, seed=9)
    feeder.step({"b": other[:3], "a": tokens[:20], "c": other[:11]})
    feeder.step({"c": other[11:], "b": other[3:4]})
    got = feeder.step({"a": tokens[20:44], "b": other[4:]})["a"]
    assert (got - want[20:44]).abs().max() < BOUND
    got = feeder.step({"b": other[:1], "c": other[:1], "a": tokens[44:]}, wanted="last")["a"]
    assert (got - want[44:]).abs().max() < BOUND


def test_only_the_wanted_rows_get_logits_and_in_their_order(case):
    model, tokens, want = case
    feeder = Feeder(model)
    got = feeder.step({"a": tokens[:20], "b": tokens[:5]}, wanted="last")
    assert got["a"].shape == got["b"].shape == (1, model.vocab_size)
    assert (got["a"] - want[19]).abs().max() < BOUND and (got["b"] - want[4]).abs().max() < BOUND


def test_every_weight_comes_back_as_it_was_saved(case):
    model = case[0]
    tensors = random_tensors(model.config, seed=3)
    got = dict(model.named_tensors())
    assert set(got) == set(tensors)
    for name, values in tensors.items():
        assert torch.equal(got[name], values), name


def test_mixed_windows_make_one_page_group_for_each_window(tmp_path):
    changes = {
        "num_hidden_layers": 5,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full", "sliding")],
    }
    config = ModelConfig.from_hf(tiny_hf_settings("qwen3", **changes))
    from paged.models.llama import LlamaModel

    model = LlamaModel(config, random_tensors(config).__getitem__)
    assert model.spec.num_groups == 2 and model.spec.windows == (0, 6) and model.spec.layers == 3
    assert [(p.group, p.index, p.window) for p in model._places] == [
        (0, 0, 0),
        (1, 0, 6),
        (1, 1, 6),
        (0, 1, 0),
        (1, 2, 6),
    ]


@pytest.mark.parametrize("max_seq_len, limit", [(None, 256), (100, 100), (256, 256), (1000, 256)])
def test_the_longest_sequence_can_be_lowered_and_not_raised(tmp_path, max_seq_len, limit):
    settings = tiny_hf_settings()
    oracle_of(settings, random_tensors(ModelConfig.from_hf(settings))).save_pretrained(tmp_path)
    model = load_model(tmp_path, max_seq_len=max_seq_len)
    assert model.max_seq_len == limit
    feeder = Feeder(model, 16)
    with pytest.raises(ValueError, match=rf"below the model's {limit}"):
        feeder.feed("a", [1] * (limit + 1))


def test_a_folder_saved_by_transformers_4_gives_the_same_logits(tmp_path):
    """Its config has rope_scaling and rope_theta instead of rope_parameters."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    settings = tiny_hf_settings(rope_parameters={**scaling, "rope_theta": 10000.0})
    oracle_of(settings, random_tensors(ModelConfig.from_hf(settings))).save_pretrained(tmp_path)
    tokens = random_tokens(20, 96)
    want = Feeder(load_model(tmp_path)).feed("a", tokens)
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["rope_parameters"]
    stored.update(rope_scaling=scaling, rope_theta=10000.0)
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert torch.equal(Feeder(load_model(tmp_path)).feed("a", tokens), want)


def test_weights_in_bf16_compute_in_bf16_and_stay_near_fp32():
    from paged.models.llama import LlamaModel

    config = ModelConfig.from_hf(tiny_hf_settings("qwen3"))
    tensors = random_tensors(config)
    tokens = random_tokens(40, 96)
    want = Feeder(LlamaModel(config, tensors.__getitem__)).feed("a", tokens)
    model = LlamaModel(config, tensors.__getitem__, dtype=torch.bfloat16)
    got = Feeder(model).feed("a", tokens, 7)
    assert got.dtype == torch.float32 and model.tensor("lm_head.weight").dtype == torch.bfloat16
    error = (got - want).abs().max() / want.std()
    assert 0 < error < 0.3
    agreeing = (got.argmax(-1) == want.argmax(-1)).float().mean()
    assert agreeing > 0.9


def test_a_step_without_rows_gives_no_logits():
    from paged.models.base import ForwardBatch
    from paged.models.tiny import tiny_model

    model = tiny_model("tiny:llama")
    feeder = Feeder(model)
    nothing = np.zeros(0, np.int32)
    batch = ForwardBatch(nothing, np.zeros(1, np.int32), nothing, np.zeros((1, 0, 1), np.int32), nothing)
    assert model.forward(batch, feeder.storage).shape == (0, model.vocab_size)


def test_threads_may_run_forwards_at_once_on_storage_of_their_own():
    from concurrent.futures import ThreadPoolExecutor

    from paged.models.tiny import tiny_model

    prompts = [random_tokens(40 + 200 * i, 512, seed=i) for i in range(4)]  # the longer ones make the table grow
    alone = [Feeder(tiny_model("tiny:llama")).feed("a", prompt, 100) for prompt in prompts]
    model = tiny_model("tiny:llama")
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda prompt: Feeder(model).feed("a", prompt, 100), prompts))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(together, alone, strict=True))


@pytest.mark.filterwarnings("error")
def test_arrays_that_may_not_be_written_to_are_no_reason_to_warn():
    from paged.models.tiny import tiny_model
    from paged.session import Session

    model = tiny_model("tiny:llama")
    tokens = np.arange(20, dtype=np.int32)
    want = Session(model, model.create_kv_pool(num_pages=4)).eval(tokens)
    tokens.flags.writeable = False
    assert torch.equal(Session(model, model.create_kv_pool(num_pages=4)).eval(tokens), want)
