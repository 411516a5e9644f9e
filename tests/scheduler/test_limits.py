"""Time limits: what ends when its time is up, what it keeps, and what nobody pays who has none."""

from __future__ import annotations

import pytest
from byhand import span
from driver import Driver
from fakes import EchoModel

from paged.errors import InvalidRequest
from paged.sampling import SamplingParams
from scheduler.engine import Engine
from scheduler.limits import Pace, TimeLimits
from scheduler.request import RequestState


class Clock:
    def __init__(self) -> None:
        self.now, self.reads = 50.0, 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


def driver(**config) -> tuple[Driver, Clock]:
    d, clock = Driver(64, 4, **config), Clock()
    d.scheduler.limits.clock = clock
    return d, clock


def taken_out(d: Driver) -> list[str]:
    names = [request.id for request in d.scheduler.failed]
    d.scheduler.failed.clear()
    return names


def test_a_running_request_ends_when_its_time_is_up_and_keeps_its_tokens() -> None:
    d, clock = driver()
    request = d.submit("a", span(0, 6), 30, limits={"timeout_s": 5.0})
    d.submit("b", span(10, 6), 8)
    for _ in range(4):
        d.step()
    clock.now += 4.999
    d.step()
    assert taken_out(d) == []
    clock.now += 0.001
    d.step()
    assert taken_out(d) == ["a"]
    assert (request.finish_reason, len(d.outputs["a"])) == ("cancelled", 5)
    assert request.error == "timeout_s of this request was 5.0 s, and 5.000 s have passed since it was submitted"
    assert request.known.tolist() == span(0, 6) + d.outputs["a"] == span(0, 6) + d.greedy(request, 5)
    assert d.requests.pop("a").state == RequestState.FINISHED
    d.run()
    d.expect_all_exact()
    assert d.pool.num_live == 0


@pytest.mark.parametrize("name", ["timeout_s", "queue_timeout_s"])
def test_a_waiting_request_ends_when_its_time_is_up(name: str) -> None:
    d, clock = driver(max_num_seqs=1)
    d.submit("runs", span(0, 6), 30)
    d.step()
    request = d.submit("a", span(10, 6), 8, limits={name: 2.0})
    d.step()
    clock.now += 2.0
    d.step()
    assert taken_out(d) == ["a"]
    assert request.finish_reason == "cancelled"
    assert request.error.startswith(f"{name} of this request was 2.0 s")
    assert d.waiting() == [] and not request.cursor
    d.requests.pop("a")
    d.run()
    d.expect_all_exact()


def test_a_limit_on_waiting_ends_nobody_who_has_started_even_if_it_waits_again() -> None:
    d, clock = driver()
    d.submit("a", span(0, 6), 12, limits={"queue_timeout_s": 2.0})
    d.step()
    clock.now += 1.0
    d.preempt("a")
    clock.now += 5.0
    d.run()
    d.expect_all_exact()
    assert taken_out(d) == []


def test_both_limits_end_a_request_once() -> None:
    d, clock = driver(max_num_seqs=1)
    d.submit("runs", span(0, 6), 4)
    d.step()
    d.submit("a", span(10, 6), 8, limits={"queue_timeout_s": 1.0, "timeout_s": 1.0})
    clock.now += 3.0
    d.step()
    assert taken_out(d) == ["a"]
    d.requests.pop("a")
    d.run()
    assert taken_out(d) == []


def test_a_limit_of_nothing_ends_it_in_the_next_step() -> None:
    d, _ = driver()
    d.submit("a", span(0, 6), 8, limits={"timeout_s": 0.0})
    assert d.step() is None
    assert taken_out(d) == ["a"]
    assert not d.scheduler.has_work


def test_who_ended_before_is_not_ended_again_and_its_id_may_be_used_anew() -> None:
    d, clock = driver()
    d.solo("a", span(0, 6), 3, limits={"timeout_s": 5.0})
    d.submit("a", span(0, 6), 12)
    clock.now += 9.0
    d.run()
    d.expect_all_exact()
    assert taken_out(d) == []


def test_the_clock_is_not_read_in_a_step_while_nobody_has_a_limit() -> None:
    d, clock = driver()
    d.submit("a", span(0, 6), 8)
    reads = clock.reads
    d.step()
    assert clock.reads == reads
    d.submit("b", span(0, 6), 8, limits={"timeout_s": 100.0})
    reads = clock.reads
    d.step()
    assert clock.reads == reads + 1


def test_ended_requests_are_not_kept_until_their_time_would_be_up() -> None:
    d, _ = driver()
    for i in range(500):
        d.solo(f"r{i}", [i % 90], 1, limits={"timeout_s": 1000.0, "queue_timeout_s": 900.0})
    assert len(d.scheduler.limits) <= 66


def test_limits_of_many_come_up_in_their_order() -> None:
    clock = Clock()
    limits = TimeLimits(clock)
    d, _ = driver()
    for i in range(200):
        request = d.submit(f"r{i}", [i % 90], 4, limits={"timeout_s": float((i * 37) % 200)})
        request.submitted = clock.now
        limits.watch(request)
    for second in range(200):
        clock.now = 50.0 + second
        assert [(int(r.id[1:]) * 37) % 200 for r in limits.due()] == [second]
    assert len(limits) == 0


# In an engine -----------------------------------------------------------------------------------------------------


def test_an_engine_hands_out_a_late_request_as_cancelled_with_the_reason() -> None:
    with Engine(EchoModel(), page_size=4, num_pages=64, max_num_seqs=2) as engine:
        clock = engine.scheduler.limits.clock = Clock()
        late = engine.submit([1, 2, 3], SamplingParams(max_tokens=40), timeout_s=3.0)
        other = engine.submit([4, 5, 6], SamplingParams(max_tokens=8))
        for _ in range(3):
            engine.step()
        clock.now += 3.5
        outputs = {event.request_id: event.output for event in engine.step() if event.output is not None}
        assert outputs[late].finish_reason == "cancelled"
        assert (
            outputs[late].error == "timeout_s of this request was 3.0 s, and 3.500 s have passed since it was submitted"
        )
        assert outputs[late].token_ids == engine.model.greedy([1, 2, 3], 3)
        assert engine.explain(late)["error"] == outputs[late].error
        engine.check()
        while engine.has_work:
            outputs |= {event.request_id: event.output for event in engine.step() if event.output is not None}
        assert outputs[other].token_ids == engine.model.greedy([4, 5, 6], 8)


def test_generate_returns_what_a_late_request_had() -> None:
    with Engine(EchoModel(), page_size=4, num_pages=64) as engine:
        clock = engine.scheduler.limits.clock = Clock()
        real = engine.model.forward

        def forward(batch, storage):
            clock.now += 1.0
            return real(batch, storage)

        engine.model.forward = forward
        out = engine.generate([1, 2, 3], SamplingParams(max_tokens=40), timeout_s=5.0)[0]
        assert (out.finish_reason, len(out.token_ids)) == ("cancelled", 5)
        assert not engine.has_work


@pytest.mark.parametrize("name", ["timeout_s", "queue_timeout_s", "deadline_s"])
@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_a_limit_below_zero_is_refused(name: str, bad: float) -> None:
    with Engine(EchoModel(), page_size=4, num_pages=64) as engine:
        with pytest.raises(InvalidRequest, match=f"{name} must be 0 or more seconds"):
            engine.submit([1], **{name: bad})
        assert not engine.has_work


def test_a_priority_that_is_no_int_is_refused() -> None:
    engine = Engine(EchoModel(), page_size=4, num_pages=64)
    with engine, pytest.raises(TypeError, match="priority must be an int, got str"):
        engine.submit([1], priority="high")


# Pace -------------------------------------------------------------------------------------------------------------


def test_the_pace_follows_the_steps() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.step_s is None
    pace.end()  # of no step
    assert pace.step_s is None
    for took, expected in ((2.0, 2.0), (2.0, 2.0), (18.0, 3.0)):
        pace.begin()
        clock.now += took
        pace.end()
        clock.now += 100.0  # between two steps
        assert pace.step_s == pytest.approx(expected)
