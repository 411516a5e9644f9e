"""The memory behind the page ids: one contiguous blob a page."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from paged.errors import UnsupportedShape, check, require_integer
from paged.kv.codecs import get_codec
from paged.spec import KVSpec


class PageStorage:
    """K and V of every page, contiguous: `[num_pages, layers, 2, kv_heads, page_size, head_dim]` of plain values, or
    `[num_pages, layers, kv_heads, page_size, record_bytes]` bytes of int8 and int4 records (see `paged/kv/codecs`).

    Copying, saving or moving a page is one copy of `page_bytes` bytes. The memory is uninitialised: a position is
    read only after it was written. On the CPU the pages that were never written cost address space, not memory.

    Where it `keeps_input`, `spec` is the geometry of the rows as they are stored, the first half of an input in place
    of K and the second in place of V, and `model_spec` is that of the model.

    Invariants (`check()`): the tensor is contiguous, its shape is what the codec makes of `spec`, and
    `page_bytes * num_pages` is its size in bytes.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_pages: int,
        page_size: int = 16,
        kv_dtype: str = "fp32",
        device: str | torch.device = "cpu",
        input_size: int = 0,
    ) -> None:
        """`kv_dtype` is the name of a codec; with "-h" behind it (store-h) pages hold `input_size` values of the input
        of each attention block instead of K and V. UnsupportedShape where that saves nothing."""
        num_pages, page_size = require_integer("num_pages", num_pages), require_integer("page_size", page_size)
        if page_size < 1:
            raise UnsupportedShape(f"page_size must be at least 1 token, got {page_size}")
        if num_pages < 1:
            raise UnsupportedShape(f"num_pages must be at least 1, got {num_pages}")
        name = kv_dtype.removesuffix("-h")
        self.kv_dtype = kv_dtype
        self.codec = get_codec(name)
        self.keeps_input = name != kv_dtype
        self.model_spec = spec
        self.spec = _input_spec(spec, kv_dtype, input_size) if self.keeps_input else spec
        self.page_size = page_size
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

    def write(self, layer: int, ids: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
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


def _input_spec(spec: KVSpec, kv_dtype: str, input_size: int) -> KVSpec:
    """The geometry of rows of `input_size` values, each half cut into heads of up to 64 channels."""
    name, values = kv_dtype.removesuffix("-h"), 2 * spec.num_kv_heads * spec.head_dim
    if not input_size:
        raise UnsupportedShape(f"this model cannot keep the inputs of its blocks ({kv_dtype}); use {name}")
    if input_size >= values:
        raise UnsupportedShape(
            f"{kv_dtype} would keep {input_size} values a token and layer, and K and V are {values}: it would cost "
            f"more memory and time, use {name}"
        )
    head = next((dim for dim in (64, 32, 16, 8) if not input_size % (2 * dim)), None)
    if head is None:
        raise UnsupportedShape(f"{kv_dtype} needs inputs of a multiple of 16 values, got {input_size}; use {name}")
    return replace(spec, num_kv_heads=input_size // (2 * head), head_dim=head)
