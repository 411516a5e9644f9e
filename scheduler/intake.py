"""Intake: from a prompt and what is asked of it to a request that can run, or one sentence that says why it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from paged.errors import GeometryMismatch, InvalidRequest
from paged.kv.pages import Int32
from paged.media import MediaSpan, check_spans
from paged.models.base import LanguageModel
from paged.prefix.handles import PrefixHandle
from paged.prefix.hashing import as_tokens, require_namespace
from paged.prefix.retention import Retain, Retention
from paged.sampling import SamplingParams, draw_seed
from paged.spec import KVView
from scheduler.request import PrefillStops, Request, RequestOptions

if TYPE_CHECKING:
    from scheduler.engine import Engine

Prompt = str | Sequence[int] | Int32


def tokens_of(model: LanguageModel, prompt: Prompt) -> Int32:
    """A prompt's token ids, checked against the vocabulary. InvalidRequest or TypeError says what is wrong."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise InvalidRequest("this model has no tokenizer: give the prompt as token ids")
        prompt = model.tokenizer.encode(prompt)
    tokens = as_tokens(prompt)
    if not len(tokens):
        raise InvalidRequest("the prompt is empty; it needs at least one token")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= model.vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(f"token ids must be between 0 and {model.vocab_size - 1}, got {bad}")
    return tokens


def make_request(
    engine: Engine, name: str, prompt: Prompt, params: SamplingParams | None, options: RequestOptions, new: bool = True
) -> Request:
    """A request that was checked in every way; `name` is its id unless the options have one. Of `params.n` it heeds
    nothing: see make_samples. With `new` False no media of it is remembered: it will not run."""
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"params must be SamplingParams, got {type(params).__name__}")
    unknown = set(options) - set(RequestOptions.__annotations__)
    if unknown:
        known = ", ".join(RequestOptions.__annotations__)
        raise TypeError(f"a request takes {known}; got {', '.join(sorted(unknown))}")
    request_id, namespace, prefix = options.get("request_id"), options.get("namespace", ""), options.get("prefix")
    if request_id is not None and not isinstance(request_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"request_id must be a str, got {type(request_id).__name__}")
    cache = options.get("cache", True)
    if not isinstance(cache, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"cache must be True or False, got {cache!r}")
    require_namespace(namespace)
    model = engine.model
    params.validate_for(model.vocab_size)
    tokens, media = keyed_tokens(engine, prompt, options.get("media", ()), new)
    view = model.view(options.get("loops"), options.get("cache_window", 0))
    if prefix is not None:
        require_prefix(engine, prefix, tokens, view, namespace)
    limit = engine.scheduler.fit(len(tokens), params.max_tokens, view, namespace)
    ends = params.end_ids(model.eos_token_ids)
    return Request(
        id=request_id if request_id is not None else name,
        prompt=tokens.copy(),  # the caller may reuse its buffer
        params=params,
        seed=params.seed if params.seed is not None else draw_seed(),
        end_ids=ends,
        limit=limit,
        namespace=namespace,
        priority=_priority(options.get("priority", 0)),
        deadline_s=_seconds(options, "deadline_s"),
        timeout_s=_seconds(options, "timeout_s"),
        queue_timeout_s=_seconds(options, "queue_timeout_s"),
        stops=_stops(options.get("stops")),
        retain=_retention(options.get("retain")),
        view=view,
        cache=cache,
        media=media,
        prefix=prefix,
        matcher=None if params.grammar is None else engine.grammars.matcher(params.grammar, ends),
    )


def keyed_tokens(
    engine: Engine, prompt: Prompt, media: Sequence[MediaSpan], new: bool = True
) -> tuple[Int32, tuple[MediaSpan, ...]]:
    """A prompt's token ids with those of its media in their places (see MediaIds.keyed), and the spans in order."""
    tokens, model = tokens_of(engine.model, prompt), engine.model
    spans = check_spans(media, len(tokens), model.media_size, model.name)
    return engine.media_ids.keyed(tokens, spans, new), spans


def _priority(priority: int) -> int:
    if not isinstance(priority, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"priority must be an int, got {type(priority).__name__}")
    return priority


def _seconds(options: RequestOptions, name: Literal["deadline_s", "timeout_s", "queue_timeout_s"]) -> float | None:
    seconds = options.get(name)
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(cast("object", seconds), Real):
        raise TypeError(f"{name} must be a number of seconds or None, got {seconds!r}")
    if not seconds >= 0:
        raise InvalidRequest(f"{name} must be 0 or more seconds, got {seconds}")
    return seconds


def _stops(stops: PrefillStops | None) -> PrefillStops:
    if stops is not None and not isinstance(stops, PrefillStops):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"stops must be PrefillStops or None, got {type(stops).__name__}")
    return stops or PrefillStops()


def _retention(retain: Retain) -> Retention | None:
    try:
        return Retention.of(retain)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def require_engine(engine: Engine, prefix: PrefixHandle) -> None:
    """GeometryMismatch for a prefix that another engine built: its pages are not here."""
    if prefix.pool is not engine.pool:
        raise GeometryMismatch("this prefix was built by another engine; build it with this one's build_prefix()")


def require_prefix(engine: Engine, prefix: PrefixHandle, tokens: Int32, view: KVView, namespace: str) -> None:
    """Refuse a prefix that is not what this request would compute."""
    if not isinstance(prefix, PrefixHandle):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"prefix must be a PrefixHandle from build_prefix(), got {type(prefix).__name__}")
    require_engine(engine, prefix)
    prefix.require(view)
    if prefix.namespace != namespace:
        raise InvalidRequest(f"the prefix belongs to namespace {prefix.namespace!r}, the request to {namespace!r}")
    if not np.array_equal(tokens[: prefix.num_tokens], prefix.tokens):
        raise InvalidRequest(f"the prompt does not start with the {prefix.num_tokens} tokens of the prefix")
