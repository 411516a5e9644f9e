"""Behaviours 18, 19 and 25, as far as an engine is what a server asks: queue, hang-ups, concurrency, the end."""

from __future__ import annotations

import asyncio

import pytest
from byhand import span
from fakes import EchoModel
from gated import GatedModel, run

from paged.errors import Draining, PromptTooLong
from scheduler import AsyncEngine, Engine, SamplingParams

PARAMS = SamplingParams(max_tokens=8)


def test_a_third_request_waits_for_two_and_one_that_is_cancelled_in_the_queue_gives_no_token() -> None:
    model = EchoModel()
    engine = Engine(model, num_pages=64, max_num_seqs=2)
    for name in "abcd":
        engine.submit([ord(name) - 90, 2, 3], PARAMS, request_id=name)
    events = engine.step()
    assert engine.stats()["num_running"] == 2 and engine.stats()["num_waiting"] == 2
    assert engine.cancel("c")
    while engine.has_work:
        events += engine.step()
    outputs = {e.request_id: e.output for e in events if e.finished}
    assert (outputs["c"].finish_reason, outputs["c"].token_ids) == ("cancelled", [])
    for name in "abd":
        assert outputs[name].token_ids == model.greedy([ord(name) - 90, 2, 3], 8)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_request_that_is_cancelled_while_it_runs_says_nothing_more_and_its_neighbour_is_as_alone(steps: int) -> None:
    model = EchoModel()
    engine = Engine(model, num_pages=64, max_num_seqs=2)
    engine.submit(span(0, 20), PARAMS, request_id="victim")
    engine.submit(span(30, 20), PARAMS, request_id="survivor")
    before = [e for _ in range(steps) for e in engine.step()]
    engine.cancel("victim")
    after = engine.step()
    last = [e for e in after if e.request_id == "victim"]
    assert [e.token_ids for e in last] == [[]] and last[0].output.finish_reason == "cancelled"
    said = [t for e in before if e.request_id == "victim" for t in e.token_ids]
    assert last[0].output.token_ids == said == model.greedy(span(0, 20), steps)
    later = []
    while engine.has_work:
        later += engine.step()
    assert {e.request_id for e in later} == {"survivor"}
    [survivor] = [e.output for e in later if e.finished]
    assert survivor.token_ids == model.greedy(span(30, 20), 8)


def test_what_a_server_answers_from() -> None:
    """25: too long, hang-up, two at once, the same again from the cache, and the end."""

    async def main() -> None:
        model = GatedModel(max_seq_len=256)
        engine = AsyncEngine(model, num_pages=64)
        with pytest.raises(PromptTooLong, match="300 tokens and max_seq_len is 256"):
            engine.stream([1] * 300, PARAMS)  # 400

        first = asyncio.create_task(engine.generate([span(0, 40)], PARAMS))
        await model.step_began()
        second = asyncio.create_task(engine.generate([span(40, 40)], PARAMS))
        await asyncio.sleep(0)
        model.free()
        [a], [b] = await asyncio.gather(first, second)
        assert (await engine.stats())["peak_running"] == 2
        assert (a.token_ids, b.token_ids) == (model.greedy(span(0, 40), 8), model.greedy(span(40, 40), 8))

        [again] = await engine.generate([span(0, 40)], PARAMS)
        assert again.token_ids == a.token_ids and again.num_cached_tokens == 39

        async with engine.stream([5, 6], SamplingParams(max_tokens=200)) as stream:
            await anext(stream)  # and hangs up
        assert (await engine.stats())["num_cancelled"] == 1

        live = engine.stream([7, 8], SamplingParams(max_tokens=200))
        await anext(live)
        drained = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(Draining):  # 503
            engine.stream([9], PARAMS)
        await drained
        assert live.output.finish_reason == "length" and len(live.output.token_ids) == 200
        await engine.close()

    run(main())
