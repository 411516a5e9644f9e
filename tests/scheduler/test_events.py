"""What subscribers hear of requests and of pages, and that nothing they do touches a request."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from byhand import span
from fakes import EchoModel
from gated import join

from paged.prefix.events import PageMirror, PagesStored
from scheduler import Engine, SamplingParams, SchedulerConfig
from scheduler.events import Admitted, Finished, Preempted

PARAMS = SamplingParams(max_tokens=6)


def engine_of(**settings) -> Engine:
    settings.setdefault("num_pages", 64)
    return Engine(EchoModel(), max_num_seqs=4, **settings)


def heard(engine: Engine) -> list:
    events: list = []
    engine.subscribe(events.append)
    return events


def test_a_request_is_admitted_and_finished_with_its_reason_and_counts() -> None:
    engine = engine_of()
    events = heard(engine)
    engine.submit(span(0, 40), PARAMS, request_id="a")
    assert events == []
    engine.step()
    assert events == [Admitted("a", 40, 0, False)]
    while engine.has_work:
        engine.step()
    engine.generate([span(0, 40)], PARAMS, request_id="b")
    assert events == [
        Admitted("a", 40, 0, False),
        Finished("a", "length", 40, 0, 45, 6, 0, ""),
        Admitted("b", 40, 39, False),
        Finished("b", "length", 40, 39, 6, 6, 0, ""),
    ]


def test_a_preempted_request_is_told_and_its_resume_too() -> None:
    engine = engine_of(num_pages=9)
    events = heard(engine)
    outputs = engine.generate([span(0, 40), span(40, 50), [1, 2]], SamplingParams(max_tokens=30))
    preempted = [e for e in events if isinstance(e, Preempted)]
    assert len(preempted) == engine.stats()["num_preemptions"] > 0
    for event in preempted:
        later = events[events.index(event) + 1 :]
        again = next(e for e in later if e.request_id == event.request_id)
        assert isinstance(again, Admitted) and again.resumed
    ends = {e.request_id: e for e in events if isinstance(e, Finished)}
    for output in outputs:
        end = ends[output.request_id]
        assert (end.reason, end.num_preemptions) == (output.finish_reason, output.num_preemptions)
        assert (end.num_computed_tokens, end.num_generated_tokens) == (output.num_computed_tokens, 30)
    firsts = [e for e in events if isinstance(e, Admitted) and not e.resumed]
    assert len(firsts) == engine.stats()["num_admitted"] == 3


def test_every_way_to_end_is_told_once_also_without_a_step() -> None:
    engine = engine_of()
    events = heard(engine)
    engine.submit([1, 2], PARAMS, request_id="waits")
    engine.cancel("waits")
    assert [(e.request_id, e.reason) for e in events] == [("waits", "cancelled")]
    events.clear()
    engine.submit([1, 2], SamplingParams(max_tokens=6, n=2), request_id="both")
    engine.step()
    engine.cancel("both")
    ends = [e for e in events if isinstance(e, Finished)]
    assert [(e.request_id, e.reason) for e in ends] == [("both", "cancelled"), ("both/1", "cancelled")]
    events.clear()
    prefix = engine.build_prefix(span(0, 20))
    engine.generate([span(0, 20)], SamplingParams(max_tokens=1), prefix=prefix, request_id="at once")
    assert [(e.request_id, e.reason, e.num_generated_tokens) for e in events] == [("at once", "length", 1)]
    events.clear()
    del prefix
    engine.submit([3], PARAMS, request_id="live")
    engine.close()
    assert [(e.request_id, e.reason) for e in events] == [("live", "cancelled")]


def test_a_failed_step_is_told_with_its_error() -> None:
    engine = engine_of()
    events = heard(engine)

    def broken(batch, storage):
        raise ValueError("no more")

    engine.model.forward = broken  # type: ignore[method-assign]
    engine.generate([[1, 2]], PARAMS)
    assert [type(e) for e in events] == [Admitted, Finished]
    assert (events[1].reason, events[1].error) == ("error", "ValueError: no more")


def test_who_unsubscribes_hears_no_more_and_the_others_go_on() -> None:
    engine = engine_of()
    first: list = []
    stop = engine.subscribe(first.append)
    second = heard(engine)
    engine.generate([[1]], PARAMS)
    stop()
    stop()
    engine.generate([[2]], PARAMS)
    assert (len(first), len(second)) == (2, 4)


def test_a_function_that_was_subscribed_twice_is_told_until_both_have_ended() -> None:
    engine = engine_of()
    calls: list = []
    tell = calls.append
    once, again = engine.subscribe(tell), engine.subscribe(tell)
    once()
    once()
    engine.generate([[1]], PARAMS)
    assert len(calls) == 2
    again()
    engine.generate([[2]], PARAMS)
    assert len(calls) == 2


@pytest.mark.parametrize("pages", [False, True])
def test_subscriptions_that_threads_begin_and_end_do_not_undo_each_other(pages: bool) -> None:
    engine = engine_of()
    subscribe = engine.subscribe_pages if pages else engine.subscribe

    def work() -> None:
        for _ in range(500):
            subscribe(lambda event: None)  # stays
            subscribe(lambda event: None)()

    threads = [threading.Thread(target=work) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        join(threads)
    finally:
        sys.setswitchinterval(interval)
    subscribers = engine.delivery.subscribers
    assert len(subscribers.pages if pages else subscribers.requests) == 2000


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_callback_that_fails_is_counted_and_touches_no_request(error, caplog) -> None:
    engine = engine_of()

    def fails(event) -> None:
        raise error("of the callback")

    engine.subscribe(fails)
    events = heard(engine)
    prompts = [span(0, 30), span(3, 20), [5]]
    outputs = engine.generate(prompts, PARAMS)
    assert [o.token_ids for o in outputs] == [engine.model.greedy(p, 6) for p in prompts]
    assert len(events) == 6
    assert engine.stats()["num_callback_errors"] == 6
    assert len([r for r in caplog.records if "a subscriber failed" in r.message]) == 1
    engine.check()


def test_a_page_callback_that_fails_is_counted_and_the_cache_goes_on() -> None:
    engine = engine_of()

    def fails(event) -> None:
        raise KeyError

    engine.subscribe_pages(fails)
    mirror = PageMirror(16)
    engine.subscribe_pages(mirror.apply)
    [output] = engine.generate([span(0, 40)], PARAMS)
    assert output.token_ids == engine.model.greedy(span(0, 40), 6)
    assert engine.stats()["num_callback_errors"] >= 1
    assert len(mirror.pages) == engine.cache.held_pages
    engine.check()


def test_a_callback_may_submit_cancel_and_run_requests() -> None:
    """Case B54, submit from a callback: nothing hangs, and what comes of it is told in its turn."""
    engine = engine_of()
    order: list = []
    ran: list = []

    def follow(event) -> None:
        order.append((type(event).__name__, event.request_id))
        if event == Admitted("a", 2, 0, False):
            engine.submit([3, 4], PARAMS, request_id="b")
            engine.submit([5, 6], PARAMS, request_id="c")
            assert engine.cancel("c")
        if isinstance(event, Finished) and event.request_id == "b":
            ran.extend(engine.generate([[7, 8]], PARAMS, request_id="d"))

    seen: list = []
    engine.subscribe(follow)
    engine.subscribe(lambda event: seen.append((type(event).__name__, event.request_id)))
    [output] = engine.generate([[1, 2]], PARAMS, request_id="a")
    outputs = {}
    while engine.has_work:
        outputs.update({e.request_id: e.output for e in engine.step() if e.finished})
    assert output.token_ids == engine.model.greedy([1, 2], 6)
    assert outputs["b"].token_ids == engine.model.greedy([3, 4], 6)
    assert outputs["c"].finish_reason == "cancelled"
    assert ran[0].token_ids == engine.model.greedy([7, 8], 6)
    assert order == seen
    assert order[:2] == [("Admitted", "a"), ("Finished", "c")]
    assert order[-2:] == [("Admitted", "d"), ("Finished", "d")]
    engine.check()


def test_with_nobody_there_nothing_is_noted() -> None:
    engine = engine_of()
    engine.generate([span(0, 40)], PARAMS)
    assert not engine.delivery.subscribers._waiting
    assert engine.cache.listen is None


def test_page_events_rebuild_the_index_and_end_with_their_last_subscriber() -> None:
    """Behaviour 44, through the engine: replayed, they are the index after every step."""
    engine = engine_of(num_pages=12)
    mirror, events = PageMirror(16), []
    stops = [engine.subscribe_pages(mirror.apply), engine.subscribe_pages(events.append)]
    for seed in range(6):
        rng = np.random.default_rng(seed)
        for _ in range(2):
            engine.submit(rng.integers(0, 97, 50).tolist(), PARAMS)
        while engine.has_work:
            engine.step()
            mirror.check()
            index = engine.cache.index
            assert set(mirror.pages) == {index.keys[node] for node in np.flatnonzero(index.birth >= 0).tolist()}
    assert engine.stats()["evicted_pages"] > 0 and any(isinstance(e, PagesStored) for e in events)
    engine.reset_prefix_cache()
    assert not mirror.pages
    stops[0]()
    assert engine.cache.listen is not None
    stops[1]()
    engine.step()
    assert engine.cache.listen is None
    with pytest.raises(RuntimeError, match="prefix_cache=False"):
        engine_of(prefix_cache=False).subscribe_pages(events.append)


def test_a_subscription_that_ends_while_a_step_runs_leaves_the_cache_its_listener_until_then() -> None:
    """The step may just have looked whether there is one."""
    engine, events = engine_of(), []
    stop, forward, seen = engine.subscribe_pages(events.append), engine.model.forward, []

    def unsubscribing(batch, storage):
        thread = threading.Thread(target=stop)
        join([thread])
        seen.append(engine.cache.listen)
        return forward(batch, storage)

    engine.model.forward = unsubscribing
    engine.generate([span(0, 40)], SamplingParams(max_tokens=1))
    assert None not in seen and events == [] and engine.cache.listen is None


def test_the_last_rows_of_who_attached_all_of_its_full_pages_are_told_too() -> None:
    """It never had to work out the keys of these pages, and a page is told with the key above it."""
    engine, mirror = engine_of(), PageMirror(16)
    engine.subscribe_pages(mirror.apply)
    engine.generate([span(0, 32)], SamplingParams(max_tokens=1))
    above = list(mirror.pages)[-1]
    [output] = engine.generate([span(0, 34)], SamplingParams(max_tokens=1))
    assert output.num_cached_tokens == 32
    assert [page.parent for page in mirror.pages.values() if page.tokens == (32, 33)] == [above]
    assert mirror.pages.keys() == engine.cache.index.by_key.keys()
    assert engine.stats()["cache_errors"] == 0


def test_who_is_pushed_out_and_starts_again_in_the_same_step_is_told_so_in_that_order() -> None:
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=32, max_chunk_tokens=8, policy="priority")
    engine = Engine(EchoModel(), page_size=4, num_pages=200, config=config)
    events = heard(engine)
    for name in ("a", "b"):
        engine.submit([1, 1, 1, 1], SamplingParams(max_tokens=40), request_id=name, priority=5, cache=False)
    engine.step()
    for name in ("c", "d"):  # d wins a slot, and then waits for the pages of c
        engine.submit([60] * 50, SamplingParams(max_tokens=4), request_id=name)
    engine.step()
    assert engine.explain("b")["state"] == "running"
    assert [type(event) for event in events if event.request_id == "b"] == [Admitted, Preempted, Admitted]


def test_who_was_admitted_for_a_step_that_was_called_off_is_told_as_admitted_once() -> None:
    engine = Engine(EchoModel(), num_pages=64, config=SchedulerConfig(plan_ahead=True))
    events: list[object] = []
    engine.subscribe(events.append)
    engine.submit([1, 2], SamplingParams(max_tokens=3), request_id="runs")
    engine.step()
    engine.submit([3], SamplingParams(max_tokens=1), timeout_s=0, request_id="late")
    engine.submit([4, 5], SamplingParams(max_tokens=2), request_id="beside")  # called off with the step of "late"
    while engine.has_work:
        engine.step()
    told = [(type(e), getattr(e, "resumed", None)) for e in events if e.request_id == "beside"]
    assert told == [(Admitted, False), (Finished, None)]
    assert engine.explain("beside")["num_preemptions"] == 1
