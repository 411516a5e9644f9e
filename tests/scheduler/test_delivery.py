"""What is cancelled while a step runs ends when the step has; nothing that a step calls can touch its requests."""

from __future__ import annotations

import gc

import pytest
from byhand import span
from fakes import ByteTokenizer, EchoModel, ScriptModel

from paged.errors import Closed
from paged.text import OutputText
from scheduler import Engine, SamplingParams, SchedulerConfig

PARAMS = SamplingParams(max_tokens=8)


class Calling(EchoModel):
    """Calls `hook` in the middle of each step."""

    hook = staticmethod(lambda: None)

    def forward(self, batch, storage):
        self.hook()
        return super().forward(batch, storage)


def engine_of() -> Engine:
    return Engine(Calling(), num_pages=32, max_num_seqs=4)


def test_a_cancel_from_within_a_step_takes_effect_at_its_end() -> None:
    engine = engine_of()
    engine.submit(span(0, 20), PARAMS, request_id="a")
    engine.submit(span(30, 9), PARAMS, request_id="b")
    engine.step()
    answers = []
    engine.model.hook = lambda: answers.append(engine.cancel("a"))
    last = [e for e in engine.step() if e.request_id == "a"][-1]
    assert answers == [True]
    assert last.output.finish_reason == "cancelled"
    assert last.output.token_ids == engine.model.greedy(span(0, 20), 2)  # the token of that step is delivered
    engine.model.hook = lambda: None
    engine.check()
    ends = []
    while engine.has_work:
        ends += [e.output for e in engine.step() if e.finished]
    assert [o.token_ids for o in ends] == [engine.model.greedy(span(30, 9), 8)]
    assert engine.pool.num_live == 0


def test_a_request_that_ends_in_the_step_in_which_it_is_cancelled_has_ended() -> None:
    engine = engine_of()
    engine.submit(span(0, 20), SamplingParams(max_tokens=1), request_id="a")
    engine.model.hook = lambda: engine.cancel("a")
    [event] = engine.step()
    assert event.output.finish_reason == "length"
    assert engine.stats()["num_cancelled"] == 0
    engine.check()


def test_a_stream_that_is_collected_in_the_middle_of_a_step_cancels_its_request_at_the_steps_end() -> None:
    engine = engine_of()
    held = [engine.stream(span(0, 20), PARAMS)]
    engine.submit(span(30, 9), PARAMS)
    next(held[0])

    def collect() -> None:
        held.clear()
        gc.collect()

    engine.model.hook = collect
    engine.step()
    engine.check()
    assert engine.stats()["num_cancelled"] == 1
    assert len(engine.scheduler.requests) == 1


def test_a_stream_that_is_collected_while_its_thread_holds_the_engine_ends_with_the_next_step() -> None:
    engine = engine_of()
    stream = engine.stream(span(0, 20), PARAMS)
    next(stream)
    with engine.lock:
        del stream
        gc.collect()
        assert len(engine.scheduler.requests) == 1
    assert engine.step() == []
    assert not engine.scheduler.requests and engine.pool.num_live == 0
    engine.check()


def test_a_step_within_a_step_is_refused_and_ends_the_requests_of_the_outer_one() -> None:
    engine = engine_of()
    engine.submit(span(0, 20), PARAMS, request_id="a")
    engine.model.hook = lambda: engine.generate([[1, 2]], PARAMS)
    [event] = engine.step()
    assert "a step was begun from within a step" in event.output.error
    engine.model.hook = lambda: None
    engine.check()
    [output] = engine.generate([span(0, 20)], PARAMS)
    assert output.token_ids == engine.model.greedy(span(0, 20), 8)


def test_closing_from_within_a_step_gives_all_pages_back_at_its_end() -> None:
    engine = engine_of()
    engine.submit(span(0, 20), PARAMS)
    engine.step()
    engine.model.hook = engine.close
    [event] = engine.step()[-1:]
    assert event.output.finish_reason == "cancelled"
    assert engine.pool.num_free == 32 and not engine.has_work
    with pytest.raises(Closed):
        engine.submit([1])


@pytest.mark.parametrize("ending", ["length", "cancelled"])
def test_where_the_end_of_a_text_fails_everybody_hears_the_same_of_it(monkeypatch, ending: str) -> None:
    def failing(self) -> str:
        raise ValueError("no such character")

    engine = engine_of()
    engine.model.tokenizer = ByteTokenizer([b"a"] * engine.model.vocab_size)
    told: list = []
    engine.subscribe(told.append)
    monkeypatch.setattr(OutputText, "flush", failing)
    stream = engine.stream([1, 2], PARAMS, request_id="a")
    if ending == "cancelled":
        next(stream)
        stream.close()
    *_, last = stream
    want = ("error", "ValueError: no such character") if ending == "length" else ("cancelled", "")
    account = engine.explain("a")
    assert (last.output.finish_reason, last.output.error) == want
    assert (account["finish_reason"], account["error"]) == want
    assert (told[-1].reason, told[-1].error) == want
    assert last.finish_reason == want[0] and account["stop_reason"] is None
    assert engine.delivery.latencies.end_to_end.counts.sum() == 0
    assert engine.stats()["num_cancelled"] == (ending == "cancelled")


@pytest.mark.parametrize("how", ["cancel", "close", "collect"])
def test_pages_come_back_without_another_step_where_one_was_begun_ahead(how: str) -> None:
    engine = Engine(EchoModel(), num_pages=32, config=SchedulerConfig(max_num_seqs=4, plan_ahead=True))
    stream = engine.stream(span(0, 20), SamplingParams(max_tokens=50))
    next(stream)
    next(stream)
    if how == "cancel":
        engine.cancel(stream.request_id)
    elif how == "close":
        stream.close()
    else:
        del stream
        gc.collect()
    assert engine.pool.num_live == 0
    engine.check()
    [output] = engine.generate([span(0, 20)], PARAMS)
    assert output.token_ids == engine.model.greedy(span(0, 20), 8)


def test_pages_come_back_where_a_text_ended_the_last_request_and_a_step_was_begun_ahead() -> None:
    model = ScriptModel([1, 2, 3, 4, 5, 6])
    model.tokenizer = ByteTokenizer([b"", b"a", b"b", b"c", b"d", b"e", b"f"])
    engine = Engine(model, num_pages=32, config=SchedulerConfig(max_num_seqs=4, plan_ahead=True))
    [output] = engine.generate([ScriptModel.prompt(5)], SamplingParams(max_tokens=20, stop="cd"))
    assert output.text == "ab"
    assert engine.pool.num_live == 0
    engine.check()
