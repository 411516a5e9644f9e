"""SavedFile: one safetensors file with a checksum over all of it, never seen half written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from paged.errors import LoadError

_DTYPES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}
_BLANK = b"0" * 32  # stands for the checksum while it is computed
_PIECE = 1 << 25  # bytes read or written at once


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor to be written. `pieces` are its rows in order, so that a large one is never in memory as a whole."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[torch.Tensor]


def rows_at_once(row_bytes: int) -> int:
    """How many rows of a tensor to read or write at once."""
    return max(1, _PIECE // max(1, row_bytes))


def write_file(path: str | os.PathLike[str], metadata: dict[str, str], parts: Iterable[Part]) -> None:
    """Write a safetensors file of `parts`, with `metadata` and the XXH3-128 of all its bytes (the checksum blank).

    They go to a temporary file in the same folder, which takes the place of `path` once it is on the disk: whatever
    interrupts this leaves at `path` what was there. OSError, with that path, where it cannot be written.
    """
    target, path = os.fspath(path), Path(os.path.realpath(path))  # what a link stands for is replaced, not the link
    ordered = sorted(parts, key=lambda part: -part.dtype.itemsize)  # then each one is aligned to its items
    head = _head(metadata, ordered)
    temporary = path.with_name(f".{uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            checksum = xxhash.xxh3_128(head)
            file.write(head)
            for piece in chain.from_iterable(part.pieces for part in ordered):
                if piece.numel():
                    data = piece.contiguous().view(-1).view(torch.uint8).numpy().data
                    checksum.update(data)
                    file.write(data)
            file.seek(0)
            file.write(head.replace(_BLANK, checksum.hexdigest().encode(), 1))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, f"the file could not be saved: {error.strerror}", target) from error
        raise
    with suppress(OSError):  # the rename, too, survives a power cut where folders can be synced
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _head(metadata: dict[str, str], parts: Iterable[Part]) -> bytes:
    """Length and header of a safetensors file, padded to 8 bytes; the checksum comes first in it."""
    entries: dict[str, Any] = {"__metadata__": {"checksum": _BLANK.decode(), **metadata}}
    end = 0
    for part in parts:
        start = end
        end += torch.Size(part.shape).numel() * part.dtype.itemsize
        entries[part.name] = {"dtype": _DTYPES[part.dtype], "shape": part.shape, "data_offsets": (start, end)}
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class SavedFile:
    """A file of `write_file`, opened for reading: the safetensors library saw that its header fits its length.

    `metadata` can be trusted after `verify`, and tensors are to be asked for after it. Every error is a LoadError
    that names the file, what was expected and what was found.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._bytes, self._handle = self._open()
        except (SafetensorError, OSError, ValueError) as error:
            raise LoadError(f"{self.path}: expected a whole safetensors file, found: {error}") from None
        self.metadata: dict[str, str] = self._handle.metadata() or {}
        self._names = frozenset(self._handle.keys())

    def _open(self) -> tuple[BinaryIO, Any]:
        """The file twice: its bytes and its tensors. A writer may put another in its place between the two."""
        while True:
            file = open(self.path, "rb")  # noqa: SIM115
            try:
                handle = safe_open(self.path, framework="pt")
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                    return file, handle
            except BaseException:
                file.close()
                raise
            file.close()

    def close(self) -> None:
        """Nothing is verified any more; tensors may still be asked for."""
        self._bytes.close()

    def verify(self) -> None:
        """LoadError unless every byte is the one that was written. Cost: reads the file once, and closes it."""
        found = self.metadata.get("checksum", "")
        checksum = xxhash.xxh3_128()
        with self._bytes as file:
            length = file.read(8)
            checksum.update(length)
            checksum.update(file.read(int.from_bytes(length, "little")).replace(found.encode(), _BLANK, 1))
            while data := file.read(_PIECE):
                checksum.update(data)
        self.expect(checksum.hexdigest() == found, f"contents with the checksum {found}", checksum.hexdigest())

    def expect(self, condition: object, expected: str, found: object) -> None:
        """LoadError that says what was expected and what was found, unless `condition`."""
        if not condition:
            raise LoadError(f"{self.path}: expected {expected}, found {found}; the file is damaged, save it again")

    def tensor(self, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> torch.Tensor:
        """One tensor; None in `shape` stands for any length. Not copied: the file lies behind."""
        self.shape(name, dtype, shape)
        return self._handle.get_tensor(name)

    def pieces(self, name: str, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensor `rows` rows at a time, each with the number of its first row. Not copied: the file lies behind."""
        whole = self._handle.get_slice(name)
        for start in range(0, whole.get_shape()[0], rows):
            yield start, whole[start : start + rows]

    def shape(self, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> tuple[int, ...]:
        """The shape of one tensor, which must be `shape` where that is not None, as its type must be `dtype`."""
        self.expect(name in self._names, f"a tensor {name}", "none")
        part = self._handle.get_slice(name)
        found, kind = tuple(part.get_shape()), part.get_dtype()
        fits = len(found) == len(shape) and all(want in (None, n) for want, n in zip(shape, found, strict=True))
        wanted = ["any" if n is None else n for n in shape]
        self.expect(fits and kind == _DTYPES[dtype], f"{name} as {_DTYPES[dtype]} {wanted}", f"{kind} {list(found)}")
        return found
