"""What every loader returns: a config, lazily read tensors under Hugging Face names, a tokenizer, a template."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paged.errors import MissingTensor
from paged.models.config import DeltaConfig, ModelConfig

if TYPE_CHECKING:
    from paged.loaders.chat import ChatTemplate
    from paged.loaders.tokenizer import Tokenizer

Shape = tuple[int, ...]


class TensorSource:
    """Named tensors of a checkpoint, read when asked for.

    Names are those of Hugging Face ("model.layers.0.self_attn.q_proj.weight"), layouts too: weights are
    `[out_features, in_features]`, rotary pairs are (i, i + head_dim / 2). Each `get` returns memory of its own, so
    that a file may be replaced under a running process and one tensor at a time is held twice at most.
    """

    source: str

    def names(self) -> list[str]:
        """Names in the order of the file."""
        raise NotImplementedError

    def shape(self, name: str) -> Shape:
        """Shape of one tensor, without reading it; MissingTensor if there is none of that name."""
        raise NotImplementedError

    def get(self, name: str, dtype: torch.dtype | None = torch.float32) -> torch.Tensor:
        """One tensor on the CPU as `dtype`; None keeps a stored float type (quantised ones become fp32)."""
        raise NotImplementedError

    def __contains__(self, name: object) -> bool:
        return name in self.names()


@dataclass(slots=True)
class Checkpoint:
    """A model as it lies on disk. The tensors that `config` calls for were checked to be there, in their shapes.

    A tied head is not among the names: use "model.embed_tokens.weight" where `config.tie_embeddings`.
    """

    config: ModelConfig
    source: str
    tensors: TensorSource
    tokenizer: Tokenizer | None = None
    chat: ChatTemplate | None = None
    eos_token_ids: tuple[int, ...] = ()


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every tensor that a model of this config computes with."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    gates = 1 if config.delta is None else 2  # the hybrids' q_proj gives the gate of attention's output as well
    attention = (
        ("self_attn.q_proj", q_rows * gates, hidden, config.attention_bias),
        ("self_attn.k_proj", kv_rows, hidden, config.attention_bias),
        ("self_attn.v_proj", kv_rows, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, q_rows, config.output_bias),
    )
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        delta = config.delta if config.layer_types[layer : layer + 1] == ("linear_attention",) else None
        if delta is not None:
            tensors.update({prefix + name: shape for name, shape in _delta_tensors(delta, hidden).items()})
        for name, out_features, in_features, bias in (
            *(attention if delta is None else ()),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        ):
            tensors[f"{prefix}{name}.weight"] = (out_features, in_features)
            if bias:
                tensors[f"{prefix}{name}.bias"] = (out_features,)
        if config.sphere is None:
            tensors[prefix + "input_layernorm.weight"] = (hidden,)
            tensors[prefix + "post_attention_layernorm.weight"] = (hidden,)
        else:
            tensors.update({prefix + name: shape for name, shape in _sphere_tensors(config).items()})
        if config.qk_norm and delta is None:
            tensors[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            tensors[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
    if config.sphere is None:
        tensors["model.norm.weight"] = (hidden,)
    else:
        tensors["lm_head.logit_scale"] = (config.vocab_size,)
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


def _sphere_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Tensors of a layer of the family dory in place of the weights of norms."""
    hidden, inner, q_rows = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    return {
        "self_attn.gate_proj.weight": (q_rows, hidden),
        "self_attn.sqk": (q_rows,),
        "self_attn.s_gate": (q_rows,),
        "mlp.suv_gate": (inner,),
        "mlp.suv_up": (inner,),
        "lambda_1": (hidden,),
        "lambda_2": (hidden,),
    }


def _delta_tensors(delta: DeltaConfig, hidden: int) -> dict[str, Shape]:
    """Tensors of a gated delta layer in place of attention."""
    return {
        "linear_attn.in_proj_qkv.weight": (delta.num_channels, hidden),
        "linear_attn.in_proj_z.weight": (delta.value_size, hidden),
        "linear_attn.in_proj_b.weight": (delta.num_value_heads, hidden),
        "linear_attn.in_proj_a.weight": (delta.num_value_heads, hidden),
        "linear_attn.conv1d.weight": (delta.num_channels, 1, delta.conv_kernel),
        "linear_attn.A_log": (delta.num_value_heads,),
        "linear_attn.dt_bias": (delta.num_value_heads,),
        "linear_attn.norm.weight": (delta.value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, delta.value_size),
    }


def check_tensors(
    config: ModelConfig, tensors: TensorSource, place: Callable[[str], str], harmless: str = "(?!)"
) -> list[str]:
    """Names of the tensors that `config` calls for; MissingTensor unless each is there in its shape.

    Warns of tensors it does not call for, but for names in which the pattern `harmless` is found. `place(name)` is
    the file and the tensor as a message names them. Reads no tensor.
    """
    expected = expected_tensors(config)
    found = dict.fromkeys(tensors.names())
    for name, shape in expected.items():
        if name not in found:
            why = (
                " (tie_word_embeddings is false, so the model has a head of its own)"
                if name == "lm_head.weight"
                else ""
            )
            raise MissingTensor(f"{place(name)}: expected a tensor of shape {list(shape)}, found none{why}")
        if tensors.shape(name) != shape:
            raise MissingTensor(
                f"{place(name)}: expected shape {list(shape)}, found {list(tensors.shape(name))}; "
                "the configuration and the weights belong to different models"
            )
    extra = [name for name in found if name not in expected and not re.search(harmless, name)]
    if extra:
        listed = ", ".join(extra[:5]) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
        warnings.warn(
            f"{tensors.source}: ignored tensors that a {config.family} model has no use for: {listed}", stacklevel=3
        )
    return list(expected)
