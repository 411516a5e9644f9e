"""Model: TinyLoop's token-level API over an Engine; names, order and defaults of arguments are those of its pages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paged.errors import Closed, ContextTooLong, GeometryMismatch, LoopsMismatch, OutOfPages, require_integer
from paged.kv.pages import Int32
from paged.models.base import LanguageModel
from paged.models.registry import load_model
from paged.prefix.handles import PrefixHandle
from paged.prefix.pool import PrefixPool
from paged.prefix.resume import ResumeHandle
from paged.sampling import SamplingParams
from paged.spec import KVView
from scheduler import generation
from scheduler.engine import Engine
from scheduler.generation import Call, memory
from scheduler.intake import require_engine
from scheduler.stops import Stops, texts_and_ids


@dataclass(slots=True)
class ModelStats:
    """What the calls of one Model came to."""

    pool_hits: int = 0
    pool_misses: int = 0
    pool_fallbacks: int = 0  # hits whose prefix could not be used: the call computed its whole prompt


def kv_dtype_from_env(default: str) -> str:
    """The kv_dtype that TinyLoop's environment variables name.

    TINYLOOP_KV_INT8=1 is "int8", TINYLOOP_KV_INT4=1 "int4", neither is `default`; TINYLOOP_KV_H_MODE=1 adds "-h": pages
    keep the input of each block instead of K and V. "", "0" and "false" count as not set. ValueError for both widths.
    """
    int8, int4, store_h = (
        os.environ.get(f"TINYLOOP_KV_{name}", "").lower() not in ("", "0", "false")
        for name in ("INT8", "INT4", "H_MODE")
    )
    if int8 and int4:
        raise ValueError("TINYLOOP_KV_INT8 and TINYLOOP_KV_INT4 are both set: unset one of them")
    name = "int8" if int8 else "int4" if int4 else default
    return name + "-h" if store_h else name


class Model:
    """One model with an engine of its own, for callers that think in tokens: prompts and results are token ids.

    Each call that generates returns prompt and continuation in one list. May be shared by threads: calls of several
    threads run as one batch (beam search and speculative decoding take turns with it, step by step). Everything else
    than these verbs is `engine`'s.

    Arguments of all calls that generate:
        max_tokens          tokens to generate at most
        loops               depth of a looped model; None: its default. Leave it out for other models
        temperature, top_k, top_p, repetition_penalty, seed    see SamplingParams; temperature 0 is greedy
        cache_window        W > 0: every token sees the last W positions alone
        stop_sequences      strings, or sequences of token ids (which are left out of the result)
        grammar             see paged.Grammar
        num_beams           > 1: the best continuation that beam search finds; nothing is sampled, there is no grammar
        draft_loops         > 0: draft at this depth and verify at `loops`; the tokens stay the same
        n                   > 1: a list of that many continuations instead of one

    Errors: ValueError or TypeError for an argument that cannot be, Closed (a RuntimeError) after `close`, LoopsMismatch
    (a RuntimeError) for a handle of another depth, OutOfPages (a RuntimeError, "out of memory"), ContextTooLong (both a
    RuntimeError and a ValueError) where prompt and max_tokens exceed max_seq_len.
    """

    def __init__(self, source: str | LanguageModel = "smollm2", max_seq_len: int = 2048, **options: Any) -> None:
        """`source` is what `load_model` takes; `options` are further arguments of Engine.

        Where `kv_dtype` is not given, TinyLoop's environment variables choose it: see `kv_dtype_from_env`.
        """
        model = load_model(source, max_seq_len=max_seq_len, device=options.pop("device", "auto"))
        options.setdefault("kv_dtype", kv_dtype_from_env(model.default_kv_dtype()))
        self.engine = Engine(model, **options)
        self.stats = ModelStats()
        self._closed = False

    def config(self) -> dict[str, Any]:
        """What the model is, as plain values: name, vocab_size, max_seq_len, default_loops, max_loops, ..."""
        model = self._open("config")
        return {
            "name": model.name,
            "vocab_size": model.vocab_size,
            "max_seq_len": model.max_seq_len,
            "default_loops": model.default_loops,
            "max_loops": model.max_loops,
            "kv_dtype": self.engine.kv_dtype,
            "page_size": self.engine.pool.page_size,
            "eos_token_ids": list(model.eos_token_ids),
            **model.extra_info(),
        }

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, for a model with a tokenizer."""
        self._open("encode")
        return self.engine.tokens_of(text).tolist()

    def decode(self, tokens: Sequence[int] | Int32) -> str:
        """The text of token ids."""
        tokenizer = self._open("decode").tokenizer
        if tokenizer is None:
            raise ValueError("this model has no tokenizer: its tokens stand for no text")
        return tokenizer.decode(tokens)

    # One prompt -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Sequence[int] | Int32,
        max_tokens: int = 32,
        loops: int | None = None,
        temperature: float = 0.0,
        top_k: int = 50,
        top_p: float = 1.0,
        cache_window: int = 0,
        repetition_penalty: float = 1.0,
        stop_sequences: Stops = (),
        **more: Any,
    ) -> list[int]:
        """Prompt and continuation. `more`: seed, grammar, num_beams, draft_loops, n (see the class)."""
        self._open("generate")
        call = self._call(
            loops,
            cache_window,
            stop_sequences,
            more,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
        )
        return self._run(self.engine.tokens_of(prompt), None, call)

    def generate_stream(
        self,
        prompt: Sequence[int] | Int32 | PrefixHandle,
        max_tokens: int = 32,
        loops: int | None = None,
        temperature: float = 0.0,
        top_k: int = 50,
        top_p: float = 1.0,
        cache_window: int = 0,
        repetition_penalty: float = 1.0,
        stop_sequences: Stops = (),
        pool: PrefixPool | None = None,
        **more: Any,
    ) -> Iterator[int]:
        """The tokens of the continuation as they come; closing the iterator ends the request.

        A handle instead of a prompt continues that prefix, and `pool` gives the longest registered prefix. Arguments as
        those of `generate`, but for num_beams and n: neither has one continuation that grows.
        """
        self._open("generate_stream")
        call = self._call(
            loops,
            cache_window,
            stop_sequences,
            more,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
        )
        if call.num_beams > 1 or call.params.n > 1:
            raise ValueError("a stream has one continuation: num_beams and n must be 1, or use generate()")
        if isinstance(prompt, PrefixHandle):
            if pool is not None:
                raise TypeError("generate_stream takes a handle or a pool, got both")
            self._require_handle(prompt, call)
            prefix, tokens = prompt, prompt.tokens
        else:
            tokens = self.engine.tokens_of(prompt)
            prefix = None if pool is None else self._match(pool, tokens, call)
        generation.fit(self.engine, tokens, call)
        return generation.stream(self.engine, tokens, prefix, call)

    # One prefix, many calls -----------------------------------------------------------------------------------

    def build_prefix_cache(
        self,
        prompt: Sequence[int] | Int32,
        loops: int | None = None,
        cache_window: int = 0,
        share_depths: bool = False,
    ) -> PrefixHandle:
        """Compute a prefix once; the handle serves any number of calls at that depth and window, also at once.

        With `share_depths` it serves smaller depths too. Its pages go back when nothing refers to it any more.
        """
        self._open("build_prefix_cache")
        tokens = self._prefix_args(prompt, loops, cache_window)
        with memory():
            return self.engine.build_prefix(tokens, loops=loops, cache_window=cache_window, share_depths=share_depths)

    def generate_from_prefix_cache(
        self,
        prefix: PrefixHandle,
        max_tokens: int = 32,
        loops: int | None = None,
        temperature: float = 0.0,
        top_k: int = 50,
        top_p: float = 1.0,
        cache_window: int = 0,
        repetition_penalty: float = 1.0,
        stop_sequences: Stops = (),
        **more: Any,
    ) -> list[int]:
        """Continue a prefix: its tokens and the continuation. The first token needs no forward.

        The depth must be that of the prefix (None: the model's default, as everywhere), and so must the window.
        """
        self._open("generate_from_prefix_cache")
        call = self._call(
            loops,
            cache_window,
            stop_sequences,
            more,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
        )
        self._require_handle(prefix, call)
        return self._run(prefix.tokens, prefix, call)

    # Many prefixes --------------------------------------------------------------------------------------------

    def register_prefix(
        self,
        pool: PrefixPool,
        tokens: Sequence[int] | Int32,
        loops: int | None = None,
        cache_window: int = 0,
    ) -> int:
        """Compute a prefix and keep it in `pool`; returns the number of tokens that can match, 0 if there is no room.

        What is registered already is not computed again. The pool keeps a copy of the tokens. Where there are no pages
        for it beside the entry that it would push out of a full pool, that one goes first.
        """
        model = self._open("register_prefix")
        _require(pool, PrefixPool, "pool")
        ids = self._prefix_args(tokens, loops, cache_window)
        view = model.view(loops, cache_window)
        found = pool.find(ids, view.loops, cache_window)
        if found is not None:
            if self._serves(found.handle, view):
                return pool.register(found.handle)
            pool.remove(found.id)  # of another engine, or of weights that have changed since
        while True:
            try:
                handle = self.engine.build_prefix(
                    ids, loops=loops, cache_window=cache_window, share_depths=pool.share_depths
                )
            except OutOfPages:
                if not pool.make_room():
                    return 0
            else:
                return pool.register(handle)

    def generate_with_pool(
        self,
        pool: PrefixPool,
        prompt: Sequence[int] | Int32,
        max_tokens: int = 128,
        loops: int | None = None,
        temperature: float = 1.0,
        top_k: int = 50,
        cache_window: int = 0,
        **more: Any,
    ) -> list[int]:
        """Prompt and continuation, from the longest registered prefix that the prompt starts with, or from nothing.

        `more`: top_p, repetition_penalty, stop_sequences, and what `generate` takes as more.
        """
        self._open("generate_with_pool")
        _require(pool, PrefixPool, "pool")
        stops = more.pop("stop_sequences", ())
        call = self._call(loops, cache_window, stops, more, max_tokens=max_tokens, temperature=temperature, top_k=top_k)
        tokens = self.engine.tokens_of(prompt)
        generation.fit(self.engine, tokens, call)
        prefix = self._match(pool, tokens, call)
        try:
            return self._run(tokens, prefix, call)
        except RuntimeError:
            if prefix is None or self._closed:
                raise
            self._count("pool_fallbacks")
            return self._run(tokens, None, call)

    # One prefix, several depths -------------------------------------------------------------------------------

    def build_resume_handle(
        self,
        tokens: Sequence[int] | Int32,
        L_used: int,
        max_loops: int = 32,
        cache_window: int = 0,
    ) -> ResumeHandle:
        """Compute a prefix at depth `L_used`, so that `resume_generate` can go on at any depth up to `max_loops`."""
        self._open("build_resume_handle")
        L_used, max_loops = require_integer("L_used", L_used), require_integer("max_loops", max_loops)
        if max_loops > 64 or not 1 <= L_used <= max_loops:
            raise ValueError(f"1 <= L_used <= max_loops <= 64 must hold, got L_used {L_used} and max_loops {max_loops}")
        ids = self._prefix_args(tokens, L_used, cache_window)
        with memory():
            return self.engine.build_resume(ids, L_used, max_loops=max_loops, cache_window=cache_window)

    def resume_generate(
        self,
        handle: ResumeHandle,
        new_L: int,
        max_tokens: int = 32,
        loops: int | None = None,
        temperature: float = 0.0,
        top_k: int = 50,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        stop_sequences: Stops = (),
        **more: Any,
    ) -> list[int]:
        """Bring the prefix to depth `new_L` and continue it: only iterations [L_used, new_L) run over the prefix.

        Each token of the continuation is computed with `loops` iterations (None: new_L), at most `new_L`. The handle
        stays as it is; `resume` gives the deeper prefix as a handle of its own.
        """
        self._open("resume_generate")
        _require(handle, ResumeHandle, "handle")
        new_L = require_integer("new_L", new_L)
        depth = new_L if loops is None else loops
        call = self._call(
            depth,
            handle.cache_window,
            stop_sequences,
            more,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
        )
        if depth > new_L:
            raise LoopsMismatch(
                f"loops mismatch: the prefix is resumed at {new_L} loops, and tokens of {depth} would need its rows at "
                "that depth; lower loops or raise new_L"
            )
        deeper = self.resume(handle, new_L)
        return self._run(handle.tokens, deeper, call)

    def resume(self, handle: ResumeHandle, new_L: int) -> PrefixHandle:
        """The prefix of a resume handle at depth `new_L`, as a handle that any number of calls may start from.

        Where no layers follow the loop block, calls of less depth too; their first token is that of `new_L`.
        """
        self._open("resume")
        _require(handle, ResumeHandle, "handle")
        require_engine(self.engine, handle)
        with memory(), self.engine.lock:
            session = handle.resume(new_L)
            try:
                if self.engine.cache is not None:
                    self.engine.cache.insert(session, handle.tokens)
                loop = session.model.spec.loop
                shared = loop is not None and loop.after_group is None
                return PrefixHandle(session, share_depths=shared, own_logits=True)
            finally:
                session.release()

    # Ending ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what runs and give the pages back; later calls raise Closed. A second close does nothing."""
        self._closed = True
        self.engine.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Parts ----------------------------------------------------------------------------------------------------

    def _open(self, verb: str) -> LanguageModel:
        if self._closed:
            raise Closed(f"scheduler.Model is closed; cannot call {verb}")
        return self.engine.model

    def _call(
        self, loops: int | None, cache_window: int, stop_sequences: Stops, more: dict[str, Any], **sampling: Any
    ) -> Call:
        """What a call asks for; `more` may hold num_beams and draft_loops, and further fields of SamplingParams."""
        depth = self.engine.model.view(loops, cache_window).loops  # refuses what the model does not take
        texts, ids = texts_and_ids(stop_sequences, self.engine.model.vocab_size)
        beams = require_integer("num_beams", more.pop("num_beams", 1))
        drafts = require_integer("draft_loops", more.pop("draft_loops", 0))
        if drafts >= max(1, depth):
            raise ValueError(f"draft_loops must be at least 1 and below the {depth} loops of the call, got {drafts}")
        params = SamplingParams(**sampling, **more, stop=texts)
        return Call(params, loops, cache_window, ids, beams, drafts)

    def _prefix_args(self, tokens: Sequence[int] | Int32, loops: int | None, cache_window: int) -> Int32:
        """The tokens of a prefix, checked like its depth and window."""
        model, ids = self.engine.model, self.engine.tokens_of(tokens)
        model.view(loops, cache_window)
        if len(ids) > model.max_seq_len:
            raise ContextTooLong(
                f"the prefix has {len(ids)} tokens, and max_seq_len is {model.max_seq_len}; shorten it"
            )
        return ids

    def _require_handle(self, prefix: PrefixHandle, call: Call) -> None:
        """Refuse what is no handle, and one that does not serve the call."""
        _require(prefix, PrefixHandle, "prefix")
        require_engine(self.engine, prefix)
        prefix.require(self.engine.model.view(call.loops, call.cache_window))

    def _serves(self, prefix: PrefixHandle, view: KVView) -> bool:
        """Whether a registered prefix of that depth and window can be used."""
        try:
            require_engine(self.engine, prefix)
            prefix.require(view)
        except GeometryMismatch:
            return False
        return True

    def _match(self, pool: PrefixPool, tokens: Int32, call: Call) -> PrefixHandle | None:
        """The longest registered prefix of a prompt."""
        _require(pool, PrefixPool, "pool")
        view = self.engine.model.view(call.loops, call.cache_window)
        entry = pool.match(tokens, view.loops, call.cache_window)
        if entry is None:
            self._count("pool_misses")
            return None
        self._count("pool_hits")
        if not self._serves(entry.handle, view):
            self._count("pool_fallbacks")
            return None
        return entry.handle

    def _count(self, name: str) -> None:
        with self.engine.lock:
            setattr(self.stats, name, getattr(self.stats, name) + 1)

    def _run(self, tokens: Int32, prefix: PrefixHandle | None, call: Call) -> Any:
        """Prompt and continuation in one list; a list of those where several are asked for."""
        outputs = generation.run(self.engine, tokens, prefix, call)
        prompt: list[int] = tokens.tolist()
        whole = [prompt + output for output in outputs]
        return whole if call.params.n > 1 else whole[0]


def _require(value: object, kind: type, name: str) -> None:
    """TypeError for an argument of another kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
