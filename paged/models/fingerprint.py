"""What tells the weights of two models apart: the root of every prefix chain."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
import xxhash


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """16 bytes that depend on dtype, shape and every value of `tensor`. XXH3-128, about 10 GB/s."""
    values = tensor.detach().cpu().contiguous()
    head = f"{values.dtype} {tuple(values.shape)} ".encode()
    hasher = xxhash.xxh3_128(head)
    if values.numel():
        hasher.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.digest()


def fingerprint_of(config: object, digests: Mapping[str, bytes]) -> str:
    """32 hex digits from a model's settings (what msgspec can encode) and the digest of each weight by name.

    Two models get the same fingerprint only if settings, names, shapes and all values agree, whatever file they were
    read from. A model of your own may use it: `fingerprint_of({...}, {name: tensor_digest(t) ...})`, again after
    each change of its weights.
    """
    payload = (config, sorted(digests.items()))
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(payload, order="deterministic"))
