"""How K and V values are stored in a page: one file a codec."""

from __future__ import annotations

from paged.kv.codecs.int4 import INT4
from paged.kv.codecs.int8 import INT8
from paged.kv.codecs.plain import PLAIN, PlainCodec
from paged.kv.codecs.records import RecordCodec

Codec = PlainCodec | RecordCodec

CODECS: dict[str, Codec] = {**PLAIN, INT8.name: INT8, INT4.name: INT4}


def get_codec(name: str) -> Codec:
    """The codec called `name` ("fp32", "fp16", "bf16", "int8", "int4"). ValueError lists the names there are."""
    try:
        return CODECS[name]
    except KeyError:
        raise ValueError(f"kv_dtype must be one of {', '.join(sorted(CODECS))}, got {name!r}") from None


__all__ = ["CODECS", "Codec", "PlainCodec", "RecordCodec", "get_codec"]
