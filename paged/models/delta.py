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

import numpy as np
import torch
import torch.nn.functional as F

from paged.kv.state import StatePool
from paged.models.config import DeltaConfig
from paged.ops.plan import Int32
from paged.spec import StatePlane, StateSpec

CONV, DELTA = "conv", "delta"  # names of the planes

_NORM_EPS = 1e-6  # of the length of q and k
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


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of one delta layer besides its projections, fp32.

    conv     [kernel, channels]       taps, that of the oldest input first
    decay    [value_heads]            exp(A_log)
    dt_bias  [value_heads]
    norm     [value_head_dim]         of the norm after the delta rule
    """

    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float


def gated_delta(
    projected: torch.Tensor, shape: DeltaConfig, weights: DeltaWeights, step: DeltaStep, layer: int
) -> torch.Tensor:
    """Everything of a delta layer between its input projections and its output projection.

    projected  [T, channels + value_size + 2 * value_heads]: the products for (q, k, v), the gate z, b and a
    layer      index of the layer among the delta layers

    Moves the states of the step's slots in place. Returns fp32 `[T, value_size]`; rows of sequences that take no part
    are zeros. Cost: about `8 * key_head_dim * value_head_dim` operations a row and value head.
    """
    if step.order is None:
        step.order = _Order.of(step, shape.conv_kernel, projected.device)
    order = step.order
    rows = projected if order.rows is None else projected.index_select(0, order.rows)
    parts = rows.float().split([shape.num_channels, shape.value_size, shape.num_value_heads, shape.num_value_heads], 1)
    inputs, z, b, a = parts
    history, state = (step.states.planes[name][:, layer] for name in (CONV, DELTA))
    mixed = by_rows(F.silu, _convolve(inputs, weights.conv, history, order))
    beta = by_rows(torch.sigmoid, b)
    decay = by_rows(torch.exp, by_rows(F.softplus, a + weights.dt_bias) * -weights.decay)
    out = _recur(mixed, decay, beta, state, shape, order)
    z = by_rows(F.silu, z).view(out.shape)
    mean = _tree_sum((out * out).transpose(1, 2)) / shape.value_head_dim
    out = (out / (mean + weights.norm_eps).sqrt()[..., None] * weights.norm * z).view(len(rows), -1)
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
