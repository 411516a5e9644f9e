"""GGUF files: weights of every type that the gguf package dequantises, under Hugging Face names and layouts.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from paged.errors import LoadError, MissingTensor
from paged.loaders.chat import ChatTemplate
from paged.loaders.checkpoint import Checkpoint, Shape, TensorSource, check_tensors
from paged.loaders.tokenizer_files import tokenizer_from_gguf
from paged.models.config import ModelConfig

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CHUNK_VALUES = 1 << 18  # values dequantised at a time: 1 MB of fp32 and its scratch stay in the caches


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; names without one come back as they are."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _BLOCK:
        return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"
    return _TOP_LEVEL.get(name, name)


def half_split_rows(num_rows: int, num_heads: int) -> np.ndarray:
    """Row order that turns interleaved rotary pairs (2i, 2i + 1) of each head into pairs (i, i + head_dim / 2).

    The converter of llama.cpp stores Q and K of the architecture "llama" interleaved, because its kernel rotates
    neighbours; Hugging Face weights are half-split.
    """
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()


class GGUFTensors(TensorSource):
    """The tensors of one GGUF file. `get` dequantises, about 10 to 20 ns a value on one core."""

    def __init__(self, path: Path, reader: gguf.GGUFReader, permuted_heads: Mapping[str, int], tied: bool) -> None:
        """`permuted_heads`: heads of each Hugging Face module ("q_proj", "k_proj") whose rows are interleaved."""
        self.source = str(path)
        self._permuted_heads = permuted_heads
        self._tensors = {hf_name(tensor.name): tensor for tensor in reader.tensors}
        self._hidden = {"rope_freqs.weight"} | ({"lm_head.weight"} if tied else set())

    def names(self) -> list[str]:
        return [name for name in self._tensors if name not in self._hidden]

    def shape(self, name: str) -> Shape:
        return tuple(int(n) for n in reversed(self._tensor(name).shape))

    def get(self, name: str, dtype: torch.dtype | None = torch.float32) -> torch.Tensor:
        tensor = self._tensor(name)
        shape = self.shape(name)
        if dtype is None:
            dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(tensor.tensor_type.name, torch.float32)
        order = self._row_order(name, shape)
        if len(shape) == 1:
            values = dequantize(tensor.data.reshape(1, -1), tensor.tensor_type).reshape(-1)
            return torch.tensor(values if order is None else values[order]).to(dtype)
        out = torch.empty(shape, dtype=dtype)
        # NumPy knows no bf16; where it will do, its copies wake no pool of threads for each chunk.
        copied = None if dtype == torch.bfloat16 else out.numpy()
        step = max(1, _CHUNK_VALUES // max(1, math.prod(shape[1:])))
        for start in range(0, len(out), step):
            chosen = slice(start, start + step) if order is None else order[start : start + step]
            # As one long row: dequantize walks 16 rows at a time, and each step costs a dozen small array operations.
            values = dequantize(tensor.data[chosen].reshape(1, -1), tensor.tensor_type).reshape(-1, *shape[1:])
            if copied is not None:
                copied[start : start + step] = values
            else:
                out[start : start + step] = torch.from_numpy(values if values.flags.writeable else values.copy())
        return out

    def _tensor(self, name: str) -> gguf.ReaderTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise MissingTensor(f"{self.source}: expected tensor {_gguf_name(name)}, found none") from None

    def _row_order(self, name: str, shape: Shape) -> np.ndarray | None:
        module = name.split(".")[-2] if name.count(".") else ""
        heads = self._permuted_heads.get(module)
        return None if heads is None else half_split_rows(shape[0], heads)


def read_gguf(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a GGUF file: settings, tokenizer and template are read at once, tensors when asked for (by mmap).

    Architectures: llama (Llama, Mistral, SmolLM2), qwen2, qwen3. Raises LoadError for what is not GGUF, is cut
    off, or holds another architecture, and MissingTensor for a tensor that is not there or has another shape.
    """
    path = Path(path)
    reader = _open(path)
    metadata = {name: _value(path, field) for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    if metadata.get("split.count", 1) != 1:
        raise LoadError(
            f"{path}: expected a whole model in one file, found one part of {metadata['split.count']}; "
            "merge the parts with gguf-split"
        )
    shapes = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    _check_types(path, reader)
    factors = tuple(
        float(value)
        for t in reader.tensors
        if t.name == "rope_freqs.weight"
        for value in dequantize(t.data.reshape(1, -1), t.tensor_type).ravel()
    )
    config = ModelConfig.from_gguf(metadata, shapes, factors, source=str(path))
    interleaved = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if config.family == "llama" else {}
    tensors = GGUFTensors(path, reader, interleaved, tied=config.tie_embeddings)
    check_tensors(config, tensors, place=lambda name: f"{path}: {_gguf_name(name)}")
    tokenizer = tokenizer_from_gguf(metadata, str(path))
    chat = None
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        bos, eos = ("", "") if tokenizer is None else (tokenizer.bos_token, tokenizer.eos_token)
        tool_use = metadata.get("tokenizer.chat_template.tool_use")
        chat = ChatTemplate(template, bos, eos, where=str(path), tool_use=tool_use)
    eos_ids = tokenizer.eos_ids if tokenizer is not None else ()
    return Checkpoint(config, str(path), tensors, tokenizer, chat, eos_ids)


class _Reader(gguf.GGUFReader):
    """GGUFReader that refuses to read past the end, where the package would return short arrays, and that reads
    an array field in one go: tens of times faster on a vocabulary, and a damaged length cannot run away."""

    _plain: np.ndarray | None = None

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        if self._plain is None:
            self._plain = self.data.view(np.ndarray)  # slices of a plain array cost a fraction of a memmap's
        dtype = np.dtype(dtype)
        offset, end = int(offset), int(offset) + int(count) * dtype.itemsize
        if end > self._plain.size:
            raise LoadError(f"expected at least {end} bytes, found {self._plain.size}: the file is cut off or damaged")
        return self._plain[offset:end].view(dtype)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type = gguf.GGUFValueType(self._get(orig_offs, np.uint32)[0])
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        types = [gguf.GGUFValueType.ARRAY, item_type]
        offset = orig_offs + 12
        if item_type == gguf.GGUFValueType.STRING:
            strings, end = self._strings(offset, count)
            return end - orig_offs, strings, list(range(count)), types
        if item_type not in self.gguf_scalar_to_np:
            raise LoadError(f"expected an array of numbers or strings, found an array of {item_type.name}")
        values = self._get(offset, self.gguf_scalar_to_np[item_type], count)
        return offset + values.nbytes - orig_offs, [values], [0], types

    def _strings(self, offset: int, count: int) -> tuple[list[bytes], int]:
        self._get(offset, np.uint64, count)  # each string has at least a length
        buffer, size, strings = memoryview(self.data), self.data.size, []  # type: ignore[arg-type]
        for _ in range(count):
            start = offset + 8
            offset = start + struct.unpack_from("<Q", buffer, offset)[0] if start <= size else start
            if offset > size:
                raise LoadError(f"expected at least {offset} bytes, found {size}: the file is cut off or damaged")
            strings.append(bytes(buffer[start:offset]))
        return strings, offset


def _open(path: Path) -> gguf.GGUFReader:
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise LoadError(f"{path}: expected a readable GGUF file, found {error.strerror or error}") from None
    if head[:4] != b"GGUF":
        raise LoadError(f"{path}: expected a GGUF file, which begins with b'GGUF', found {head[:4]!r}")
    version = int.from_bytes(head[4:8], "little")
    if version not in (2, 3):
        order = " (a big-endian file?)" if version & 0xFFFF == 0 and version else ""
        raise LoadError(f"{path}: expected GGUF version 2 or 3, little-endian, found version {version}{order}")
    try:
        return _Reader(path)
    except LoadError as error:
        raise LoadError(f"{path}: {error}") from None
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        raise LoadError(f"{path}: expected a well-formed GGUF header, found {error}") from None


def _value(path: Path, field: Any) -> Any:
    """A metadata field as a Python value: number, bool, str or a list of these."""
    try:
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            if field.types[-1] == gguf.GGUFValueType.STRING:
                return [part.decode("utf-8") for part in field.parts[len(field.parts) - len(field.data) :]]
            return field.parts[-1].tolist()
        if field.types[0] == gguf.GGUFValueType.STRING:
            return bytes(field.parts[-1]).decode("utf-8")
        return field.parts[-1].tolist()[0]
    except UnicodeDecodeError as error:
        raise LoadError(f"{path}: expected UTF-8 text in {field.name}, found {error.object[:20]!r}") from None


def _check_types(path: Path, reader: gguf.GGUFReader) -> None:
    """LoadError unless one block of every stored type can be dequantised."""
    for tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.values():
        _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        try:
            dequantize(np.zeros((1, block_bytes), np.uint8), tensor.tensor_type)
        except NotImplementedError:
            raise LoadError(
                f"{path}: {tensor.name} is stored as {tensor.tensor_type.name}, "
                f"which the installed gguf package does not dequantise; convert it to another type"
            ) from None


def _gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor; names without one come back as they are."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    for ours, theirs in _BLOCK.items():
        if match and match[2] == theirs:
            return f"blk.{match[1]}.{ours}.{match[3]}"
    return next((ours for ours, theirs in _TOP_LEVEL.items() if theirs == name), name)
