"""How K and V values are stored in a page: one file a codec."""

from __future__ import annotations

from paged.kv.codecs.plain import PLAIN, PlainCodec


def get_codec(name: str) -> PlainCodec:
    """The codec called `name` ("fp32", "fp16", "bf16"). ValueError lists the names there are."""
    try:
        return PLAIN[name]
    except KeyError:
        raise ValueError(f"kv_dtype must be one of {', '.join(sorted(PLAIN))}, got {name!r}") from None


__all__ = ["PlainCodec", "get_codec"]
