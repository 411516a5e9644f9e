"""Samples of one prompt share its full pages, and write into pages of their own behind it."""

from __future__ import annotations

import pytest
from byhand import span
from fakes import EchoModel
from token_api import opened, prompt_of

from scheduler import Engine, SamplingParams

SEEDS = (1, 2, 3)


def params(seed: int, **more) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=20, **more)


def engine_of() -> Engine:
    return Engine(EchoModel(97), num_pages=32, page_size=16, max_num_seqs=8)


def pages(engine: Engine, name: str) -> list[int]:
    """The pages of a running request."""
    return engine.scheduler.state.pages(engine.scheduler.requests[name].slot)[0].tolist()


@pytest.mark.parametrize(("length", "shared"), [(20, 1), (32, 2), (33, 2)])
@pytest.mark.parametrize("aborted", [None, 0, 1, 2])
def test_each_has_rows_of_its_own_behind_the_full_pages(length: int, shared: int, aborted: int | None) -> None:
    """Of 32 tokens each computes the second page, for its last token; full and equal, the three become one."""
    prompt = span(3, length)
    alone = [engine_of().generate([prompt], params(seed))[0].token_ids for seed in SEEDS]
    engine = engine_of()
    names = [engine.submit(prompt, params(seed)) for seed in SEEDS]
    outputs = {}

    def step() -> None:
        for event in engine.step():
            if event.output is not None:
                outputs[event.request_id] = event.output
        engine.check()

    for _ in range(6):
        step()
    tables = [pages(engine, name) for name in names]
    assert len({tuple(table[:shared]) for table in tables}) == 1
    own = [page for table in tables for page in table[shared:]]
    assert len(set(own)) == len(own) >= 3 and not set(own) & set(tables[0][:shared])
    assert engine.pool.refs[tables[0][0]] == 3 + 1  # and the cache
    if aborted is not None:
        assert engine.cancel(names[aborted])
        engine.check()
    while engine.has_work:
        step()
    for i, name in enumerate(names):
        if i == aborted:
            assert outputs[name].token_ids == alone[i][: len(outputs[name].token_ids)]
        else:
            assert outputs[name].token_ids == alone[i]
    assert engine.pool.num_live == 0
    engine.cache.release()
    assert engine.pool.num_free == engine.pool.num_pages and not engine.pool.refs.any()


@pytest.mark.parametrize("length", [20, 32])
def test_in_a_looped_model_they_do_so_in_every_iteration(length: int) -> None:
    prompt = prompt_of(length)
    with opened() as api:
        outs = api.generate(prompt, max_tokens=20, temperature=1.0, seed=5, n=3)
        [output] = api.engine.generate([prompt], params(5, n=3, top_k=50))
        assert outs == [prompt + sample.token_ids for sample in output.samples]
    for i in range(3):
        with opened() as api:
            [alone] = api.engine.generate([prompt], params(5, n=3, top_k=50).sample(i))
            assert outs[i] == prompt + alone.token_ids
