"""Who could run, or would not gain by it, is not touched by somebody else's shortage."""

from __future__ import annotations

import asyncio
import time

import pytest
from byhand import span
from driver import Driver
from fakes import EchoHybrid, EchoModel

from scheduler import AsyncEngine, Engine, SamplingParams, SchedulerConfig
from scheduler.quota import Quota
from scheduler.slots import Slots


def test_a_running_request_that_gives_way_alone_does_not_end_the_one_that_is_driven() -> None:
    engine = Engine(EchoModel(), page_size=4, num_pages=8, config=SchedulerConfig(max_num_seqs=1))
    engine.submit(span(0, 10), SamplingParams(max_tokens=20), request_id="long")
    engine.step()
    handle = engine.build_prefix(span(40, 16))
    stream = engine.stream([60, 61], SamplingParams(max_tokens=2))
    assert [t for event in stream for t in event.token_ids] == engine.model.greedy([60, 61], 2)
    assert handle.num_tokens == 16


def test_of_those_that_wait_the_head_ends_where_nothing_can_move() -> None:
    engine = Engine(EchoModel(), page_size=4, num_pages=8, config=SchedulerConfig(max_bypass=0))
    handle = engine.build_prefix(span(40, 16))
    engine.submit(span(0, 24), SamplingParams(max_tokens=2), request_id="head")
    stream = engine.stream([60, 61], SamplingParams(max_tokens=2))
    assert [t for event in stream for t in event.token_ids] == engine.model.greedy([60, 61], 2)
    assert "out of memory" in engine.explain("head")["error"] and handle.num_tokens == 16


@pytest.mark.parametrize("quota", [Quota(max_running=1), Quota(max_pages=3)])
def test_nobody_is_pushed_out_for_a_request_that_its_quota_keeps_waiting(quota: Quota) -> None:
    driver = Driver(page_size=4, policy="priority", max_num_seqs=2, quotas={"n": quota})
    for i in range(2):
        driver.submit(f"slow{i}", span(20 * i, 8), 20, priority=5)
    driver.step()
    for i in range(2):
        driver.submit(f"urgent{i}", span(40 + 10 * i, 6), 3, namespace="n")
    driver.run()
    driver.expect_all_exact()
    assert driver.scheduler.stats.num_preemptions == 1


@pytest.mark.parametrize("policy", ["fcfs", "fair_share"])
def test_a_start_that_fails_half_way_ends_that_request_alone_under_quotas(policy: str) -> None:
    config = SchedulerConfig(policy=policy, quota=Quota(max_running=2))
    engine = Engine(EchoHybrid(), page_size=4, num_pages=64, config=config)
    checkpointer = engine.scheduler.checkpointer
    assert checkpointer is not None
    real, checkpointer.begin = checkpointer.begin, lambda *_: 1 / 0  # type: ignore[method-assign]
    engine.submit(span(0, 20), SamplingParams(max_tokens=3), request_id="a")
    [event] = engine.step()
    assert event.finish_reason == "error"
    checkpointer.begin = real  # type: ignore[method-assign]
    [output] = engine.generate([span(0, 20)], SamplingParams(max_tokens=3))
    assert output.token_ids == engine.model.greedy(span(0, 20), 3)
    engine.check()


def test_all_streams_of_a_loop_that_was_closed_are_cancelled() -> None:
    class Slow(EchoModel):
        def forward(self, batch, storage):
            time.sleep(0.005)
            return super().forward(batch, storage)

    engine, loop, kept = AsyncEngine(Slow(), page_size=4, num_pages=600), asyncio.new_event_loop(), []

    async def read(i: int) -> None:
        kept.append(engine.stream([1 + i, 2, 3], SamplingParams(max_tokens=500)))
        async for _ in kept[-1]:
            pass

    async def begin() -> None:
        kept.extend([asyncio.ensure_future(read(i)) for i in range(3)])
        await asyncio.sleep(0.05)

    loop.run_until_complete(begin())
    loop.close()
    end = time.monotonic() + 2.0
    while engine.has_work and time.monotonic() < end:
        time.sleep(0.01)
    assert engine.engine.scheduler.stats.num_cancelled == 3
    engine.steps.stop()


def test_a_window_of_one_token_on_pages_of_one_token_leaves_no_page_and_that_is_in_order() -> None:
    driver = Driver(page_size=1)
    driver.submit("a", span(0, 5), 4, cache_window=1)
    driver.run()
    driver.expect_all_exact()


def test_a_caller_of_step_is_told_that_nothing_can_move() -> None:
    engine = Engine(EchoModel(), page_size=4, num_pages=8)
    handle = engine.build_prefix(span(0, 26))
    engine.submit(span(40, 9), SamplingParams(max_tokens=3), request_id="a")
    events = [event for _ in range(5) for event in engine.step()]
    assert not engine.has_work
    [output] = [event.output for event in events if event.output is not None]
    assert output.finish_reason == "error" and "held by handles" in output.error
    engine.check()
    del handle
    [output] = engine.generate([span(40, 9)], SamplingParams(max_tokens=3))
    assert output.token_ids == engine.model.greedy(span(40, 9), 3)


def test_a_commit_that_fails_half_way_tells_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(EchoModel(), num_pages=64)
    real, calls = Slots.vacate, []

    def vacate(self, slot):
        calls.append(slot)
        if len(calls) == 2:
            raise RuntimeError("injected")
        return real(self, slot)

    for name in "abc":
        engine.submit(span(ord(name) - 97, 9), SamplingParams(max_tokens=2), request_id=name)
    monkeypatch.setattr(Slots, "vacate", vacate)
    outputs = {}
    while engine.has_work:
        outputs |= {event.request_id: event.output for event in engine.step() if event.output is not None}
        engine.check()
    assert sorted(outputs) == ["a", "b", "c"]
    assert [outputs[name].finish_reason for name in "abc"] == ["length", "error", "error"]
    assert engine.pool.num_live == 0
