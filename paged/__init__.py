"""Paged KV cache for one sequence at a time: pages, prefix cache, models, sampling, sessions.

Importing this package loads no torch: each public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged.batch import eval_batch
    from paged.beam import Beam, BeamSearch
    from paged.errors import (
        BadLogits,
        CheckFailed,
        Closed,
        ContextTooLong,
        Draining,
        DuplicateRequest,
        ExtraMissing,
        GeometryMismatch,
        InvalidRequest,
        LoadError,
        LoopsMismatch,
        MissingTensor,
        NativeMissing,
        OutOfPages,
        PagedError,
        ProcessorFailed,
        PromptTooLong,
        QueueFull,
        RequestFailed,
        SessionInUse,
        StateMismatch,
        UnsupportedShape,
    )
    from paged.grammar import Grammar
    from paged.kv.page_table import PageTable
    from paged.kv.pages import PagePool
    from paged.kv.state import StatePool, StateSnapshot
    from paged.loaders.renderer import ChatRenderer, MarkedPrompt
    from paged.matcher import GrammarCompiler, GrammarMatcher
    from paged.media import MediaSpan
    from paged.models.registry import load_model
    from paged.prefix.cache import PrefixCache
    from paged.prefix.checkpoints import Checkpoint
    from paged.prefix.explain import Explanation
    from paged.prefix.handles import PrefixHandle
    from paged.prefix.hashing import page_hash
    from paged.prefix.pins import Pin
    from paged.prefix.pool import PrefixPool
    from paged.prefix.resume import ResumeHandle
    from paged.prefix.retention import Retention
    from paged.sampling import SamplingParams
    from paged.session import Session
    from paged.spec import KVSpec, StatePlane, StateSpec
    from paged.speculative import SpeculativeDecoder

__version__ = "0.1.0"

_HOME = {
    "PagePool": "paged.kv.pages",
    "PageTable": "paged.kv.page_table",
    "KVSpec": "paged.spec",
    "StatePlane": "paged.spec",
    "StateSpec": "paged.spec",
    "StatePool": "paged.kv.state",
    "StateSnapshot": "paged.kv.state",
    "PrefixCache": "paged.prefix.cache",
    "Checkpoint": "paged.prefix.checkpoints",
    "Explanation": "paged.prefix.explain",
    "Pin": "paged.prefix.pins",
    "PrefixHandle": "paged.prefix.handles",
    "PrefixPool": "paged.prefix.pool",
    "ResumeHandle": "paged.prefix.resume",
    "Retention": "paged.prefix.retention",
    "page_hash": "paged.prefix.hashing",
    "Session": "paged.session",
    "eval_batch": "paged.batch",
    **dict.fromkeys(("Beam", "BeamSearch"), "paged.beam"),
    "SpeculativeDecoder": "paged.speculative",
    "SamplingParams": "paged.sampling",
    "Grammar": "paged.grammar",
    "MediaSpan": "paged.media",
    **dict.fromkeys(("GrammarCompiler", "GrammarMatcher"), "paged.matcher"),
    "load_model": "paged.models.registry",
    **dict.fromkeys(("ChatRenderer", "MarkedPrompt"), "paged.loaders.renderer"),
    **dict.fromkeys(
        (
            "PagedError",
            "LoadError",
            "MissingTensor",
            "UnsupportedShape",
            "InvalidRequest",
            "PromptTooLong",
            "ContextTooLong",
            "DuplicateRequest",
            "QueueFull",
            "OutOfPages",
            "BadLogits",
            "ProcessorFailed",
            "GeometryMismatch",
            "SessionInUse",
            "StateMismatch",
            "LoopsMismatch",
            "Closed",
            "Draining",
            "RequestFailed",
            "NativeMissing",
            "ExtraMissing",
            "CheckFailed",
        ),
        "paged.errors",
    ),
}

__all__ = [
    "BadLogits",
    "Beam",
    "BeamSearch",
    "ChatRenderer",
    "CheckFailed",
    "Checkpoint",
    "Closed",
    "ContextTooLong",
    "Draining",
    "DuplicateRequest",
    "Explanation",
    "ExtraMissing",
    "GeometryMismatch",
    "Grammar",
    "GrammarCompiler",
    "GrammarMatcher",
    "InvalidRequest",
    "KVSpec",
    "LoadError",
    "LoopsMismatch",
    "MarkedPrompt",
    "MediaSpan",
    "MissingTensor",
    "NativeMissing",
    "OutOfPages",
    "PagePool",
    "PageTable",
    "PagedError",
    "Pin",
    "PrefixCache",
    "PrefixHandle",
    "PrefixPool",
    "ProcessorFailed",
    "PromptTooLong",
    "QueueFull",
    "RequestFailed",
    "ResumeHandle",
    "Retention",
    "SamplingParams",
    "Session",
    "SessionInUse",
    "SpeculativeDecoder",
    "StateMismatch",
    "StatePlane",
    "StatePool",
    "StateSnapshot",
    "StateSpec",
    "UnsupportedShape",
    "__version__",
    "eval_batch",
    "load_model",
    "page_hash",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'paged' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
