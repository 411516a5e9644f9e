"""Matrix products whose rows do not depend on their neighbours.

Promise 1 rests on this file: on the CPU in fp32, row i of a product has the same bits whatever the number of rows
is and whatever stands in the others. oneDNN's prepacked product has that property on the processors it was measured
on, and is the fastest for few rows. It is no documented property, so it is probed for each shape when a weight is
packed; where it does not hold, products are computed in tiles of a fixed number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

TILE = 16  # rows of a product where the number of rows must be fixed

# Packed for two rows or more, oneDNN takes one layout and one order of summation; packed for one row, another.
_PACK_ROWS = 16
_PROBE_ROWS = (2, 3, 4, 5, 8, 16, 17, 33)
_SMALL_WEIGHT = 4_000_000  # values; up to here a probe of 256 rows costs a few milliseconds

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowMode:
    """How products of one weight are computed. packed: oneDNN, at least `rows` rows; tile: exactly `rows` rows;
    plain: as the device does it, with no promise about bits."""

    kind: Literal["packed", "tile", "plain"]
    rows: int = 1

    def __str__(self) -> str:
        if self.kind == "packed":
            return "oneDNN prepacked" + (", one row padded to two" if self.rows == 2 else "")
        return f"fixed tiles of {self.rows} row{'s' * (self.rows > 1)}" if self.kind == "tile" else "plain"


_modes: dict[tuple[int, int, int], RowMode] = {}  # (out_features, in_features, threads) -> what its probe found


class PackedLinear:
    """`x @ weight.T + bias` for one weight `[N, K]`, the only way in which models multiply matrices.

    On the CPU in fp32 the weight is copied into oneDNN's blocked layout: drop yours, or memory doubles. The first
    weight of each shape costs one probe, about as long as a product of 300 rows.
    """

    __slots__ = ("_bias", "_weight", "in_features", "mode", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._weight = weight
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            self.mode = RowMode("plain")
            return
        packed = _pack(weight)
        key = (self.out_features, self.in_features, torch.get_num_threads())
        if key not in _modes:
            _modes[key] = _choose_mode(weight, packed)
        self.mode = _modes[key]
        if self.mode.kind == "packed" and packed is not None:
            self._weight = packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x [M, K]` -> new memory `[M, N]`; the bits of row i depend on row i of x alone (not in mode plain)."""
        if self.mode.kind == "plain":
            return F.linear(x, self._weight, self._bias)
        if self.mode.kind == "tile":
            return _tiled(lambda rows: F.linear(rows, self._weight, self._bias), x, self.mode.rows)
        if len(x) < self.mode.rows:
            padded = torch.cat([x, x.new_zeros(self.mode.rows - len(x), self.in_features)])
            return _packed_product(padded, self._weight, self._bias)[: len(x)]
        return _packed_product(x, self._weight, self._bias)

    def dense(self) -> torch.Tensor:
        """The weight `[N, K]`, bit for bit as it was given; a copy where it is packed."""
        return self._weight.to_dense() if self._weight.is_mkldnn else self._weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self._bias


def row_mode() -> str:
    """How this process computes fp32 products on the CPU, for `paged info`: the modes of all shapes packed so far.

    Packs and probes one small weight if there are none.
    """
    if not _modes:
        PackedLinear(torch.ones(256, 256))
    return "; ".join(sorted({str(mode) for mode in _modes.values()}))


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight in oneDNN's blocked layout; None where this build of torch has no such product."""
    try:
        with torch.inference_mode():
            return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACK_ROWS)
    except (AttributeError, RuntimeError):  # no oneDNN: the operator is missing, or refuses to run
        return None


def _packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _tiled(product: Product, x: torch.Tensor, tile: int) -> torch.Tensor:
    """`product` of x in pieces of exactly `tile` rows, the last one filled up with zeros."""
    missing = -len(x) % tile
    padded = torch.cat([x, x.new_zeros(missing, x.shape[1])]) if missing else x
    pieces = [product(padded[start : start + tile]) for start in range(0, len(padded), tile)]
    return torch.cat(pieces)[: len(x)] if pieces else product(x)


@torch.inference_mode()
def _choose_mode(weight: torch.Tensor, packed: torch.Tensor | None) -> RowMode:
    """The fastest mode that keeps the rows of products with `weight` equal, by trying."""
    rows = _probe_rows(256 if weight.numel() <= _SMALL_WEIGHT else 64, weight.shape[1])
    if packed is not None:
        fewest = _fewest_equal_rows(lambda x: _packed_product(x, packed, None), rows)
        if fewest:
            return RowMode("packed", fewest)
    whole = F.linear(rows[:TILE], weight)
    turned = F.linear(rows[:TILE].flip(0), weight).flip(0)
    return RowMode("tile", TILE if torch.equal(whole, turned) else 1)


def _fewest_equal_rows(product: Product, x: torch.Tensor) -> int:
    """Smallest m (1 or 2) such that products of m rows and more give each row the bits it has in `product(x)`; 0 if
    none. Tries the last rows of x, so that a row changes its place as well."""
    whole = product(x)
    for count in _PROBE_ROWS:
        if not torch.equal(product(x[-count:]), whole[-count:]):
            return 0
    return 1 if torch.equal(product(x[-1:]), whole[-1:]) else 2


def _probe_rows(count: int, width: int) -> torch.Tensor:
    """Values whose sums round differently in every order; the global generator is not touched."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0))
