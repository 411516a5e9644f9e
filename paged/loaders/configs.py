"""The two notations of model settings, config.json and GGUF metadata, read into a ModelConfig.

Keys of GGUF metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from paged.errors import LoadError
from paged.models.config import FAMILIES, DeltaConfig, Family, LoopConfig, ModelConfig, RopeScaling, SphereConfig

_T = TypeVar("_T")

# What the Hugging Face config classes assume where config.json leaves a field out.
_HF_DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
    "qwen3_5": {
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25,
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "dory": {
        "num_key_value_heads": 4, "max_position_embeddings": 8192, "head_dim": 256, "sliding_window": 1024,
        "initializer_range": 0.0177, "ngpt_alpha_init": 0.05, "n_input_layers": 8, "n_output_layers": 8,
        "n_recurrent_loops": 2, "full_attention_interval": 4,
    },
}  # fmt: skip
_LARGEST = sys.float_info.max  # JSON may hold an int that no float can
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")
_GGUF_YARN_PLAIN = {"yarn_ext_factor": 1, "yarn_attn_factor": 1, "yarn_log_multiplier": 0}  # the only ones computed
_LOOPED = "looped"  # a model_type of our own: a Llama with loop_layers, which the other families may have as well
_HF_OUTER = ("tie_word_embeddings", "quantization_config")  # what stands beside a nested text_config
_HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "DoryForCausalLM": "dory",
}


def config_from_hf(values: Mapping[str, Any], source: str) -> ModelConfig:
    """Read a Hugging Face config dict; see ModelConfig.from_hf."""
    if not isinstance(values, Mapping):
        raise LoadError(f"{source}: expected a JSON object of model settings, found {type(values).__name__}")
    family = _hf_family(values, source)
    if family == "qwen3_5" and isinstance(text := values.get("text_config"), Mapping):
        values = {**text, **{key: values[key] for key in _HF_OUTER if key in values}}
    if family == "dory":
        values = _dory_layers(values)
    fields = _Fields({**_HF_DEFAULTS[family], **values}, source)
    fields.refuse_unless("hidden_act", "silu")
    fields.refuse_unless("quantization_config", None)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    num_layers = _num_layers(fields, "num_hidden_layers")
    max_seq_len = fields.integer("max_position_embeddings")
    sphere, loop = (_dory_sphere(fields), _dory_loop(fields, num_layers)) if family == "dory" else (None, None)
    turned = fields if sphere is None else _dory_rope(fields, _FULL, 1e7)
    theta, scaling, limit = _hf_rope(turned, max_seq_len)
    head_dim = fields.integer("head_dim", _divide(hidden_size, num_heads, source))
    if family == "qwen3_5":
        window, layer_types = 0, _hf_every_nth(fields, num_layers, "linear_attention")
    elif family == "dory":
        window, layer_types = fields.integer("sliding_window"), _hf_every_nth(fields, num_layers, "sliding_attention")
    else:
        window, layer_types = _hf_window(fields, family, num_layers)
    bias = bool(fields.get("attention_bias", False)) and family in ("llama", "qwen3", "qwen3_5", "dory")
    config = fields.make(
        ModelConfig,
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_seq_len=limit,
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        attention_bias=bias or family == "qwen2",
        output_bias=bias,
        mlp_bias=family in ("llama", "dory") and bool(fields.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_5"),
        sliding_window=window,
        layer_types=layer_types,
        rotary_dim=_hf_rotary_dim(turned, family, head_dim),
        delta=_hf_delta(fields) if family == "qwen3_5" else None,
        loop=loop,
        sphere=sphere,
    )
    return _hf_loop(fields, config)


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: tuple[float, ...], source: str
) -> ModelConfig:
    """Read GGUF metadata; see ModelConfig.from_gguf."""
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
    scaling = _gguf_rope(fields, rope_factors)
    max_seq_len = fields.integer("context_length")
    if scaling.kind == "yarn":
        max_seq_len = max(max_seq_len, _stretched(fields, scaling))
    return fields.make(
        ModelConfig,
        family=family,
        vocab_size=rows or fields.integer("vocab_size", len(tokens) if tokens is not None else None),
        hidden_size=hidden_size,
        num_layers=_num_layers(fields, "block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        max_seq_len=max_seq_len,
        tie_embeddings="output.weight" not in shapes,
        attention_bias=family == "qwen2" or "blk.0.attn_q.bias" in shapes,
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
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # GGUF may give one number a layer; layers that differ are refused below
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1 or not abs(value) < 2**63:
            raise LoadError(f"{self.source}: expected an integer for {self.prefix}{name}, found {_short(value)}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._required(name, default, "a number")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
            raise LoadError(f"{self.source}: expected a number for {self.prefix}{name}, found {_short(value)}")
        return float(value)

    def refuse_unless(self, name: str, supported: Any) -> None:
        """LoadError unless the field is absent, null or equal to the one supported value."""
        value = self.get(name)
        if value is not None and value != supported:
            wanted = "no such field" if supported is None else repr(supported)
            raise LoadError(f"{self.source}: only {wanted} is supported for {self.prefix}{name}, found {_short(value)}")

    def make(self, kind: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """`kind(...)`, whose errors then name the file."""
        try:
            return kind(*args, **kwargs)
        except LoadError as error:
            raise LoadError(f"{self.source}: {error}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _num_layers(fields: _Fields, name: str) -> int:
    """A number of layers that lists of one entry a layer can be made of; a damaged file may claim billions."""
    num_layers = fields.integer(name)
    if num_layers > 10_000:
        raise LoadError(f"{fields.source}: expected at most 10000 layers in {fields.prefix}{name}, found {num_layers}")
    return num_layers


def _divide(hidden_size: int, num_heads: int, source: str) -> int | None:
    """The head size where the file gives none; None (= required) if the heads do not divide the hidden size."""
    if num_heads < 1:
        raise LoadError(f"{source}: the number of attention heads must be positive, got {num_heads}")
    return None if hidden_size % num_heads else hidden_size // num_heads


def _hf_family(values: Mapping[str, Any], source: str) -> Family:
    model_type = values.get("model_type")
    architectures = values.get("architectures")
    if model_type is None and isinstance(architectures, list) and architectures:
        model_type = _HF_ARCHITECTURES.get(str(architectures[0]))
    model_type = {"qwen3_5_text": "qwen3_5", _LOOPED: "llama"}.get(str(model_type), model_type)
    if model_type not in FAMILIES:
        raise LoadError(
            f"{source}: model_type must be one of {', '.join(FAMILIES)}, {_LOOPED}, found {model_type!r} "
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
    types = fields.get("layer_types")
    if types is None:
        types = [_SLIDING if layer >= first else _FULL for layer in range(num_layers)]
    return window, _layer_types(fields, types)


def _hf_every_nth(fields: _Fields, num_layers: int, other: str) -> tuple[str, ...]:
    """Layer types; without a list of them every `full_attention_interval`-th is attention, and the rest is `other`."""
    types, interval = fields.get("layer_types"), fields.integer("full_attention_interval")
    if types is None and interval > 0:
        types = [other if (layer + 1) % interval else _FULL for layer in range(num_layers)]
    return _layer_types(fields, types)


def _layer_types(fields: _Fields, types: Any) -> tuple[str, ...]:
    if not isinstance(types, list):
        raise LoadError(f"{fields.source}: expected a list for layer_types, found {_short(types)}")
    return tuple(str(kind) for kind in types)


def _hf_delta(fields: _Fields) -> DeltaConfig:
    """Sizes of the layers that Hugging Face calls linear attention."""
    return fields.make(
        DeltaConfig,
        num_key_heads=fields.integer("linear_num_key_heads"),
        num_value_heads=fields.integer("linear_num_value_heads"),
        key_head_dim=fields.integer("linear_key_head_dim"),
        value_head_dim=fields.integer("linear_value_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim"),
    )


def _hf_loop(fields: _Fields, config: ModelConfig) -> ModelConfig:
    """The config with our own fields loop_layers [a, b], num_loops and max_loops; see LoopConfig."""
    layers = fields.get("loop_layers")
    if layers is None and fields.get("model_type") != _LOOPED:
        return config
    if not isinstance(layers, list):
        raise LoadError(f"{fields.source}: expected a list [a, b] for loop_layers, found {_short(layers)}")
    depths = [fields.integer(name) if fields.get(name) is not None else None for name in ("num_loops", "max_loops")]
    return fields.make(config.with_loop, tuple(layers), *depths)


def _dory_layers(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that count a layer once: files count its attention and its mlp as two."""
    types = values.get("layer_types")
    if not isinstance(types, list) or "mlp" not in types:
        return values
    counts = ("num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers")
    halved = {name: values[name] // 2 for name in counts if isinstance(values.get(name), int)}
    return {**values, **halved, "layer_types": types[::2]}


def _dory_loop(fields: _Fields, num_layers: int) -> LoopConfig:
    """The layers called recurrent; every iteration must have K and V of its own."""
    fields.refuse_unless("recurrent_kv_cache_mode", "per_loop")
    start, after = fields.integer("n_input_layers"), fields.integer("n_output_layers")
    end = num_layers - after
    if fields.integer("n_recurrent_layers", end - start) != end - start:
        raise LoadError(
            f"{fields.source}: n_input_layers, n_recurrent_layers and n_output_layers must add up to {num_layers} "
            f"layers, found {start}, {fields.get('n_recurrent_layers')} and {after}"
        )
    loops = fields.integer("n_recurrent_loops")
    return fields.make(LoopConfig, (start, end), loops, max(loops, 32))


def _dory_rope(fields: _Fields, kind: str, theta: float) -> _Fields:
    """The settings with the rotary embedding of one kind of layers alone; unscaled, as it is in every such model."""
    raw = fields.get("rope_parameters", {})
    rope = raw.get(kind, {}) if isinstance(raw, Mapping) and "rope_theta" not in raw else None
    if not isinstance(rope, Mapping):
        raise LoadError(f"{fields.source}: expected rope_parameters of each kind of layers, found {_short(raw)}")
    _Fields(rope, fields.source, f"rope_parameters.{kind}.").refuse_unless("rope_type", "default")
    rope = {"rope_theta": theta, **rope}
    return _Fields({**fields.values, "rope_parameters": rope, "rope_scaling": None}, fields.source)


def _dory_sphere(fields: _Fields) -> SphereConfig:
    sliding, _, _ = _hf_rope(_dory_rope(fields, _SLIDING, 1e4), 1)
    return fields.make(SphereConfig, fields.number("initializer_range"), fields.number("ngpt_alpha_init"), sliding)


def _hf_rotary_dim(fields: _Fields, family: Family, head_dim: int) -> int:
    """Leading values of a head that are rotated, 0 for all: only the hybrids may rotate a part."""
    rope = _rope_fields(fields)
    if family == "qwen3_5":
        return int(head_dim * rope.number("partial_rotary_factor", fields.number("partial_rotary_factor")))
    fields.refuse_unless("partial_rotary_factor", 1)
    rope.refuse_unless("partial_rotary_factor", 1)
    return 0


def _hf_rope(fields: _Fields, max_seq_len: int) -> tuple[float, RopeScaling, int]:
    """theta, scaling and the number of positions."""
    rope = _rope_fields(fields)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("default", "none"):
        return theta, RopeScaling(), max_seq_len
    if kind not in _ROPE_TYPES:
        raise LoadError(f"{fields.source}: rope scaling must be one of {', '.join(_ROPE_TYPES)}, found {_short(kind)}")
    if kind == "dynamic":
        original = rope.integer("original_max_position_embeddings", max_seq_len)
        warnings.warn(
            f"{fields.source}: dynamic rope scaling changes keys that are already cached; "
            f"positions are limited to {original}, where it has no effect",
            stacklevel=4,
        )
        return theta, RopeScaling(), original
    factor = rope.number("factor")
    if factor <= 0:
        raise LoadError(f"{fields.source}: expected a positive number for rope_scaling.factor, found {factor}")
    if kind == "linear":
        return theta, RopeScaling("linear", factor), max_seq_len
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            factor,
            _original_length(fields, rope),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
        return theta, scaling, max_seq_len
    scaling = RopeScaling(
        "yarn",
        factor,
        _original_length(fields, rope, max_seq_len),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
        truncate=bool(rope.get("truncate", True)),
    )
    return theta, scaling, max(max_seq_len, _stretched(fields, scaling))


def _rope_fields(fields: _Fields) -> _Fields:
    """The settings of the rotary embedding: transformers 5 writes them as rope_parameters, 4 as rope_scaling.

    Of both, rope_scaling counts, as it does in transformers: it is what people add to a file to stretch its context.
    """
    scaling, parameters = fields.get("rope_scaling"), fields.get("rope_parameters")
    raw = scaling or parameters or {}
    if not isinstance(raw, Mapping):
        raise LoadError(f"{fields.source}: expected an object for rope_parameters, found {_short(raw)}")
    nested = [name for name, value in raw.items() if isinstance(value, Mapping)]
    if nested:
        raise LoadError(
            f"{fields.source}: only one rotary embedding for all layers is supported in rope_parameters, "
            f"found one for {_short(nested[0])}"
        )
    if scaling and isinstance(parameters, Mapping) and "rope_theta" not in {**fields.values, **raw}:
        theta = parameters.get("rope_theta", 10000.0)
        if theta != 10000.0:  # transformers goes back to its default here, and nobody means that
            raise LoadError(
                f"{fields.source}: rope_scaling replaces rope_parameters and so its rope_theta, {_short(theta)}; "
                "expected a rope_theta in rope_scaling as well, or all of these settings in rope_parameters"
            )
    return _Fields(raw, fields.source, "rope_scaling.")


def _original_length(fields: _Fields, rope: _Fields, default: int | None = None) -> int:
    """Positions before any scaling; transformers prefers the number that stands outside of the rope settings."""
    name = "original_max_position_embeddings"
    return fields.integer(name) if fields.get(name) is not None else rope.integer(name, default)


def _stretched(fields: _Fields, scaling: RopeScaling) -> int:
    """The positions that yarn makes of the original ones."""
    length = scaling.factor * scaling.original_max_seq_len
    if not length < 2**63:
        raise LoadError(
            f"{fields.source}: expected rope scaling to a length below 2**63, found a factor of {scaling.factor}"
        )
    return int(length)


def _yarn_attention_factor(rope: _Fields, factor: float) -> float:
    """`0.1 ln(factor) + 1` (section 3.4 of the YaRN paper), or the ratio of two such where mscale fields ask for it."""

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)


def _gguf_rope(fields: _Fields, factors: tuple[float, ...]) -> RopeScaling:
    kind = fields.get("rope.scaling.type", "linear")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0))
    if factor < 0:
        raise LoadError(
            f"{fields.source}: expected a number >= 0 for {fields.prefix}rope.scaling.factor, found {factor}"
        )
    if factors:
        if kind not in ("none", "linear") or factor not in (0.0, 1.0):
            raise LoadError(f"{fields.source}: rope_freqs.weight together with rope scaling {kind!r} is not supported")
        return RopeScaling("factors", factors=factors)
    if kind == "none" or factor in (0.0, 1.0):
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "yarn":
        for name, plain in _GGUF_YARN_PLAIN.items():
            fields.refuse_unless(f"rope.scaling.{name}", plain)
        return RopeScaling(
            "yarn",
            factor,
            fields.integer("rope.scaling.original_context_length"),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=(0.1 * math.log(factor) + 1.0) * fields.number("rope.scaling.attn_factor", 1.0),
        )
    raise LoadError(
        f"{fields.source}: {fields.prefix}rope.scaling.type must be one of none, linear, yarn, found {kind!r}"
    )
