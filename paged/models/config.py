"""The hyperparameters of the Llama-like families and of their hybrids, from a config.json or from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from paged.errors import LoadError

Family = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_5", "dory"]
RopeKind = Literal["none", "linear", "llama3", "yarn", "factors"]

FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5", "dory")

LoopChange = tuple[tuple[int, int] | None, int | None, int | None]  # what ModelConfig.with_loop takes


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
class DeltaConfig:
    """Sizes of the gated delta layers of a hybrid model: each key head serves as many value heads in a row."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    def __post_init__(self) -> None:
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel"):
            _positive_int(name, getattr(self, name))
        if self.num_value_heads % self.num_key_heads:
            raise LoadError(
                f"the value heads of delta layers must be a multiple of their key heads, "
                f"got {self.num_value_heads}:{self.num_key_heads}"
            )

    @property
    def key_size(self) -> int:
        """Values of all key heads, or of all query heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the causal convolution: q, k and v."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True, slots=True)
class SphereConfig:
    """Constants of a model whose hidden states stay on the unit sphere (nGPT, https://arxiv.org/abs/2410.01131).

    initializer_range  value that a learned scale has in a file when it stands for its initial value
    ngpt_alpha_init    initial rate at which a layer moves its input towards what it computed
    sliding_theta      rotary theta of the layers with a window; the others have the model's rope_theta
    """

    initializer_range: float
    ngpt_alpha_init: float
    sliding_theta: float

    def __post_init__(self) -> None:
        for name in ("initializer_range", "ngpt_alpha_init", "sliding_theta"):
            _positive_number(name, getattr(self, name))


MAX_LOOPS = 64  # iterations at most: each has its row in every page table, and a damaged file may claim billions


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Which layers are iterated, and how often.

    layers     (a, b): layers a .. b - 1 are the loop block; those before it run once, those after it once at the end
    num_loops  iterations where a batch gives none
    max_loops  iterations that a batch may ask for, at most 64
    """

    layers: tuple[int, int]
    num_loops: int = 8
    max_loops: int = 32

    def __post_init__(self) -> None:
        layers: object = self.layers
        if not isinstance(layers, tuple) or [type(layer) for layer in layers] != [int, int]:
            raise LoadError(f"loop_layers must be two layer numbers (a, b), got {layers!r}")
        for name in ("num_loops", "max_loops"):
            _positive_int(name, getattr(self, name))
        if self.max_loops > MAX_LOOPS:
            raise LoadError(f"max_loops must be at most {MAX_LOOPS}, got {self.max_loops}")
        if self.num_loops > self.max_loops:
            raise LoadError(f"num_loops must be at most max_loops {self.max_loops}, got {self.num_loops}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that shapes the computation of one model; equal configs mean equal computation graphs.

    attention_bias  q, k and v projections have a bias
    output_bias     the attention's output projection has one
    mlp_bias        gate, up and down projections have one
    qk_norm         q and k are RMS-normalised per head before the rotation (Qwen3)
    sliding_window  tokens a windowed layer sees, the query itself included; 0 = none
    layer_types     "full_attention" or "sliding_attention" a layer; empty = all sliding if sliding_window, else full;
                    in a hybrid "linear_attention" or "full_attention"
    rotary_dim      leading values of a head that the rotary embedding turns; 0 = the whole head
    delta           sizes of the "linear_attention" layers; None = there are none
    loop            the layers that are iterated; None = each layer runs once
    sphere          constants of the family dory; None in every other

    The activation is always SiLU. Two families mean more than these say. qwen3_5: norms whose weights are counted from
    1, and a gate on the output of attention. dory: norms without weights, interpolation where others add, a gate on
    the output of attention, learned scales, and an input that every iteration of the loop block gets again.
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
    rotary_dim: int = 0
    delta: DeltaConfig | None = None
    loop: LoopConfig | None = None
    sphere: SphereConfig | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise LoadError(f"model family must be one of {', '.join(FAMILIES)}, got {self.family!r}")
        for name in (
            "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
            "max_seq_len",
        ):  # fmt: skip
            _positive_int(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta"):
            _positive_number(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise LoadError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads}:{self.num_kv_heads}")
        if self.head_dim % 2:
            raise LoadError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise LoadError(f"rotary_dim must be even and at most head_dim {self.head_dim}, got {self.rotary_dim}")
        if (self.delta is not None) != (self.family == "qwen3_5"):
            raise LoadError(f"delta layers belong to the family qwen3_5, got {self.family} and {self.delta}")
        if isinstance(self.sliding_window, bool) or not isinstance(self.sliding_window, int) or self.sliding_window < 0:
            raise LoadError(f"sliding_window must be an int >= 0, got {self.sliding_window!r}")
        if self.layer_types:
            other = "sliding_attention" if self.delta is None else "linear_attention"
            unknown = set(self.layer_types) - {"full_attention", other}
            if unknown or len(self.layer_types) != self.num_layers:
                raise LoadError(
                    f"layer_types must be {self.num_layers} of full_attention or {other}, "
                    f"got {len(self.layer_types)}" + (f" with {sorted(unknown)}" if unknown else "")
                )
            if "sliding_attention" in self.layer_types and not self.sliding_window:
                raise LoadError("layer_types names a sliding_attention layer but sliding_window is 0")
        if self.delta is not None and len(set(self.layer_types)) != 2:
            raise LoadError("a hybrid needs layers of both kinds in layer_types, linear_attention and full_attention")
        if (self.sphere is not None) != (self.family == "dory"):
            raise LoadError(f"hidden states on a sphere belong to the family dory, got {self.family} and {self.sphere}")
        if self.family == "dory" and self.loop is None:
            raise LoadError("a model of the family dory needs a loop, got none")
        if self.loop is not None:
            if self.delta is not None:
                raise LoadError("the layers of a hybrid cannot loop: a delta layer has one state, not one an iteration")
            start, end = self.loop.layers
            if not 0 <= start < end <= self.num_layers:
                raise LoadError(f"loop_layers must be a run (a, b) of the {self.num_layers} layers, got {(start, end)}")
        _check_scaling(self.rope_scaling, self.rotary_dim or self.head_dim, self.rope_theta)

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Sliding window of each layer in tokens, the query itself included; 0 = full attention."""
        if not self.layer_types:
            return (self.sliding_window,) * self.num_layers
        return tuple(self.sliding_window if kind == "sliding_attention" else 0 for kind in self.layer_types)

    def with_loop(
        self, layers: tuple[int, int] | None = None, num_loops: int | None = None, max_loops: int | None = None
    ) -> ModelConfig:
        """This config with other layers looped, or to another depth; what is None stays, or is what LoopConfig says.

        `max_loops` rises with `num_loops` where only the latter is given. LoadError for layers that cannot loop, and
        for depths of a model that has no looped layers.
        """
        if layers is None and num_loops is None and max_loops is None:
            return self
        if layers is None and self.loop is None:
            raise LoadError(f"this {self.family} model has no looped layers; give loop_layers=(a, b) with the depth")
        known = self.loop or LoopConfig((0, self.num_layers))
        depth = known.num_loops if num_loops is None else num_loops
        if max_loops is None:
            max_loops = max(known.max_loops, depth)
        elif num_loops is None:
            depth = min(depth, max_loops)
        return replace(self, loop=LoopConfig(known.layers if layers is None else layers, depth, max_loops))

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Read a Hugging Face config dict (of transformers 4 or 5); LoadError names the field and `source`.

        A field that the dict leaves out has the default of the family's config class.
        """
        from paged.loaders.configs import config_from_hf

        return config_from_hf(values, source)

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
        from paged.loaders.configs import config_from_gguf

        return config_from_gguf(metadata, shapes or {}, rope_factors, source)


def _positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LoadError(f"{name} must be a positive int, got {value!r}")


def _positive_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise LoadError(f"{name} must be a positive number, got {value!r}")


def _check_scaling(scaling: RopeScaling, rotary_dim: int, theta: float) -> None:
    if scaling.kind == "factors":
        if len(scaling.factors) != rotary_dim // 2 or not all(0 < f < math.inf for f in scaling.factors):
            raise LoadError(f"rope factors must be {rotary_dim // 2} positive numbers, got {len(scaling.factors)}")
    elif scaling.kind not in ("none", "linear", "llama3", "yarn"):
        raise LoadError(f"rope scaling must be one of none, linear, llama3, yarn, factors, got {scaling.kind!r}")
    if scaling.factor <= 0:
        raise LoadError(f"the factor of rope scaling {scaling.kind} must be positive, got {scaling.factor}")
    if scaling.kind in ("llama3", "yarn") and scaling.original_max_seq_len < 1:
        raise LoadError(
            f"rope scaling {scaling.kind} needs the original maximum length, got {scaling.original_max_seq_len}"
        )
    # The ends of a ramp that are one, or none at all, would make frequencies that are not numbers.
    if scaling.kind == "llama3" and not scaling.low_freq_factor < scaling.high_freq_factor:
        raise LoadError(
            "rope scaling llama3 needs a low_freq_factor below its high_freq_factor, "
            f"got {scaling.low_freq_factor} and {scaling.high_freq_factor}"
        )
    if scaling.kind == "yarn" and not (scaling.beta_fast > 0 and scaling.beta_slow > 0 and theta != 1):
        raise LoadError(
            "rope scaling yarn needs a positive beta_fast and beta_slow, and a theta other than 1, "
            f"got {scaling.beta_fast}, {scaling.beta_slow} and {theta}"
        )
