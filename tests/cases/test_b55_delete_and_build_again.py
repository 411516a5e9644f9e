"""Engines that are deleted leave nothing: no object, no memory, no thread, and the user's model as it was."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
import weakref

import pytest
import torch
from byhand import span
from fakes import EchoHybrid, EchoModel
from gated import PATIENCE_S, run

from paged import Session, load_model
from scheduler import AsyncEngine, Engine, SamplingParams

PARAMS = SamplingParams(max_tokens=4)
PROMPTS = [span(0, 30), span(0, 22), [5, 6, 7]]


def use(engine: Engine) -> list[list[int]]:
    """A batch, a stream that is left half way, and a request that is live when the engine goes."""
    outputs = engine.generate(PROMPTS, PARAMS)
    stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=50))
    next(stream)
    engine.submit([9, 9], SamplingParams(max_tokens=50, n=2, temperature=1.0))
    engine.step()
    return [o.token_ids for o in outputs]


def use_async(engine: AsyncEngine) -> list[list[int]]:
    async def main() -> list[list[int]]:
        outputs = await engine.generate(PROMPTS, PARAMS)
        stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=50))
        await anext(stream)
        return [o.token_ids for o in outputs]

    return run(main())


def forward(model, tokens: list[int]) -> torch.Tensor:
    """The user's own forward of a prompt: the logits after its last token."""
    return Session(model, model.create_kv_pool(8, 16)).eval(tokens)


@pytest.mark.parametrize("kind", ["tiny:llama", "tiny:hybrid", "echo"])
def test_the_users_model_is_as_it_was(kind: str) -> None:
    model = EchoModel() if kind == "echo" else load_model(kind)
    before = forward(model, span(0, 20)).clone()
    fields = {k: id(v) for k, v in vars(model).items() if k not in ("num_forwards", "num_rows")}
    weights = {name: tensor.clone() for name, tensor in vars(model).items() if isinstance(tensor, torch.Tensor)}
    first = None
    for _ in range(3):
        engine = Engine(model, num_pages=64, max_num_seqs=4)
        tokens = use(engine)
        assert first is None or tokens == first
        first = tokens
        del engine
        gc.collect()
    assert {k: id(v) for k, v in vars(model).items() if k not in ("num_forwards", "num_rows")} == fields
    for name, tensor in weights.items():
        assert torch.equal(getattr(model, name), tensor)
    assert torch.equal(forward(model, span(0, 20)), before)


@pytest.mark.parametrize(("model_of", "end"), [(EchoModel, "deleted"), (EchoModel, "closed"), (EchoHybrid, "deleted")])
def test_ten_engines_one_after_the_other_are_gone_and_memory_is_flat(model_of, end: str) -> None:
    dead, sizes = [], []
    tracemalloc.start()
    try:
        for _ in range(10):
            model = model_of()
            engine = Engine(model, num_pages=64, max_num_seqs=4)
            use(engine)
            dead += [weakref.ref(o) for o in (model, engine, engine.pool, engine.cache, engine.scheduler)]
            if end == "closed":
                engine.close()
            del engine, model
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert all(ref() is None for ref in dead)
    assert max(sizes[2:]) - min(sizes[2:]) < 50_000  # an engine of this size takes several hundred thousand


@pytest.mark.parametrize("end", ["deleted", "closed"])
def test_async_engines_are_gone_with_their_threads(end: str) -> None:
    dead, before = [], threading.active_count()
    for _ in range(5):
        model = EchoModel()
        engine = AsyncEngine(model, num_pages=64, max_num_seqs=4)
        assert use_async(engine) == [model.greedy(p, 4) for p in PROMPTS]
        steps = engine.steps
        dead += [weakref.ref(o) for o in (model, engine, engine.engine, engine.engine.pool)]
        if end == "closed":
            asyncio.run(engine.close())
        del engine, model
        gc.collect()
        steps.ended.result(PATIENCE_S)
        steps.join(PATIENCE_S)
        del steps
        gc.collect()
    assert all(ref() is None for ref in dead)
    assert threading.active_count() <= before


def test_an_engine_is_built_while_another_one_runs_and_both_serve() -> None:
    model = EchoModel()
    first = Engine(model, num_pages=64, max_num_seqs=4)
    stream = first.stream([1, 2, 3], SamplingParams(max_tokens=20))
    next(stream)
    second = Engine(model, num_pages=64, max_num_seqs=4)
    use(second)
    del second
    gc.collect()
    assert list(stream)[-1].output.token_ids == model.greedy([1, 2, 3], 20)
