"""Records: K and V of one position and head, quantised in groups of channels that share a scale.

A value x of a group is stored as a whole number q of `bits` bits with x ~ q * scale, -2^(bits - 1) <= q < 2^(bits - 1).
The scale is an fp16 number of either sign: the value of the largest magnitude, whatever its sign, is the one that the
lowest q stands for, so that no q is wasted (the rule of llama.cpp's Q4_0). A product q * scale has at most 19 bits: it
is exact in fp32, so every backend decodes the same numbers.

A record depends on its own row only, never on other tokens: pages are written row by row, and full ones never change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.errors import UnsupportedShape
from paged.spec import KVSpec

_LARGEST = 65504.0  # of fp16


def group_bounds(head_dim: int, size: int) -> list[tuple[int, int]]:
    """First and last-plus-one channel of each group: `size` channels, and what is left belongs to the last one."""
    count = max(1, head_dim // size)
    return [(g * size, (g + 1) * size if g + 1 < count else head_dim) for g in range(count)]


def quantise(x: torch.Tensor, bits: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(q, scales)` of rows `[..., dim]` in fp32: int16 `[..., dim]` and fp16 `[..., groups]`.

    A group that holds a value that is not finite gets the scale NaN, so that whoever reads it sees NaN. Scales beyond
    fp16 are clamped. Rounds half to even; csrc/cpu/append.inc does the same arithmetic, bit for bit.
    """
    half = 2 ** (bits - 1)
    codes, scales = [], []
    for first, end in group_bounds(x.shape[-1], size):
        part = x[..., first:end]
        high, low = part.amax(-1), part.amin(-1)
        peak = torch.where(-low > high, low, high)
        scale = (peak / -half).clamp(-_LARGEST, _LARGEST).half()
        step = scale.float().unsqueeze(-1)
        q = (part / step).clamp(-half, half - 1).round()
        finite = part.isfinite().all(-1)
        codes.append(torch.where(finite.unsqueeze(-1) & (step != 0), q, 0.0).to(torch.int16))
        scales.append(torch.where(finite, scale + 0.0, torch.nan))  # -0 becomes 0
    return torch.cat(codes, -1), torch.stack(scales, -1)


def dequantise(q: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    """`q * scale` in fp32, `[..., dim]`; exact."""
    x = q.to(torch.float32)
    for g, (first, end) in enumerate(group_bounds(q.shape[-1], size)):
        x[..., first:end] *= scales[..., g : g + 1].float()
    return x


@dataclass(frozen=True)
class RecordCodec:
    """What the codecs of records share. A page is `[layers, kv_heads, page_size, record_bytes]` bytes.

    `name`, and `group_size`: channels that share a scale. The head size must be a multiple of 8.
    """

    name: str
    group_size: int

    dtype = torch.uint8
    row_dtypes = (torch.float32, torch.float16, torch.bfloat16)

    def record_bytes(self, head_dim: int) -> int:
        """Bytes of K and V of one position and head, a multiple of 4."""
        raise NotImplementedError

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Records uint8 `[..., record_bytes]` of rows `[..., head_dim]` in fp32."""
        raise NotImplementedError

    def decode(self, records: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V in fp32, each `[..., head_dim]`."""
        raise NotImplementedError

    def page_shape(self, spec: KVSpec, page_size: int) -> tuple[int, ...]:
        """Shape of one page, in bytes. UnsupportedShape for a head size that is no multiple of 8."""
        if spec.head_dim % 8:
            raise UnsupportedShape(f"{self.name} pages need a head size that is a multiple of 8, got {spec.head_dim}")
        return spec.layers, spec.num_kv_heads, page_size, self.record_bytes(spec.head_dim)

    def write(
        self, pages: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store rows `[n, kv_heads, head_dim]` at `offsets [n]` of the pages `ids [n]`; `pages` is one layer's view."""
        pages[ids, :, offsets] = self.encode(k.float(), v.float())

    def read(self, pages: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer's `pages`, each fp32 `[num_pages, kv_heads, page_size, head_dim]`; decoded copies."""
        return self.decode(pages, head_dim)


def scale_bytes(scales: torch.Tensor) -> torch.Tensor:
    """fp16 scales `[..., groups]` as bytes `[..., 2 * groups]`, in the machine's order."""
    return scales.contiguous().view(torch.uint8)


def scales_at(records: torch.Tensor, first: int, groups: int) -> torch.Tensor:
    """The fp16 scales `[..., groups]` that begin at byte `first` of each record."""
    return records[..., first : first + 2 * groups].contiguous().view(torch.float16)
