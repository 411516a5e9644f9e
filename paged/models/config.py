"""The hyperparameters of the Llama-like families, from a Hugging Face config.json or from GGUF metadata."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from paged.errors import LoadError

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeKind = Literal["none", "linear", "llama3", "yarn", "factors"]

FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")

# What the Hugging Face config classes assume where config.json leaves a field out.
_HF_DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
}
_HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the rotary frequencies differ from `theta ** (-2i / head_dim)`, i = 0 .. head_dim / 2 - 1.

    none     they do not
    linear   all are divided by `factor`
    llama3   long wavelengths are divided by `factor`, short ones kept, with a smooth ramp between
             `original_max_seq_len / low_freq_factor` and `original_max_seq_len / high_freq_factor`
    yarn     NTK-by-parts (https://arxiv.org/abs/2309.00071): a ramp between the dimensions that turn `beta_fast`
             and `beta_slow` times in `original_max_seq_len`; cos and sin are multiplied by `attention_factor`;
             `truncate` rounds the ends of the ramp to whole dimensions
    factors  frequency i is divided by `factors[i]` (the tensor rope_freqs.weight of a GGUF file)
    """

    kind: RopeKind = "none"
    factor: float = 1.0
    original_max_seq_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that shapes the computation of one model; equal configs mean equal computation graphs.

    attention_bias  q, k and v projections have a bias
    output_bias     the attention's output projection has one
    mlp_bias        gate, up and down projections have one
    qk_norm         q and k are RMS-normalised per head before the rotation (Qwen3)
    sliding_window  tokens a windowed layer sees, the query itself included; 0 = none
    layer_types     "full_attention" or "sliding_attention" a layer; empty = all sliding if sliding_window, else full

    The activation is always SiLU and the rotary embedding always covers the whole head: anything else is refused.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    max_seq_len: int = 2048
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0
    layer_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise LoadError(f"model family must be one of {', '.join(FAMILIES)}, got {self.family!r}")
        for name in (
            "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
            "max_seq_len",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LoadError(f"{name} must be a positive int, got {value!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise LoadError(f"{name} must be a positive number, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise LoadError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads}:{self.num_kv_heads}")
        if self.head_dim % 2:
            raise LoadError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")
        if isinstance(self.sliding_window, bool) or not isinstance(self.sliding_window, int) or self.sliding_window < 0:
            raise LoadError(f"sliding_window must be an int >= 0, got {self.sliding_window!r}")
        if self.layer_types:
            unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
            if unknown or len(self.layer_types) != self.num_layers:
                raise LoadError(
                    f"layer_types must be {self.num_layers} of full_attention or sliding_attention, "
                    f"got {len(self.layer_types)}" + (f" with {sorted(unknown)}" if unknown else "")
                )
            if "sliding_attention" in self.layer_types and not self.sliding_window:
                raise LoadError("layer_types names a sliding_attention layer but sliding_window is 0")
        _check_scaling(self.rope_scaling, self.head_dim)

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Sliding window of each layer in tokens, the query itself included; 0 = full attention."""
        if not self.layer_types:
            return (self.sliding_window,) * self.num_layers
        return tuple(self.sliding_window if kind == "sliding_attention" else 0 for kind in self.layer_types)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Read a Hugging Face config dict (of transformers 4 or 5); LoadError names the field and `source`.

        A field that the dict leaves out has the default of the family's config class.
        """
        if not isinstance(values, Mapping):
            raise LoadError(f"{source}: expected a JSON object of model settings, found {type(values).__name__}")
        family = _hf_family(values, source)
        fields = _Fields({**_HF_DEFAULTS[family], **values}, source)
        fields.refuse_unless("hidden_act", "silu")
        fields.refuse_unless("quantization_config", None)
        fields.refuse_unless("partial_rotary_factor", 1)
        num_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        num_layers = fields.integer("num_hidden_layers")
        max_seq_len = fields.integer("max_position_embeddings")
        theta, scaling, limit = _hf_rope(fields, max_seq_len)
        window, layer_types = _hf_window(fields, family, num_layers)
        bias = bool(fields.get("attention_bias", False)) and family in ("llama", "qwen3")
        return fields.build(
            family=family,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=fields.integer("head_dim", _divide(hidden_size, num_heads, source)),
            intermediate_size=fields.integer("intermediate_size"),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_seq_len=limit,
            tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
            attention_bias=bias or family == "qwen2",
            output_bias=bias,
            mlp_bias=family == "llama" and bool(fields.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            sliding_window=window,
            layer_types=layer_types,
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        rope_factors: tuple[float, ...] = (),
        source: str = "GGUF metadata",
    ) -> ModelConfig:
        """Read GGUF metadata (key -> value); LoadError names the key and `source`.

        What GGUF tells only by the presence of a tensor (tied head, biases, vocabulary size where the key is
        missing) is read from `shapes`, GGUF tensor name -> shape with rows first. `rope_factors` are the values
        of rope_freqs.weight.
        """
        shapes = shapes or {}
        arch = metadata.get("general.architecture")
        if arch not in ("llama", "qwen2", "qwen3"):
            raise LoadError(
                f"{source}: general.architecture must be one of llama, qwen2, qwen3, found {arch!r}; "
                "other architectures are not implemented"
            )
        family = cast(Family, arch)
        fields = _Fields({k.removeprefix(arch + "."): v for k, v in metadata.items()}, source, arch + ".")
        fields.refuse_unless("expert_count", 0)
        num_heads = fields.integer("attention.head_count")
        hidden_size = fields.integer("embedding_length")
        head_dim = fields.integer("attention.key_length", _divide(hidden_size, num_heads, source))
        fields.refuse_unless("attention.value_length", head_dim)
        fields.refuse_unless("rope.dimension_count", head_dim)
        rows = shapes.get("token_embd.weight", (0,))[0]
        tokens = fields.get("tokenizer.ggml.tokens")
        return fields.build(
            family=family,
            vocab_size=rows or fields.integer("vocab_size", len(tokens) if tokens is not None else None),
            hidden_size=hidden_size,
            num_layers=fields.integer("block_count"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            intermediate_size=fields.integer("feed_forward_length"),
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope_theta=fields.number("rope.freq_base", 10000.0),
            rope_scaling=_gguf_rope(fields, rope_factors),
            max_seq_len=fields.integer("context_length"),
            tie_embeddings="output.weight" not in shapes,
            attention_bias="blk.0.attn_q.bias" in shapes or (family == "qwen2"),
            output_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_down.bias" in shapes,
            qk_norm=family == "qwen3",
            sliding_window=fields.integer("attention.sliding_window", 0),
        )


class _Fields:
    """A mapping whose missing or ill-typed entries become LoadErrors that name the file and the field."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def _required(self, name: str, default: Any, kind: str) -> Any:
        value = self.get(name, default)
        if value is None:
            raise LoadError(f"{self.source}: expected {kind} for {self.prefix}{name}, found no such field")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._required(name, default, "an integer")
        if isinstance(value, (list, tuple)) and len(set(value)) == 1:
            value = value[0]  # GGUF may give one number a layer; layers that differ are refused below
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
            raise LoadError(f"{self.source}: expected an integer for {self.prefix}{name}, found {value!r}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._required(name, default, "a number")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise LoadError(f"{self.source}: expected a number for {self.prefix}{name}, found {value!r}")
        return float(value)

    def refuse_unless(self, name: str, supported: Any) -> None:
        """LoadError unless the field is absent, null or equal to the one supported value."""
        value = self.get(name)
        if value is not None and value != supported:
            wanted = "no such field" if supported is None else repr(supported)
            raise LoadError(f"{self.source}: only {wanted} is supported for {self.prefix}{name}, found {value!r}")

    def build(self, **kwargs: Any) -> ModelConfig:
        try:
            return ModelConfig(**kwargs)
        except LoadError as error:
            raise LoadError(f"{self.source}: {error}") from None


def _divide(hidden_size: int, num_heads: int, source: str) -> int | None:
    """The head size where the file gives none; None (= required) if the heads do not divide the hidden size."""
    if num_heads < 1:
        raise LoadError(f"{source}: the number of attention heads must be positive, got {num_heads}")
    return None if hidden_size % num_heads else hidden_size // num_heads


def _check_scaling(scaling: RopeScaling, head_dim: int) -> None:
    if scaling.kind == "factors":
        if len(scaling.factors) != head_dim // 2 or not all(0 < f < math.inf for f in scaling.factors):
            raise LoadError(f"rope factors must be {head_dim // 2} positive numbers, got {len(scaling.factors)}")
    elif scaling.kind not in ("none", "linear", "llama3", "yarn"):
        raise LoadError(f"rope scaling must be one of none, linear, llama3, yarn, factors, got {scaling.kind!r}")
    if scaling.factor <= 0:
        raise LoadError(f"the factor of rope scaling {scaling.kind} must be positive, got {scaling.factor}")
    if scaling.kind in ("llama3", "yarn") and scaling.original_max_seq_len < 1:
        raise LoadError(
            f"rope scaling {scaling.kind} needs the original maximum length, got {scaling.original_max_seq_len}"
        )


def _hf_family(values: Mapping[str, Any], source: str) -> Family:
    model_type = values.get("model_type")
    architectures = values.get("architectures") or []
    if model_type is None and architectures:
        model_type = _HF_ARCHITECTURES.get(architectures[0], architectures[0])
    if model_type not in FAMILIES:
        raise LoadError(
            f"{source}: model_type must be one of {', '.join(FAMILIES)}, found {model_type!r} "
            f"(architectures {architectures!r}); other architectures are not implemented"
        )
    return cast(Family, model_type)


def _hf_window(fields: _Fields, family: Family, num_layers: int) -> tuple[int, tuple[str, ...]]:
    """Window and layer types; null or `use_sliding_window: false` mean full attention everywhere."""
    window = fields.values.get("sliding_window")
    if family == "llama" or window is None:
        return 0, ()
    window = fields.integer("sliding_window")
    if family == "mistral":
        return window, ()
    if not fields.get("use_sliding_window", False):
        return 0, ()
    first = fields.integer("max_window_layers", 28)
    types = fields.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    return window, tuple(types)


def _hf_rope(fields: _Fields, max_seq_len: int) -> tuple[float, RopeScaling, int]:
    """theta, scaling and the number of positions; transformers 5 writes rope_parameters, 4 rope_scaling."""
    raw = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(raw, Mapping):
        raise LoadError(f"{fields.source}: expected an object for rope_parameters, found {raw!r}")
    rope = _Fields(raw, fields.source, "rope_scaling.")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    rope.refuse_unless("partial_rotary_factor", 1)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("default", "none"):
        return theta, RopeScaling(), max_seq_len
    if kind == "dynamic":
        original = rope.integer("original_max_position_embeddings", max_seq_len)
        warnings.warn(
            f"{fields.source}: dynamic rope scaling changes keys that are already cached; "
            f"positions are limited to {original}, where it has no effect",
            stacklevel=4,
        )
        return theta, RopeScaling(), original
    factor = rope.number("factor")
    if kind == "linear":
        return theta, RopeScaling("linear", factor), max_seq_len
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            factor,
            rope.integer("original_max_position_embeddings"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
        return theta, scaling, max_seq_len
    if kind == "yarn":
        original = rope.integer("original_max_position_embeddings", max_seq_len)
        scaling = RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
            truncate=bool(rope.get("truncate", True)),
        )
        return theta, scaling, max(max_seq_len, int(factor * original))
    raise LoadError(
        f"{fields.source}: rope scaling must be one of default, linear, llama3, yarn, dynamic, found {kind!r}"
    )


def _yarn_attention_factor(rope: _Fields, factor: float) -> float:
    """`0.1 ln(factor) + 1` (section 3.4 of the YaRN paper), or the ratio of two such where mscale fields ask for it."""

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dim:
        return scale(float(mscale)) / scale(float(all_dim))
    return scale(1.0)


def _gguf_rope(fields: _Fields, factors: tuple[float, ...]) -> RopeScaling:
    kind = fields.get("rope.scaling.type", "linear")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0))
    if factors:
        if kind not in ("none", "linear") or factor not in (0.0, 1.0):
            raise LoadError(f"{fields.source}: rope_freqs.weight together with rope scaling {kind!r} is not supported")
        return RopeScaling("factors", factors=factors)
    if kind == "none" or factor in (0.0, 1.0):
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "yarn":
        scaling = RopeScaling(
            "yarn",
            factor,
            fields.integer("rope.scaling.original_context_length"),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        )
        base = 0.1 * math.log(factor) + 1.0
        return replace(scaling, attention_factor=base * fields.number("rope.scaling.attn_factor", 1.0))
    raise LoadError(
        f"{fields.source}: {fields.prefix}rope.scaling.type must be one of none, linear, yarn, found {kind!r}"
    )
