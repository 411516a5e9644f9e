"""Page hashes in chains: the key of a page depends on every token before it, and on its namespace."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from paged.errors import InvalidRequest, require_text

Int32 = npt.NDArray[np.int32]
PageHash = Callable[[Hashable, bytes], Hashable]


def page_hash(parent: bytes, tokens: bytes) -> bytes:
    """Key of a page: XXH3-128 over the parent's 16-byte key and the page's token ids (little-endian int32).

    The same in every process and on every machine. It only routes: a hit always compares the tokens, so a
    collision costs a miss and never serves another prompt's rows.
    """
    return xxhash.xxh3_128_digest(parent + tokens)


def namespace_key(**fields: object) -> bytes:
    """The root of the chains of one namespace: its fields (model, codec, adapter, salt, ...) in one encoding.

    MessagePack of the sorted (name, value) pairs is self-delimiting, so no two different sets of fields share an
    encoding: adapter "x" with no salt is not salt "x" with no adapter. Empty and None fields are left out, which
    makes adding a field later harmless.
    """
    return msgspec.msgpack.encode(sorted((name, value) for name, value in fields.items() if value not in ("", None)))


def fields_of(namespace: bytes) -> dict[str, Any]:
    """The fields that a namespace_key was made of."""
    return dict(msgspec.msgpack.decode(namespace))


def root_hash(namespace: bytes) -> bytes:
    """The 16 bytes that the key of a namespace's first page is chained to."""
    return xxhash.xxh3_128_digest(namespace)


def require_namespace(namespace: object) -> str:
    """A caller's salt. Errors as those of `require_text`, else it would fail where the key is made, within a step."""
    return require_text("namespace", namespace)


def as_tokens(tokens: object) -> Int32:
    """Token ids as a C-contiguous int32 array; an int32 array is taken as it is, without a copy.

    Lists, tuples and integer arrays of any width are accepted and give equal keys for equal ids. TypeError for
    anything that does not hold whole numbers, InvalidRequest (a ValueError) for more than one dimension or ids that
    int32 cannot hold.
    """
    if isinstance(tokens, np.ndarray):
        array: npt.NDArray[Any] = cast("npt.NDArray[Any]", tokens)
    elif isinstance(tokens, Sequence) and not isinstance(tokens, (str, bytes)):
        try:
            values = cast("Sequence[object]", tokens)
            array = np.asarray(values) if len(values) else np.zeros(0, np.int32)
        except (ValueError, OverflowError):  # ragged, or an int that no array holds
            raise InvalidRequest("token ids must be one flat list of whole numbers that fit int32") from None
    else:
        raise TypeError(f"token ids must be a list of ints or an int array, got {type(tokens).__name__}")
    if array.ndim != 1:
        raise InvalidRequest(f"token ids must have one dimension, got {array.ndim} (shape {array.shape})")
    if array.dtype != np.int32:
        if array.dtype.kind == "O" and all(isinstance(token, int) for token in array.tolist()):
            raise InvalidRequest(f"token ids must fit int32, got {max(array.tolist(), key=abs)}")
        if array.dtype.kind not in "iu":
            raise TypeError(f"token ids must be whole numbers, got values of type {array.dtype}")
        low, high = (int(array.min()), int(array.max())) if len(array) else (0, 0)
        if low < -(2**31) or high >= 2**31:
            raise InvalidRequest(f"token ids must fit int32, got {low if low < -(2**31) else high}")
    return np.ascontiguousarray(array, dtype=np.int32)


def extend_keys(keys: list[Hashable], root: Hashable, tokens: Int32, page_size: int, hash_page: PageHash) -> None:
    """Append the keys of the full pages of `tokens` that `keys` does not have yet. O(new tokens)."""
    done, full = len(keys), len(tokens) // page_size
    if done >= full:
        return
    data = tokens[done * page_size : full * page_size].astype("<i4", copy=False).tobytes()
    step = 4 * page_size
    parent = keys[-1] if keys else root
    for offset in range(0, len(data), step):
        parent = hash_page(parent, data[offset : offset + step])
        keys.append(parent)
