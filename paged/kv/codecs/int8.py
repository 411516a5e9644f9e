"""int8: a byte a value, one fp16 scale for 32 channels of a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.kv.codecs.records import RecordCodec, dequantise, group_bounds, quantise, scale_bytes, scales_at


@dataclass(frozen=True)
class Int8Codec(RecordCodec):
    """Record: `head_dim` bytes of K, as many of V, the scales of K, those of V. 1.06 bytes a value at head size 64."""

    name: str = "int8"
    group_size: int = 32

    def record_bytes(self, head_dim: int) -> int:
        """2 * head_dim + 4 * groups."""
        return 2 * head_dim + 4 * len(group_bounds(head_dim, self.group_size))

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Records uint8 `[..., record_bytes]` of rows `[..., head_dim]` in fp32."""
        k_codes, k_scales = quantise(k, 8, self.group_size)
        v_codes, v_scales = quantise(v, 8, self.group_size)
        codes = torch.cat([k_codes, v_codes], -1).to(torch.int8).view(torch.uint8)
        return torch.cat([codes, scale_bytes(k_scales), scale_bytes(v_scales)], -1)

    def decode(self, records: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V in fp32, each `[..., head_dim]`."""
        groups = len(group_bounds(head_dim, self.group_size))
        codes = records[..., : 2 * head_dim].contiguous().view(torch.int8)
        k_scales = scales_at(records, 2 * head_dim, groups)
        v_scales = scales_at(records, 2 * head_dim + 2 * groups, groups)
        return (
            dequantise(codes[..., :head_dim], k_scales, self.group_size),
            dequantise(codes[..., head_dim:], v_scales, self.group_size),
        )


INT8 = Int8Codec()
