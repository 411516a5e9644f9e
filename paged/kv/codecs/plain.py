"""Values stored as they are, in fp32, fp16 or bf16."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.spec import KVSpec


@dataclass(frozen=True)
class PlainCodec:
    """A codec without scales: `dtype` values, `limit` the largest magnitude that is stored (0: no limit).

    A page is `[layers, 2, kv_heads, page_size, head_dim]`. fp16 clamps to +-65504, so that one outlier does not turn a
    whole row into infinities.
    """

    name: str
    dtype: torch.dtype
    limit: float = 0.0

    @property
    def row_dtypes(self) -> tuple[torch.dtype, ...]:
        """What rows may be appended in: fp32 and the stored type."""
        return torch.float32, self.dtype

    def page_shape(self, spec: KVSpec, page_size: int) -> tuple[int, ...]:
        """Shape of one page, in values of `dtype`."""
        return spec.layers, 2, spec.num_kv_heads, page_size, spec.head_dim

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """`values` in the stored dtype, the same shape."""
        if self.limit:
            values = values.clamp(-self.limit, self.limit)
        return values.to(self.dtype)

    def write(
        self, pages: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store rows `[n, kv_heads, head_dim]` at `offsets [n]` of the pages `ids [n]`; `pages` is one layer's view."""
        pages[ids, 0, :, offsets] = self.encode(k)
        pages[ids, 1, :, offsets] = self.encode(v)

    def read(self, pages: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer's `pages`, each `[num_pages, kv_heads, page_size, head_dim]`; views."""
        return pages[:, 0], pages[:, 1]


PLAIN: dict[str, PlainCodec] = {
    "fp32": PlainCodec("fp32", torch.float32),
    "fp16": PlainCodec("fp16", torch.float16, 65504.0),
    "bf16": PlainCodec("bf16", torch.bfloat16),
}
