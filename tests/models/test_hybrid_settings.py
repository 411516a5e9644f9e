"""The tiny hybrid, and which settings make a hybrid: as transformers reads them, or refused by name."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from feeder import Feeder, random_tokens

from paged.errors import LoadError
from paged.models.config import DeltaConfig, ModelConfig
from paged.models.delta import GatedDelta
from paged.models.fingerprint import fingerprint_of, tensor_digest
from paged.models.hybrid import HybridModel
from paged.models.registry import load_model
from paged.models.tiny import TINY_HYBRID, random_tensors, tiny_hf_settings

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen3_5")

rope = partial(dict, rope_theta=10000.0, rope_type="default")
FULL, LINEAR = "full_attention", "linear_attention"


@pytest.fixture(scope="module")
def tiny() -> HybridModel:
    model = load_model("tiny:hybrid")
    assert isinstance(model, HybridModel)
    return model


# What it is


def test_the_tiny_hybrid_has_the_shape_it_says(tiny):
    assert tiny.name == "tiny:hybrid" and tiny.vocab_size == 512 and tiny.max_seq_len == 4096
    assert (tiny.spec.layers, tiny.spec.num_kv_heads, tiny.spec.head_dim, tiny.spec.num_groups) == (1, 2, 16, 1)
    assert [(p.name, p.shape, p.dtype) for p in tiny.state_spec.planes] == [
        ("conv", (3, 3, 128), "fp32"),
        ("delta", (3, 4, 16, 16), "fp32"),
    ]
    info = tiny.extra_info()
    assert (info["num_layers"], info["num_attention_layers"], info["dtype"]) == (4, 1, "float32")
    assert info["state_bytes"] == tiny.state_spec.num_bytes == 4 * (3 * 3 * 128 + 3 * 4 * 16 * 16)
    assert info["num_parameters"] == sum(t.numel() for t in random_tensors(TINY_HYBRID).values())


def test_its_weights_are_these():
    """Fixed for good: stored prefix chains and expected outputs elsewhere are made with them."""
    tensors = random_tensors(TINY_HYBRID)
    assert fingerprint_of({}, {n: tensor_digest(t) for n, t in tensors.items()}) == WEIGHTS


WEIGHTS = "cbdc4b68145f7d9b863ee785cb82878a"


def test_models_differ_by_their_fingerprints(tiny):
    again = HybridModel(TINY_HYBRID, random_tensors(TINY_HYBRID).__getitem__)
    other = HybridModel(TINY_HYBRID, random_tensors(TINY_HYBRID, seed=1).__getitem__)
    changed = random_tensors(TINY_HYBRID)
    changed["model.layers.1.linear_attn.A_log"][3] += 1e-6
    slightly = HybridModel(TINY_HYBRID, changed.__getitem__)
    assert again.fingerprint == tiny.fingerprint
    assert len({tiny.fingerprint, other.fingerprint, slightly.fingerprint}) == 3


@pytest.mark.parametrize("seed", range(4))
def test_greedy_text_of_the_tiny_hybrid_wanders_over_its_vocabulary(tiny, seed):
    feeder, tokens, margins = Feeder(tiny), [], []
    logits = feeder.feed("a", random_tokens(10, 512, seed))[-1]
    for _ in range(40):
        best = logits.topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        logits = feeder.feed("a", tokens[-1:])[-1]
    assert len(set(tokens)) >= 20 and np.median(margins) > 0.2


def test_an_early_token_changes_late_logits(tiny):
    prompt = random_tokens(60, 512)
    want = Feeder(tiny).feed("a", prompt)[-1]
    for position in (0, 20, 40):
        changed = list(prompt)
        changed[position] = (changed[position] + 1) % 512
        assert (Feeder(tiny).feed("a", changed)[-1] - want).abs().max() > 0.01


def test_the_longest_sequence_can_be_lowered_behind_a_view_that_keeps_the_state(tiny):
    lowered = load_model("tiny:hybrid", max_seq_len=32)
    assert lowered.max_seq_len == 32
    with pytest.raises(ValueError, match="below the model's 32"):
        Feeder(lowered).feed("a", [1] * 33)
    view = load_model(tiny, max_seq_len=100)
    assert view is not tiny and view.max_seq_len == 100 and view.state_spec == tiny.state_spec
    tokens = random_tokens(30, 512)
    assert torch.equal(Feeder(view).feed("a", tokens, 7), Feeder(tiny).feed("a", tokens))


def test_a_model_without_recurrent_state_has_no_state_pool(tiny):
    assert load_model("tiny:llama").create_state_pool(4) is None
    pool = tiny.create_state_pool(5)
    assert pool is not None and pool.num_slots == 5 and pool.spec == tiny.state_spec


# Settings


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 9, "full_attention_interval": 3},
        {"layer_types": [FULL, LINEAR, LINEAR, FULL]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.75}},
        {"rope_parameters": rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True)},
        {"head_dim": None, "num_key_value_heads": None, "linear_key_head_dim": None, "linear_num_value_heads": None},
    ],
)
def test_settings_mean_what_the_config_class_of_transformers_makes_of_them(changes):
    values = {k: v for k, v in tiny_hf_settings("qwen3_5", **changes).items() if v is not None}
    ours = ModelConfig.from_hf(values)
    peer = transformers.AutoConfig.for_model(**{k: v for k, v in values.items() if k != "architectures"})
    assert ours.family == "qwen3_5" and ours.layer_types == tuple(peer.layer_types)
    assert (ours.num_kv_heads, ours.head_dim) == (peer.num_key_value_heads, peer.head_dim)
    rope = peer.rope_parameters
    assert (ours.rope_theta, ours.rotary_dim) == (
        rope["rope_theta"],
        int(peer.head_dim * rope["partial_rotary_factor"]),
    )
    assert ours.delta == DeltaConfig(
        peer.linear_num_key_heads,
        peer.linear_num_value_heads,
        peer.linear_key_head_dim,
        peer.linear_value_head_dim,
        peer.linear_conv_kernel_dim,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [LINEAR] * 4}, "a hybrid needs layers of both kinds"),
        ({"layer_types": [FULL] * 4}, "a hybrid needs layers of both kinds"),
        ({"layer_types": [LINEAR, FULL]}, "layer_types must be 4 of full_attention or linear_attention, got 2"),
        ({"layer_types": [LINEAR, "sliding_attention", LINEAR, FULL]}, r"got 4 with \['sliding_attention'\]"),
        ({"layer_types": "linear"}, "expected a list for layer_types, found 'linear'"),
        ({"full_attention_interval": 0}, "expected a list for layer_types, found None"),
        ({"linear_num_value_heads": 3}, "value heads of delta layers must be a multiple .* got 3:2"),
        ({"linear_conv_kernel_dim": 0}, "conv_kernel must be a positive int, got 0"),
        ({"linear_key_head_dim": "x"}, "expected an integer for linear_key_head_dim, found 'x'"),
        ({"rope_parameters": rope(partial_rotary_factor=0.2)}, "rotary_dim must be even and at most .*, got 3"),
        ({"rope_parameters": rope(partial_rotary_factor=1.5)}, "at most head_dim 16, got 24"),
        ({"model_type": "qwen3_5_moe_text"}, "found 'qwen3_5_moe_text'"),
        ({"hidden_act": "gelu"}, "only 'silu' is supported for hidden_act"),
    ],
)
def test_settings_that_make_no_hybrid_are_refused(changes, message):
    with pytest.raises(LoadError, match=rf"^some/config\.json: .*{message}"):
        ModelConfig.from_hf(tiny_hf_settings("qwen3_5", **changes), "some/config.json")


def test_delta_layers_belong_to_the_hybrid_family():
    delta = DeltaConfig(1, 1, 8, 8, 4)
    with pytest.raises(LoadError, match="delta layers belong to the family qwen3_5, got llama"):
        ModelConfig("llama", 96, 48, 3, 4, 2, 16, 80, delta=delta)
    with pytest.raises(LoadError, match="delta layers belong to the family qwen3_5, got qwen3_5 and None"):
        ModelConfig("qwen3_5", 96, 48, 2, 4, 2, 16, 80, layer_types=(LINEAR, FULL))


def test_a_quantised_folder_of_text_and_images_is_refused():
    values = {"model_type": "qwen3_5", "text_config": tiny_hf_settings("qwen3_5"), "quantization_config": {"bits": 8}}
    with pytest.raises(LoadError, match="only no such field is supported for quantization_config"):
        ModelConfig.from_hf(json.loads(json.dumps(values)))


def test_native_code_is_what_computes_the_tiny_hybrid(tiny):
    pytest.importorskip("paged._native")
    rules = [layer.mixer.rule for layer in tiny._layers[:3]]
    assert all(isinstance(rule, GatedDelta) and rule.index == i for i, rule in enumerate(rules))
    assert all(rule._kernels(torch.zeros(1, 4)) is not None for rule in rules)
