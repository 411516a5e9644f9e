"""The Llama-like models: Llama, Mistral, Qwen2, Qwen3 and what shares their layout (SmolLM2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paged.errors import MissingTensor
from paged.kv.storage import PageStorage
from paged.loaders.checkpoint import expected_tensors
from paged.models.base import ForwardBatch, LanguageModel
from paged.models.config import ModelConfig
from paged.models.fingerprint import fingerprint_of, tensor_digest
from paged.models.layers import RMSNorm, embed, silu_mul
from paged.models.linear import PackedLinear, row_mode
from paged.models.rotary import Rotary
from paged.models.step import Place, Step
from paged.models.store_h import Projection, keep
from paged.spec import KVSpec

TensorOf = Callable[[str], torch.Tensor]  # Hugging Face name -> values


@dataclass(slots=True)
class Layer:
    """Weights of one layer; q, k and v are one product, gate and up another."""

    input_norm: RMSNorm
    qkv: PackedLinear
    qk_norm: RMSNorm | None
    output: PackedLinear
    post_norm: RMSNorm
    gate_up: PackedLinear
    down: PackedLinear


class LlamaModel(LanguageModel):
    """A decoder of RMSNorm, rotary attention with grouped heads, and SwiGLU, over paged K and V.

    On the CPU in fp32 the logits of a row have the same bits whatever else is in the batch, however its prompt was
    cut into chunks, and wherever its pages lie (given a backend whose rows have that property). Layers with equal
    windows share one page group. The sum of layer outputs is kept in fp32 whatever `dtype` the weights have.

    `forward` keeps no state: threads may call it at once, on different pages.
    """

    windows_cache = True

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

        `max_seq_len` lowers the limit of the config and cannot raise it.
        """
        if max_seq_len is not None and max_seq_len < 1:
            raise ValueError(f"max_seq_len must be at least 1, got {max_seq_len}")
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self.media_size = config.hidden_size
        self.max_seq_len = min(config.max_seq_len, max_seq_len or config.max_seq_len)
        self.name = config.family
        self._places, self.spec = self._page_groups(config)
        self.input_size = config.hidden_size
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling, self.max_seq_len, self.device)
        self._scale = config.head_dim**-0.5
        self._digests: dict[str, bytes] = {}
        read = self._digesting(tensors)
        with torch.inference_mode():
            self._embed = read("model.embed_tokens.weight")
            self._layers = [self._build_layer(index, read) for index in range(config.num_layers)]
            self._final_norm = RMSNorm(read("model.norm.weight"), config.rms_norm_eps)
            self._head = PackedLinear(self._embed if config.tie_embeddings else read("lm_head.weight"))
        self.fingerprint = fingerprint_of(config, self._digests)

    # Computing ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, storage: PageStorage) -> torch.Tensor:
        """Append K and V of the batch's rows to their pages and return fp32 logits `[R, vocab_size]`, new memory."""
        step, x = Step(self, batch, storage), self._embedded(batch)
        for layer, place in zip(self._layers, self._places, strict=True):
            self._run(layer, place, x, step)
        return self._logits(x, batch)

    def _embedded(self, batch: ForwardBatch) -> torch.Tensor:
        return embed(batch, self._embed)

    def _run(self, layer: Layer, place: Place, x: torch.Tensor, step: Step) -> None:
        """Add what one layer contributes to x, `[T, hidden_size]`; its K and V rows are appended."""
        x += self._attention(layer, place, x, step)
        normed = layer.post_norm(x, step.normed).to(self.dtype)
        x += layer.down(silu_mul(layer.gate_up(normed), step.act))

    def _logits(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Final norm and head of the wanted rows, fp32 `[R, vocab_size]`; x stays as it is."""
        x = batch.wanted(x)
        normed = self._final_norm(x, torch.empty_like(x)).to(self.dtype)
        return self._head(normed).float()

    def _attention(self, layer: Layer, place: Place, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The attention block's contribution to x, `[T, hidden_size]`; its K and V rows are appended."""
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        normed = layer.input_norm(x, step.normed).to(self.dtype)
        qkv = layer.qkv(normed).view(len(x), heads + 2 * kv_heads, dim)
        qk, v = qkv.split((heads + kv_heads, kv_heads), 1)
        if layer.qk_norm is not None:
            qk = layer.qk_norm(qk.float(), torch.empty(qk.shape, device=self.device))
        q, k = step.rotate(qk.float()).split((heads, kv_heads), 1)
        if step.storage.keeps_input:
            mixed = self._attend_inputs(layer, place, normed, q.to(self.dtype), step)
        else:
            step.backend.append(step.storage, place.index, k, v.float(), step.plan(place.group))
            mixed = step.attend(q.to(self.dtype), place, self._scale)
        return layer.output(mixed.view(len(x), heads * dim))

    def _attend_inputs(
        self, layer: Layer, place: Place, normed: torch.Tensor, q: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """Attention over pages that hold the block's input."""
        keep(step, place, normed)
        if place.group not in step.projections:
            step.projections[place.group] = Projection(self, step, place.group)
        return step.projections[place.group].attend(layer, place, q, self._scale)

    def _page_groups(self, config: ModelConfig) -> tuple[list[Place], KVSpec]:
        """One page group for each distinct window, in order of first use; a page has room for the largest group."""
        if config.loop is not None:
            raise ValueError(f"layers {config.loop.layers} of this config loop: it is a config for LoopedModel")
        windows: list[int] = []
        counts: list[int] = []
        places = []
        for window in config.layer_windows:
            if window not in windows:
                windows.append(window)
                counts.append(0)
            group = windows.index(window)
            places.append(Place(group, counts[group], window))
            counts[group] += 1
        spec = KVSpec(max(counts), config.num_kv_heads, config.head_dim, len(windows), tuple(windows))
        return places, spec

    # Weights --------------------------------------------------------------------------------------------------

    def tensor(self, name: str) -> torch.Tensor:
        """The present values of one weight by its Hugging Face name, `[out_features, in_features]` or `[n]`.

        A copy where the weight is packed. KeyError for a name that the model does not have.
        """
        prefix, _, kind = name.rpartition(".")
        if name not in self._digests:
            raise KeyError(name)
        if prefix == "model.embed_tokens":
            return self._embed
        if prefix == "lm_head":
            return self._head.dense()
        if prefix == "model.norm":
            return self._final_norm.weight
        _, _, index, *path = prefix.split(".")
        part = path[-1]
        layer = self._layers[int(index)]
        heads = self.config.num_heads
        if part in ("q_norm", "k_norm") and layer.qk_norm is not None:
            return layer.qk_norm.weight[0 if part == "q_norm" else heads]
        if part in ("input_layernorm", "post_attention_layernorm"):
            return (layer.input_norm if part == "input_layernorm" else layer.post_norm).weight
        fused, start, size = self._fused_rows(layer)[part]
        values = fused.dense() if kind == "weight" else fused.bias
        assert values is not None
        return values[start : start + size]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight as (Hugging Face name, values), one at a time."""
        for name in self._digests:
            yield name, self.tensor(name)

    @torch.inference_mode()
    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the named weights and the fingerprint. Cost: the layers named are packed again.

        No forward may run meanwhile. Rows that the old weights computed are wrong from now on: a new Session refuses a
        pool made before (GeometryMismatch), and an Engine has to be told by `Engine.reset_prefix_cache`, or it attaches
        them. MissingTensor for a name the model does not have or another shape; then nothing was changed.
        """
        expected = expected_tensors(self.config)
        for name, values in tensors.items():
            if name not in expected:
                raise MissingTensor(f"update_weights: expected names of this model's tensors, found {name!r}")
            if tuple(values.shape) != expected[name]:
                raise MissingTensor(
                    f"update_weights: {name} must have shape {list(expected[name])}, found {list(values.shape)}"
                )

        def read(name: str) -> torch.Tensor:
            return tensors[name] if name in tensors else self.tensor(name)

        config, digesting = self.config, self._digesting(read)
        for index in sorted({int(n.split(".")[2]) for n in tensors if n.startswith("model.layers.")}):
            self._layers[index] = self._build_layer(index, digesting)
        if "model.embed_tokens.weight" in tensors:
            self._embed = digesting("model.embed_tokens.weight").clone()
            if config.tie_embeddings:
                self._head = PackedLinear(self._embed)
        if "model.norm.weight" in tensors:
            self._final_norm = RMSNorm(digesting("model.norm.weight").clone(), config.rms_norm_eps)
        if "lm_head.weight" in tensors:
            self._head = PackedLinear(digesting("lm_head.weight").clone())
        self.fingerprint = fingerprint_of(config, self._digests)

    def refresh_fingerprint(self) -> str:
        """Hash the weights again, after they were changed in some other way than `update_weights`; returns the new
        fingerprint. Cost: one copy of every weight, about 0.5 s a billion."""
        self._digests = {name: tensor_digest(values) for name, values in self.named_tensors()}
        self.fingerprint = fingerprint_of(self.config, self._digests)
        return self.fingerprint

    def _digesting(self, tensors: TensorOf) -> TensorOf:
        """`tensors`, in the model's dtype and on its device, with a note of each one's digest."""

        def read(name: str) -> torch.Tensor:
            values = tensors(name).detach().to(self.dtype)
            self._digests[name] = tensor_digest(values)
            return values.to(self.device)

        return read

    def _build_layer(self, index: int, read: TensorOf) -> Layer:
        config, prefix = self.config, f"model.layers.{index}."

        def linear(names: tuple[str, ...], with_bias: bool) -> PackedLinear:
            weight = torch.cat([read(f"{prefix}{name}.weight") for name in names])
            bias = torch.cat([read(f"{prefix}{name}.bias") for name in names]) if with_bias else None
            return PackedLinear(weight, bias)

        qk_norm = None
        if config.qk_norm:
            q_norm, k_norm = (read(f"{prefix}self_attn.{name}_norm.weight") for name in "qk")
            each = [q_norm] * config.num_heads + [k_norm] * config.num_kv_heads
            qk_norm = RMSNorm(torch.stack(each), config.rms_norm_eps)
        return Layer(
            input_norm=RMSNorm(read(prefix + "input_layernorm.weight").clone(), config.rms_norm_eps),
            qkv=linear(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.attention_bias),
            qk_norm=qk_norm,
            output=linear(("self_attn.o_proj",), config.output_bias),
            post_norm=RMSNorm(read(prefix + "post_attention_layernorm.weight").clone(), config.rms_norm_eps),
            gate_up=linear(("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
            down=linear(("mlp.down_proj",), config.mlp_bias),
        )

    def _fused_rows(self, layer: Layer) -> dict[str, tuple[PackedLinear, int, int]]:
        """For each projection: the product that holds it, its first row there, its number of rows."""
        config = self.config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        return {
            "q_proj": (layer.qkv, 0, q),
            "k_proj": (layer.qkv, q, kv),
            "v_proj": (layer.qkv, q + kv, kv),
            "o_proj": (layer.output, 0, config.hidden_size),
            "gate_proj": (layer.gate_up, 0, inner),
            "up_proj": (layer.gate_up, inner, inner),
            "down_proj": (layer.down, 0, config.hidden_size),
        }

    def extra_info(self) -> dict[str, Any]:
        """Family, size, dtype, and how matrix products keep their rows apart."""
        config = self.config
        return {
            "family": config.family,
            "num_layers": config.num_layers,
            "num_parameters": int(sum(np.prod(shape) for shape in expected_tensors(config).values())),
            "dtype": str(self.dtype).removeprefix("torch."),
            "row_mode": row_mode() if self.device.type == "cpu" and self.dtype == torch.float32 else "plain",
        }
