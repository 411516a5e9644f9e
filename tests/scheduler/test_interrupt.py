"""Ctrl-C at any moment: it takes effect between two steps, and leaves an engine that goes on."""

from __future__ import annotations

import signal
import sys
import threading
from itertools import count

import pytest
from byhand import span
from fakes import EchoModel

from scheduler import Engine, SamplingParams
from scheduler.interrupt import HeldInterrupt
from scheduler.lock import FairLock

PROMPTS = [span(0, 9), span(0, 6), span(30, 5)]
PARAMS = SamplingParams(max_tokens=4)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


class Pressing(EchoModel):
    """Somebody presses Ctrl-C so many times in the middle of its second forward."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.went_on = False

    def forward(self, batch, storage):
        if self.num_forwards == 1 and self.times:
            for _ in range(self.times):
                press()
            self.went_on = True
        return super().forward(batch, storage)


@pytest.fixture(autouse=True)
def _handler():
    # Python sets none where whoever started it ignores Ctrl-C, as a shell does for what runs in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    after = signal.signal(signal.SIGINT, before)
    assert after is signal.default_int_handler, "the program's own handler was not put back"


def test_the_step_that_runs_is_finished_first() -> None:
    model = Pressing(times=1)
    engine = Engine(model, num_pages=32)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS)
    assert model.went_on and model.num_forwards == 2
    engine.check()
    assert not engine.has_work and engine.pool.num_live == 0
    assert engine.generate(PROMPTS, PARAMS)[0].token_ids == model.greedy(PROMPTS[0], 4)


def test_no_event_is_lost_when_a_step_is_interrupted() -> None:
    model = Pressing(times=1)
    engine = Engine(model, num_pages=32)
    engine.submit(PROMPTS[0], PARAMS)
    tokens = [token for event in engine.step() for token in event.token_ids]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while engine.has_work:
        tokens += [token for event in engine.step() for token in event.token_ids]
    assert tokens == model.greedy(PROMPTS[0], 4)


def test_a_second_one_breaks_into_the_step() -> None:
    model = Pressing(times=2)
    engine = Engine(model, num_pages=32)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS)
    assert not model.went_on


def test_a_handler_that_raises_nothing_is_called_once_and_the_work_goes_on() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: calls.append(number))
    try:
        model = Pressing(times=1)
        outputs = Engine(model, num_pages=32).generate(PROMPTS, PARAMS)
        assert [o.token_ids for o in outputs] == [model.greedy(prompt, 4) for prompt in PROMPTS]
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_where_the_program_ignores_it_nothing_is_held() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert HeldInterrupt.begin() is None
        outputs = Engine(Pressing(times=3), num_pages=32).generate(PROMPTS, PARAMS)
        assert all(o.finish_reason == "length" for o in outputs)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_of_its_own_holds_nothing() -> None:
    seen: list[object] = [0]
    thread = threading.Thread(target=lambda: seen.append(HeldInterrupt.begin()))
    thread.start()
    thread.join()
    assert seen[-1] is None


def test_who_waits_for_the_lock_can_be_interrupted() -> None:
    lock, held, let_go = FairLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            let_go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    threading.Timer(0.05, press_main).start()
    with pytest.raises(KeyboardInterrupt), lock:
        raise AssertionError("it was held by another thread")
    assert not lock.owned
    let_go.set()
    thread.join()
    with lock:
        assert lock.owned


def press_main() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def interrupted_at(line: int) -> bool:
    """Run two batches and press Ctrl-C before the so-manieth line of Python of them; False if there are not as many."""
    model = EchoModel()
    engine = Engine(model, num_pages=12, max_num_batched_tokens=8)
    lines, pressed = count(), False

    def watch(frame, what, _):
        nonlocal pressed
        if what == "line" and next(lines) == line:
            pressed = True
            sys.settrace(None)
            press()
        return watch

    sys.settrace(watch)
    try:
        for prompt in PROMPTS[:2]:
            for _ in engine.stream(prompt, PARAMS):
                pass
        engine.generate(PROMPTS, PARAMS)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    engine.check()
    outputs: list[list[int]] = []
    thread = threading.Thread(target=lambda: outputs.append(engine.generate(PROMPTS, PARAMS)[0].token_ids), daemon=True)
    thread.start()  # which would wait for ever for a lock that was not given back
    thread.join(30)
    assert outputs == [model.greedy(PROMPTS[0], 4)]
    while engine.has_work:
        engine.step()
    assert engine.pool.num_live == 0 and engine.scheduler.state.num_free == engine.config.max_num_seqs
    return pressed


# Python itself drops an interrupt that comes in a destructor.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", range(0, 149, 50))
def test_before_any_line_of_a_batch_it_leaves_a_sound_engine(first: int) -> None:
    for line in range(first, 1_000_000, 149):
        if not interrupted_at(line):
            assert line > 2000, "hardly anything ran"
            return
