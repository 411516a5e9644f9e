"""Memory that was never written, made visible: every byte 255, which is not a number in any stored type or scale."""

from __future__ import annotations

import torch

from paged.kv.storage import PageStorage


def poison(storage: PageStorage) -> None:
    """Every value, or every scale of a record, becomes NaN."""
    storage.pages.view(torch.uint8).fill_(255)


def unwritten(storage: PageStorage) -> torch.Tensor:
    """bool, the shape of `storage.pages`: what `poison` left and nobody wrote since."""
    if storage.pages.is_floating_point():
        return storage.pages.isnan()
    return (storage.pages == 255).all(-1, keepdim=True).expand_as(storage.pages)


def refill(storage: PageStorage, value: float) -> None:
    """`value` where nothing was written; in records, every two bytes, and so every scale, become that fp16 number."""
    if storage.pages.is_floating_point():
        storage.pages[storage.pages.isnan()] = value
        return
    record = torch.full((storage.pages.shape[-1] // 2,), value, dtype=torch.float16).view(torch.uint8)
    storage.pages.copy_(torch.where(unwritten(storage), record, storage.pages))
