"""How an engine for asyncio ends: drained, closed, interrupted, collected, or with its process."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from fakes import EchoModel
from gated import PATIENCE_S, GatedModel, run

from paged.errors import Closed, Draining
from scheduler import AsyncEngine, SamplingParams

PARAMS = SamplingParams(max_tokens=6)


def engine_of(model=None, **settings) -> AsyncEngine:
    settings.setdefault("num_pages", 64)
    settings.setdefault("max_num_seqs", 16)
    return AsyncEngine(model or EchoModel(), **settings)


def test_draining_finishes_what_is_live_and_refuses_the_rest() -> None:
    async def main() -> None:
        model = GatedModel()
        engine = engine_of(model)
        stream = engine.stream([1, 2, 3], PARAMS)
        await model.step_began()
        drained = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(Draining, match="takes no new requests"):
            engine.stream([4])
        with pytest.raises(Draining):
            await engine.generate([[4]])
        assert not drained.done()
        model.free()
        await drained
        assert stream.output.token_ids == model.greedy([1, 2, 3], 6)
        assert [t async for e in stream for t in e.token_ids] == stream.output.token_ids  # and it can still be read
        await engine.close()

    run(main())


def test_closing_cancels_what_is_live_and_later_calls_say_so() -> None:
    async def main() -> None:
        model = GatedModel()
        engine = engine_of(model)
        stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=1000))
        batch = asyncio.create_task(engine.generate([[4, 5], [6]], SamplingParams(max_tokens=1000)))
        await model.step_began()
        closing = [asyncio.create_task(engine.close()) for _ in range(2)]
        await asyncio.sleep(0)
        model.free()
        await asyncio.gather(*closing)
        assert (await stream.result()).finish_reason == "cancelled"
        assert [o.finish_reason for o in await batch] == ["cancelled"] * 2
        for verb in (engine.generate, engine.build_prefix):
            with pytest.raises(Closed, match="closed"):
                await verb([1])
        with pytest.raises(Closed):
            engine.stream([1])
        with pytest.raises(Closed):
            await engine.stats()
        await engine.close()
        await engine.drain()
        assert engine.engine.pool.num_free == engine.engine.pool.num_pages

    run(main())


def test_an_engine_that_was_interrupted_ends_every_reader_and_says_why() -> None:
    class Interrupted(GatedModel):
        def forward(self, batch, storage):
            logits = super().forward(batch, storage)
            if self.num_forwards == 3:
                raise KeyboardInterrupt("by hand")
            return logits

    async def main() -> None:
        model = Interrupted()
        engine = engine_of(model, max_num_seqs=1)
        running = engine.stream([1, 2, 3], PARAMS)
        await model.step_began()
        waiting = engine.stream([4, 5], PARAMS)
        batch = asyncio.create_task(engine.generate([[6, 7]], PARAMS))
        await asyncio.sleep(0)
        model.free()
        output = await running.result()
        assert output.finish_reason == "error" and "KeyboardInterrupt: by hand" in output.error
        for reader in (waiting.result(), batch):
            with pytest.raises(Closed, match="a step of this engine raised KeyboardInterrupt: by hand"):
                await reader
        with pytest.raises(Closed, match="by hand"):
            engine.stream([1])
        with pytest.raises(Closed, match="by hand"):
            await engine.stats()
        await engine.close()

    run(main())


def test_an_engine_that_is_left_open_is_collected_with_its_thread() -> None:
    async def main() -> tuple[weakref.ref, ...]:
        engine = engine_of()
        await engine.generate([[1, 2, 3]], PARAMS)
        steps = engine.steps
        dead = weakref.ref(engine), weakref.ref(engine.engine), weakref.ref(engine.engine.pool)
        del engine
        gc.collect()
        await asyncio.wrap_future(steps.ended)
        steps.join(PATIENCE_S)
        return dead

    dead = run(main())
    gc.collect()
    assert [ref() for ref in dead] == [None] * 3


def test_a_stream_keeps_its_engine() -> None:
    async def main() -> None:
        stream = engine_of().stream([1, 2, 3], PARAMS)
        gc.collect()
        assert len((await stream.result()).token_ids) == 6

    run(main())


@pytest.mark.parametrize("how", ["idle", "in a step", "unread"])
def test_a_process_ends_with_an_engine_left_open(how: str) -> None:
    code = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from fakes import EchoModel
from scheduler import AsyncEngine, SamplingParams
engine = AsyncEngine(EchoModel(), num_pages=300)
async def main():
    await engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    if {how!r} != "idle":
        stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=4000))
        await anext(stream)
        if {how!r} == "unread":
            engine.kept = stream
    print("done")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_reader_that_knows_an_end_of_its_own_stops_a_request_as_complete() -> None:
    async def main() -> None:
        async with engine_of() as engine:
            stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=4000))
            async for _ in stream:
                await stream.stop()
            assert stream.output.finish_reason == "stop" and 1 <= len(stream.output.token_ids) < 4000
            assert (await engine.stats())["num_cancelled"] == 0

    run(main())
