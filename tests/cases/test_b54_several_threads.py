"""Several threads, event loops and callbacks on one engine: every output equals the solo one, and nothing hangs."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from fakes import EchoModel
from gated import PATIENCE_S, GatedModel, join, run

from paged import load_model
from scheduler import AsyncEngine, Engine, SamplingParams
from scheduler.events import Finished

PARAMS = SamplingParams(max_tokens=6)


def prompts_of(n: int, seed: int, vocab: int = 97) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    head = np.random.default_rng(0).integers(0, vocab, 20).tolist()
    return [head + rng.integers(0, vocab, int(k)).tolist() for k in rng.integers(1, 40, n)]


def test_eight_threads_with_twenty_blocking_calls_beside_a_half_read_stream_and_two_loops() -> None:
    model = EchoModel()
    sync = Engine(model, num_pages=60, max_num_seqs=12)
    engine = AsyncEngine(sync)
    held = sync.stream([8, 8, 8], SamplingParams(max_tokens=60))
    next(held)
    wrong: list[object] = []

    def blocking(seed: int) -> None:
        for prompt in prompts_of(20, seed):
            [output] = sync.generate([prompt], PARAMS)
            wrong.extend([] if output.token_ids == model.greedy(prompt, 6) else [output])

    def in_a_loop(seed: int) -> None:
        async def streamed(prompt: list[int]) -> None:
            tokens = [t async for event in engine.stream(prompt, PARAMS) for t in event.token_ids]
            wrong.extend([] if tokens == model.greedy(prompt, 6) else [tokens])

        async def main() -> None:
            outputs, *_ = await asyncio.gather(
                engine.generate(prompts_of(10, seed), PARAMS), *map(streamed, prompts_of(10, seed + 1))
            )
            wanted = [model.greedy(p, 6) for p in prompts_of(10, seed)]
            wrong.extend([] if [o.token_ids for o in outputs] == wanted else [outputs])

        run(main())

    join(
        [threading.Thread(target=blocking, args=(i,)) for i in range(8)]
        + [threading.Thread(target=in_a_loop, args=(i,)) for i in (100, 200)]
    )
    assert not wrong
    assert [t for e in held for t in e.token_ids] == model.greedy([8, 8, 8], 60)[1:]
    sync.check()
    assert sync.stats()["num_cancelled"] == 0
    asyncio.run(engine.close())
    assert sync.pool.num_live == 0


def test_a_thread_that_submits_does_not_wait_for_the_work_of_others_to_end() -> None:
    """Its requests run in the steps of the other thread, and end before that one's does."""
    engine = Engine(EchoModel(max_seq_len=4096), num_pages=600, max_num_seqs=4)
    began, ended_at = threading.Event(), []
    engine.subscribe(lambda event: ended_at.append(event.request_id) if isinstance(event, Finished) else began.set())

    def long() -> None:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=600), request_id="long")

    def short() -> None:
        assert began.wait(PATIENCE_S)
        for i in range(5):
            engine.generate([[4, i]], PARAMS, request_id=f"short {i}")

    join([threading.Thread(target=long), threading.Thread(target=short)])
    assert ended_at == [*(f"short {i}" for i in range(5)), "long"]


@pytest.mark.parametrize("of", ["engine", "async engine"])
def test_submitting_from_a_callback_does_not_hang(of: str) -> None:
    model = GatedModel()
    model.free()
    sync = Engine(model, num_pages=64)
    chain = [[i, i + 1] for i in range(10)]
    names = {f"link {i}": prompt for i, prompt in enumerate(chain)}

    def follow(event: object) -> None:
        if isinstance(event, Finished) and event.request_id in names:
            i = int(event.request_id.split()[1]) + 1
            if i < len(chain):
                sync.submit(chain[i], PARAMS, request_id=f"link {i}")

    sync.subscribe(follow)
    sync.submit(chain[0], PARAMS, request_id="link 0")
    outputs = {}
    if of == "engine":
        while sync.has_work:
            outputs.update({e.request_id: e.output for e in sync.step() if e.finished})
    else:

        async def main() -> None:
            async with AsyncEngine(sync) as engine:
                await engine.generate([[50, 51]], SamplingParams(max_tokens=80))  # its thread runs the chain too

        run(main())
        outputs.update({e.request_id: e.output for e in sync.step() if e.finished})
    assert {name: o.token_ids for name, o in outputs.items()} == {n: model.greedy(p, 6) for n, p in names.items()}


def test_a_callback_that_hands_work_to_a_loop_does_not_hang() -> None:
    """The callback runs in the thread of the steps; the loop submits, and nobody waits for anybody."""

    async def main() -> None:
        model = EchoModel()
        async with AsyncEngine(model, num_pages=64) as engine:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[list[int]] = loop.create_future()

            async def more() -> None:
                [output] = await engine.generate([[7, 8]], PARAMS, request_id="second")
                done.set_result(output.token_ids)

            def follow(event: object) -> None:
                if isinstance(event, Finished) and event.request_id == "first":
                    asyncio.run_coroutine_threadsafe(more(), loop)

            engine.engine.subscribe(follow)
            await engine.generate([[1, 2]], PARAMS, request_id="first")
            assert await done == model.greedy([7, 8], 6)

    run(main())


def test_one_tokenizer_serves_eight_threads_with_different_texts(smollm2) -> None:
    tokenizer = smollm2.tokenizer
    texts = [" ".join(["harbour", "log", "é", "日本", "🙂"][: 1 + i % 5]) * (1 + 7 * i) for i in range(24)]
    want = [tokenizer.encode(text).tolist() for text in texts]
    wrong: list[str] = []

    def work(seed: int) -> None:
        for i in np.random.default_rng(seed).permutation(len(texts)).tolist() * 5:
            tokens = tokenizer.encode(texts[i]).tolist()
            if tokens != want[i] or texts[i] not in tokenizer.decode(tokens):
                wrong.append(texts[i])

    join([threading.Thread(target=work, args=(i,)) for i in range(8)])
    assert not wrong


def test_two_engines_of_one_model_run_in_two_threads() -> None:
    model = load_model("tiny:llama")
    prompts = prompts_of(5, 3)
    params = SamplingParams(max_tokens=8)
    want = [o.token_ids for o in Engine(model, num_pages=64).generate(prompts, params)]
    got: dict[int, list[list[int]]] = {}

    def work(i: int) -> None:
        got[i] = [o.token_ids for o in Engine(model, num_pages=64).generate(prompts, params)]

    join([threading.Thread(target=work, args=(i,)) for i in range(2)])
    assert got == {0: want, 1: want}
