"""Times of a request and histograms of many: by counts and given clocks, never by how long a test takes."""

from __future__ import annotations

import pytest
from fakes import EchoModel

import scheduler.delivery
import scheduler.live
from scheduler import Engine, SamplingParams
from scheduler.latency import Histogram, Latencies, Times


class Clock:
    """One second a step of the model, and no time for anything else."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(scheduler.delivery, "perf_counter", lambda: self.now)
        monkeypatch.setattr(scheduler.live, "perf_counter", lambda: self.now)

    def engine(self, **settings) -> Engine:
        engine = Engine(EchoModel(), num_pages=64, **settings)
        forward = engine.model.forward

        def timed(batch, storage):
            self.now += 1.0
            return forward(batch, storage)

        engine.model.forward = timed  # type: ignore[method-assign]
        return engine


def test_a_duration_falls_into_the_first_bucket_that_holds_it() -> None:
    h = Histogram((1.0, 2.0, 5.0))
    for seconds in (0.0, 1.0, 1.5, 2.0, 4.0, 7.0):
        h.add(seconds)
    assert h.counts.tolist() == [2, 2, 1, 1]
    assert h.cumulative() == [(1.0, 2), (2.0, 4), (5.0, 5), (float("inf"), 6)]
    assert h.sum_s == 15.5
    with pytest.raises(ValueError, match="must rise"):
        Histogram((1.0, 1.0))


def test_only_a_request_that_ended_by_itself_counts_whole() -> None:
    latencies = Latencies()
    latencies.record(Times(10.0, 11.0, 13.0, 17.0), 5, complete=True)
    latencies.record(Times(10.0, 11.0, 13.0, 17.0), 5, complete=False)
    latencies.record(Times(10.0, ended=12.0), 0, complete=False)  # cancelled in the queue
    latencies.record(Times(10.0, 11.0, 13.0, 13.0), 1, complete=True)
    sums = {name: (int(h.counts.sum()), h.sum_s) for name, _, h in latencies.items()}
    assert sums == {
        "queue_wait": (3, 3.0),
        "time_to_first_token": (3, 9.0),
        "time_per_output_token": (1, 1.0),
        "end_to_end": (2, 10.0),
    }


def test_explain_says_how_long_a_request_waited_and_ran(monkeypatch) -> None:
    clock = Clock(monkeypatch)
    engine = clock.engine(max_num_seqs=1)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=4), request_id="first")
    engine.submit([4, 5], SamplingParams(max_tokens=3), request_id="second")
    assert [engine.explain("first")[k] for k in ("wait_s", "time_to_first_token_s", "end_to_end_s")] == [None] * 3
    engine.step()
    assert [engine.explain("first")[k] for k in ("wait_s", "time_to_first_token_s", "end_to_end_s")] == [0.0, 1.0, None]
    assert engine.explain("second")["wait_s"] is None
    while engine.has_work:
        engine.step()
    for name, want in (("first", [0.0, 1.0, 4.0]), ("second", [4.0, 5.0, 7.0])):
        told = engine.explain(name)
        assert [told[k] for k in ("wait_s", "time_to_first_token_s", "end_to_end_s")] == want
    sums = {name: (int(h.counts.sum()), h.sum_s) for name, _, h in engine.delivery.latencies.items()}
    assert sums == {
        "queue_wait": (2, 4.0),
        "time_to_first_token": (2, 6.0),
        "time_per_output_token": (2, 2.0),
        "end_to_end": (2, 11.0),
    }


def test_a_preempted_request_keeps_its_first_times(monkeypatch) -> None:
    clock = Clock(monkeypatch)
    engine = clock.engine(max_num_seqs=4)
    engine.pool.alloc(55)
    outputs = engine.generate([list(range(40)), list(range(50)), [1, 2]], SamplingParams(max_tokens=30))
    again = [o for o in outputs if o.num_preemptions]
    assert again
    for output in again:
        assert engine.explain(output.request_id)["wait_s"] == 0.0
        assert engine.explain(output.request_id)["time_to_first_token_s"] == 1.0
    assert int(engine.delivery.latencies.queue_wait.counts.sum()) == 3


def test_explain_says_what_ended_a_request_and_what_it_lost() -> None:
    engine = Engine(EchoModel(), num_pages=9, max_num_seqs=4)
    outputs = engine.generate([list(range(40)), list(range(40, 90)), [1, 2]], SamplingParams(max_tokens=30))
    told = [engine.explain(o.request_id) for o in outputs]
    assert [t["stop_reason"] for t in told] == [f"limit of {n} tokens" for n in (70, 80, 32)]
    stats = engine.stats()
    assert stats["num_preemptions"] > 0
    lost = sum(t["num_evicted_tokens"] for t in told)
    assert lost == stats["preempted_tokens"] - stats["reattached_tokens"] > 0
    for t, o in zip(told, outputs, strict=True):
        assert t["num_computed_tokens"] == o.num_prompt_tokens - o.num_cached_tokens + 29 + t["num_evicted_tokens"]
    end = engine.model.greedy([1, 2], 3)[2]
    engine.generate([[1, 2]], SamplingParams(max_tokens=9, stop_token_ids=[end]), request_id="ends")
    assert engine.explain("ends")["stop_reason"] == f"token {end}"
    engine.submit([1, 2], request_id="gone")
    engine.cancel("gone")
    assert engine.explain("gone")["stop_reason"] is None


def test_where_no_token_was_drawn_none_is_counted_and_none_came_first() -> None:
    engine = Engine(EchoModel(), num_pages=32)
    forward = engine.model.forward
    engine.model.forward = lambda batch, storage: forward(batch, storage) * float("nan")  # type: ignore[method-assign]
    [output] = engine.generate([[1, 2, 3]], request_id="bad")
    assert (output.finish_reason, output.token_ids) == ("error", [])
    assert engine.stats()["generated_tokens"] == 0
    assert engine.explain("bad")["time_to_first_token_s"] is None
    assert engine.delivery.latencies.time_to_first_token.counts.sum() == 0
