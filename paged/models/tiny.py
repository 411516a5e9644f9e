"""Small models with seeded random weights, for tests and examples that must not need a download."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xxhash

from paged.errors import LoadError
from paged.loaders.checkpoint import expected_tensors
from paged.models.base import LanguageModel
from paged.models.config import DeltaConfig, Family, LoopChange, LoopConfig, ModelConfig
from paged.models.registry import build_model

TINY_LLAMA = ModelConfig(
    family="llama",
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=160,
    max_seq_len=4096,
)

TINY_HYBRID = ModelConfig(
    family="qwen3_5",
    vocab_size=512,
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_seq_len=4096,
    qk_norm=True,
    layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention"),
    rotary_dim=8,
    delta=DeltaConfig(num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16, conv_kernel=4),
)


# One layer before the loop and none after it: at depth 1 this is tiny:llama, weights included.
TINY_LOOPED = replace(TINY_LLAMA, loop=LoopConfig((1, 2), num_loops=8, max_loops=32))

_TINY = {"tiny:llama": TINY_LLAMA, "tiny:hybrid": TINY_HYBRID, "tiny:looped": TINY_LOOPED}


def tiny_model(
    name: str,
    *,
    max_seq_len: int | None = None,
    device: str | torch.device = "cpu",
    loop: LoopChange = (None, None, None),
) -> LanguageModel:
    """The model called "tiny:llama", "tiny:hybrid" or "tiny:looped"; its weights are the same in every process, on
    every machine. `loop` loops other layers of it, as ModelConfig.with_loop says."""
    if name not in _TINY:
        raise LoadError(f"the tiny models are {', '.join(_TINY)}; found {name!r}")
    config = _TINY[name].with_loop(*loop)
    model = build_model(config, random_tensors(config).__getitem__, max_seq_len=max_seq_len, device=device)
    model.name = name
    return model


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of a model of this config, fp32; each depends only on (seed, name, shape).

    Scaled so that layers change what passes through them and logits differ clearly (standard deviation about 3):
    greedy text of such a model wanders over its vocabulary instead of repeating one token. Delta layers forget half
    of their state in about twenty tokens, some heads sooner, some later.
    """
    tensors = {}
    head = 3.0 if config.sphere is not None else 3.0 / math.sqrt(config.hidden_size)  # what it multiplies has length 1
    for name, shape in expected_tensors(config).items():
        rng = np.random.Generator(np.random.PCG64(xxhash.xxh3_64_intdigest(name.encode(), seed=seed)))
        values = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2 and name != "model.embed_tokens.weight":
            values *= head if name == "lm_head.weight" else 1.5 / math.sqrt(shape[1])
        elif name.endswith("norm.weight"):
            centre = 0.0 if config.delta is not None and ".linear_attn." not in name else 1.0
            values = centre + 0.1 * values
        elif ".linear_attn." in name:
            if name.endswith("A_log"):
                values -= 3.0
            elif name.endswith("conv1d.weight"):
                values *= 1.5 / math.sqrt(shape[-1])
        elif name.endswith(".bias"):
            values *= 0.5
        elif config.sphere is not None and len(shape) == 1:
            values = (1.0 if ".suv_" in name else config.sphere.initializer_range) * (1.0 + 0.2 * values)
        elif config.tie_embeddings:
            values *= head
        tensors[name] = torch.from_numpy(values)
    return tensors


def tiny_hf_settings(family: Family = "llama", **overrides: Any) -> dict[str, Any]:
    """A Hugging Face config.json, as a dict, of a random model of `family` that runs in milliseconds."""
    settings: dict[str, Any] = {
        "model_type": "qwen3_5_text" if family == "qwen3_5" else family,
        "architectures": [family.capitalize() + "ForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "qwen3_5":
        settings |= {
            "num_hidden_layers": 4,
            "full_attention_interval": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 4,
        }
        del settings["sliding_window"]
    if family == "dory":
        loop = {"n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3, "ngpt_alpha_init": 0.2}
        settings |= {"num_hidden_layers": 4, "sliding_window": 9, **loop}
        del settings["rope_theta"]
    return {**settings, **overrides}
