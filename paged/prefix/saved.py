"""A prefix cache in a file: what it holds goes out of one process and is taken in by another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from paged.errors import GeometryMismatch, LoadError
from paged.kv.pages import Int32
from paged.kv.storage import PageStorage
from paged.prefix.checkpoint_intake import CheckpointIntake
from paged.prefix.saved_checkpoints import CheckpointRecord, SavedCheckpoints
from paged.prefix.saved_file import Part, SavedFile, rows_at_once, write_file
from paged.prefix.saved_tree import ChainRecord, SavedTree
from paged.prefix.tree_intake import TreeIntake
from paged.spec import KVSpec, StateSpec

if TYPE_CHECKING:
    from paged.prefix.cache import PrefixCache

FORMAT = 1
_KIND = "paged.prefix_cache"


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a cache must agree on with a file before it takes anything from it."""

    format: int
    model: str
    codec: str
    page_size: int
    kv: KVSpec
    state: StateSpec | None


class Records(msgspec.Struct, forbid_unknown_fields=True):
    """What no array holds. A namespace stands for its model, codec, adapter and salt."""

    namespaces: list[bytes]
    chains: list[ChainRecord]
    checkpoints: list[CheckpointRecord]


def save_cache(cache: PrefixCache, path: str | os.PathLike[str]) -> int:
    """Write everything that `cache` holds to one file; returns the pages written. See PrefixCache.save."""
    storage, store = _storage(cache), cache.checkpoints
    header, records = _header(cache), Records([], [], [])
    if store is None:
        saved = SavedTree.of(cache)
        parts, records.chains = saved.parts(), saved.chains
    else:
        saved = SavedCheckpoints.of(store)
        assert header.state is not None
        parts, records.checkpoints = saved.parts(header.state), saved.records
    records.namespaces = saved.namespaces
    text = np.frombuffer(bytearray(msgspec.json.encode(records)), np.uint8)
    parts.append(Part("records", torch.uint8, text.shape, [torch.from_numpy(text)]))
    shape = (len(saved.ids), *storage.pages.shape[1:])
    parts.append(Part("pages", storage.codec.dtype, shape, _pages(storage, saved)))
    write_file(path, {_KIND: msgspec.json.encode(header).decode()}, parts)
    return len(saved.ids)


def load_cache(cache: PrefixCache, path: str | os.PathLike[str]) -> int:
    """Take in what a file holds and `cache` does not; returns the pages taken in. See PrefixCache.load."""
    storage, pool = _storage(cache), cache.pool
    cache.require_pool()
    file = SavedFile(path)
    with closing(file):
        _agree(file, _header(cache))
    num_pages = file.shape("pages", storage.codec.dtype, (None, *storage.pages.shape[1:]))[0]
    records = _decoded(file, file.tensor("records", torch.uint8, (None,)).numpy().tobytes(), Records)
    names = records.namespaces
    file.expect(len(set(names)) == len(names), "different namespaces", "one of them twice")
    room = pool.num_free + pool.max_pages - pool.num_pages
    if cache.checkpoints is None:
        intake = TreeIntake(SavedTree.read(file, cache, names, records.chains, num_pages), cache, room)
    else:
        saved = SavedCheckpoints.read(file, cache, names, records.checkpoints, num_pages)
        intake = CheckpointIntake(saved, cache.checkpoints, room)
    ids = pool.alloc(len(intake.pages))
    try:
        _copy_in(file, storage, intake.pages, ids)
    except BaseException:
        pool.release(ids)
        raise
    intake.enter(ids)
    return len(ids)


def _storage(cache: PrefixCache) -> PageStorage:
    storage = cache.pool.storage
    if storage is None:
        raise GeometryMismatch("this pool has no storage, so there are no rows to save or to load")
    if not cache.pool.fingerprint:
        raise GeometryMismatch(
            "a file of rows must name the model that computed them, and this pool's model has no fingerprint; "
            "give the model one (see paged.models.fingerprint) before it makes its pool"
        )
    return storage


def _header(cache: PrefixCache) -> Header:
    pool = cache.pool
    assert pool.storage is not None
    return Header(FORMAT, pool.fingerprint, pool.storage.kv_dtype, pool.page_size, pool.storage.spec, pool.state_spec)


def _agree(file: SavedFile, ours: Header) -> None:
    """LoadError for a file that is damaged or of another kind, GeometryMismatch for one of another model."""
    file.expect(_KIND in file.metadata, f"a saved prefix cache (metadata {_KIND})", sorted(file.metadata) or "none")
    text = file.metadata[_KIND].encode()
    version = _decoded(file, text, dict[str, object]).get("format")
    if version != FORMAT:
        raise LoadError(
            f"{file.path}: expected format {FORMAT}, found {version}; load it with the version of paged that wrote it"
        )
    file.verify()
    theirs = _decoded(file, text, Header)
    for name in ("model", "codec", "page_size", "kv", "state"):
        saved, own = getattr(theirs, name), getattr(ours, name)
        if saved != own:
            raise GeometryMismatch(
                f"{file.path} was saved with {name} {saved!r}, and this cache has {own!r}; "
                "load it into a cache of the model and pool settings that it was saved from"
            )


def _decoded(file: SavedFile, text: bytes, kind: type) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LoadError(f"{file.path}: expected the fields of a {kind.__name__}, found: {error}") from None


def _pages(storage: PageStorage, saved: SavedTree | SavedCheckpoints) -> Iterator[torch.Tensor]:
    """The pages in pieces on the host. Rows behind the last one of a partial page may be anybody's: they become 0."""
    ids, rows, step = saved.ids, saved.rows_of_page, rows_at_once(storage.page_bytes)
    for start in range(0, len(ids), step):
        at = torch.from_numpy(ids[start : start + step].astype(np.int64)).to(storage.device)
        piece = storage.pages.index_select(0, at).cpu()
        for page in np.flatnonzero(rows[start : start + step] < storage.page_size).tolist():
            piece[page, :, :, :, int(rows[start + page]) :] = 0
        yield piece


def _copy_in(file: SavedFile, storage: PageStorage, wanted: Int32, ids: Int32) -> None:
    """Copy the pages `wanted` of a file (ascending) into the pages `ids` of the pool."""
    step = rows_at_once(storage.page_bytes)
    for start, piece in file.pieces("pages", step):
        first, last = np.searchsorted(wanted, (start, start + step)).tolist()
        if first < last:
            source = torch.from_numpy(wanted[first:last].astype(np.int64) - start)
            into = torch.from_numpy(ids[first:last].astype(np.int64)).to(storage.device)
            storage.pages.index_copy_(0, into, piece.index_select(0, source).to(storage.device))
