"""Requests that start from a prefix handle: beside the cache, without one, behind it, and where it has all of them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from byhand import span
from driver import Driver
from fakes import EchoHybrid, EchoLooped, EchoModel

from paged import GeometryMismatch
from paged.prefix.handles import PrefixHandle
from paged.session import Session
from scheduler import Engine, Model, SamplingParams
from scheduler.events import Finished
from scheduler.prefixes import building, extend, open_session


def keep(driver: Driver, tokens, loops: int | None = None, cache_window: int = 0, **options) -> PrefixHandle:
    session = Session(driver.model, driver.pool, loops, cache_window)
    session.eval(tokens)
    handle = PrefixHandle(session, **options)
    session.release()
    driver.scheduler.check()
    return handle


@pytest.mark.parametrize("kind", [EchoModel, EchoHybrid])
@pytest.mark.parametrize("cache", [False, True])
def test_a_request_computes_what_follows_the_prefix_alone(kind, cache: bool) -> None:
    driver = Driver(64, 4, cache, model=kind())
    handle = keep(driver, span(0, 10))
    driver.submit("a", span(0, 13), prefix=handle)
    driver.step()
    assert driver.plans[0] == {"a": 3} and driver.requests["a"].num_cached_tokens == 10
    pages = driver.pages("a")
    assert pages[:2] == handle.page_table[0, :2].tolist() and pages[2] != handle.page_table[0, 2]
    driver.run()
    driver.expect_all_exact()
    handle.check()


def test_without_a_cache_a_prompt_that_is_the_prefix_computes_its_last_token() -> None:
    driver = Driver(64, 4, False)
    handle = keep(driver, span(0, 10))
    driver.submit("a", span(0, 10), prefix=handle)
    driver.run()
    assert driver.plans[0] == {"a": 1}
    driver.expect_all_exact()


def test_a_recurrent_state_serves_only_what_goes_on_behind_it() -> None:
    driver = Driver(64, 4, False, model=EchoHybrid())
    handle = keep(driver, span(0, 10))
    driver.submit("a", span(0, 10), prefix=handle)
    driver.run()
    assert driver.plans[0] == {"a": 10}, "its state is behind the token whose logits are wanted"
    driver.expect_all_exact()


@pytest.mark.parametrize(("length", "rows"), [(7, 7), (8, 1), (6, 1), (11, 11)])
def test_where_a_window_left_what_the_last_token_sees_all_is_computed(length: int, rows: int) -> None:
    """With a window of 4, a prefix of 7 tokens has left the page of 0 to 3, and token 6 sees position 3."""
    driver = Driver(64, 4, False)
    handle = keep(driver, span(0, length), cache_window=4)
    driver.submit("a", span(0, length), cache_window=4, prefix=handle)
    driver.run()
    assert driver.plans[0] == {"a": rows}
    driver.submit("b", span(0, length + 1), cache_window=4, prefix=handle)
    driver.step()
    assert driver.plans[-1] == {"b": 1}
    driver.run()
    driver.expect_all_exact()


def test_the_cache_is_taken_where_it_has_more() -> None:
    driver = Driver(64, 4)
    handle = keep(driver, span(0, 5))
    driver.solo("warm", span(0, 13), 1)
    driver.submit("a", span(0, 14), prefix=handle)
    driver.step()
    assert driver.plans[-1] == {"a": 2} and driver.requests["a"].num_cached_tokens == 12
    assert not set(driver.pages("a")) & set(handle.page_ids.tolist())
    driver.run()
    driver.expect_all_exact()


def test_where_the_cache_has_less_the_prefix_is_taken_and_merges_with_it() -> None:
    """Else an idle page could stand above one in use, and nothing could evict it."""
    driver = Driver(64, 4)
    driver.solo("warm", span(0, 5), 1)  # one page is cached
    handle = keep(driver, span(0, 12))
    own = handle.page_table[0].tolist()
    driver.submit("a", span(0, 14), 4, prefix=handle)
    driver.step()
    assert driver.plans[-1] == {"a": 2} and driver.requests["a"].num_cached_tokens == 12
    driver.run()
    assert handle.page_table[0].tolist()[0] != own[0], "the handle, too, goes on with the cached page"
    assert handle.page_table[0].tolist()[1:] == own[1:]
    handle.check()
    driver.expect_all_exact()
    driver.submit("b", span(0, 14), 4)
    driver.run()
    assert driver.requests["b"].num_cached_tokens == 12, "what the prefix held is cached now"


@pytest.mark.parametrize("loops", [1, 2, 4])
def test_a_deep_prefix_serves_smaller_depths(loops: int) -> None:
    driver = Driver(200, 4, model=EchoLooped())
    handle = keep(driver, span(0, 10), 4, share_depths=True)
    free = driver.pool.num_free
    driver.submit("a", span(0, 13), loops=loops, prefix=handle)
    driver.step()
    assert driver.plans[0] == {"a": 3}
    assert free - driver.pool.num_free == 2 * (1 + loops), "two pages in each group that it uses"
    driver.run()
    driver.expect_all_exact()


def test_a_prefix_that_does_not_fit_waits_and_takes_nothing() -> None:
    driver = Driver(8, 4, False)
    handle = keep(driver, span(0, 8))
    driver.submit("big", span(50, 18), 3)
    driver.step()
    driver.submit("a", span(0, 13), 2, prefix=handle)  # two pages more, and one is free
    before = driver.pool.refs.copy()
    driver.step()
    assert driver.waiting() == ["a"]
    assert np.array_equal(driver.pool.refs, before)
    driver.run()
    driver.expect_all_exact()


def test_a_request_that_ended_keeps_no_prefix() -> None:
    driver = Driver(64, 4, False)
    handle = keep(driver, span(0, 8))
    driver.submit("a", span(0, 9), 2, prefix=handle)
    driver.run()
    assert driver.requests["a"].prefix is None
    del handle
    assert driver.pool.num_free == 64


def test_a_preempted_request_starts_from_its_prefix_again() -> None:
    driver = Driver(64, 4, False)
    handle = keep(driver, span(0, 10))
    driver.submit("a", span(0, 12), prefix=handle)
    driver.step()
    driver.step()
    driver.preempt("a")
    driver.step()
    assert driver.plans[-1] == {"a": 4}, "two of the prompt and two new ones"
    driver.run()
    driver.expect_all_exact()


@pytest.mark.parametrize("what", ["prefix", "resume", "drafts"])
def test_what_is_computed_while_the_weights_change_is_not_cached_and_no_prefix(what: str, monkeypatch) -> None:
    """As another thread may change them between two chunks of a long prompt."""
    api = Model("tiny:looped", num_pages=600)
    engine, model, tokens, calls = api.engine, api.engine.model, [i % 90 for i in range(600)], []
    name = "run_loops" if what == "resume" else "forward"
    plain = getattr(model, name)

    def changing(*args):
        calls.append(args)
        if len(calls) == 2:
            model.update_weights({"model.norm.weight": -model.tensor("model.norm.weight")})
            engine.reset_prefix_cache()
        return plain(*args)

    monkeypatch.setattr(model, name, changing)
    if what == "drafts":
        api.generate(tokens, max_tokens=1, loops=2, draft_loops=1)
    else:
        with pytest.raises(GeometryMismatch, match="weights of the model have changed while"):
            engine.build_prefix(tokens, loops=2) if what == "prefix" else engine.build_resume(tokens, 2)
    assert len(calls) >= 2 and engine.prefix_match_len(tokens, loops=2) == 0
    assert engine.pool.num_free == engine.pool.num_pages
    engine.check()


def test_a_request_that_needs_no_slot_counts_its_prompt_as_cached() -> None:
    engine = Engine(EchoModel(97), num_pages=40, page_size=4)
    handle = engine.build_prefix(span(0, 10))
    seen: list[object] = []
    engine.subscribe(seen.append)
    [output] = engine.generate([span(0, 10)], SamplingParams(max_tokens=1), prefix=handle)
    assert (output.num_prompt_tokens, output.num_cached_tokens, output.num_computed_tokens) == (10, 10, 0)
    assert engine.explain(output.request_id)["num_cached_tokens"] == 10
    stats = engine.stats()
    assert (stats["num_admitted"], stats["prompt_tokens"], stats["cached_tokens"]) == (0, 10, 10)
    [event] = seen
    assert isinstance(event, Finished) and event.num_cached_tokens == 10


@pytest.mark.parametrize("way", ["generate", "step"])
def test_while_a_prefix_is_built_no_request_counts_as_stuck(way: str) -> None:
    engine = Engine(EchoModel(97), num_pages=10, page_size=4)
    outputs, attempts = [], threading.Semaphore(0)
    advance = engine.advance

    def counted() -> bool:
        done = advance()
        attempts.release()
        return done

    engine.advance = counted  # type: ignore[method-assign]

    def work() -> None:
        params = SamplingParams(max_tokens=2)
        if way == "generate":
            outputs.extend(engine.generate([span(0, 20)], params))
            return
        engine.submit(span(0, 20), params)
        while engine.has_work:
            outputs.extend(event.output for event in engine.step() if event.output is not None)

    with building(engine), open_session(engine, "", None, 0) as session:
        extend(engine, session, np.asarray(span(50, 33), np.int32))
        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(5):
            assert attempts.acquire(timeout=60)
        assert not outputs and engine.has_work
    thread.join(60)
    assert [output.finish_reason for output in outputs] == ["length"]
    engine.check()


def test_pages_that_no_build_will_give_back_still_end_a_request() -> None:
    engine = Engine(EchoModel(97), num_pages=10, page_size=4)
    handle = engine.build_prefix(span(50, 33))
    [output] = engine.generate([span(0, 20)], SamplingParams(max_tokens=2))
    assert output.finish_reason == "error" and "out of memory" in output.error
    handle.check()
