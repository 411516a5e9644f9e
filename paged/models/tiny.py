"""Small models with seeded random weights, for tests and examples that must not need a download."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import xxhash

from paged.errors import LoadError
from paged.loaders.checkpoint import expected_tensors
from paged.models.base import LanguageModel
from paged.models.config import Family, ModelConfig
from paged.models.llama import LlamaModel

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


def tiny_model(name: str, *, max_seq_len: int | None = None, device: str | torch.device = "cpu") -> LanguageModel:
    """The model called "tiny:llama". Its weights are the same in every process and on every machine."""
    if name != "tiny:llama":
        raise LoadError(f'the tiny models are "tiny:llama"; found {name!r}')
    weights = random_tensors(TINY_LLAMA)
    model = LlamaModel(TINY_LLAMA, weights.__getitem__, max_seq_len=max_seq_len, device=device)
    model.name = name
    return model


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of a model of this config, fp32; each depends only on (seed, name, shape).

    Scaled so that layers change what passes through them and logits differ clearly (standard deviation about 3):
    greedy text of such a model wanders over its vocabulary instead of repeating one token.
    """
    tensors = {}
    for name, shape in expected_tensors(config).items():
        rng = np.random.Generator(np.random.PCG64(xxhash.xxh3_64_intdigest(name.encode(), seed=seed)))
        values = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2 and name != "model.embed_tokens.weight":
            values *= (3.0 if name == "lm_head.weight" else 1.5) / math.sqrt(shape[1])
        elif name.endswith("norm.weight"):
            values = 1.0 + 0.1 * values
        elif name.endswith(".bias"):
            values *= 0.5
        elif config.tie_embeddings:
            values *= 3.0 / math.sqrt(shape[1])
        tensors[name] = torch.from_numpy(values)
    return tensors


def tiny_hf_settings(family: Family = "llama", **overrides: Any) -> dict[str, Any]:
    """A Hugging Face config.json, as a dict, of a random model of `family` that runs in milliseconds."""
    architectures = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    settings: dict[str, Any] = {
        "model_type": family,
        "architectures": [architectures[family] + "ForCausalLM"],
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
    return {**settings, **overrides}
