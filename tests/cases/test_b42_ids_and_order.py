"""Ids are the caller's, one live request each; results come in the order of the prompts, call after call."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from fakes import EchoModel
from gated import run

from paged.errors import DuplicateRequest
from scheduler import AsyncEngine, Engine, SamplingParams


def test_an_id_is_refused_while_it_is_live_and_cancelled_once() -> None:
    engine = Engine(EchoModel(), num_pages=64)
    engine.submit([1, 2], SamplingParams(max_tokens=9), request_id="a")
    engine.step()
    for call in (engine.submit, engine.stream, engine.generate):
        with pytest.raises(DuplicateRequest, match="'a' is still live"):
            call([3, 4], request_id="a")
    engine.check()
    first = []
    while engine.has_work:
        first += [e.output for e in engine.step() if e.finished]
    assert [o.token_ids for o in first] == [engine.model.greedy([1, 2], 9)]
    engine.submit([5, 6], SamplingParams(max_tokens=9), request_id="a")
    engine.step()
    assert engine.cancel("a") is True and engine.cancel("a") is False
    assert engine.stats()["num_cancelled"] == 1
    assert [e.output.finish_reason for e in engine.step() if e.finished] == ["cancelled"]
    assert engine.generate([[7, 8]], SamplingParams(max_tokens=2), request_id="a")[0].request_id == "a"


def test_a_batch_whose_id_is_taken_leaves_the_live_one_alone() -> None:
    """Its own clean-up must not cancel the request that had the id before."""
    engine = Engine(EchoModel(), num_pages=64)
    engine.submit([1, 2], SamplingParams(max_tokens=5), request_id="a")
    with pytest.raises(DuplicateRequest):
        engine.generate([[3, 4]], request_id="a")
    outputs = []
    while engine.has_work:
        outputs += [e.output for e in engine.step() if e.finished]
    assert [(o.finish_reason, o.token_ids) for o in outputs] == [("length", engine.model.greedy([1, 2], 5))]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_two_batches_that_end_in_mixed_order_come_back_in_theirs(kind: str) -> None:
    prompts = [np.random.default_rng(i).integers(0, 97, 10 + 13 * i).tolist() for i in range(5)]
    params = [SamplingParams(max_tokens=n) for n in (17, 1, 9, 3, 12)]
    model = EchoModel()
    want = [model.greedy(p, s.max_tokens) for p, s in zip(prompts, params, strict=True)]
    if kind == "sync":
        engine = Engine(model, num_pages=64, max_num_seqs=3)
        batches = [engine.generate(prompts, params) for _ in range(2)]
    else:

        async def main() -> list:
            async with AsyncEngine(model, num_pages=64, max_num_seqs=3) as engine:
                return list(await asyncio.gather(*(engine.generate(prompts, params) for _ in range(2))))

        batches = run(main())
    for outputs in batches:
        assert [o.token_ids for o in outputs] == want
    ids = [o.request_id for outputs in batches for o in outputs]
    assert len(set(ids)) == 10


def test_a_thousand_ids_are_kept_apart_whatever_they_look_like() -> None:
    engine = Engine(EchoModel(), num_pages=200, max_num_seqs=32)
    looks = (str, hex, "{}/1".format, "Ä {}".format, "request-{}".format)
    ids = ["", *dict.fromkeys(look(i) for i in range(200) for look in looks)][:1000]
    for i, name in enumerate(ids):
        assert engine.submit([i % 97, i // 97], SamplingParams(max_tokens=2), request_id=name) == name
    for bad in (7, 1.5, b"x", ("a",)):
        with pytest.raises(TypeError, match="request_id must be a str"):
            engine.submit([1], request_id=bad)  # type: ignore[arg-type]
    outputs = {}
    while engine.has_work:
        outputs.update({e.request_id: e.output for e in engine.step() if e.finished})
    assert sorted(outputs) == sorted(ids)
    for i, name in enumerate(ids):
        assert outputs[name].token_ids == engine.model.greedy([i % 97, i // 97], 2)
