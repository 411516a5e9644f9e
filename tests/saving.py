"""What a prefix cache holds, as plain values to compare; and saved files forged to say something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors import safe_open

from paged.prefix.cache import PrefixCache
from paged.prefix.saved_file import Part, write_file

KIND = "paged.prefix_cache"


def rows_of(cache: PrefixCache, page: int, rows: int) -> bytes | None:
    """The bytes of the first `rows` positions of a page; None where a window left the page behind."""
    return (
        None
        if page < 0
        else cache.pool.storage.pages[page, :, :, :, :rows].contiguous().view(torch.uint8).numpy().tobytes()
    )


def nodes_of(cache: PrefixCache) -> dict[tuple[bytes, tuple[int, ...]], list[bytes | None]]:
    """(namespace, tokens up to the end of a page) -> the bytes of its rows, a group each.

    Without the places whose pages a window left and on which nothing stands any more: they are of no use.
    """
    index = cache.index
    out = {}
    for node in np.flatnonzero(index.birth >= 0).tolist():
        tokens, at = [], node
        while at >= 0:
            tokens.insert(0, index.tokens[at, : index.rows[at]].tolist())
            at = int(index.parent[at])
        pages = [rows_of(cache, page, int(index.rows[node])) for page in index.pages[node].tolist()]
        out[index._root_of[at], tuple(t for page in tokens for t in page)] = pages
    used = {(name, tokens[:n]) for (name, tokens), rows in out.items() if any(rows) for n in range(len(tokens) + 1)}
    return {key: rows for key, rows in out.items() if key in used}


def checkpoints_of(cache: PrefixCache) -> dict[tuple[bytes, tuple[int, ...]], tuple]:
    """(namespace, tokens) -> kind, preview, birth, hits, the bytes of the pages and of the state; oldest use first."""
    out = {}
    for c in cache.checkpoints or ():
        size = cache.pool.page_size
        rows = [
            rows_of(cache, page, min(size, c.num_tokens - i % c.pages.shape[1] * size))
            for i, page in enumerate(c.pages.ravel().tolist())
        ]
        state = {name: tensor.numpy().tobytes() for name, tensor in c.snapshot.tensors.items()}
        facts = (c.opening, c.preview, c.born_at, c.num_hits, c.last_hit_at, c.snapshot.position)
        out[c.namespace, tuple(c.tokens.tolist())] = (*facts, rows, state)
    return out


def contents(cache: PrefixCache) -> list:
    """All that a cache holds, in an order to compare."""
    chains = [(c.preview, c.born_at, c.num_tokens, c.num_pages, c.num_hits, c.last_hit_at) for c in cache.chains()]
    return [nodes_of(cache), list(checkpoints_of(cache).items()), sorted(chains)]


def everything(cache: PrefixCache) -> list:
    """The contents, and every number of the pool and of the cache's own that a call might have changed."""
    pool, index = cache.pool, cache.index
    numbers = [pool.num_pages, pool.num_free, pool.num_cached_only, index.tick, index.num_pages, index._next_birth]
    arrays = [pool.refs.tolist(), pool.held.tolist(), index.last_use[index.birth >= 0].tolist()]
    counters = [getattr(cache.stats, name) for name in cache.stats.__slots__]
    store = cache.checkpoints
    return [contents(cache), numbers, arrays, counters, store and (store._tick, store.num_bytes, len(store))]


def forge(
    path: Path, tensors: Callable[[dict], object] = len, records=len, header=len, into: Path | None = None
) -> Path:
    """Write the file again after each of these has changed its part: tensors by name, the records, the header."""
    file = safe_open(path, framework="pt")
    parts = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    text = msgspec.json.decode(file.metadata()[KIND])
    notes = msgspec.json.decode(parts["records"].numpy().tobytes())
    header(text)
    records(notes)
    parts["records"] = torch.from_numpy(np.frombuffer(bytearray(msgspec.json.encode(notes)), np.uint8))
    tensors(parts)
    written = [Part(name, tensor.dtype, tuple(tensor.shape), [tensor]) for name, tensor in parts.items()]
    write_file(into or path, {KIND: msgspec.json.encode(text).decode()}, written)
    return into or path
