"""A process does not grow with the requests that it has served, in whichever way they ended."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from fakes import EchoModel
from gated import run

from paged.prefix.stats import PrefixChain
from scheduler import AsyncEngine, Engine, SamplingParams

ONE = SamplingParams(max_tokens=1)


class Fails(EchoModel):
    """Fails in a step that holds the token 96."""

    def forward(self, batch, storage):
        if (batch.tokens == 96).any():
            raise ValueError("a prompt that raises")
        return super().forward(batch, storage)


def prompt_of(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 96, 50).astype(np.int32)


def ours() -> Counter:
    """Live objects of ours by type, but for what the cache says of its pages: at most one a page."""
    gc.collect()
    kinds = {type(o) for o in gc.get_objects()} - {PrefixChain}
    kinds = {k for k in kinds if str(k.__module__).startswith(("scheduler.", "paged."))}
    return Counter(type(o).__qualname__ for o in gc.get_objects() if type(o) in kinds)


@pytest.mark.slow
def test_thousands_of_requests_leave_no_object_and_no_memory() -> None:
    engine = Engine(Fails(), num_pages=100, max_num_seqs=8)
    engine.cache.remembered = 1000  # evictions: as many as there are before the measurement

    def serve(first: int, last: int) -> None:
        for i in range(first, last):
            [output] = engine.generate([prompt_of(i)], ONE)
            assert output.finish_reason == "length"

    serve(0, 1000)  # the last thousand are what `explain` knows
    before = ours()
    tracemalloc.start()
    try:
        serve(1000, 1100)
        start = tracemalloc.get_traced_memory()[0]
        serve(1100, 3000)
        for i in range(500):
            name = engine.submit(prompt_of(i), SamplingParams(max_tokens=50))
            if i % 2:
                engine.step()
            assert engine.cancel(name)
            engine.step()
        for i in range(200):
            [output] = engine.generate([np.append(prompt_of(i), np.int32(96))], ONE)
            assert "a prompt that raises" in output.error
            del output
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
    assert ours() - before == Counter()
    assert grown < 1_000_000
    stats = engine.stats()
    assert (stats["num_finished"], stats["num_cancelled"]) == (3700, 500)
    assert stats["live_pages"] == 0 and 0 < stats["cached_only_pages"] <= 100
    assert len(engine.delivery.recent) == 1000 and len(engine.cache.evicted) == 1000
    engine.check()


@pytest.mark.parametrize("way", ["end", "cancel", "unread", "error"])
def test_async_requests_leave_no_object(way: str) -> None:
    async def main() -> None:
        async with AsyncEngine(Fails(), num_pages=100, max_num_seqs=8) as engine:

            async def serve(i: int) -> None:
                tokens = np.append(prompt_of(i), np.int32(96)) if way == "error" else prompt_of(i)
                stream = engine.stream(tokens, SamplingParams(max_tokens=100 if way == "cancel" else 2))
                if way == "cancel":
                    await anext(stream)
                    await stream.aclose()
                elif way == "unread":
                    while stream.output is None:
                        await engine.stats()
                else:
                    await stream.result()

            for i in range(20):
                await serve(i)
            await engine.stats()  # behind the last step, whose thread may still hold what it worked with
            before = ours()
            for i in range(60):
                await serve(i)
            await engine.stats()
            assert ours() - before == Counter()
            assert not engine.has_work

    run(main())
    asyncio.run(asyncio.sleep(0))
