"""The looped models of the Dory family: hidden states on the unit sphere (nGPT, https://arxiv.org/abs/2410.01131)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paged.kv.storage import PageStorage
from paged.loaders.checkpoint import expected_tensors
from paged.models.base import ForwardBatch
from paged.models.config import ModelConfig
from paged.models.delta import by_rows
from paged.models.fingerprint import fingerprint_of, tensor_digest
from paged.models.layers import embed, silu_mul, unit_norm
from paged.models.linear import PackedLinear, row_mode
from paged.models.looped import Loops
from paged.models.rotary import Rotary, Rotation
from paged.models.step import Place, Step

TensorOf = Callable[[str], torch.Tensor]  # Hugging Face name -> values


@dataclass(slots=True)
class _Layer:
    """q, k, v and the gate of attention's output are one product, gate and up another. Scales are fp32: of the queries
    `[heads, 1 or head_dim]`, of both gates and of up a value a column, and the rates at which each half of the layer
    moves its input."""

    qkvg: PackedLinear
    query_scale: torch.Tensor
    gate_scale: torch.Tensor
    output: PackedLinear
    gate_up: PackedLinear
    gate_up_scale: torch.Tensor
    down: PackedLinear
    attention_rate: torch.Tensor
    mlp_rate: torch.Tensor


class _DoryStep(Step):
    """Layers with a window rotate by another theta than those without."""

    __slots__ = ("rotate_windowed",)

    def __init__(
        self, model: DoryModel, batch: ForwardBatch, storage: PageStorage, seqs: npt.NDArray[np.bool_] | None
    ) -> None:
        super().__init__(model, batch, storage, seqs)
        heads = model.config.num_heads + model.config.num_kv_heads
        self.rotate_windowed = Rotation(model.rotary_windowed, self.plan(0).positions, heads)


class DoryModel(Loops):
    """A looped model whose hidden states have length 1 where a layer reads them. Every half of a layer moves its input
    some way towards what it computed from it, and every iteration of the loop block begins with the direction of the
    last one's result plus that of what entered the first.

    Promises are those of LlamaModel: on the CPU in fp32 the bits of a row depend on its own sequence and depth alone.
    A residual holds the result of an iteration and, beside it, what entered the first: `residual_size` is twice
    `hidden_size`.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: TensorOf,
        *,
        max_seq_len: int | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`tensors(name)` gives each tensor of `expected_tensors(config)`; they are read once, one after another.

        `max_seq_len` lowers the limit of the config and cannot raise it. ValueError for a config of another family.
        """
        if max_seq_len is not None and max_seq_len < 1:
            raise ValueError(f"max_seq_len must be at least 1, got {max_seq_len}")
        if config.sphere is None:
            raise ValueError(f"a DoryModel needs a config of the family dory, got one of {config.family}")
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self.media_size = config.hidden_size
        self.max_seq_len = min(config.max_seq_len, max_seq_len or config.max_seq_len)
        self.name = config.family
        self._places, self.spec = self._page_groups(config)
        self.residual_size = 2 * config.hidden_size
        self._sphere = config.sphere
        self.rotary, self.rotary_windowed = (
            Rotary(config.head_dim, theta, config.rope_scaling, self.max_seq_len, self.device)
            for theta in (config.rope_theta, config.sphere.sliding_theta)
        )
        digests: dict[str, bytes] = {}

        def read(name: str) -> torch.Tensor:
            values = tensors(name).detach().to(dtype)
            digests[name] = tensor_digest(values)
            return values.to(self.device)

        with torch.inference_mode():
            self._embed = read("model.embed_tokens.weight")
            self._layers = [self._build_layer(f"model.layers.{index}.", read) for index in range(config.num_layers)]
            self._head = PackedLinear(self._embed if config.tie_embeddings else read("lm_head.weight"))
            self._logit_scale = read("lm_head.logit_scale").float() * (1.0 / config.sphere.initializer_range)
        self.fingerprint = fingerprint_of(config, digests)

    # Computing ------------------------------------------------------------------------------------------------

    def _step(self, batch: ForwardBatch, storage: PageStorage, seqs: npt.NDArray[np.bool_] | None = None) -> _DoryStep:
        return _DoryStep(self, batch, storage, seqs)

    def _embedded(self, batch: ForwardBatch) -> torch.Tensor:
        return embed(batch, self._embed)

    def _carried(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x, unit_norm(x, torch.empty_like(x))]

    def _enter(self, carried: list[torch.Tensor]) -> None:
        x, entered = carried
        x.copy_(unit_norm(x, torch.empty_like(x))).add_(entered)

    def _run(self, layer: _Layer, place: Place, x: torch.Tensor, step: _DoryStep) -> None:
        for part, rate in ((self._attention, layer.attention_rate), (self._mlp, layer.mlp_rate)):
            x.copy_(unit_norm(x, step.normed))
            moved = part(layer, place, x.to(self.dtype), step).float()
            x.add_(unit_norm(moved, step.normed).sub_(x).mul_(rate))

    def _attention(self, layer: _Layer, place: Place, normed: torch.Tensor, step: _DoryStep) -> torch.Tensor:
        """Attention with unit queries and keys and a gated output of length 1, `[T, hidden_size]`; K and V rows are
        appended."""
        config, rows = self.config, len(normed)
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        product = layer.qkvg(normed).float()
        gate = product[:, (heads + 2 * kv_heads) * dim :]
        qk, v, _ = product.view(rows, -1, dim).split((heads + kv_heads, kv_heads, heads), 1)
        rotate = step.rotate_windowed if place.window else step.rotate
        q, k = rotate(unit_norm(qk, torch.empty(qk.shape, device=self.device))).split((heads, kv_heads), 1)
        step.backend.append(step.storage, place.index, k, v, step.plan(place.group))
        mixed = step.attend((q * layer.query_scale).to(self.dtype), place, dim**-0.5)
        mixed = mixed.reshape(rows, heads * dim).float() * by_rows(torch.sigmoid, gate * layer.gate_scale)
        return layer.output(unit_norm(mixed, torch.empty_like(mixed)).to(self.dtype))

    def _mlp(self, layer: _Layer, place: Place, normed: torch.Tensor, step: _DoryStep) -> torch.Tensor:
        """SwiGLU with scaled gate and up, and an output of length 1, `[T, hidden_size]`."""
        gate_up = layer.gate_up(normed).float() * layer.gate_up_scale
        act = torch.empty(len(normed), self.config.intermediate_size, device=self.device)
        silu_mul(gate_up, act)
        return layer.down(unit_norm(act, torch.empty_like(act)).to(self.dtype))

    def _logits(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        x = batch.wanted(x)
        return self._head(unit_norm(x, torch.empty_like(x)).to(self.dtype)).float() * self._logit_scale

    # Weights --------------------------------------------------------------------------------------------------

    def _build_layer(self, prefix: str, read: TensorOf) -> _Layer:
        config, sphere = self.config, self._sphere
        heads, dim = config.num_heads, config.head_dim

        def linear(names: tuple[str, ...], biased: tuple[str, ...]) -> PackedLinear:
            """One product; those of its parts that are not `biased` have a bias of 0."""
            weights = [read(f"{prefix}{name}.weight") for name in names]
            biases = [
                read(f"{prefix}{name}.bias") if name in biased else torch.zeros(len(weight), device=self.device)
                for name, weight in zip(names, weights, strict=True)
            ]
            return PackedLinear(torch.cat(weights), torch.cat(biases).to(self.dtype) if biased else None)

        def scale(name: str, factor: float) -> torch.Tensor:
            return read(prefix + name).float() * factor

        qkv = tuple(f"self_attn.{name}_proj" for name in "qkv")
        gate_up = ("mlp.gate_proj", "mlp.up_proj")
        return _Layer(
            qkvg=linear((*qkv, "self_attn.gate_proj"), qkv if config.attention_bias else ()),
            query_scale=scale("self_attn.sqk", dim**0.5 / sphere.initializer_range).square().view(heads, dim),
            gate_scale=scale("self_attn.s_gate", config.hidden_size**0.25 / sphere.initializer_range).square(),
            output=linear(("self_attn.o_proj",), ("self_attn.o_proj",) if config.output_bias else ()),
            gate_up=linear(gate_up, gate_up if config.mlp_bias else ()),
            gate_up_scale=torch.cat([scale(f"mlp.suv_{name}", config.hidden_size**0.5) for name in ("gate", "up")]),
            down=linear(("mlp.down_proj",), ("mlp.down_proj",) if config.mlp_bias else ()),
            attention_rate=scale("lambda_1", sphere.ngpt_alpha_init / sphere.initializer_range).abs(),
            mlp_rate=scale("lambda_2", sphere.ngpt_alpha_init / sphere.initializer_range).abs(),
        )

    def extra_info(self) -> dict[str, Any]:
        """Family, size, which layers loop and how often, dtype, and how matrix products keep their rows apart."""
        return {
            "family": self.config.family,
            "num_layers": self.config.num_layers,
            "num_parameters": sum(prod(shape) for shape in expected_tensors(self.config).values()),
            "loop_layers": self.loop_layers,
            "default_loops": self.default_loops,
            "max_loops": self.max_loops,
            "dtype": str(self.dtype).removeprefix("torch."),
            "row_mode": row_mode() if self.device.type == "cpu" and self.dtype == torch.float32 else "plain",
        }
