"""int4: 4 bits a value of V, 5 of K, one fp16 scale for 64 channels of a head; K is rotated first.

K has a few channels that are far larger than the others in every token, and they would take all of a group's range. A
Hadamard rotation of a head's channels spreads them (QuaRot, arXiv 2404.00456): q . k is what it was, since the query is
rotated too. docs/adr/0007 has the measurements behind the rotation, the fifth bit and the size of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.kv.codecs.records import RecordCodec, dequantise, group_bounds, quantise, scale_bytes, scales_at

MOST_ROTATED = 64  # channels that are rotated together


def rotation_size(head_dim: int) -> int:
    """Neighbouring channels that are rotated together: the largest power of two that divides `head_dim`, up to 64."""
    return min(head_dim & -head_dim, MOST_ROTATED)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Blocks of `rotation_size` channels of `x [..., dim]` times the Hadamard matrix of +1 and -1; fp32 or fp64.

    Twice, it multiplies by the size of a block. The order of the sums is that of csrc/cpu/records.inc.
    """
    size, step = rotation_size(x.shape[-1]), 1
    while step < size:
        pairs = x.unflatten(-1, (-1, 2, step))
        x = torch.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).flatten(-3)
        step *= 2
    return x


@dataclass(frozen=True)
class Int4Codec(RecordCodec):
    """Record: low 4 bits of rotated K, then V, two values a byte, the first in the lower half; the scales of K, those
    of V; the fifth bits of K, eight a byte from the lowest; zeros up to a multiple of 4. 0.59 bytes a value at head
    size 64. Codes are stored without sign: K + 16 and V + 8."""

    name: str = "int4"
    group_size: int = 64

    def record_bytes(self, head_dim: int) -> int:
        """head_dim + 4 * groups + head_dim / 8, rounded up to a multiple of 4."""
        size = head_dim + 4 * len(group_bounds(head_dim, self.group_size)) + head_dim // 8
        return -(-size // 4) * 4

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Records uint8 `[..., record_bytes]` of rows `[..., head_dim]` in fp32."""
        k_codes, k_scales = quantise(rotate(k), 5, self.group_size)
        v_codes, v_scales = quantise(v, 4, self.group_size)
        k_codes, v_codes = k_codes + 16, v_codes + 8
        nibbles = torch.cat([k_codes & 15, v_codes], -1).unflatten(-1, (-1, 2))
        packed = (nibbles[..., 0] | nibbles[..., 1] << 4).to(torch.uint8)
        fifth = ((k_codes >> 4).unflatten(-1, (-1, 8)) << _shifts(k, 8, 1)).sum(-1).to(torch.uint8)
        record = torch.cat([packed, scale_bytes(k_scales), scale_bytes(v_scales), fifth], -1)
        return torch.nn.functional.pad(record, (0, self.record_bytes(k.shape[-1]) - record.shape[-1]))

    def decode(self, records: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V in fp32, each `[..., head_dim]`; K is rotated back, which rounds."""
        groups = len(group_bounds(head_dim, self.group_size))
        k_scales = scales_at(records, head_dim, groups)
        v_scales = scales_at(records, head_dim + 2 * groups, groups)
        first = head_dim + 4 * groups
        packed = records[..., :head_dim].to(torch.int16).unsqueeze(-1)
        nibbles = (packed >> _shifts(packed, 2, 4) & 15).flatten(-2)
        fifth = records[..., first : first + head_dim // 8].to(torch.int16).unsqueeze(-1)
        k_codes = nibbles[..., :head_dim] + ((fifth >> _shifts(fifth, 8, 1) & 1) << 4).flatten(-2)
        k = dequantise(k_codes - 16, k_scales, self.group_size)
        v = dequantise(nibbles[..., head_dim:] - 8, v_scales, self.group_size)
        return rotate(k) / rotation_size(head_dim), v


def _shifts(like: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """0, bits, 2 * bits, ... int16 `[count]` on the device of `like`."""
    return torch.arange(0, count * bits, bits, dtype=torch.int16, device=like.device)


INT4 = Int4Codec()
