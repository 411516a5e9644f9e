"""Values stored as they are, in fp32, fp16 or bf16."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PlainCodec:
    """A codec without scales: `dtype` values, `limit` the largest magnitude that is stored (0: no limit).

    fp16 clamps to +-65504, so that one outlier does not turn a whole row into infinities.
    """

    name: str
    dtype: torch.dtype
    limit: float = 0.0

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """`values` in the stored dtype, the same shape."""
        if self.limit:
            values = values.clamp(-self.limit, self.limit)
        return values.to(self.dtype)


PLAIN: dict[str, PlainCodec] = {
    "fp32": PlainCodec("fp32", torch.float32),
    "fp16": PlainCodec("fp16", torch.float16, 65504.0),
    "bf16": PlainCodec("bf16", torch.bfloat16),
}
