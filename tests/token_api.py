"""What the tests of the token-level API share: the models, a Model that must leave no page behind, and a count of what
a call computed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from feeder import random_tokens

from paged import Session, load_model
from paged.models.looped import LoopedModel
from scheduler import Model

VOCAB = 512


@lru_cache
def tiny(name: str = "tiny:looped", max_seq_len: int = 256) -> LoopedModel:
    return load_model(name, max_seq_len=max_seq_len, device="cpu")


@lru_cache
def with_layers_after() -> LoopedModel:
    """A looped model with a layer behind the loop block, whose rows belong to one depth."""
    return load_model("tiny:llama", max_seq_len=256, device="cpu", loop_layers=(0, 1), loops=4, max_loops=16)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return random_tokens(length, VOCAB, seed)


@dataclass
class Work:
    """What a model computed: forwards, rows in them, and rows times iterations of the loop block."""

    forwards: int = 0
    rows: int = 0
    iterations: int = 0
    calls: list[tuple[int, int, int]] = field(default_factory=list)  # rows, first iteration, depth of each call

    def add(self, batch, start: int, default: int) -> None:
        counts = np.diff(batch.q_indptr)
        depths = np.full(len(counts), default) if batch.loops is None else batch.loops
        self.forwards += 1
        self.rows += int(counts.sum())
        self.iterations += int((counts * (depths - start)).sum())
        self.calls.append((int(counts.sum()), start, int(depths.max())))


@contextmanager
def counting(model) -> Iterator[Work]:
    """Counts what runs in `model` inside the block."""
    work, forward, run_loops = Work(), model.forward, getattr(model, "run_loops", None)
    default = getattr(model, "default_loops", None) or 0

    def counted(batch, storage):
        work.add(batch, 0, default)
        return forward(batch, storage)

    def counted_loops(batch, storage, residual=None, start=0):
        work.add(batch, start, default)
        return run_loops(batch, storage, residual, start)

    before = dict(model.__dict__)
    model.forward, model.run_loops = counted, counted_loops
    try:
        yield work
    finally:
        del model.forward, model.run_loops
        model.__dict__.update((name, before[name]) for name in ("forward", "run_loops") if name in before)


@contextmanager
def opened(model=None, num_pages: int = 1500, **options) -> Iterator[Model]:
    """A Model over a shared model object; at its end all must be sound, and every page back but what handles hold."""
    model = tiny() if model is None else model
    with Model(model, num_pages=num_pages, **options) as api:
        yield api
        api.engine.check()
    pool = api.engine.pool
    pool.check()
    if pool.num_live:
        gc.collect()
        sessions = [x for x in gc.get_objects() if type(x) is Session and x.pool is pool]
        assert pool.num_live == len({page for session in sessions for page in session.table.ids.tolist()})


def live_pages(api: Model) -> int:
    """Pages that something beside the cache holds."""
    gc.collect()
    return api.engine.pool.num_live
