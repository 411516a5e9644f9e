"""Prefixes that an engine computes and keeps, beside the requests that it serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from paged.errors import OutOfPages
from paged.kv.pages import Int32
from paged.prefix.handles import PrefixHandle
from paged.prefix.resume import ResumeHandle
from paged.session import Session

if TYPE_CHECKING:
    from scheduler.engine import Engine

CHUNK = 512  # tokens evaluated in one go; requests of other threads run in between


@contextmanager
def building(engine: Engine) -> Iterator[None]:
    """Within it pages are held by hand that come back by themselves, so that no request counts as stuck meanwhile."""
    with engine.lock:
        engine.num_building += 1
    try:
        yield
    finally:
        with engine.lock:
            engine.num_building -= 1


@contextmanager
def open_session(engine: Engine, namespace: str, loops: int | None, cache_window: int) -> Iterator[Session]:
    """A session over the engine's pool, for what is driven by hand; released at the end.

    Whoever evaluates with it holds `engine.lock` meanwhile.
    """
    with engine.lock:
        engine.require_open()
        session = Session(engine.model, engine.pool, loops, cache_window, namespace)
    try:
        yield session
    finally:
        with engine.lock:
            session.release()


def attach(engine: Engine, session: Session, tokens: Int32) -> None:
    """Give a fresh session what is cached of `tokens`; nothing, if the pool has no room to copy a partial page to: what
    would be attached is then evicted to compute it again."""
    if engine.cache is not None:
        with engine.lock, suppress(OutOfPages):
            engine.cache.attach(session, tokens)


def extend(engine: Engine, session: Session, tokens: Int32) -> None:
    """Evaluate `tokens` behind what the session has."""
    for start in range(0, len(tokens), CHUNK):
        with engine.lock:
            engine.require_open()
            session.eval(tokens[start : start + CHUNK])


def build_prefix(
    engine: Engine, tokens: Int32, namespace: str, loops: int | None, cache_window: int, share_depths: bool
) -> PrefixHandle:
    """See Engine.build_prefix."""
    with building(engine), open_session(engine, namespace, loops, cache_window) as session:
        attach(engine, session, tokens)
        extend(engine, session, tokens[session.n_past :])
        with engine.lock:
            if engine.cache is not None:
                engine.cache.insert(session, tokens)
            return PrefixHandle(session, share_depths)


def build_resume(
    engine: Engine, tokens: Int32, namespace: str, loops: int, cache_window: int, max_loops: int
) -> ResumeHandle:
    """See Engine.build_resume. Nothing cached is of use: the pages of a prefix do not hold its residual."""
    with building(engine), open_session(engine, namespace, loops, cache_window) as session:
        residual = []
        for start in range(0, len(tokens), CHUNK):
            with engine.lock:
                engine.require_open()
                residual.append(session.eval_residual(tokens[start : start + CHUNK]))
        with engine.lock:
            if engine.cache is not None:
                engine.cache.insert(session, tokens)
            return ResumeHandle(session, residual, max_loops)
