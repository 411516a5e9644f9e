"""Generation: how one call of the token-level API runs: as a request, by beam search, or drafted at a small depth."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from paged.beam import BeamSearch
from paged.errors import ContextTooLong, OutOfPages, RequestFailed
from paged.kv.pages import Int32
from paged.prefix.handles import PrefixHandle
from paged.sampling import SamplingParams, draw_seed
from paged.session import Session
from paged.speculative import SpeculativeDecoder
from scheduler.engine import Engine
from scheduler.intake import require_prefix
from scheduler.output import RequestOutput
from scheduler.prefixes import attach, building, extend
from scheduler.request import RequestOptions
from scheduler.stops import StopSequences


@dataclass(frozen=True, slots=True)
class Call:
    """What one generation is asked for. `token_stops` are sequences of ids that end it and are left out."""

    params: SamplingParams
    loops: int | None
    cache_window: int
    token_stops: tuple[tuple[int, ...], ...] = ()
    num_beams: int = 1
    draft_loops: int = 0

    def __post_init__(self) -> None:
        if self.num_beams < 1 or self.draft_loops < 0:
            raise ValueError(
                f"num_beams must be at least 1 and draft_loops at least 0, got {self.num_beams} and {self.draft_loops}"
            )
        if any(not stop for stop in self.token_stops):
            raise ValueError("a stop sequence must hold at least one token id")
        by_hand = self.num_beams > 1 or self.draft_loops > 0
        if self.num_beams > 1 and self.draft_loops:
            raise ValueError("num_beams and draft_loops cannot be combined: beams have no single draft to verify")
        if by_hand and self.params.stop:
            raise ValueError(
                "beam search and drafting end at token ids: give stop_sequences as token ids, not as strings"
            )
        if self.num_beams > 1 and self.params.grammar is not None:
            raise ValueError("num_beams and grammar cannot be combined: beam search draws by the model's scores alone")
        if self.num_beams > 1 and self.params.logits_processors:
            raise ValueError("num_beams and logits_processors cannot be combined: beams go by the model's scores alone")
        if 1 < self.num_beams < self.params.n:
            raise ValueError(f"n continuations need num_beams >= n, got n {self.params.n} and {self.num_beams} beams")

    def sample(self, index: int) -> Call:
        """What continuation `index` of `params.n` is asked for, alone."""
        return replace(self, params=self.params.sample(index))


def run(engine: Engine, tokens: Int32, prefix: PrefixHandle | None, call: Call) -> list[list[int]]:
    """The continuations of a prompt: one, or `params.n`; of beam search the `params.n` best of `num_beams`."""
    fit(engine, tokens, call)
    if call.num_beams > 1:
        with building(engine), _session(engine, tokens, prefix, call) as session:
            ends = call.params.end_ids(engine.model.eos_token_ids)
            with memory():
                search = BeamSearch(session, call.num_beams, ends, lock=engine.lock)
                beams = search.run(_most_tokens(engine, tokens, call))
            return [_cut(list(beam.token_ids), call) for beam in beams[: call.params.n]]
    if call.draft_loops or call.token_stops:
        return [list(stream(engine, tokens, prefix, call.sample(i))) for i in range(call.params.n)]
    [output] = engine.generate([tokens], call.params, **_options(prefix, call))
    samples = output.samples or (output,)
    for sample in samples:
        _require_end(engine, sample)
    return [sample.token_ids for sample in samples]


def stream(engine: Engine, tokens: Int32, prefix: PrefixHandle | None, call: Call) -> Generator[int]:
    """The tokens of one continuation as they come, but for those that may turn out to be part of a stop sequence."""
    stops = StopSequences(call.token_stops)
    if call.draft_loops:
        with closing(_drafted(engine, tokens, prefix, call)) as source:
            for token in source:
                yield from stops.push(token)
                if stops.ended:
                    return
    else:
        with engine.stream(tokens, call.params, **_options(prefix, call)) as events:
            for token in (token for event in events for token in event.token_ids):
                yield from stops.push(token)
                if stops.ended:
                    events.stop()
                    return
        assert events.output is not None
        _require_end(engine, events.output)
    yield from stops.flush()


def fit(engine: Engine, tokens: Int32, call: Call) -> None:
    """ContextTooLong where the prompt and what is asked for do not fit the model, OutOfPages where not the pool."""
    most, wanted = engine.model.max_seq_len, call.params.max_tokens or 1
    if len(tokens) + wanted > most:
        raise ContextTooLong(
            f"{len(tokens)} prompt tokens and max_tokens {wanted} make {len(tokens) + wanted}, and max_seq_len is "
            f"{most}; shorten the prompt, lower max_tokens, or raise max_seq_len"
        )
    room = engine.scheduler.capacity_for(engine.model.view(call.loops, call.cache_window))
    if len(tokens) + wanted > room:
        raise OutOfPages(
            f"out of memory: {len(tokens)} prompt tokens and max_tokens {wanted} make {len(tokens) + wanted}, and the "
            f"whole pool holds {room} at this depth; shorten the prompt, lower max_tokens, or raise num_pages"
        )


@contextmanager
def memory() -> Iterator[None]:
    """Say "out of memory" of a pool that is full, as TinyLoop does."""
    try:
        yield
    except OutOfPages as error:
        raise OutOfPages(f"out of memory: {error}; free a handle or make the pool larger (num_pages)") from error


def _options(prefix: PrefixHandle | None, call: Call) -> RequestOptions:
    return {"loops": call.loops, "cache_window": call.cache_window, "prefix": prefix}


def _require_end(engine: Engine, output: RequestOutput) -> None:
    """RequestFailed unless the request came to an end of its own; Closed if the engine was closed meanwhile."""
    if output.finish_reason not in ("stop", "length"):
        engine.require_open()
        raise RequestFailed(output.error or f"the request was {output.finish_reason} before its end")


def _drafted(engine: Engine, tokens: Int32, prefix: PrefixHandle | None, call: Call) -> Generator[int]:
    params = call.params
    ends = params.end_ids(engine.model.eos_token_ids)
    seed = params.seed if params.seed is not None else draw_seed()
    matcher = None if params.grammar is None else engine.grammars.matcher(params.grammar, ends)
    with _session(engine, tokens, prefix, call) as session, memory():
        decoder = SpeculativeDecoder(
            session, params, seed, call.draft_loops, end_ids=ends, lock=engine.lock, matcher=matcher
        )
        least = params.min_tokens if matcher is None else 0  # see SamplingParams
        for i, token in enumerate(decoder.tokens(_most_tokens(engine, tokens, call))):
            if token in ends and i >= least:
                return
            yield token
            engine.require_open()


def _most_tokens(engine: Engine, tokens: Int32, call: Call) -> int:
    """max_tokens; where that is None, what model and pool have room for."""
    view = engine.model.view(call.loops, call.cache_window)
    return engine.scheduler.fit(len(tokens), call.params.max_tokens, view) - len(tokens)


@contextmanager
def _session(engine: Engine, tokens: Int32, prefix: PrefixHandle | None, call: Call) -> Iterator[Session]:
    """A session that has evaluated `tokens`, from a prefix or from what is cached; their full pages are cached."""
    with memory():
        session = _opened(engine, tokens, prefix, call)
    try:
        with memory():
            extend(engine, session, tokens[session.n_past :])
        with engine.lock:
            if engine.cache is not None:  # whole pages: a cached last one would have to be copied before the next token
                size = engine.pool.page_size
                engine.cache.insert(session, tokens[: len(tokens) // size * size])
        yield session
    finally:
        with engine.lock:
            session.release()


def _opened(engine: Engine, tokens: Int32, prefix: PrefixHandle | None, call: Call) -> Session:
    """A session that stands behind what is there of `tokens`."""
    with engine.lock:
        engine.require_open()
        if prefix is not None:
            require_prefix(engine, prefix, tokens, engine.model.view(call.loops, call.cache_window), "")
            if prefix.opens(call.loops):
                return prefix.open(call.loops)
        session = Session(engine.model, engine.pool, call.loops, call.cache_window)
        attach(engine, session, tokens)
        return session


def _cut(tokens: list[int], call: Call) -> list[int]:
    """The tokens in front of the first stop sequence."""
    stops, out = StopSequences(call.token_stops), list[int]()
    for token in tokens:
        out += stops.push(token)
        if stops.ended:
            return out
    return out + stops.flush()
