"""A client that goes away takes its request with it, within two steps, once; one that stays cancels nothing."""

from __future__ import annotations

import asyncio
import gc

import pytest
from byhand import span
from gated import GatedModel, run

from scheduler import AsyncEngine, SamplingParams

LONG = SamplingParams(max_tokens=2000)
LINE = [t % 97 for t in span(0, 100)]
SHORT = SamplingParams(max_tokens=5)


class Watched:
    """An engine that remembers in which step each request was cancelled. A step begins when the test allows it."""

    def __init__(self, **settings) -> None:
        self.model = GatedModel()
        self.engine = AsyncEngine(self.model, num_pages=400, max_num_batched_tokens=64, **settings)
        self.cancelled_at: dict[str, int] = {}
        scheduler = self.engine.engine.scheduler
        finish = scheduler.finish

        def watched(request, reason: str) -> None:
            if reason == "cancelled":
                assert request.id not in self.cancelled_at, "cancelled twice"
                self.cancelled_at[request.id] = scheduler.stats.num_steps
            finish(request, reason)

        scheduler.finish = watched  # type: ignore[method-assign]

    @property
    def step(self) -> int:
        """The number of the step that runs."""
        return self.engine.engine.scheduler.stats.num_steps

    async def expect_gone(self, name: str, left_at: int) -> None:
        """The request `name` was left in step `left_at`; another one keeps the engine busy meanwhile."""
        for _ in range(2):
            if name not in self.cancelled_at:
                self.model.allow()
                await self.model.step_began()
        assert self.cancelled_at[name] <= left_at + 1
        assert name not in self.engine.engine.scheduler.requests

    async def finish(self) -> None:
        self.model.free()
        await self.engine.drain()
        await self.engine.check()
        assert self.engine.engine.pool.num_live == 0
        assert (await self.engine.stats())["num_cancelled"] == len(self.cancelled_at)
        await self.engine.close()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", ["aclose", "async with", "task", "timeout", "collect"])
@pytest.mark.parametrize("tokens", [0, 1])
def test_a_stream_that_is_left_ends_within_two_steps(how: str, tokens: int, n: int) -> None:
    """With 0 tokens it is left during the first step of its prefill, with 1 as soon as its first token came."""
    params = SamplingParams(max_tokens=2000, n=n, temperature=1.0)

    async def main() -> None:
        w = Watched()
        other = w.engine.stream([9, 9], LONG, request_id="other")  # keeps the steps going
        await w.model.step_began()
        stream = w.engine.stream(LINE, params, request_id="gone")
        w.model.allow()
        await w.model.step_began()  # the first step of its prefill runs
        if tokens:
            first = asyncio.create_task(anext(stream))
            for _ in range(2):  # of two: 100 tokens, 64 a step
                w.model.allow()
                await w.model.step_began()
            assert (await first).token_ids
        left_at = w.step
        names = ["gone", *(f"gone/{i}" for i in range(1, n))]
        assert set(names) <= w.engine.engine.scheduler.requests.keys()

        async def within() -> None:
            async with stream:
                pass

        leaving = None
        if how == "aclose":
            leaving = asyncio.create_task(stream.aclose())
        elif how == "async with":
            leaving = asyncio.create_task(within())
        elif how == "task":
            task = asyncio.create_task(stream.result())
            await asyncio.sleep(0)
            if not task.done():
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
        elif how == "timeout":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(stream.result(), 0.01)
        else:
            del stream, within
            gc.collect()
        await asyncio.sleep(0)
        for name in names:
            await w.expect_gone(name, left_at)
        if leaving is not None:
            await leaving
        other.leave()
        await w.finish()
        assert set(w.cancelled_at) == {*names, "other"}

    run(main())


@pytest.mark.parametrize("events", [1, 3])
def test_leaving_the_loop_over_a_stream_ends_its_request_within_two_steps(events: int) -> None:
    async def main() -> None:
        w = Watched()
        other = w.engine.stream([9, 9], LONG, request_id="other")
        left_at: list[int] = []

        async def read() -> None:
            taken = 0
            async for event in w.engine.stream(LINE, LONG, request_id="gone"):
                assert event.token_ids
                taken += 1
                if taken == events:
                    left_at.append(w.step)
                    break

        task = asyncio.create_task(read())
        while not left_at:
            await w.model.step_began()
            w.model.allow()
        await task
        await w.model.step_began()
        await w.expect_gone("gone", left_at[0])
        other.leave()
        await w.finish()
        assert set(w.cancelled_at) == {"gone", "other"}

    run(main())


@pytest.mark.parametrize("how", ["task", "timeout"])
def test_a_batch_that_is_left_ends_within_two_steps(how: str) -> None:
    async def main() -> None:
        w = Watched()
        other = w.engine.stream([9, 9], LONG, request_id="other")
        await w.model.step_began()
        batch = w.engine.generate([LINE, span(5, 7), [1]], LONG)
        if how == "timeout":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(batch, 0.01)
        else:
            task = asyncio.create_task(batch)
            await asyncio.sleep(0)
            w.model.allow()
            await w.model.step_began()
            assert len(w.engine.engine.scheduler.requests) == 4
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        left_at = w.step
        for name in ("request-1", "request-2", "request-3"):
            if how == "task":  # a batch that was left before a step took it in never shows up at all
                await w.expect_gone(name, left_at)
        other.leave()
        await w.finish()
        assert len(w.cancelled_at) == 4

    run(main())


def test_fifty_normal_ends_cancel_nothing() -> None:
    async def main() -> None:
        w = Watched()
        w.model.free()

        async def one(i: int) -> None:
            if i % 2:
                async with w.engine.stream([i, 2, 3], SHORT) as stream:
                    assert len([e async for e in stream]) <= 5
                await stream.aclose()
                assert stream.output.finish_reason == "length"
            else:
                [output] = await w.engine.generate([[i, 2, 3]], SHORT)
                assert output.finish_reason == "length"

        await asyncio.gather(*map(one, range(50)))
        gc.collect()
        assert not w.cancelled_at
        await w.finish()

    run(main())


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_nobody_reads_is_one_event_however_long_it_runs(n: int) -> None:
    async def main() -> None:
        w = Watched()
        w.model.free()
        stream = w.engine.stream([1, 2, 3], SamplingParams(max_tokens=1500, n=n, temperature=1.0, seed=3))
        await w.engine.drain()
        assert len(stream._box._events) == n
        assert not stream._box.port._ready  # the loop was never called for it
        output = stream.output
        events = [event async for event in stream]
        assert len(events) == n and events[-1].output is output
        assert [e.token_ids for e in sorted(events, key=lambda e: e.index)] == [s.token_ids for s in output.samples]
        assert [len(s.token_ids) for s in output.samples] == [1500] * n
        await w.finish()

    run(main())


def test_a_reader_that_is_slow_gets_every_token_once() -> None:
    async def main() -> None:
        w = Watched()
        stream = w.engine.stream([1, 2, 3], SamplingParams(max_tokens=30))
        tokens: list[int] = []
        sizes = []
        for steps in (1, 4, 2, 7, 1, 15):
            for _ in range(steps):
                await w.model.step_began()
                w.model.allow()
            await w.engine.stats() if steps < 15 else await w.engine.drain()  # the last of these steps is over
            event = await anext(stream)
            tokens += event.token_ids
            sizes.append(len(event.token_ids))
        assert sum(sizes) == 30 and max(sizes) > 2
        assert tokens == w.model.greedy([1, 2, 3], 30) == stream.output.token_ids
        await w.finish()

    run(main())
