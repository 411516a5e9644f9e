"""One way in: whatever names a model becomes a LanguageModel."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paged.kv.storage import PageStorage
from paged.models.base import ForwardBatch, LanguageModel
from paged.models.config import LoopChange, ModelConfig
from paged.spec import KVSpec

ModelSource = str | os.PathLike[str] | LanguageModel | Any


def load_model(
    source: ModelSource,
    *,
    max_seq_len: int | None = None,
    device: str = "auto",
    loop_layers: tuple[int, int] | None = None,
    loops: int | None = None,
    max_loops: int | None = None,
) -> LanguageModel:
    """A model from "smollm2", a .gguf file, a Hugging Face folder, a tiny model ("tiny:llama", "tiny:hybrid",
    "tiny:looped"), or your own object.

    `max_seq_len` lowers the model's own limit and cannot raise it. `device` is "auto" (a GPU if there is one),
    "cpu", "cuda" or "cuda:N"; the weights are fp32 on the CPU and bf16 on a GPU. An object of your own needs the
    attributes of `LanguageModel`, keeps its own device, and is not altered: it is returned as it is if it is a
    LanguageModel (and max_seq_len is not lowered), else behind a view of it.

    `loop_layers=(a, b)` makes a LoopedModel of any Llama-like one: layers a .. b - 1 run `loops` times (default 8;
    once gives the plain model's logits), or as often as a batch says, up to `max_loops` (default 32). A model that is
    looped by its own config has these three from there, and each that is given here replaces one.

    LoadError (a ValueError) names the file and what was expected in it; TypeError names a missing attribute.
    """
    if isinstance(source, (str, os.PathLike)):
        target, loop = pick_device(device), (loop_layers, loops, max_loops)
        if isinstance(source, str) and source.startswith("tiny:"):
            from paged.models.tiny import tiny_model

            return tiny_model(source, max_seq_len=max_seq_len, device=target, loop=loop)
        return _from_checkpoint(source, max_seq_len, target, loop)
    if (loop_layers, loops, max_loops) != (None, None, None):
        raise ValueError(f"loop_layers, loops and max_loops are for models on disk, got a {type(source).__name__}")
    return _own_model(source, max_seq_len)


def pick_device(device: str) -> torch.device:
    """The torch device for "auto", "cpu", "cuda" or "cuda:N"; ValueError if it is none of these, or not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f'device must be "auto", "cpu", "cuda" or "cuda:N", got {device!r}')
    if found.type == "cuda" and not (found.index or 0) < torch.cuda.device_count():
        raise ValueError(f"device {device!r} was asked for, and torch sees {torch.cuda.device_count()} GPUs")
    return found


def build_model(
    config: ModelConfig,
    tensors: Callable[[str], torch.Tensor],
    *,
    max_seq_len: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LanguageModel:
    """The model of a config, whatever its kind; the arguments are those of LlamaModel."""
    from paged.models.dory import DoryModel
    from paged.models.hybrid import HybridModel
    from paged.models.llama import LlamaModel
    from paged.models.looped import LoopedModel

    if config.family == "qwen3_5":
        kind = HybridModel
    elif config.family == "dory":
        kind = DoryModel
    else:
        kind = LlamaModel if config.loop is None else LoopedModel
    return kind(config, tensors, max_seq_len=max_seq_len, device=device, dtype=dtype)


def _from_checkpoint(
    source: str | os.PathLike[str], max_seq_len: int | None, device: torch.device, loop: LoopChange
) -> LanguageModel:
    from paged.loaders.open import open_checkpoint

    checkpoint = open_checkpoint(source)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_model(
        checkpoint.config.with_loop(*loop),
        lambda name: checkpoint.tensors.get(name, dtype),
        max_seq_len=max_seq_len,
        device=device,
        dtype=dtype,
    )
    model.name = Path(source).stem if os.path.exists(source) else str(source)
    model.tokenizer = checkpoint.tokenizer
    model.chat = checkpoint.chat
    model.eos_token_ids = checkpoint.eos_token_ids
    return model


# What an object of one's own must have, and of which type; the rest of LanguageModel has defaults.
_REQUIRED: tuple[tuple[str, type, str], ...] = (
    ("spec", KVSpec, "the geometry of its pages, a paged.KVSpec"),
    ("vocab_size", int, "the number of columns of its logits, an int"),
    ("max_seq_len", int, "the positions it can hold, an int"),
    ("fingerprint", str, "a str that differs between models and between weights (see paged.models.fingerprint)"),
)
_OPTIONAL = (
    "eos_token_ids",
    "name",
    "device",
    "tokenizer",
    "chat",
    "state_spec",
    "default_loops",
    "max_loops",
    "windows_cache",
    "input_size",
    "media_size",
)


class _View(LanguageModel):
    """A model of the user's own that is not a LanguageModel, or whose limit was lowered."""

    def __init__(self, model: Any, max_seq_len: int) -> None:
        self.model = model
        self.spec = model.spec
        self.vocab_size = model.vocab_size
        self.max_seq_len = max_seq_len
        for name in _OPTIONAL:
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))

    @property
    def fingerprint(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The model's own, asked for each time: it changes when the weights do."""
        return self.model.fingerprint

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: ForwardBatch, storage: PageStorage) -> torch.Tensor:
        return self.model.forward(batch, storage)

    def run_loops(
        self, batch: ForwardBatch, storage: PageStorage, residual: torch.Tensor | None = None, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = getattr(self.model, "run_loops", super().run_loops)
        return own(batch, storage, residual, start)

    def default_kv_dtype(self) -> str:
        own = getattr(self.model, "default_kv_dtype", None)
        return own() if own is not None else super().default_kv_dtype()

    def extra_info(self) -> dict[str, Any]:
        own = getattr(self.model, "extra_info", None)
        return own() if own is not None else {}


def _own_model(model: Any, max_seq_len: int | None) -> LanguageModel:
    kind = type(model).__name__
    for name, wanted, meaning in _REQUIRED:
        value = getattr(model, name, None)
        if not isinstance(value, wanted) or isinstance(value, bool) or value == "":
            found = "none" if value is None else repr(value)
            raise TypeError(f"a model needs the attribute {name}: {meaning}; {kind} has {found}")
    forward = getattr(type(model), "forward", None)
    if forward is None or forward is LanguageModel.forward:
        raise TypeError(f"a model needs the method forward(batch, storage) -> logits [R, vocab_size]; {kind} has none")
    if max_seq_len is not None and max_seq_len < 1:
        raise ValueError(f"max_seq_len must be at least 1, got {max_seq_len}")
    limit = min(model.max_seq_len, max_seq_len or model.max_seq_len)
    if isinstance(model, LanguageModel) and limit == model.max_seq_len:
        return model
    return _View(model, limit)
