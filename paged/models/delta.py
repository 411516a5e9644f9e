"""The gated delta rule behind a causal convolution: what a hybrid model has in place of attention in most layers.

Gated Delta Networks, https://arxiv.org/abs/2412.06464, with the arithmetic of the Qwen3-Next and Qwen3.5 families.
For each head, with a state S `[key_head_dim, value_head_dim]`, decay d and strength b of the token:

    S <- d S;  S <- S + k (b (v - S^T k))^T;  out = S^T q

A state goes through its tokens one by one, in prefill as in decoding, so that the bits of a row do not depend on how
its sequence was cut into steps or on what else was in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from paged.kv.state import StatePool
from paged.models.config import DeltaConfig
from paged.ops.dispatch import get_backend
from paged.ops.plan import Int32
from paged.spec import StatePlane, StateSpec

if TYPE_CHECKING:
    from paged._native import DeltaLayer, Kernels

CONV, DELTA = "conv", "delta"  # names of the planes

_NORM_EPS = 1e-6  # of the length of q and k
_LANES, _TAPS = 8, 16  # the native code takes head sizes that are multiples of _LANES, and at most _TAPS taps
_VECTOR = 32  # elements of one pass of torch's vectorised loops, at most
_SERIAL = 32768  # elements up to which torch computes in one thread


def delta_state_spec(shape: DeltaConfig, num_layers: int) -> StateSpec:
    """State of one sequence in `num_layers` delta layers: the last inputs of the convolution, oldest first, and S."""
    heads = (shape.num_value_heads, shape.key_head_dim, shape.value_head_dim)
    return StateSpec(
        (
            StatePlane(CONV, (num_layers, shape.conv_kernel - 1, shape.num_channels)),
            StatePlane(DELTA, (num_layers, *heads)),
        )
    )


@dataclass(slots=True)
class DeltaStep:
    """Where the rows of one step belong, for all delta layers: `slots` in `states` as StatePool.advance gives them."""

    slots: Int32
    q_indptr: Int32
    states: StatePool
    order: _Order | None = field(default=None)  # what the torch version prepares once a step


class GatedDelta:
    """Everything of one delta layer between its input projections and its output projection: convolution, delta rule,
    norm and gate. Native code on the CPU in fp32, plain torch elsewhere."""

    def __init__(
        self,
        shape: DeltaConfig,
        index: int,
        *,
        conv: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        norm: torch.Tensor,
        norm_eps: float,
    ) -> None:
        """`index` counts the delta layers. Weights as they are saved, in any float type:

        conv     [channels, 1, kernel]   taps, that of the oldest input first
        a_log    [value_heads]
        dt_bias  [value_heads]
        norm     [value_head_dim]        of the norm after the delta rule
        """
        self.shape = shape
        self.index = index
        self.conv = conv[:, 0].float().t().contiguous()
        self.decay = a_log.float().exp()
        self.dt_bias = dt_bias.float().contiguous()
        self.norm = norm.float().contiguous()
        self.norm_eps = norm_eps
        self._native: DeltaLayer | None = None

    def __call__(self, projected: torch.Tensor, step: DeltaStep) -> torch.Tensor:
        """Move the states of the step's slots in place; returns fp32 `[T, value_size]`.

        projected  [T, channels + value_size + 2 * value_heads]: the products for (q, k, v), the gate z, b and a

        Rows of sequences that take no part become zeros. Cost: about `8 * key_head_dim * value_head_dim` operations
        for each row and value head.
        """
        kernels = self._kernels(projected)
        return self.in_torch(projected, step) if kernels is None else self._in_native(projected, step, kernels)

    def _kernels(self, projected: torch.Tensor) -> Kernels | None:
        """The native kernels, where they compute this layer and were not turned off by PAGED_BACKEND."""
        shape = self.shape
        fits = not (shape.key_head_dim % _LANES or shape.value_head_dim % _LANES or shape.conv_kernel > _TAPS)
        if not fits or projected.device.type != "cpu" or projected.dtype != torch.float32:
            return None
        return getattr(get_backend("cpu"), "kernels", None)

    def _in_native(self, projected: torch.Tensor, step: DeltaStep, kernels: Kernels) -> torch.Tensor:
        shape = self.shape
        if self._native is None:
            from paged import _native

            self._native = _native.DeltaLayer(
                shape.num_key_heads,
                shape.num_value_heads,
                shape.key_head_dim,
                shape.value_head_dim,
                shape.conv_kernel,
                self.conv.data_ptr(),
                self.decay.data_ptr(),
                self.dt_bias.data_ptr(),
                self.norm.data_ptr(),
                self.norm_eps,
            )
        if projected.stride(1) != 1:
            projected = projected.contiguous()
        mixed = torch.empty(len(projected), shape.num_channels)
        out = torch.empty(len(projected), shape.value_size)
        history, state = (step.states.planes[name] for name in (CONV, DELTA))
        kernels.delta(
            self._native,
            step.q_indptr,
            step.slots,
            projected.data_ptr(),
            projected.stride(0),
            history[:, self.index].data_ptr(),
            history.stride(0),
            state[:, self.index].data_ptr(),
            state.stride(0),
            mixed.data_ptr(),
            out.data_ptr(),
        )
        return out

    def in_torch(self, projected: torch.Tensor, step: DeltaStep) -> torch.Tensor:
        """What a call does, in plain torch on any device: the oracle of the native code, and much slower."""
        shape = self.shape
        if step.order is None:
            step.order = _Order.of(step, shape.conv_kernel, projected.device)
        order = step.order
        rows = projected if order.rows is None else projected.index_select(0, order.rows)
        sizes = [shape.num_channels, shape.value_size, shape.num_value_heads, shape.num_value_heads]
        inputs, z, b, a = rows.float().split(sizes, 1)
        history, state = (step.states.planes[name][:, self.index] for name in (CONV, DELTA))
        mixed = by_rows(F.silu, _convolve(inputs, self.conv, history, order))
        beta = by_rows(torch.sigmoid, b)
        decay = by_rows(torch.exp, by_rows(F.softplus, a + self.dt_bias) * -self.decay)
        out = _recur(mixed, decay, beta, state, shape, order)
        z = by_rows(F.silu, z).view(out.shape)
        mean = _tree_sum((out * out).transpose(1, 2)) / shape.value_head_dim
        out = (out / (mean + self.norm_eps).sqrt()[..., None] * self.norm * z).view(len(rows), shape.value_size)
        if order.rows is None:
            return out
        whole = out.new_zeros(len(projected), out.shape[1])
        whole[order.rows] = out
        return whole


# The torch version ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Order:
    """The active sequences of a step, the longest first, and their rows, counted without those of the others.

    rows   [T']          rows of the step that belong to active sequences; None: all of them
    slots  [S']          state slot of each sequence
    taps   [T', kernel]  for each row, its inputs among (histories of all sequences, rows)
    kept   [S', kernel - 1]  the same for the history that each sequence leaves
    times  [T']          the rows ordered by their number within the sequence, then by sequence
    widths               how many sequences have a first row, a second, ...
    """

    rows: torch.Tensor | None
    slots: torch.Tensor
    taps: torch.Tensor
    kept: torch.Tensor
    times: torch.Tensor
    widths: list[int]

    @classmethod
    def of(cls, step: DeltaStep, kernel: int, device: torch.device) -> _Order:
        counts = np.diff(step.q_indptr)
        active = np.flatnonzero(step.slots >= 0)
        of_row = np.repeat(step.slots, counts) >= 0
        counts = counts[active]
        first = np.cumsum(counts) - counts
        longest_first = np.argsort(-counts, kind="stable")
        slots, counts, first = step.slots[active][longest_first], counts[longest_first], first[longest_first]
        sequence = np.repeat(np.arange(len(counts)), counts)
        row = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(len(sequence))
        local = row - first[sequence]

        past = kernel - 1

        def inputs(sequence: np.ndarray, local: np.ndarray) -> np.ndarray:
            """Index of the input number `local` of a sequence; those below 0 are in its history."""
            return np.where(local < 0, sequence * past + past + local, len(counts) * past + first[sequence] + local)

        taps = np.empty((len(row), kernel), np.int64)
        taps[row] = inputs(sequence[:, None], local[:, None] + np.arange(-past, 1))
        kept = inputs(np.arange(len(counts))[:, None], counts[:, None] + np.arange(-past, 0))

        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)

        return cls(
            None if of_row.all() else tensor(np.flatnonzero(of_row)),
            tensor(slots),
            tensor(taps),
            tensor(kept),
            tensor(row[np.lexsort((sequence, local))]),
            np.bincount(local).tolist(),
        )


def by_rows(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """An elementwise function of `x [M, N]` whose bits in a row do not depend on M.

    torch computes what does not fill a vector register one by one, and exp differs there in the last bit. So the rows
    are padded to whole vectors, and handed over in pieces that one thread computes.
    """
    if x.device.type != "cpu" or not x.numel():
        return function(x)
    rows, width = x.shape
    padded = F.pad(x, (0, -width % _VECTOR))
    step = max(1, _SERIAL // padded.shape[1])
    if rows <= step:
        return function(padded)[:, :width]
    return torch.cat([function(padded[start : start + step]) for start in range(0, rows, step)])[:, :width]


def _convolve(x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor, order: _Order) -> torch.Tensor:
    """The causal convolution of each channel of `x [T, channels]`, with zeros or `history` before its first row."""
    past = history.index_select(0, order.slots)
    inputs = torch.cat([past.flatten(0, 1), x])
    out = inputs[order.taps[:, 0]] * weight[0]
    for tap in range(1, len(weight)):
        out = out + inputs[order.taps[:, tap]] * weight[tap]
    history[order.slots] = inputs[order.kept]
    return out


def _recur(
    mixed: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    shape: DeltaConfig,
    order: _Order,
) -> torch.Tensor:
    """The delta rule over `mixed [T, channels]` (q, k, v); returns `[T, value_heads, value_head_dim]`.

    One Python step for each row of the longest sequence; all sequences, heads and channels advance together.
    """
    mixed, decay, beta = (x.index_select(0, order.times) for x in (mixed, decay, beta))
    q, k, v = mixed.split([shape.key_size, shape.key_size, shape.value_size], 1)
    q, k = (_unit(x.view(-1, shape.num_key_heads, shape.key_head_dim)) for x in (q, k))
    q = q * shape.key_head_dim**-0.5
    group = shape.num_value_heads // shape.num_key_heads
    q, k = (x.repeat_interleave(group, 1)[..., None] for x in (q, k))
    v = v.view(-1, shape.num_value_heads, shape.value_head_dim)
    out = torch.empty_like(v)
    state = states.index_select(0, order.slots)
    start = 0
    for width in order.widths:
        now = slice(start, start + width)
        s = state[:width] * decay[now, :, None, None]
        delta = (v[now] - _tree_sum(s * k[now])) * beta[now, :, None]
        s = s + k[now] * delta[:, :, None]
        out[now] = _tree_sum(s * q[now])
        state[:width] = s
        start += width
    states[order.slots] = state
    back = torch.empty_like(out)
    back[order.times] = out
    return back


def _unit(x: torch.Tensor) -> torch.Tensor:
    """`x [..., D]` with length 1 in its last dimension."""
    return x / (_tree_sum((x * x).transpose(-1, -2)) + _NORM_EPS).sqrt()[..., None]


def _tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension but one, by halves: sums of two numbers only, in an order that is always the same."""
    while (length := x.shape[-2]) > 1:
        half = length // 2
        pairs = x[..., :half, :] + x[..., half : 2 * half, :]
        x = torch.cat([pairs, x[..., 2 * half :, :]], -2) if length % 2 else pairs
    return x[..., 0, :]
