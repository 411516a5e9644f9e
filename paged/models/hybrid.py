"""The hybrids of the Qwen3.5 family: gated delta layers, and full attention every few layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from paged.errors import GeometryMismatch
from paged.kv.storage import PageStorage
from paged.loaders.checkpoint import expected_tensors
from paged.models.base import ForwardBatch, LanguageModel
from paged.models.config import ModelConfig
from paged.models.delta import DeltaStep, GatedDelta, by_rows, delta_state_spec
from paged.models.fingerprint import fingerprint_of, tensor_digest
from paged.models.layers import RMSNorm, embed, silu_mul
from paged.models.linear import PackedLinear, row_mode
from paged.models.rotary import Rotary
from paged.models.step import Place, Step
from paged.spec import KVSpec, StateSpec

TensorOf = Callable[[str], torch.Tensor]  # Hugging Face name -> values


@dataclass(slots=True)
class _Attention:
    """`index` counts the attention layers: the layer of a page. q, k, v and the gate of the output are one product."""

    index: int
    qkvg: PackedLinear
    qk_norm: RMSNorm
    output: PackedLinear


@dataclass(slots=True)
class _Delta:
    """(q, k, v), the gate z, b and a are one product."""

    inputs: PackedLinear
    rule: GatedDelta
    output: PackedLinear


@dataclass(slots=True)
class _Layer:
    input_norm: RMSNorm
    mixer: _Attention | _Delta
    post_norm: RMSNorm
    gate_up: PackedLinear
    down: PackedLinear


class HybridModel(LanguageModel):
    """A decoder whose layers mix tokens by the gated delta rule, and some by attention over paged K and V.

    Pages hold the attention layers only; the rest of a sequence is its recurrent state, `state_spec`, of constant
    size. So a step needs `batch.states` and `batch.state_slots`, and its rows must follow the state of their slot.

    On the CPU in fp32 the logits of a row have the same bits whatever else is in the batch, however its prompt was
    cut into chunks, and wherever its pages and its state lie. The sum of layer outputs, the states and the delta
    rule are fp32 whatever `dtype` the weights have.

    `forward` keeps no state in the model: threads may call it at once, on different pages and slots.
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

        `max_seq_len` lowers the limit of the config and cannot raise it. ValueError for a config without delta layers.
        """
        if max_seq_len is not None and max_seq_len < 1:
            raise ValueError(f"max_seq_len must be at least 1, got {max_seq_len}")
        if config.delta is None:
            raise ValueError(f"a hybrid needs a config with delta layers, got one of the family {config.family}")
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self.media_size = config.hidden_size
        self.max_seq_len = min(config.max_seq_len, max_seq_len or config.max_seq_len)
        self.name = config.family
        self._shape = config.delta
        num_attention = config.layer_types.count("full_attention")
        self.spec = KVSpec(num_attention, config.num_kv_heads, config.head_dim)
        self.state_spec: StateSpec = delta_state_spec(config.delta, config.num_layers - num_attention)
        self._rotary_dim = config.rotary_dim or config.head_dim
        self.rotary = Rotary(self._rotary_dim, config.rope_theta, config.rope_scaling, self.max_seq_len, self.device)
        digests: dict[str, bytes] = {}

        def read(name: str) -> torch.Tensor:
            values = tensors(name).detach().to(dtype)
            digests[name] = tensor_digest(values)
            return values.to(self.device)

        with torch.inference_mode():
            self._embed = read("model.embed_tokens.weight")
            self._layers = [self._build_layer(index, read) for index in range(config.num_layers)]
            self._final_norm = self._norm(read("model.norm.weight"))
            self._head = PackedLinear(self._embed if config.tie_embeddings else read("lm_head.weight"))
        self.fingerprint = fingerprint_of(config, digests)

    # Computing ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, storage: PageStorage) -> torch.Tensor:
        """Append K and V of the batch's rows to their pages, move their states, and return fp32 logits
        `[R, vocab_size]`, new memory.

        ValueError for a batch without states, GeometryMismatch for states of another model, StateMismatch for rows
        that do not follow their state: then nothing was touched. After any later error the states of the batch's
        slots are not valid at any position (see StatePool.advance).
        """
        states = batch.states
        if states is None or batch.state_slots is None:
            raise ValueError(
                f"{self.name} keeps recurrent state: the batch needs states (model.create_state_pool) and state_slots"
            )
        if states.spec != self.state_spec:
            raise GeometryMismatch("these states were made for another model; make them with model.create_state_pool()")
        step = Step(self, batch, storage)
        x = embed(batch, self._embed)
        with states.advance(batch.state_slots, batch.q_indptr, batch.kv_lens) as slots:
            delta = DeltaStep(slots, batch.q_indptr, states)
            for layer in self._layers:
                self._run(layer, x, step, delta)
        x = batch.wanted(x)
        normed = self._final_norm(x, torch.empty_like(x)).to(self.dtype)
        return self._head(normed).float()

    def _run(self, layer: _Layer, x: torch.Tensor, step: Step, delta: DeltaStep) -> None:
        """Add what one layer contributes to x, `[T, hidden_size]`."""
        normed = layer.input_norm(x, step.normed).to(self.dtype)
        mixer = layer.mixer
        if isinstance(mixer, _Attention):
            x += self._attention(mixer, normed, step)
        else:
            mixed = mixer.rule(mixer.inputs(normed), delta)
            x += mixer.output(mixed.to(self.dtype))
        gate_up = layer.gate_up(layer.post_norm(x, step.normed).to(self.dtype))
        x += layer.down(silu_mul(gate_up, step.act))

    def _attention(self, layer: _Attention, normed: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention with rotated leading values of each head and a gated output, `[T, hidden_size]`."""
        config, turned = self.config, self._rotary_dim
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        product = layer.qkvg(normed).float()
        gate = product[:, (heads + 2 * kv_heads) * dim :]
        qk, v, _ = product.view(len(normed), -1, dim).split((heads + kv_heads, kv_heads, heads), 1)
        qk = layer.qk_norm(qk, torch.empty(qk.shape, device=self.device))
        rotated = step.rotate(qk[..., :turned])
        qk = rotated if turned == dim else torch.cat([rotated, qk[..., turned:]], -1)
        q, k = qk.split((heads, kv_heads), 1)
        step.backend.append(step.storage, layer.index, k, v, step.plan(0))
        mixed = step.attend(q.to(self.dtype), Place(0, layer.index, 0), dim**-0.5)
        mixed = mixed.view(len(normed), heads * dim).float() * by_rows(torch.sigmoid, gate)
        return layer.output(mixed.to(self.dtype))

    # Weights --------------------------------------------------------------------------------------------------

    def _norm(self, weight: torch.Tensor) -> RMSNorm:
        """The family stores the weights of its norms less 1."""
        return RMSNorm(1.0 + weight.float(), self.config.rms_norm_eps)

    def _build_layer(self, index: int, read: TensorOf) -> _Layer:
        config, prefix = self.config, f"model.layers.{index}."
        kind = config.layer_types[index]
        build = self._build_attention if kind == "full_attention" else self._build_delta
        return _Layer(
            input_norm=self._norm(read(prefix + "input_layernorm.weight")),
            mixer=build(config.layer_types[:index].count(kind), prefix, read),
            post_norm=self._norm(read(prefix + "post_attention_layernorm.weight")),
            gate_up=PackedLinear(torch.cat([read(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")])),
            down=PackedLinear(read(prefix + "mlp.down_proj.weight")),
        )

    def _build_attention(self, index: int, prefix: str, read: TensorOf) -> _Attention:
        config, prefix = self.config, prefix + "self_attn."
        heads, dim = config.num_heads, config.head_dim

        def fused(kind: str) -> torch.Tensor:
            """q, k, v, gate; q_proj holds q and gate of each head in turn."""
            q, k, v = (read(f"{prefix}{name}_proj.{kind}") for name in "qkv")
            q, gate = q.view(heads, 2, dim, -1).unbind(1)
            return torch.cat([q.reshape(heads * dim, -1), *(x.view(len(x), -1) for x in (k, v)), gate.flatten(0, 1)])

        q_norm, k_norm = (self._norm(read(f"{prefix}{name}_norm.weight")).weight for name in "qk")
        norms = torch.stack([q_norm] * heads + [k_norm] * config.num_kv_heads)
        return _Attention(
            index,
            PackedLinear(fused("weight"), fused("bias")[:, 0] if config.attention_bias else None),
            RMSNorm(norms, config.rms_norm_eps),
            PackedLinear(read(prefix + "o_proj.weight"), read(prefix + "o_proj.bias") if config.output_bias else None),
        )

    def _build_delta(self, index: int, prefix: str, read: TensorOf) -> _Delta:
        prefix += "linear_attn."
        rule = GatedDelta(
            self._shape,
            index,
            conv=read(prefix + "conv1d.weight"),
            a_log=read(prefix + "A_log"),
            dt_bias=read(prefix + "dt_bias"),
            norm=read(prefix + "norm.weight"),
            norm_eps=self.config.rms_norm_eps,
        )
        inputs = torch.cat([read(f"{prefix}in_proj_{name}.weight") for name in ("qkv", "z", "b", "a")])
        return _Delta(PackedLinear(inputs), rule, PackedLinear(read(prefix + "out_proj.weight")))

    def extra_info(self) -> dict[str, Any]:
        """Family, size, dtype, bytes of a sequence's state, and how matrix products keep their rows apart."""
        config = self.config
        return {
            "family": config.family,
            "num_layers": config.num_layers,
            "num_attention_layers": self.spec.layers,
            "num_parameters": sum(prod(shape) for shape in expected_tensors(config).values()),
            "state_bytes": self.state_spec.num_bytes,
            "dtype": str(self.dtype).removeprefix("torch."),
            "row_mode": row_mode() if self.device.type == "cpu" and self.dtype == torch.float32 else "plain",
        }
