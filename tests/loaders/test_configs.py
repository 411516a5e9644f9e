"""paged.models.config and paged.loaders.configs: settings are read as transformers reads them, or refused by name."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders.builders import gguf_metadata, hf_config
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paged.errors import LoadError
from paged.models.config import ModelConfig, RopeScaling
from paged.models.rotary import Rotary

PEERS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def peer_of(values: dict) -> object:
    return PEERS[values["model_type"]](**{k: v for k, v in values.items() if k != "model_type"})


@pytest.mark.parametrize("family", PEERS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 8, "head_dim": 16, "rms_norm_eps": 1e-5},
        {"rope_theta": 500000.0, "tie_word_embeddings": True},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"max_position_embeddings": 77},
        {"sliding_window": None},
        {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
        {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 0},
        {"sliding_window": 16, "use_sliding_window": True,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ],
)  # fmt: skip
def test_a_config_dict_means_what_the_config_class_of_transformers_makes_of_it(family: str, changes: dict) -> None:
    values = {"model_type": family, **SIZES, **changes}
    ours, peer = ModelConfig.from_hf(values), peer_of(values)
    assert ours.family == family
    assert ours.num_kv_heads == peer.num_key_value_heads
    assert ours.head_dim == getattr(peer, "head_dim", None) or peer.hidden_size // peer.num_attention_heads
    assert ours.rms_norm_eps == peer.rms_norm_eps
    assert ours.max_seq_len == peer.max_position_embeddings
    assert ours.tie_embeddings == peer.tie_word_embeddings
    assert ours.rope_theta == peer.rope_parameters["rope_theta"]
    # The Llama model of transformers reads no window, and its Mistral has one for all layers.
    window = 0 if family == "llama" else peer.sliding_window or 0
    types = peer.layer_types if family.startswith("qwen") else ["sliding_attention"] * 3
    assert ours.layer_windows == tuple(window if kind == "sliding_attention" else 0 for kind in types)


@pytest.mark.parametrize("family", PEERS)
def test_null_kv_heads_and_head_size_follow_from_the_heads(family: str) -> None:
    config = ModelConfig.from_hf({"model_type": family, **SIZES, "num_key_value_heads": None, "head_dim": None})
    assert (config.num_kv_heads, config.head_dim) == (32, 2)


@pytest.mark.parametrize("notation", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"type": "linear", "factor": 4}, RopeScaling("linear", 4.0)),
        ({**LLAMA3, "original_max_position_embeddings": 64}, RopeScaling("llama3", 8.0, 64)),
        ({"rope_type": "default"}, RopeScaling()),
        (None, RopeScaling()),
    ],
)
def test_both_notations_of_rope_scaling_are_read(notation: str, rope: dict | None, expected: RopeScaling) -> None:
    config = ModelConfig.from_hf(hf_config(**{notation: rope}))
    assert config.rope_scaling == expected
    assert config.max_seq_len == 128


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e6, "outer": 32},
        {"rope_parameters": None, "outer": 32},
    ],
)
@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_of_two_places_for_one_rope_setting_that_of_transformers_counts(kind: str, changes: dict) -> None:
    """A context is stretched by adding rope_scaling to a file that has rope_parameters already."""
    rope = {**LLAMA3, "rope_type": kind, "original_max_position_embeddings": 64}
    values = hf_config(**{k: v for k, v in changes.items() if k != "outer"}, rope_scaling=rope)
    if "outer" in changes:
        values["original_max_position_embeddings"] = changes["outer"]
    config = ModelConfig.from_hf(values)
    peer: Any = peer_of(deepcopy(values))
    peer.standardize_rope_params()
    theirs = peer.rope_parameters
    assert config.rope_scaling.kind == theirs["rope_type"]
    assert config.rope_scaling.original_max_seq_len == theirs["original_max_position_embeddings"]
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](peer, "cpu")
    rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling, config.max_seq_len)
    np.testing.assert_allclose(rotary.frequencies, frequencies.numpy(), rtol=1e-6)
    assert rotary.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize(
    "extra",
    [{}, {"mscale": 0.7, "mscale_all_dim": 0.9}, {"attention_factor": 1.5}, {"beta_fast": 16, "beta_slow": 2},
     {"truncate": False}, {"factor": 0.5}],
)  # fmt: skip
def test_yarn_has_the_attention_factor_and_the_length_that_it_stretches_to(extra: dict) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **extra}
    values = hf_config(rope_parameters={**rope, "rope_theta": 10000.0})
    config = ModelConfig.from_hf(values)
    _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](peer_of(values), torch.device("cpu"))
    scaling = config.rope_scaling
    assert scaling.attention_factor == pytest.approx(attention_factor)
    assert (scaling.kind, scaling.factor, scaling.original_max_seq_len) == ("yarn", rope["factor"], 64)
    assert scaling.beta_fast == rope.get("beta_fast", 32)
    assert scaling.beta_slow == rope.get("beta_slow", 1)
    assert scaling.truncate == rope.get("truncate", True)
    assert config.max_seq_len == max(128, int(rope["factor"] * 64))


def test_dynamic_scaling_is_kept_to_the_positions_where_it_has_no_effect() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
    with pytest.warns(UserWarning, match="dynamic rope scaling.*limited to 64"):
        config = ModelConfig.from_hf(hf_config(rope_scaling=rope))
    assert config.rope_scaling == RopeScaling()
    assert config.max_seq_len == 64


@pytest.mark.parametrize(
    ("family", "changes", "biases"),
    [
        ("llama", {}, (False, False, False)),
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("mistral", {"attention_bias": True, "mlp_bias": True}, (False, False, False)),
        ("qwen2", {}, (True, False, False)),
        ("qwen3", {}, (False, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases_are_where_the_family_has_them(family: str, changes: dict, biases: tuple) -> None:
    config = ModelConfig.from_hf(hf_config(family, **changes))
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == biases
    assert config.qk_norm == (family == "qwen3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_neox"}, "model_type must be one of llama, mistral, .*, found 'gpt_neox'"),
        ({"model_type": None, "architectures": ["FooForCausalLM"]}, "found None .*FooForCausalLM"),
        ({"hidden_act": "gelu"}, "only 'silu' is supported for hidden_act, found 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor, found 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "no such field is supported for quantization_config"),
        ({"hidden_size": None}, "expected an integer for hidden_size, found no such field"),
        ({"hidden_size": "64"}, "expected an integer for hidden_size, found '64'"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers, found 1.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers, found True"),
        ({"num_hidden_layers": 10**9}, "at most 10000 layers in num_hidden_layers, found 1000000000"),
        ({"vocab_size": 0}, "vocab_size must be a positive int, got 0"),
        ({"rms_norm_eps": "x"}, "expected a number for rms_norm_eps, found 'x'"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": float("inf")}, "expected a number for rms_norm_eps, found inf"),
        ({"num_attention_heads": 0}, "heads must be positive"),
        ({"num_key_value_heads": 4}, "multiple of num_kv_heads, got 6:4"),
        ({"head_dim": 33}, "head_dim must be even"),
        ({"head_dim": None, "hidden_size": 100}, "expected an integer for head_dim"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "found 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "a number for rope_scaling.factor, found no such field"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "positive number for rope_scaling.factor"),
        ({"rope_scaling": LLAMA3}, "rope_scaling.original_max_position_embeddings, found no such field"),
        ({"rope_scaling": [1]}, r"expected an object for rope_parameters, found \[1\]"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope scaling must be one of .*, found 'proportional'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
         "only one rotary embedding .* in rope_parameters, found one for 'full_attention'"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "linear", "factor": 2}},
         "rope_scaling replaces rope_parameters and so its rope_theta, 1000000.0"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "layer_types": ["x", "y"]},
         r"got 2 with \['x', 'y'\]"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "layer_types": 3}, "a list for"),
        ({"model_type": "mistral", "sliding_window": -8}, "sliding_window must be an int >= 0, got -8"),
    ],
)  # fmt: skip
def test_what_is_missing_or_unsupported_is_named_with_the_file(changes: dict, message: str) -> None:
    values = {k: v for k, v in hf_config(**changes).items() if v is not None}
    with pytest.raises(LoadError, match=r"^some/config\.json: .*" + message):
        ModelConfig.from_hf(values, source="some/config.json")


def test_architectures_name_the_family_where_model_type_is_missing() -> None:
    values = hf_config(architectures=["Qwen3ForCausalLM"])
    del values["model_type"]
    assert ModelConfig.from_hf(values).family == "qwen3"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [*hf_config(), "rope_scaling", "rope_parameters", "layer_types", "use_sliding_window", "architectures"]
ROPE = st.dictionaries(
    st.sampled_from(["rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast",
                     "original_max_position_embeddings", "mscale", "mscale_all_dim", "attention_factor"]),
    JSON | st.sampled_from(["linear", "llama3", "yarn", "default"]),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    family=st.sampled_from(list(PEERS)),
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON | ROPE, max_size=4),
)
@pytest.mark.filterwarnings("ignore:.*dynamic rope scaling")
def test_any_json_gives_a_config_or_a_load_error(family: str, changes: dict) -> None:
    try:
        config = ModelConfig.from_hf(hf_config(family, **changes))
    except LoadError:
        return
    assert len(config.layer_windows) == config.num_layers


TINY_CONFIG = ModelConfig.from_hf(hf_config())
GGUF_YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 64,
}
SHAPES = {"token_embd.weight": (96, 192), "output.weight": (96, 192)}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_gguf_metadata_gives_the_config_it_was_written_from(arch: str) -> None:
    metadata = {"general.architecture": arch, **gguf_metadata(TINY_CONFIG, arch)}
    config = ModelConfig.from_gguf(metadata, SHAPES)
    assert config == ModelConfig.from_hf(hf_config(arch))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, RopeScaling()),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"rope.scale_linear": 2.0}, RopeScaling("linear", 2.0)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, RopeScaling()),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
         RopeScaling("yarn", 4.0, 64, attention_factor=1.138629436)),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
          "rope.scaling.attn_factor": 0.5, "rope.scaling.yarn_beta_fast": 16.0},
         RopeScaling("yarn", 4.0, 64, attention_factor=0.569314718, beta_fast=16.0)),
    ],
)  # fmt: skip
def test_gguf_rope_scaling_is_read(keys: dict, expected: RopeScaling) -> None:
    metadata = {"general.architecture": "llama", **gguf_metadata(TINY_CONFIG, "llama")}
    config = ModelConfig.from_gguf({**metadata, **{f"llama.{k}": v for k, v in keys.items()}}, SHAPES)
    assert config.rope_scaling.attention_factor == pytest.approx(expected.attention_factor, rel=1e-8)
    assert config.rope_scaling.kind == expected.kind
    assert (config.rope_scaling.factor, config.rope_scaling.beta_fast) == (expected.factor, expected.beta_fast)
    assert config.max_seq_len == (256 if expected.kind == "yarn" else 128)


@pytest.mark.parametrize(
    ("changes", "factors", "message"),
    [
        ({"general.architecture": "mamba"}, (), "general.architecture must be one of llama, .*, found 'mamba'"),
        ({"general.architecture": None}, (), "found None"),
        ({"llama.expert_count": 8}, (), "only 0 is supported for llama.expert_count, found 8"),
        ({"llama.block_count": None}, (), "expected an integer for llama.block_count, found no such field"),
        ({"llama.block_count": 1 << 31}, (), "at most 10000 layers in llama.block_count, found 2147483648"),
        ({"llama.rope.dimension_count": 16}, (), "only 32 is supported for llama.rope.dimension_count, found 16"),
        ({"llama.attention.head_count_kv": [2, 3]}, (), r"llama.attention.head_count_kv, found \[2, 3\]"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, (), "found 'longrope'"),
        ({"llama.rope.scaling.factor": -2.0}, (), "number >= 0 for llama.rope.scaling.factor, found -2.0"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}, (), "context_length, found no"),
        ({**GGUF_YARN, "llama.rope.scaling.yarn_attn_factor": 0.5}, (), "only 1 .* for .*attn_factor, found 0.5"),
        ({**GGUF_YARN, "llama.rope.scaling.yarn_ext_factor": 0.0}, (), "only 1 .* for .*ext_factor, found 0.0"),
        ({**GGUF_YARN, "llama.rope.scaling.yarn_log_multiplier": 0.1}, (), "only 0 .* for .*multiplier, found 0.1"),
        ({"llama.rope.scaling.factor": 2.0}, (1.0,) * 16, "rope_freqs.weight together with rope scaling"),
        ({}, (1.0,) * 3, "rope factors must be 16 positive numbers, got 3"),
        ({}, (0.0,) * 16, "rope factors must be 16 positive numbers"),
    ],
)  # fmt: skip
def test_gguf_metadata_that_is_missing_or_unsupported_is_named(changes: dict, factors: tuple, message: str) -> None:
    metadata = {"general.architecture": "llama", **gguf_metadata(TINY_CONFIG, "llama"), **changes}
    metadata = {k: v for k, v in metadata.items() if v is not None}
    with pytest.raises(LoadError, match=r"^some\.gguf: .*" + message):
        ModelConfig.from_gguf(metadata, SHAPES, factors, source="some.gguf")


def test_one_number_a_layer_is_read_where_the_layers_agree() -> None:
    metadata = {"general.architecture": "llama", **gguf_metadata(TINY_CONFIG, "llama")}
    config = ModelConfig.from_gguf({**metadata, "llama.attention.head_count_kv": [2, 2]}, SHAPES)
    assert config.num_kv_heads == 2


def test_the_vocabulary_size_comes_from_the_embedding_then_from_the_metadata() -> None:
    metadata = {"general.architecture": "llama", **gguf_metadata(TINY_CONFIG, "llama")}
    assert ModelConfig.from_gguf(metadata, SHAPES).vocab_size == 96
    assert ModelConfig.from_gguf({**metadata, "llama.vocab_size": 50}).vocab_size == 50
    assert ModelConfig.from_gguf({**metadata, "tokenizer.ggml.tokens": ["a", "b"]}).vocab_size == 2
    with pytest.raises(LoadError, match="vocab_size"):
        ModelConfig.from_gguf(metadata)


GOOD = {"family": "llama", "vocab_size": 8, "hidden_size": 4, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1,
        "head_dim": 2, "intermediate_size": 4}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "gpt2"}, "model family must be one of llama, .*, got 'gpt2'"),
        *[({name: bad}, f"{name} must be a positive int, got {bad}") for name in GOOD if name != "family"
          for bad in (0, -1, True, 1.5)],
        ({"max_seq_len": 0}, "max_seq_len must be a positive int, got 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, got nan"),
        ({"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads must be a multiple of num_kv_heads, got 3:2"),
        ({"sliding_window": -1}, "sliding_window must be an int >= 0, got -1"),
        ({"layer_types": ("full_attention",)}, "layer_types must be 2 of"),
        ({"layer_types": ("full_attention", "none")}, r"with \['none'\]"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "sliding_attention layer but sliding_window is 0"),
        ({"rope_scaling": RopeScaling("mystery")}, "got 'mystery'"),
        ({"rope_scaling": RopeScaling("linear", -1.0)}, "factor of rope scaling linear must be positive, got -1.0"),
        ({"rope_scaling": RopeScaling("yarn", 2.0)}, "yarn needs the original maximum length, got 0"),
        ({"rope_scaling": RopeScaling("yarn", 2.0, 64), "rope_theta": 1.0}, "theta other than 1, got 32.0, 1.0 and 1"),
        ({"rope_scaling": RopeScaling("yarn", 2.0, 64, beta_slow=0.0)}, "positive beta_fast and beta_slow"),
        ({"rope_scaling": RopeScaling("llama3", 2.0, 64, 4.0, 4.0)}, "low_freq_factor below .*, got 4.0 and 4.0"),
    ],
)  # fmt: skip
def test_a_config_that_no_model_has_cannot_be_made(changes: dict, message: str) -> None:
    ModelConfig(**GOOD)
    with pytest.raises(LoadError, match=message):
        ModelConfig(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 10**400}, "expected a number for rope_theta"),
        ({"rms_norm_eps": -(10**400)}, "expected a number for rms_norm_eps"),
        ({"max_position_embeddings": 10**300}, "expected an integer for max_position_embeddings"),
        ({"max_position_embeddings": 1e308}, "expected an integer for max_position_embeddings"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 1e308}},
            r"a length below 2\*\*63, found a factor of 1e\+308",
        ),
    ],
)
def test_a_number_beyond_what_machines_hold_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        ModelConfig.from_hf(hf_config(**changes))


def test_the_windows_of_the_layers_follow_from_their_types() -> None:
    assert ModelConfig(**GOOD).layer_windows == (0, 0)
    assert ModelConfig(**GOOD, sliding_window=5).layer_windows == (5, 5)
    mixed = ModelConfig(**GOOD, sliding_window=5, layer_types=("full_attention", "sliding_attention"))
    assert mixed.layer_windows == (0, 5)
    assert mixed == ModelConfig(**GOOD, sliding_window=5, layer_types=("full_attention", "sliding_attention"))
    assert hash(mixed) != hash(ModelConfig(**GOOD))
