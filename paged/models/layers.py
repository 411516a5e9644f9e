"""The parts of a Llama-like layer, each with bits that do not depend on the number of rows.

torch computes the last few elements of a loop, and the last few of each thread's share, one by one instead of in
vector registers, and exp differs there in the last bit. So nothing here applies exp to an array whose size, or whose
cut between threads, depends on the number of rows, unless every element falls into a full vector.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from paged.models.base import ForwardBatch

# torch runs an elementwise loop of at most this many elements in one thread (at::internal::GRAIN_SIZE), and cuts a
# longer one into equal shares, at least this long.
_SERIAL = 32768
# Elements of one pass of torch's vectorised loops: two registers of the widest kind, AVX-512.
_VECTOR = 32


def embed(batch: ForwardBatch, table: torch.Tensor) -> torch.Tensor:
    """What enters the first layer, fp32 `[T, hidden_size]`, new memory: rows of `table`, and media in their places."""
    tokens = batch.tokens.astype(np.int64)  # a copy: torch warns of arrays it may not write to
    if batch.media:
        np.maximum(tokens, 0, out=tokens)
    x = F.embedding(torch.from_numpy(tokens).to(table.device), table).float()
    for row, values in batch.media:
        x[row : row + len(values)] = torch.from_numpy(np.array(values)).to(x.device)
    return x


class RMSNorm:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension (https://arxiv.org/abs/1910.07467).

    `weight` is `[H]`, or `[heads, H]` where each head has its own.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        width = weight.shape[-1]
        # With the mean's 1 / H moved into both constants, fp32 needs six operations instead of nine.
        self._scaled = weight.float() * math.sqrt(width)
        self._sum_eps = torch.tensor(eps * width, dtype=torch.float32, device=weight.device)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Normalise fp32 `x [..., H]` into `out`, which is not x. Only +, *, / and sqrt: exact in every register."""
        torch.mul(x, x, out=out)
        norm = out.sum(-1, keepdim=True).add_(self._sum_eps).sqrt_()
        return torch.div(x, norm, out=out).mul_(self._scaled)


def unit_norm(x: torch.Tensor, out: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`x / sqrt(sum(x ** 2) + eps)` over the last dimension of fp32 x, into `out`, which is not x."""
    torch.mul(x, x, out=out)
    return torch.div(x, out.sum(-1, keepdim=True).add_(eps).sqrt_(), out=out)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """SwiGLU's product: `silu(gate) * up` for rows `gate_up [M, 2 N]` = (gate, up), into contiguous `out [M, N]`."""
    width = out.shape[1]
    gate, up = gate_up.chunk(2, 1)
    if gate_up.device.type != "cpu" or out.numel() <= _SERIAL:
        # One thread walks row by row, so each row has its full vectors and its tail at the same columns.
        return torch.mul(F.silu(gate), up, out=out)
    if width % _VECTOR:
        step = max(1, _SERIAL // width)
        for start in range(0, len(out), step):
            rows = slice(start, start + step)
            torch.mul(F.silu(gate[rows]), up[rows], out=out[rows])
        return out
    out.copy_(gate)
    flat = out.view(-1)
    cut = _whole_vectors(len(flat), torch.get_num_threads())
    F.silu(flat[:cut], inplace=True)
    F.silu(flat[cut:], inplace=True)
    return out.mul_(up)


def _whole_vectors(size: int, threads: int) -> int:
    """The largest `cut <= size` (a multiple of the vector) that torch shares out among threads in whole vectors.

    Up to one minimal share a thread, a multiple of the minimal share is cut into exactly these; beyond, a multiple
    of `threads` vectors is. What is left over is short enough for one thread.
    """
    shares = size // _SERIAL
    if shares < threads:
        return shares * _SERIAL
    return size // (_VECTOR * threads) * (_VECTOR * threads)
