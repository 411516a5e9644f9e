"""Behaviours 10, 45 and 49: in whichever way a request ends, its pages come back and nobody remembers it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from fakes import EchoHybrid, EchoModel

from paged import Session
from scheduler import Engine, SamplingParams, SchedulerConfig

WAYS = (
    "stop",
    "length",
    "cancelled waiting",
    "cancelled in prefill",
    "cancelled running",
    "preempted",
    "error",
    "closed",
)
LONG = SamplingParams(max_tokens=40)


def prompt_of(seed: int, length: int = 60) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


def engine_of(model, cache: bool, ahead: bool, num_pages: int = 40) -> Engine:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, plan_ahead=ahead)
    return Engine(model, num_pages=num_pages, config=config, prefix_cache=cache)


def expect_all_back(engine: Engine) -> None:
    engine.check()
    pool, scheduler = engine.pool, engine.scheduler
    assert pool.num_live == 0
    assert pool.num_free + pool.num_cached_only == pool.num_pages
    assert (len(scheduler.waiting), scheduler.waiting.num_tokens, scheduler.state.num_running) == (0, 0, 0)
    assert not scheduler.requests and not scheduler.failed
    assert not engine.delivery.live and not engine.delivery.calls and not engine.delivery.doomed
    if engine.cache is not None:
        engine.reset_prefix_cache()
        assert engine.cache.held_pages == 0
    assert pool.num_free == pool.num_pages and not pool.refs.any()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("model_of", [EchoModel, EchoHybrid])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_end_gives_every_page_back(way: str, model_of, cache: bool, ahead: bool) -> None:
    model = model_of()
    engine = engine_of(model, cache, ahead, 9 if way == "preempted" else 40)
    if way == "stop":
        end = model.greedy(prompt_of(1), 3)[-1]
        [output] = engine.generate([prompt_of(1)], SamplingParams(max_tokens=40, stop_token_ids=[end]))
        assert output.finish_reason == "stop"
    elif way == "length":
        engine.generate([prompt_of(1), prompt_of(2)], LONG)
    elif way.startswith("cancelled"):
        steps = {"cancelled waiting": 0, "cancelled in prefill": 1, "cancelled running": 4}[way]
        engine.submit(prompt_of(1), LONG, request_id="a")
        for _ in range(steps):
            engine.step()
        known = 0 if not steps else int(engine.scheduler.state.computed[engine.scheduler.requests["a"].slot])
        assert (known > 0, known > 60) == {0: (False, False), 1: (True, False), 4: (True, True)}[steps]
        engine.cancel("a")
    elif way == "preempted":
        outputs = engine.generate([prompt_of(1, 40), prompt_of(2, 50), [1, 2]], SamplingParams(max_tokens=30))
        assert sum(o.num_preemptions for o in outputs) > 0
    elif way == "error":
        forward = model.forward

        def fails(batch, storage):
            raise ValueError

        model.forward = fails  # type: ignore[method-assign]
        [output] = engine.generate([prompt_of(1)], LONG)
        assert output.finish_reason == "error"
        model.forward = forward  # type: ignore[method-assign]
    else:
        engine.submit(prompt_of(1), LONG)
        engine.submit(prompt_of(2), LONG)
        engine.step()
        engine.close()
        assert [e.output.finish_reason for e in engine.step() if e.finished] == ["cancelled"] * 2
    while engine.has_work:
        engine.step()
    expect_all_back(engine)


@pytest.mark.parametrize("seed", range(6))
def test_free_and_cached_pages_add_up_after_any_cycle(seed: int) -> None:
    """Behaviour 45; 49: a reset with nothing live leaves size 0."""
    rng = np.random.default_rng(seed)
    engine = engine_of(EchoModel(), True, bool(seed % 2), 20)
    for _ in range(4):
        names = []
        for _ in range(int(rng.integers(1, 7))):
            n = int(rng.integers(1, 4))
            params = SamplingParams(
                max_tokens=int(rng.integers(1, 12)), n=n, temperature=1.0, seed=int(rng.integers(99))
            )
            names.append(engine.submit(prompt_of(int(rng.integers(4)), int(rng.integers(1, 90))), params))
        while engine.has_work:
            engine.step()
            engine.check()
            if rng.random() < 0.1:
                engine.cancel(names[int(rng.integers(len(names)))])
        pool = engine.pool
        assert pool.num_live == 0 and pool.num_free + engine.cache.held_pages == pool.num_pages
    expect_all_back(engine)


def test_a_session_that_is_collected_in_the_middle_of_a_check_fails_nothing(monkeypatch) -> None:
    """The garbage collector runs when it likes; a session in a cycle, as the traceback of an error makes one, waits
    for it."""
    engine = Engine(EchoModel(), num_pages=64)
    session = Session(engine.model, engine.pool)
    session.eval([1, 2, 3])
    session.me = session  # type: ignore[attr-defined]
    del session
    assert engine.cache is not None
    plain = engine.cache.check
    monkeypatch.setattr(engine.cache, "check", lambda: (gc.collect(), plain()))
    engine.check()
    assert engine.pool.num_free == 64
