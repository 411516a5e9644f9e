"""The thread that runs the steps: it sleeps without work, does jobs in their turn, and says why it ended."""

from __future__ import annotations

import gc
import os
import queue
import threading
import weakref

import pytest
from fakes import EchoModel
from gated import PATIENCE_S, GatedModel, join

from paged.errors import Closed, Draining, DuplicateRequest
from scheduler import Engine, SamplingParams
from scheduler.background import StepThread

PARAMS = SamplingParams(max_tokens=6)


class Told:
    """What a call on a StepThread brings: events, or an error."""

    def __init__(self, steps: StepThread, prompt: list[int], params: SamplingParams = PARAMS, **options) -> None:
        self.events: list = []
        self.errors: list[BaseException] = []
        self.done = threading.Event()
        self.samples = steps.engine.prepare(prompt, params, **options)
        steps.start(self.samples, self.put, self.fail)

    def put(self, event) -> None:
        self.events.append(event)
        if event.finished:
            self.done.set()

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)
        self.done.set()

    def wait(self):
        assert self.done.wait(PATIENCE_S), "the call did not end"
        return self.samples.output


def thread_of(model=None, **settings) -> StepThread:
    settings.setdefault("num_pages", 64)
    return StepThread(Engine(model or EchoModel(), **settings))


def end(steps: StepThread) -> None:
    steps.stop()
    steps.ended.result(PATIENCE_S)
    steps.join(PATIENCE_S)


def test_calls_run_to_their_end_with_the_models_own_tokens() -> None:
    steps = thread_of()
    calls = [Told(steps, [i, 1, 2]) for i in range(20)]
    for i, call in enumerate(calls):
        assert call.wait().token_ids == steps.engine.model.greedy([i, 1, 2], 6)
        assert [t for e in call.events for t in e.token_ids] == call.samples.output.token_ids
        assert not call.errors
    steps.call(steps.engine.check).result(PATIENCE_S)
    end(steps)


class CountedQueue:
    """Counts how the thread asks for jobs."""

    def __init__(self, inner: queue.SimpleQueue) -> None:
        self.inner = inner
        self.asked: list[tuple] = []

    def get(self, *args):
        self.asked.append(args)
        return self.inner.get(*args)

    def __getattr__(self, name: str):
        return getattr(self.inner, name)


def test_an_idle_thread_wakes_up_for_what_it_is_told_and_for_nothing_else() -> None:
    steps = thread_of()
    steps._inbox = CountedQueue(steps._inbox)  # type: ignore[assignment]
    steps.call(lambda: None).result(PATIENCE_S)  # from now on the counted queue is asked
    before = steps.num_wakeups
    for i in range(10):
        Told(steps, [i, 2, 3]).wait()
        steps.call(lambda: None).result(PATIENCE_S)  # comes when all is over, or a step before: then it wakes nobody
    assert steps.num_wakeups - before <= 20
    before = steps.num_wakeups
    for _ in range(10):
        steps.call(lambda: None).result(PATIENCE_S)
    assert steps.num_wakeups - before == 10
    assert set(steps._inbox.asked) == {()}  # it waits without a time limit: nothing but a job ends that
    end(steps)


def test_no_step_runs_without_a_call() -> None:
    steps = thread_of()
    name = steps.engine.submit([1, 2, 3], PARAMS)  # of somebody who steps for himself
    steps.call(lambda: None).result(PATIENCE_S)
    steps.call(lambda: None).result(PATIENCE_S)
    assert steps.engine.scheduler.stats.num_steps == 0
    Told(steps, [4, 5]).wait()  # its steps serve both
    events = []
    while steps.engine.has_work:
        events += steps.engine.step()
    assert {e.request_id for e in events} == {name}
    assert events[-1].output.token_ids == steps.engine.model.greedy([1, 2, 3], 6)
    end(steps)


def test_jobs_are_done_between_steps_in_their_order() -> None:
    model = GatedModel()
    steps = thread_of(model)
    call = Told(steps, [1, 2, 3])
    model.wait_for_step()
    order: list[int] = []
    futures = [steps.call(lambda i=i: order.append(i)) for i in range(5)]
    assert not order
    model.allow()
    model.wait_for_step()
    assert order == list(range(5)) and all(f.done() for f in futures)
    model.free()
    call.wait()
    end(steps)


def test_what_a_job_raises_comes_through_its_future_and_the_thread_goes_on() -> None:
    steps = thread_of()
    with pytest.raises(KeyError, match="nobody"):
        steps.call(lambda: steps.engine.explain("nobody")).result(PATIENCE_S)
    assert Told(steps, [1, 2]).wait().finish_reason == "length"
    end(steps)


def test_a_call_that_the_engine_refuses_fails_alone() -> None:
    model = GatedModel()
    steps = thread_of(model)
    first = Told(steps, [1, 2], request_id="a")
    model.wait_for_step()
    second = Told(steps, [3, 4], request_id="a")
    third = Told(steps, [5, 6])
    model.free()
    second.done.wait(PATIENCE_S)
    assert isinstance(second.errors[0], DuplicateRequest) and not second.events
    assert first.wait().token_ids == model.greedy([1, 2], 6)
    assert third.wait().token_ids == model.greedy([5, 6], 6)
    end(steps)


def test_a_cancel_that_comes_right_behind_the_start_finds_the_call() -> None:
    model = GatedModel()
    steps = thread_of(model)
    other = Told(steps, [7, 7])
    model.wait_for_step()
    call = Told(steps, [1, 2, 3])
    steps.cancel(call.samples)
    model.allow()
    assert call.wait().finish_reason == "cancelled"
    model.free()
    assert other.wait().finish_reason == "length"
    assert steps.engine.stats()["num_cancelled"] == 1
    end(steps)


def test_draining_finishes_what_is_live_and_refuses_the_rest() -> None:
    model = GatedModel()
    steps = thread_of(model)
    live = Told(steps, [1, 2, 3])
    model.wait_for_step()
    behind = Told(steps, [6, 7])  # queued, and not with the scheduler yet
    queued = steps.engine.prepare([4, 5], PARAMS)  # prepared before, started after
    drained = steps.drain()
    with pytest.raises(Draining, match="takes no new requests"):
        steps.require_open()
    errors: list[BaseException] = []
    steps.start(queued, errors.append, errors.append)
    assert not drained.done()
    model.free()
    drained.result(PATIENCE_S)
    assert live.samples.output.token_ids == model.greedy([1, 2, 3], 6)
    assert behind.samples.output.token_ids == model.greedy([6, 7], 6)
    assert [type(e) for e in errors] == [Draining]
    steps.drain().result(PATIENCE_S)  # again: nothing is live
    steps.engine.generate([[8, 9]], PARAMS)  # the engine's own verbs go on
    end(steps)
    steps.drain().result(PATIENCE_S)


def test_stopping_cancels_what_is_live_and_fails_what_comes_later() -> None:
    model = GatedModel()
    steps = thread_of(model)
    calls = [Told(steps, [i, 2]) for i in range(3)]
    model.wait_for_step()
    drained = steps.drain()
    steps.stop()
    late = steps.call(lambda: 1)
    model.free()
    steps.ended.result(PATIENCE_S)
    assert [c.wait().finish_reason for c in calls] == ["cancelled"] * 3
    assert steps.engine.stats()["num_cancelled"] == 3
    assert drained.result(PATIENCE_S) is None
    with pytest.raises(Closed, match="was closed"):
        late.result(PATIENCE_S)  # without anything that comes later
    with pytest.raises(Closed, match="was closed"):
        steps.call(lambda: 1).result(PATIENCE_S)
    after = Told(steps, [1])
    assert isinstance(after.errors[0], Closed)
    with pytest.raises(Closed):
        steps.require_open()
    end(steps)  # again
    steps.engine.check()
    assert steps.engine.pool.num_live == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_step_that_is_not_isolated_ends_the_thread_and_every_caller_hears_why(error: type[BaseException]) -> None:
    class Fails(GatedModel):
        def forward(self, batch, storage):
            logits = super().forward(batch, storage)
            if self.num_forwards == 3:
                raise error("from without")
            return logits

    model = Fails()
    steps = thread_of(model, max_num_seqs=2)
    calls = [Told(steps, [i, 2, 3]) for i in range(5)]  # two run, three wait
    model.wait_for_step()
    drained = steps.drain()
    model.free()
    steps.ended.result(PATIENCE_S)
    for call in calls:
        call.wait()
    ended = [call for call in calls if call.events and call.events[-1].finished]
    assert [c.samples.output.finish_reason for c in ended[:2]] == ["error"] * 2
    assert all(error.__name__ in c.samples.output.error for c in ended[:2])
    waiting = [call for call in calls if call.errors]
    assert len(waiting) == 3
    for call in waiting:
        assert isinstance(call.errors[0], Closed)
        assert f"raised {error.__name__}: from without" in str(call.errors[0])
        assert isinstance(call.errors[0].__cause__, error)
    assert len({id(call.errors[0]) for call in waiting}) == 3  # each raise adds frames to its own
    assert drained.done()
    with pytest.raises(Closed, match=f"raised {error.__name__}"):
        steps.require_open()
    with pytest.raises(Closed, match=f"raised {error.__name__}"):
        steps.call(lambda: 1).result(PATIENCE_S)
    steps.join(PATIENCE_S)
    steps.engine.check()
    assert steps.engine.pool.num_live == 0


def test_no_memory_in_the_middle_of_planning_ends_the_thread_too() -> None:
    steps = thread_of()

    def schedule():
        raise MemoryError("no more")

    steps.engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    call = Told(steps, [1, 2])
    call.wait()
    assert "raised MemoryError: no more" in str(call.errors[0])
    steps.join(PATIENCE_S)
    assert steps.engine.pool.num_live == 0 and not steps.engine.scheduler.requests


def test_an_error_that_is_isolated_ends_the_requests_of_the_step_and_the_thread_goes_on() -> None:
    class Fails(GatedModel):
        def forward(self, batch, storage):
            super().forward(batch, storage)
            raise ValueError("only this step")

    steps = thread_of(Fails())
    steps.engine.model.free()
    call = Told(steps, [1, 2])
    assert "only this step" in call.wait().error
    assert Told(steps, [3, 4]).wait().finish_reason == "error"
    end(steps)


def test_calls_of_other_threads_on_the_same_engine_share_the_steps() -> None:
    steps = thread_of()
    engine = steps.engine
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        for k in range(5):
            [output] = engine.generate([[i, k, 3]], PARAMS)
            results[10 * i + k] = output.token_ids

    calls = [Told(steps, [50 + i, 1]) for i in range(10)]
    join([threading.Thread(target=work, args=(i,)) for i in range(4)])
    for i, call in enumerate(calls):
        assert call.wait().token_ids == engine.model.greedy([50 + i, 1], 6)
    assert results == {10 * i + k: engine.model.greedy([i, k, 3], 6) for i in range(4) for k in range(5)}
    end(steps)


def test_what_nothing_can_move_ends_with_an_error_instead_of_a_hang() -> None:
    steps = thread_of(num_pages=4)
    steps.engine.pool.alloc(3)
    output = Told(steps, [1] * 40).wait()
    assert output.finish_reason == "error" and "sessions outside" in output.error
    end(steps)


def test_an_ended_thread_keeps_no_engine() -> None:
    steps = thread_of()
    Told(steps, [1, 2]).wait()
    dead = weakref.ref(steps.engine)
    end(steps)
    del steps
    gc.collect()
    assert dead() is None


def test_a_thread_does_not_wait_for_itself() -> None:
    steps = thread_of()
    steps.call(steps.join).result(PATIENCE_S)
    end(steps)


def test_a_forked_process_is_told_that_it_has_no_thread(monkeypatch) -> None:
    steps = thread_of()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(Closed, match="was forked"):
        steps._inbox = queue.SimpleQueue()  # the child's copy, which nobody takes from
        steps.call(lambda: 1).result(PATIENCE_S)
    assert steps.ended.done()
