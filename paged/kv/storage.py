"""The memory behind the page ids: one contiguous blob a page."""

from __future__ import annotations

import math

import torch

from paged.errors import UnsupportedShape, check
from paged.kv.codecs import get_codec
from paged.spec import KVSpec


class PageStorage:
    """K and V of every page, contiguous: `[num_pages, layers, 2, kv_heads, page_size, head_dim]` of plain values, or
    `[num_pages, layers, kv_heads, page_size, record_bytes]` bytes of int8 and int4 records (see `paged/kv/codecs`).

    Copying, saving or moving a page is one copy of `page_bytes` bytes. The memory is uninitialised: a position is
    read only after it was written. On the CPU the pages that were never written cost address space, not memory.

    Invariants (`check()`): the tensor is contiguous, its shape is what the codec makes of `spec`, and `page_bytes * num_pages` is
    its size in bytes.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_pages: int,
        page_size: int = 16,
        kv_dtype: str = "fp32",
        device: str | torch.device = "cpu",
    ) -> None:
        if page_size < 1:
            raise UnsupportedShape(f"page_size must be at least 1 token, got {page_size}")
        if num_pages < 1:
            raise UnsupportedShape(f"num_pages must be at least 1, got {num_pages}")
        self.spec = spec
        self.page_size = page_size
        self.codec = get_codec(kv_dtype)
        self.device = torch.device(device)
        self.pages = self._allocate(num_pages)

    def _allocate(self, num_pages: int) -> torch.Tensor:
        shape = (num_pages, *self.codec.page_shape(self.spec, self.page_size))
        return torch.empty(shape, dtype=self.codec.dtype, device=self.device)

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: K and V of `page_size` positions of all layers of a group, scales included."""
        return math.prod(self.codec.page_shape(self.spec, self.page_size)) * self.codec.dtype.itemsize

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer of a group, each `[num_pages, kv_heads, page_size, head_dim]`.

        Views of plain values; of records, decoded fp32 copies of all pages, which writing to does not change them.
        """
        return self.codec.read(self.pages[:, layer], self.spec.head_dim)

    def gather(self, layer: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer of the pages `ids [n]`, each `[n, kv_heads, page_size, head_dim]`; copies, decoded."""
        return self.codec.read(self.pages[:, layer][ids], self.spec.head_dim)

    def write(
        self, layer: int, ids: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store rows `[n, kv_heads, head_dim]` of one layer at `offsets [n]` of the pages `ids [n]`."""
        self.codec.write(self.pages[:, layer], ids, offsets, k, v)

    def grow(self, num_pages: int) -> None:
        """Make room for `num_pages` pages; the ids and bytes of the present ones stay. Cost: one copy of them."""
        if num_pages <= self.num_pages:
            return
        new = self._allocate(num_pages)
        new[: self.num_pages].copy_(self.pages)
        self.pages = new

    def check(self) -> None:
        """Assert the invariants of the class docstring."""
        check(self.pages.is_contiguous(), "the pages are not contiguous")
        want = (self.num_pages, *self.codec.page_shape(self.spec, self.page_size))
        check(tuple(self.pages.shape) == want, f"page storage has shape {tuple(self.pages.shape)}, expected {want}")
        size = self.pages.numel() * self.pages.element_size()
        check(size == self.page_bytes * self.num_pages, f"page storage has {size} bytes")
