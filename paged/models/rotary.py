"""Rotary position embedding: frequencies, their scalings, and the rotation itself."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from paged.models.config import RopeScaling
from paged.ops.plan import Int32

Float64 = npt.NDArray[np.float64]

# Sines are computed in pieces of this many positions, counted from 0: a library may round the last values of an
# array differently from the others, and a row of the table must not depend on how far the table reaches.
_PIECE = 512


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Float64:
    """Radians a position for each of the `head_dim / 2` pairs, `[head_dim / 2]`. See RopeScaling for the kinds."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = theta**-exponent
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "factors":
        return plain / np.asarray(scaling.factors, np.float64)
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    if scaling.kind == "yarn":
        return _yarn(plain, head_dim, theta, scaling)
    return plain


def _llama3(plain: Float64, scaling: RopeScaling) -> Float64:
    """The Llama 3.1 release: kept from `high_freq_factor` turns up, divided below `low_freq_factor`, a ramp between."""
    turns = scaling.original_max_seq_len * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / scaling.factor


def _yarn(plain: Float64, head_dim: int, theta: float, scaling: RopeScaling) -> Float64:
    """NTK-by-parts, https://arxiv.org/abs/2309.00071 section 3.2, with the ramp over dimensions as in its code."""

    def dimension(turns: float) -> float:
        """The pair that turns `turns` times within the original length."""
        return head_dim * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    kept = 1.0 - np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / scaling.factor


class Rotary:
    """cos and sin by absolute position, computed in float64 and rounded once to fp32.

    The table grows by doubling as positions are asked for, up to `max_seq_len`: 4 * 1.5 * head_dim bytes a position.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: RopeScaling,
        max_seq_len: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.frequencies = rope_frequencies(head_dim, theta, scaling)
        self.attention_factor = scaling.attention_factor if scaling.kind == "yarn" else 1.0
        self.max_seq_len = max_seq_len
        self.device = torch.device(device)
        self._tables = self._make(min(_PIECE, max_seq_len))

    def _make(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos `[length, 1, 1, D / 2]` and sin `[length, 1, 2, D / 2]`, the latter negated for the first halves."""
        half = len(self.frequencies)
        cos, sin = np.empty((length, 1, 1, half), np.float32), np.empty((length, 1, 2, half), np.float32)
        for start in range(0, length, _PIECE):
            angles = np.outer(np.arange(start, start + _PIECE, dtype=np.float64), self.frequencies)
            count = min(_PIECE, length - start)
            cos[start : start + count, 0, 0] = (np.cos(angles) * self.attention_factor)[:count]
            sin[start : start + count, 0, 1] = (np.sin(angles) * self.attention_factor)[:count]
        np.negative(sin[:, 0, 1], out=sin[:, 0, 0])
        return torch.from_numpy(cos).to(self.device), torch.from_numpy(sin).to(self.device)

    def rows(self, positions: Int32) -> tuple[torch.Tensor, torch.Tensor]:
        """cos `[T, 1, 1, D / 2]` and signed sin `[T, 1, 2, D / 2]` of each row; a padding row (-1) counts as 0.

        ValueError for a position the model cannot hold.
        """
        end = int(positions.max(initial=0)) + 1
        cos, sin = self._tables
        if end > len(cos):
            if end > self.max_seq_len:
                raise ValueError(f"positions must be below the model's {self.max_seq_len}, got {end - 1}")
            cos, sin = self._tables = self._make(min(self.max_seq_len, max(end, 2 * len(cos))))
        index = torch.from_numpy(np.maximum(positions, 0)).to(self.device)
        return cos.index_select(0, index), sin.index_select(0, index)


class Rotation:
    """The rotation of one step's rows: cos and sin are gathered once, memory and views serve every layer.

    Products and sums of two numbers only: these round the same in a vector register and outside of one, so that a
    row's bits do not depend on its place in the tensor.
    """

    def __init__(self, table: Rotary, positions: Int32, heads: int) -> None:
        self._cos, sin = table.rows(positions)
        self._minus_sin, self._sin = sin.unbind(2)
        rows, half = len(positions), self._cos.shape[-1]
        self._shape = (rows, heads, 2, half)
        self._out = self._cos.new_empty(self._shape)
        self._scratch = torch.empty_like(self._out)
        self._first, self._second = self._scratch.unbind(2)
        self._result = self._out.view(rows, heads, 2 * half)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate pairs (i, i + D / 2) of each head of fp32 `x [T, heads, D]`; the result lasts until the next call."""
        x = x.view(self._shape)
        first, second = x.unbind(2)
        torch.mul(x, self._cos, out=self._out)
        torch.mul(second, self._minus_sin, out=self._first)
        torch.mul(first, self._sin, out=self._second)
        self._out.add_(self._scratch)
        return self._result
