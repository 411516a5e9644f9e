"""Hugging Face folders: config.json and model.safetensors, in one file or in shards."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paged.errors import LoadError, MissingTensor
from paged.loaders.chat import ChatTemplate
from paged.loaders.checkpoint import Checkpoint, Shape, TensorSource, check_tensors
from paged.loaders.tokenizer import Tokenizer
from paged.loaders.tokenizer_files import tokenizer_from_folder
from paged.models.config import ModelConfig

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_RENAMED = (
    (r"^model\.language_model\.|^backbone\.", "model."),  # of text and images; of the family dory, as are these:
    (r"^model\.embeddings\.", "model.embed_tokens."),
    (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
)
_BLOCK = re.compile(r"\.layers\.(\d+)\.(mixer|attn_alpha|mlp_alpha)(?=\.|$)")
_HARMLESS = r"\.rotary_emb\.inv_freq$|^mtp\.|^model\.visual\."  # what text alone has no use for
_FLOATS = ("F64", "F32", "F16", "BF16")  # integers and 8-bit floats need scales to mean a value


class SafetensorsFiles(TensorSource):
    """The tensors of one or more safetensors files. `get` reads one tensor by mmap and copies it."""

    def __init__(self, folder: Path, file_of: Mapping[str, str], tied: bool) -> None:
        """`file_of`: tensor name -> file name in `folder`. Where `tied`, the head is no tensor of its own."""
        self.source = str(folder)
        self._folder = folder
        self._files = {name: _open(folder / name) for name in sorted(set(file_of.values()))}
        self._file_of = dict(file_of)
        stored = {file: set(handle.keys()) for file, handle in self._files.items()}
        for name, file in file_of.items():
            if name not in stored[file]:
                raise MissingTensor(f"{folder / file}: expected tensor {name}, which {_INDEX} places there, found none")
        names = {_common_name(name): name for name in file_of}
        self._spare_head = tied and _EMBEDDING in names and _HEAD in names
        if tied and _EMBEDDING not in names and _HEAD in names:
            names = {_EMBEDDING: _HEAD, **names}  # of two tied tensors, either may have been saved
        self._stored_name = {name: stored for name, stored in names.items() if not (tied and name == _HEAD)}

    def names(self) -> list[str]:
        return list(self._stored_name)

    def place(self, name: str) -> str:
        """File and tensor, for messages."""
        file = self._file_of.get(self._stored_name.get(name, name))
        return f"{self._folder / file if file else self.source}: {name}"

    def shape(self, name: str) -> Shape:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The stored type, as safetensors calls it: "BF16"."""
        return self._slice(name).get_dtype()

    def get(self, name: str, dtype: torch.dtype | None = torch.float32) -> torch.Tensor:
        file, stored = self._find(name)
        tensor = self._files[file].get_tensor(stored)
        return tensor.to(dtype or tensor.dtype, copy=True)

    def head_differs(self) -> bool:
        """Whether there is a head that a tied model does not use, and it is not the embedding once more."""
        if not self._spare_head:
            return False
        head, embedding = (self.get(name, None) for name in (_HEAD, _EMBEDDING))
        return not torch.equal(head, embedding)

    def _find(self, name: str) -> tuple[str, str]:
        stored = self._stored_name.get(name, name)
        if stored not in self._file_of:
            raise MissingTensor(f"{self.source}: expected tensor {name}, found none")
        return self._file_of[stored], stored

    def _slice(self, name: str) -> Any:
        file, stored = self._find(name)
        return self._files[file].get_slice(stored)


def read_safetensors(folder: str | os.PathLike[str]) -> Checkpoint:
    """Open a Hugging Face folder; tensors are read when asked for.

    Read: config.json, model.safetensors or its index and shards, and where present generation_config.json,
    tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja and tool_use.jinja of
    additional_chat_templates. Raises LoadError for a file that is not there or
    cannot be read, MissingTensor for a tensor that is not there or has another shape; warns of tensors that the
    model has no use for.
    """
    folder = Path(folder)
    settings = _json(folder / "config.json")
    config = ModelConfig.from_hf(settings, source=str(folder / "config.json"))
    tensors = SafetensorsFiles(folder, _files(folder), config.tie_embeddings)
    used = check_tensors(config, tensors, place=tensors.place, harmless=_HARMLESS)
    for name in used:
        if tensors.dtype(name) not in _FLOATS:
            raise LoadError(
                f"{tensors.place(name)}: expected one of {', '.join(_FLOATS)}, found {tensors.dtype(name)}; "
                "quantised checkpoints are read from GGUF files only"
            )
    if tensors.head_differs():
        warnings.warn(
            f"{tensors.place(_HEAD)}: ignored, as tie_word_embeddings is true, although it differs from {_EMBEDDING}",
            stacklevel=2,
        )
    generation = _json(folder / "generation_config.json", required=False)
    tokenizer_settings = _json(folder / "tokenizer_config.json", required=False)
    for name, token in _json(folder / "special_tokens_map.json", required=False).items():
        if name in ("bos_token", "eos_token") and tokenizer_settings.get(name) is None:
            tokenizer_settings[name] = token  # older folders name them there alone
    eos_ids = _ids(generation, folder / "generation_config.json")
    for values in (settings, settings.get("text_config")):
        eos_ids += _ids(values, folder / "config.json") if isinstance(values, dict) else []
    tokenizer = tokenizer_from_folder(folder, tokenizer_settings, eos_ids)
    if tokenizer is not None:
        eos_ids = tokenizer.eos_ids
    chat = _template(folder, tokenizer_settings, tokenizer)
    return Checkpoint(config, str(folder), tensors, tokenizer, chat, tuple(dict.fromkeys(eos_ids)))


def _common_name(name: str) -> str:
    """What a tensor is called in models of text that count attention and mlp as one layer."""
    for pattern, plain in _RENAMED[:2]:
        name = re.sub(pattern, plain, name)
    block = _BLOCK.search(name)
    if block is not None:
        layer, kind = int(block[1]), block[2]
        part = {"attn_alpha": "lambda_1", "mlp_alpha": "lambda_2"}.get(kind, ("self_attn", "mlp")[layer % 2])
        name = f"{name[: block.start()]}.layers.{layer // 2}.{part}{name[block.end() :]}"
    return re.sub(*_RENAMED[2], name)


def _files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    if (folder / _SINGLE).is_file():
        return dict.fromkeys(_open(folder / _SINGLE).keys(), _SINGLE)
    if not (folder / _INDEX).is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(
            path.name for path in folder.glob("*.pt*")
        )
        found = f"only {', '.join(pickles[:3])}, and pickles are not read" if pickles else "neither"
        raise LoadError(f"{folder}: expected {_SINGLE} or {_INDEX}, found {found}")
    weight_map = _json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise LoadError(f"{folder / _INDEX}: expected an object weight_map of tensor and file names")
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise LoadError(f"{folder / _INDEX}: expected the plain name of a file for {name}, found {file!r}")
        if not (folder / file).is_file():
            raise LoadError(f"{folder / file}: expected a shard with {name} and others, found no such file")
    return weight_map


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise LoadError(f"{path}: expected a whole safetensors file, found: {error}") from None


def _json(path: Path, required: bool = True) -> dict[str, Any]:
    if not required and not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"{path}: expected a JSON file, found {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: expected a JSON file, found {error}") from None
    if not isinstance(values, dict):
        raise LoadError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def _ids(settings: Mapping[str, Any], path: Path) -> list[int]:
    """eos_token_id of a config: an id or a list of ids."""
    ids = settings.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(token) is int and token >= 0 for token in ids):  # true is no id
        raise LoadError(f"{path}: expected an id or a list of ids for eos_token_id, found {ids!r}")
    return ids


def _template(folder: Path, settings: Mapping[str, Any], tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """chat_template.jinja, else `chat_template` of tokenizer_config.json: a text, or a list that names a "default".

    One that is named "tool_use", in the list or in a file of its own, is for prompts with tools.
    """
    path, where = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    source, tool_use = settings.get("chat_template"), None
    if isinstance(source, list):
        named = {str(entry.get("name")): entry.get("template") for entry in source if isinstance(entry, dict)}
        source, tool_use = named.get("default"), named.get("tool_use")
    if path.is_file():
        where, source = path, _jinja(path)
        more = folder / "additional_chat_templates" / "tool_use.jinja"
        tool_use = _jinja(more) if more.is_file() else None
    if source is None:
        return None
    # Not the tokenizer's first end token: generation_config.json may name others before the one that closes turns.
    bos, eos = (_spelled(settings.get(name)) for name in ("bos_token", "eos_token"))
    if tokenizer is not None:
        bos, eos = bos or tokenizer.bos_token, eos or tokenizer.eos_token
    return ChatTemplate(source, bos, eos, where=str(where), tool_use=tool_use)


def _jinja(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path}: expected a chat template in UTF-8, found: {error}") from None


def _spelled(token: Any) -> str:
    """A token that settings name as text or as an object with `content`; "" for anything else."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""
