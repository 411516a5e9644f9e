"""Streams side by side: a few slots, a short queue, requests that leave early."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from byhand import span
from driver import Driver
from fakes import EchoModel
from gated import PATIENCE_S

from paged.errors import QueueFull
from paged.sampling import SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.policy import POLICIES


def engine(policy: str = "fcfs", max_seq_len: int = 64, **config) -> Engine:
    config = SchedulerConfig(**{"max_num_seqs": 2, "max_num_batched_tokens": 32, "policy": policy, **config})
    return Engine(EchoModel(max_seq_len=max_seq_len), page_size=4, num_pages=80, config=config)


def drain(e: Engine) -> dict[str, list[int]]:
    """Every token of every event from here on, by request."""
    tokens: dict[str, list[int]] = {}
    while e.has_work:
        for event in e.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
        e.check()
    return tokens


GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_two_run_two_wait_and_the_fifth_is_refused(policy: str) -> None:
    with engine(policy, max_queue_requests=2) as e:
        for i in range(2):
            e.submit([i] * 5, GREEDY, request_id=f"r{i}")
        events = e.step()
        for i in range(2, 4):
            e.submit([i] * 5, GREEDY, request_id=f"r{i}")
        with pytest.raises(QueueFull):
            e.submit([4] * 5, GREEDY, request_id="r4")
        assert e.cancel("r3")  # it never had a page
        gone = [event.output for event in e.step() if event.request_id == "r3"]
        assert (gone[0].finish_reason, gone[0].token_ids, gone[0].num_computed_tokens) == ("cancelled", [], 0)
        e.submit([4] * 5, GREEDY, request_id="r4")
        ended = {f"r{i}" for i in range(5)} - {"r3"}
        assert {event.request_id for event in events} == {"r0", "r1"}
        assert set(drain(e)) == ended


def test_a_victim_of_a_cancel_emits_no_more_and_the_others_do_not_notice() -> None:
    with engine() as e:
        names = [e.submit([i] * 5, GREEDY) for i in range(2)]
        seen = {name: [] for name in names}
        for _ in range(3):
            for event in e.step():
                seen[event.request_id] += event.token_ids
        assert e.cancel(names[0]) and not e.cancel(names[0])
        rest = drain(e)
        assert rest[names[0]] == []
        assert seen[names[1]] + rest[names[1]] == e.model.greedy([1] * 5, 8)
        assert seen[names[0]] == e.model.greedy([0] * 5, 3)


@pytest.mark.parametrize("prompt", [1, 40, 63])
def test_a_stream_ends_with_length_where_the_context_does(prompt: int) -> None:
    """Prompt and output together are at most max_seq_len."""
    with engine() as e:
        out = e.generate([[1] * prompt], SamplingParams(max_tokens=512, temperature=0.0))[0]
        assert (out.finish_reason, len(out.token_ids)) == ("length", 64 - prompt)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_stream_among_others_is_what_it_is_alone(policy: str, temperature: float) -> None:
    params = [SamplingParams(max_tokens=9, temperature=temperature, seed=i) for i in range(5)]
    prompts = [[*span(0, 3 * i), 90 + i] for i in range(5)]
    with engine() as alone:
        expected = [alone.generate([prompt], one)[0].token_ids for prompt, one in zip(prompts, params, strict=True)]
    with engine(policy) as e:
        assert [out.token_ids for out in e.generate(prompts, params)] == expected


def test_a_stop_id_ends_a_stream_and_is_not_shown() -> None:
    with engine() as e:
        tokens = e.model.greedy([1, 2, 3], 8)
        out = e.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=(tokens[4],)))[0]
        assert (out.token_ids, out.finish_reason) == (tokens[: tokens.index(tokens[4])], "stop")


def test_a_waiting_request_that_is_cancelled_never_took_a_page_and_a_running_one_gives_all_back() -> None:
    d = Driver(40, 4, cache=False, max_num_seqs=1)
    d.submit("runs", [1] * 9, 8)
    d.submit("waits", [2] * 9, 8)
    d.step()
    allocated = []
    real = d.pool.alloc
    d.pool.alloc = lambda n: allocated.append(n) or real(n)
    d.cancel("waits")
    assert allocated == []
    d.cancel("runs")
    assert d.pool.num_free == 40 and not d.scheduler.has_work


def test_a_head_of_125_pages_with_73_free_holds_up_no_request_of_two() -> None:
    d = Driver(200, 16, watermark=0.0, max_num_batched_tokens=4096)
    d.submit("runs", [1] * (127 * 16 - 40), 20)
    d.step()
    assert d.pool.num_free == 75
    d.submit("head", [2] * 2000, 4)
    d.submit("small", [3] * 20, 4)
    assert [r.id for r in d.step().admitted] == ["small"]
    assert d.step_until(lambda: "head" in d.running()) <= 20  # the step after `runs` ended
    d.run()
    d.expect_all_exact()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_victim_early_in_the_list_costs_the_next_one_no_step(policy: str) -> None:
    """All that still run after a preemption are in the step, whichever place the victim had."""
    d = Driver(17, 4, policy=policy, watermark=0.0, cache=False)
    for i, priority in enumerate((0, 5, 0, 0)):
        d.submit(f"r{i}", np.full(12 - i % 2, i, np.int32), 20, priority=priority)
    while not d.scheduler.stats.num_preemptions:
        d.step()
    assert set(d.plans[-1]) == set(d.running()) and len(d.running()) == 3
    d.run()
    d.expect_all_exact()


def test_a_reader_that_knows_an_end_of_its_own_stops_a_request_as_complete() -> None:
    with engine() as e:
        whole = e.generate([[1, 2, 3]], GREEDY)[0].token_ids
        stream, seen = e.stream([1, 2, 3], GREEDY), []
        for event in stream:
            seen += event.token_ids
            if len(seen) >= 3:
                stream.stop()
        assert stream.output is not None and stream.output.finish_reason == "stop"
        assert stream.output.token_ids == seen == whole[:3]
        assert e.explain(stream.request_id)["stop_reason"] == "the reader"
        stream.stop()  # once more does nothing
        assert e.stats()["num_cancelled"] == 0 and not e.has_work
        e.check()


def test_every_sample_of_a_stopped_stream_is_complete() -> None:
    with engine() as e:
        stream = e.stream([1, 2, 3], SamplingParams(max_tokens=8, temperature=1.0, n=2, seed=1))
        next(stream)
        stream.stop()
        assert [sample.finish_reason for sample in stream.output.samples] == ["stop", "stop"]
        assert e.stats()["num_cancelled"] == 0
        e.check()


def test_the_last_event_comes_where_another_thread_is_just_about_to_hand_it_out() -> None:
    with engine() as e:
        stream = e.stream([1, 2, 3], SamplingParams(max_tokens=1))
        sink, handing, go_on = stream._samples.sink, threading.Event(), threading.Event()

        def late(event) -> None:
            handing.set()
            assert go_on.wait(PATIENCE_S)
            sink(event)

        stream._samples.sink = late
        other = threading.Thread(target=e.step)
        other.start()
        assert handing.wait(PATIENCE_S) and stream.output is not None
        threading.Timer(0.2, go_on.set).start()
        events = list(stream)
        other.join()
        assert [event.token_ids for event in events] == [stream.output.token_ids]
