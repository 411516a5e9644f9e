"""The engine's verbs for asyncio: every output is checked against the model's own oracle."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
from byhand import span
from fakes import EchoLooped, EchoModel
from gated import GatedModel, join, run

from paged.errors import Closed, DuplicateRequest, InvalidRequest, QueueFull
from scheduler import AsyncEngine, Engine, MediaSpan, SamplingParams, SchedulerConfig

PARAMS = SamplingParams(max_tokens=6)


def engine_of(model=None, **settings) -> AsyncEngine:
    settings.setdefault("num_pages", 64)
    settings.setdefault("max_num_seqs", 16)
    return AsyncEngine(model or EchoModel(), **settings)


def prompts_of(n: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    head = rng.integers(0, 97, 20).tolist()
    return [head + rng.integers(0, 97, int(k)).tolist() for k in rng.integers(1, 40, n)]


# generate and stream --------------------------------------------------------------------------------------------


def test_a_batch_comes_back_in_input_order() -> None:
    async def main() -> None:
        async with engine_of() as engine:
            prompts = prompts_of(12)
            outputs = await engine.generate(prompts, [SamplingParams(max_tokens=1 + i) for i in range(12)])
            for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                assert output.token_ids == engine.engine.model.greedy(prompt, 1 + i)
            assert await engine.generate([]) == []
            await engine.check()
            assert engine.engine.pool.num_live == 0

    run(main())


def test_many_tasks_share_the_steps() -> None:
    async def main() -> None:
        async with engine_of() as engine:
            prompts = prompts_of(40)

            async def streamed(prompt: list[int]) -> list[int]:
                return [t async for event in engine.stream(prompt, PARAMS) for t in event.token_ids]

            async def batch(prompt: list[int]) -> list[int]:
                [output] = await engine.generate([prompt], PARAMS)
                return output.token_ids

            got = await asyncio.gather(*(f(p) for p in prompts for f in (streamed, batch)))
            assert got == [engine.engine.model.greedy(p, 6) for p in prompts for _ in range(2)]
            stats = await engine.stats()
            assert stats["num_finished"] == 80 and stats["num_cancelled"] == 0
            assert stats["peak_running"] == 16
            assert stats["num_steps"] < 80  # 80 requests of 6 tokens, 16 at once

    run(main())


def test_the_last_event_carries_the_output_and_the_stream_keeps_it() -> None:
    async def main() -> None:
        async with engine_of() as engine, engine.stream([1, 2, 3], PARAMS, request_id="mine") as stream:
            assert stream.output is None and stream.request_id == "mine"
            events = [event async for event in stream]
            assert [e.finished for e in events] == [False] * (len(events) - 1) + [True]
            assert events[-1].output is stream.output is await stream.result()
            assert stream.output.token_ids == [t for e in events for t in e.token_ids]
            assert [e async for e in stream] == []

    run(main())


@pytest.mark.parametrize("verb", ["generate", "stream"])
def test_samples_are_those_of_the_sync_engine(verb: str) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=3, n=4)
    [want] = Engine(EchoModel(), num_pages=64).generate([span(0, 40)], params)

    async def main() -> None:
        async with engine_of() as engine:
            if verb == "generate":
                [output] = await engine.generate([span(0, 40)], params)
            else:
                tokens: dict[int, list[int]] = {}
                outputs = []
                async for event in engine.stream(span(0, 40), params):
                    tokens.setdefault(event.index, []).extend(event.token_ids)
                    outputs += [event.output] if event.output is not None else []
                [output] = outputs
                assert [tokens[i] for i in range(4)] == [s.token_ids for s in output.samples]
            assert [s.token_ids for s in output.samples] == [s.token_ids for s in want.samples]
            assert [s.num_cached_tokens for s in output.samples] == [0, 32, 32, 32]

    run(main())


def test_what_is_wrong_with_a_prompt_is_raised_where_it_is_given() -> None:
    async def main() -> None:
        async with engine_of() as engine:
            with pytest.raises(InvalidRequest, match="between 0 and 96, got 97"):
                engine.stream([97])
            with pytest.raises(InvalidRequest, match=r"prompt 1 of 2: .*got -1"):
                await engine.generate([[1], [-1]])
            with pytest.raises(TypeError, match="params must be SamplingParams"):
                await engine.generate([[1]], {"max_tokens": 3})  # type: ignore[arg-type]
            assert engine.engine.scheduler.stats.num_admitted == 0

    run(main())


def test_a_live_id_is_refused_by_the_first_event_and_may_be_used_again() -> None:
    async def main() -> None:
        model = GatedModel()
        async with engine_of(model) as engine:
            first = engine.stream([1, 2], PARAMS, request_id="a")
            await model.step_began()
            second = engine.stream([3, 4], PARAMS, request_id="a")
            model.free()
            with pytest.raises(DuplicateRequest, match="'a' is still live"):
                await second.result()
            assert (await first.result()).token_ids == model.greedy([1, 2], 6)
            [again] = await engine.generate([[5, 6]], PARAMS, request_id="a")
            assert again.token_ids == model.greedy([5, 6], 6)
            assert (await engine.stats())["num_cancelled"] == 0

    run(main())


def test_a_failed_step_ends_its_requests_with_an_error_and_later_ones_run() -> None:
    class Fails(EchoModel):
        def forward(self, batch, storage):
            logits = super().forward(batch, storage)
            if self.num_forwards == 2:
                raise ValueError("once")
            return logits

    async def main() -> None:
        async with engine_of(Fails()) as engine:
            [output] = await engine.generate([[1, 2, 3]], PARAMS)
            assert output.finish_reason == "error" and "ValueError: once" in output.error
            events = [e async for e in engine.stream([1, 2, 3], PARAMS)]
            assert events[-1].output.token_ids == engine.engine.model.greedy([1, 2, 3], 6)

    run(main())


def test_the_loop_goes_on_while_a_step_runs() -> None:
    """No verb makes the loop wait for a step: all of them are called, and some answered, with a step held up."""

    async def main() -> None:
        model = GatedModel()
        async with engine_of(model) as engine:
            stream = engine.stream([1, 2, 3], PARAMS)
            await model.step_began()
            verbs = [
                engine.generate([[4, 5]], PARAMS),
                engine.stats(),
                engine.cancel("nobody"),
                engine.prefix_match_len([1, 2, 3]),
                engine.check(),
                engine.explain(stream.request_id),
                engine.reset_prefix_cache(),
            ]
            tasks = [asyncio.create_task(verb) for verb in verbs]
            for _ in range(20):
                await asyncio.sleep(0)
            assert not any(task.done() for task in tasks)
            model.free()
            [output], stats, cancelled, matched, _, explained, _ = await asyncio.gather(*tasks)
            assert output.token_ids == model.greedy([4, 5], 6)
            assert stats["num_steps"] >= 1 and cancelled is False and matched >= 0
            assert explained["request_id"] == stream.request_id
            assert (await stream.result()).token_ids == model.greedy([1, 2, 3], 6)

    run(main())


# going away -----------------------------------------------------------------------------------------------------


def test_closing_a_stream_waits_until_the_pages_are_back() -> None:
    async def main() -> None:
        async with engine_of(max_num_batched_tokens=16) as engine:
            for _ in range(3):
                stream = engine.stream(span(0, 40), SamplingParams(max_tokens=1000))
                await anext(stream)
                await stream.aclose()
                assert stream.output.finish_reason == "cancelled"
                assert engine.engine.pool.num_live == 0 and not engine.has_work
                await stream.aclose()
                assert [e async for e in stream] == []
            assert (await engine.stats())["num_cancelled"] == 3
            with pytest.raises(Closed, match="no output"):
                unfinished = engine.stream([1, 2], SamplingParams(max_tokens=1000))
                unfinished.leave()
                await unfinished.result()

    run(main())


def test_cancel_by_id_ends_the_stream_with_its_output() -> None:
    async def main() -> None:
        model = GatedModel()
        async with engine_of(model) as engine:
            stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=1000, n=2, temperature=1.0), request_id="a")
            await model.step_began()
            cancelled = asyncio.create_task(engine.cancel("a"))
            await asyncio.sleep(0)
            model.free()
            assert await cancelled is True
            output = await stream.result()
            assert [s.finish_reason for s in output.samples] == ["cancelled"] * 2
            assert await engine.cancel("a") is False
            assert engine.engine.pool.num_live == 0

    run(main())


def test_two_tasks_that_read_one_stream_are_refused_and_the_first_goes_on() -> None:
    async def main() -> None:
        model = GatedModel()
        async with engine_of(model) as engine:
            stream = engine.stream([1, 2, 3], PARAMS)
            await model.step_began()
            first = asyncio.create_task(stream.result())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="another task reads this stream"):
                await anext(stream)
            model.free()
            assert (await first).token_ids == model.greedy([1, 2, 3], 6)

    run(main())


def test_a_loop_that_was_closed_under_its_streams_cancels_their_requests() -> None:
    model = GatedModel()
    engine = engine_of(model)
    kept = []

    async def first() -> None:
        kept.append(engine.stream([1, 2, 3], SamplingParams(max_tokens=1000)))
        await model.step_began()
        kept[0]._box.take()  # it waits for an event, so to speak, and its loop ends

    asyncio.run(first())

    async def second() -> None:
        model.free()
        [output] = await engine.generate([[4, 5]], PARAMS)
        assert output.token_ids == model.greedy([4, 5], 6)
        assert (await engine.stats())["num_cancelled"] == 1
        assert not engine.has_work
        await engine.close()

    run(second())


# sync calls beside it -------------------------------------------------------------------------------------------


def test_sync_calls_on_the_same_engine_go_on_beside_it() -> None:
    sync = Engine(EchoModel(), num_pages=64, max_num_seqs=16)
    engine = AsyncEngine(sync)
    prompts = prompts_of(8)
    wrong: list[object] = []

    def generate() -> None:
        for p in prompts:
            [output] = sync.generate([p], PARAMS)
            wrong.extend([] if output.token_ids == sync.model.greedy(p, 6) else [output])

    def stream() -> None:
        for p in prompts:
            tokens = [t for event in sync.stream(p, PARAMS) for t in event.token_ids]
            wrong.extend([] if tokens == sync.model.greedy(p, 6) else [tokens])

    def submit() -> None:
        names = {sync.submit(p, PARAMS): p for p in prompts}
        while names:
            for event in sync.step():
                if event.finished:
                    p = names.pop(event.request_id)
                    wrong.extend([] if event.output.token_ids == sync.model.greedy(p, 6) else [event])

    async def main() -> None:
        beside = asyncio.to_thread(join, [threading.Thread(target=f) for f in (generate, stream, submit)])
        outputs, _ = await asyncio.gather(engine.generate(prompts * 3, PARAMS), beside)
        assert [o.token_ids for o in outputs] == [sync.model.greedy(p, 6) for p in prompts * 3]
        await engine.close()

    run(main())
    assert not wrong
    sync.check()
    assert sync.generate([[1, 2]], PARAMS)[0].token_ids == sync.model.greedy([1, 2], 6)  # a given engine stays open
    sync.close()


def test_closing_the_engine_itself_ends_the_streams_of_both() -> None:
    async def main() -> None:
        model = GatedModel()
        engine = engine_of(model)
        stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=1000))
        await model.step_began()
        closing = asyncio.create_task(asyncio.to_thread(engine.engine.close))
        model.free()
        await closing
        assert (await stream.result()).finish_reason == "cancelled"
        with pytest.raises(Closed):
            engine.stream([1])
        await engine.close()

    run(main())


def test_settings_beside_an_engine_that_has_its_own_are_refused() -> None:
    with (
        Engine(EchoModel(), num_pages=8) as sync,
        pytest.raises(TypeError, match="already; got num_pages beside it"),
    ):
        AsyncEngine(sync, num_pages=9)


# the other verbs ------------------------------------------------------------------------------------------------


def test_a_match_is_asked_for_with_its_media() -> None:
    async def main() -> None:
        async with engine_of() as engine:
            one, other = (MediaSpan(10, np.array([[7, value]] * 5, np.float32)) for value in (0, 1))
            await engine.generate([span(0, 50)], PARAMS, media=[one])
            assert await engine.prefix_match_len(span(0, 50), media=[one]) == 49
            assert await engine.prefix_match_len(span(0, 50), media=[other]) == 10

    asyncio.run(main())


def test_the_cache_is_asked_saved_loaded_and_reset(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine_of() as engine, engine_of() as other:
            await engine.generate([span(0, 50)], PARAMS)
            assert await engine.prefix_match_len(span(0, 50)) == 49
            assert await engine.prefix_match_len(span(0, 50), namespace="b") == 0
            saved = await engine.save_prefix_cache(tmp_path / "cache")
            assert await other.load_prefix_cache(tmp_path / "cache") == saved > 0
            assert await other.prefix_match_len(span(0, 50)) == 49
            await engine.reset_prefix_cache()
            assert await engine.prefix_match_len(span(0, 50)) == 0
            with pytest.raises(KeyError, match="nobody"):
                await engine.explain("nobody")

    run(main())


def test_a_request_is_forecast_and_the_policy_changed_between_two_steps() -> None:
    async def main() -> None:
        async with engine_of() as engine:
            await engine.generate([span(0, 50)], PARAMS)
            forecast = await engine.admit(span(0, 50), PARAMS)
            assert (forecast.accepted, forecast.num_prompt_tokens, forecast.num_matched_tokens) == (True, 50, 49)
            assert "at least one token" in (await engine.admit([], PARAMS)).reason
            await engine.set_policy("priority")
            assert engine.engine.scheduler.policy.name == "priority"
            with pytest.raises(ValueError, match="the policy must be one of"):
                await engine.set_policy("magic")

    run(main())


def test_a_queue_that_is_full_refuses_a_stream_by_its_first_event() -> None:
    async def main() -> None:
        config = SchedulerConfig(max_num_seqs=1, max_queue_requests=1)
        model = GatedModel()
        async with AsyncEngine(model, num_pages=64, config=config) as engine:
            first = engine.stream(span(0, 9), SamplingParams(max_tokens=4))
            await model.step_began()
            second, third = engine.stream(span(20, 9), PARAMS), engine.stream(span(40, 9), PARAMS)
            model.free()  # both come between this step and the next
            with pytest.raises(QueueFull, match="1"):
                await anext(third)
            outputs = [await stream.result() for stream in (first, second)]
            assert [o.finish_reason for o in outputs] == ["length", "length"]
            await engine.check()

    run(main())


def test_prefixes_are_built_and_used() -> None:
    async def main() -> None:
        async with engine_of() as engine:
            prefix = await engine.build_prefix(span(0, 40))
            [output] = await engine.generate([span(0, 50)], PARAMS, prefix=prefix)
            assert output.token_ids == engine.engine.model.greedy(span(0, 50), 6)
            assert output.num_cached_tokens == 40
            [whole] = await engine.generate([span(0, 40)], SamplingParams(max_tokens=1), prefix=prefix)
            assert whole.token_ids == engine.engine.model.greedy(span(0, 40), 1)  # without a step

    run(main())


def test_a_looped_models_depth_goes_with_the_request() -> None:
    async def main() -> None:
        async with engine_of(EchoLooped(), num_pages=128) as engine:
            outputs = [(await engine.generate([[1, 2, 3]], PARAMS, loops=k))[0] for k in (1, 2, 4)]
            assert [o.token_ids for o in outputs] == [engine.engine.model.greedy([1, 2, 3], 6, k) for k in (1, 2, 4)]

    run(main())
