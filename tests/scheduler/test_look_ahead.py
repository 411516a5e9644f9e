"""Planning ahead: a step is decided before the tokens of the one in flight are known, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import span
from driver import Driver
from fakes import ByteTokenizer, EchoHybrid, EchoModel, ScriptModel

from scheduler import Engine, SamplingParams, SchedulerConfig
from scheduler.request import RequestState


def ahead(num_pages: int = 64, page_size: int = 4, **options) -> Driver:
    return Driver(num_pages, page_size, plan_ahead=True, watermark=0.0, **options)


def greedy(driver: Driver, plan) -> np.ndarray:
    return driver.model.forward(plan.batch, driver.pool.storage).numpy().argmax(axis=1).astype(np.int32)


def test_the_step_behind_is_decided_before_the_tokens_are_known() -> None:
    driver = ahead()
    driver.submit("a", span(0, 9), 5)
    plan = driver.scheduler.schedule()
    driver.scheduler.look_ahead()
    decided = driver.scheduler._ahead
    assert (decided.slots.tolist(), decided.num_tokens.tolist()) == ([0], [1])
    tokens = greedy(driver, plan)
    driver.scheduler.commit(plan, tokens)
    after = driver.scheduler.schedule()
    assert after.batch.tokens.tolist() == tokens.tolist() and after.positions.tolist() == [10]
    driver.scheduler.commit(after, greedy(driver, after))
    driver.scheduler.check()


@pytest.mark.parametrize("budget", [1, 3, 16])
@pytest.mark.parametrize("chunk", [0, 2])
def test_outputs_are_those_of_planning_step_by_step(budget: int, chunk: int) -> None:
    driver = ahead(page_size=2, max_num_batched_tokens=budget, max_chunk_tokens=chunk, max_num_seqs=3)
    for i in range(7):
        driver.submit(f"r{i}", [*span(0, 3 * i % 5), *span(30 + i, 4)], 3 + i)
        driver.step()
    driver.run()
    driver.expect_all_exact()
    assert driver.pool.num_live == 0


def test_a_request_stops_at_max_tokens_exactly_and_computes_no_row_more() -> None:
    driver = ahead()
    driver.submit("a", span(0, 9), 5)
    driver.submit("b", span(20, 9), 3)
    driver.run()
    driver.expect_all_exact()
    assert driver.scheduler.stats.computed_tokens == 9 + 4 + 9 + 2
    assert [sorted(plan) for plan in driver.plans] == [["a", "b"]] * 3 + [["a"]] * 2


def test_a_request_that_ends_by_an_end_id_is_dropped_from_the_step_that_was_decided() -> None:
    model = EchoModel()
    tokens = model.greedy(span(0, 9), 8)
    model.eos_token_ids = (tokens[3],)
    driver = ahead(model=model)
    driver.submit("a", span(0, 9), 8)
    driver.submit("b", span(40, 9), 6)
    driver.run()
    driver.expect_all_exact()
    assert driver.requests["a"].finish_reason == "stop"
    assert driver.requests["a"].num_computed_tokens == 9 + 3


def test_a_request_that_is_cancelled_meanwhile_is_dropped_and_its_slot_serves_another() -> None:
    driver = ahead(max_num_seqs=1)
    driver.submit("a", span(0, 9), 20)
    driver.step()
    driver.step()
    driver.cancel("a")
    driver.submit("b", span(40, 9), 4)
    driver.run()
    driver.expect_all_exact()


def test_pages_of_a_cancelled_request_serve_nobody_until_the_step_that_writes_them_is_over() -> None:
    driver = ahead(num_pages=6, page_size=4)
    driver.submit("a", span(0, 13), 7)
    plan = driver.scheduler.schedule()
    pages = driver.pages("a")
    driver.scheduler.finish(driver.requests["a"], "cancelled")
    driver.submit("b", span(40, 9), 3)
    driver.scheduler.look_ahead()
    assert driver.requests["b"].state == RequestState.WAITING and bool((driver.pool.refs[pages] == 1).all())
    driver.scheduler.commit(plan, greedy(driver, plan))
    driver.scheduler.check()
    assert driver.pool.num_live == 0
    del driver.requests["a"], driver.outputs["a"]
    driver.run()
    driver.expect_all_exact()


def test_an_id_may_be_used_again_while_the_old_request_still_leaves() -> None:
    driver = ahead()
    driver.submit("a", span(0, 9), 20)
    plan = driver.scheduler.schedule()
    driver.scheduler.finish(driver.requests["a"], "cancelled")
    driver.submit("a", span(40, 9), 3)
    result = driver.scheduler.commit(plan, greedy(driver, plan))
    assert not result.requests and not len(result.tokens)
    driver.run()
    driver.expect_all_exact()


def test_where_a_request_must_be_preempted_the_step_in_flight_comes_first() -> None:
    driver = ahead(num_pages=7, page_size=2)
    for name, at in (("a", 0), ("b", 40)):
        driver.submit(name, span(at, 5), 7)
    driver.run()
    driver.expect_all_exact()
    assert driver.scheduler.stats.num_preemptions > 0


def test_a_step_that_fails_sends_back_what_was_admitted_on_top_of_it() -> None:
    driver = ahead(num_pages=64, page_size=4, max_num_batched_tokens=8)
    driver.submit("a", span(0, 15), 3)
    driver.step()
    plan = driver.scheduler.schedule()  # the second page of a
    driver.submit("twin", span(0, 15), 3)
    driver.submit("other", span(40, 5), 3)
    driver.scheduler.look_ahead()
    failed = driver.scheduler.abort(plan, "boom")
    assert "a" in [request.id for request in failed]
    driver.scheduler.check()
    for request in failed:
        del driver.requests[request.id], driver.outputs[request.id]
    driver.run()
    driver.expect_all_exact()
    assert {"twin", "other"} <= set(driver.outputs)


def test_nobody_goes_on_from_pages_that_a_failed_step_should_have_filled() -> None:
    driver = ahead(max_num_batched_tokens=32, max_chunk_tokens=8)
    driver.submit("other", span(60, 5), 9)  # so that the cap of a chunk holds
    driver.submit("a", span(0, 25), 3)
    driver.step()
    plan = driver.scheduler.schedule()  # pages 2 and 3 of a
    driver.submit("twin", span(0, 25), 3)
    driver.scheduler.look_ahead()
    [twin] = driver.scheduler._ahead.admitted
    assert int(driver.scheduler.state.computed[twin.slot]) > 16  # on pages of the step in flight, and of its own
    for request in driver.scheduler.abort(plan, "boom"):
        del driver.requests[request.id], driver.outputs[request.id]
    driver.scheduler.check()
    assert driver.waiting() == ["twin"]
    driver.run()
    driver.expect_all_exact()
    assert list(driver.outputs) == ["twin"]


def test_drafts_and_recurrent_states_are_planned_step_by_step() -> None:
    driver = ahead(model=EchoHybrid())
    driver.submit("a", span(0, 9), 5)
    plan = driver.scheduler.schedule()
    driver.scheduler.look_ahead()
    assert driver.scheduler._ahead is None
    driver.scheduler.commit(plan, greedy(driver, plan))
    driver.run()


def test_nothing_is_decided_ahead_where_nothing_is_in_flight() -> None:
    driver = ahead()
    driver.submit("a", span(0, 9), 5)
    driver.scheduler.look_ahead()
    assert driver.scheduler._ahead is None and driver.waiting() == ["a"]


# The engine -------------------------------------------------------------------------------------------------------


def engines(model, **options) -> tuple[Engine, Engine]:
    return tuple(
        Engine(model(), num_pages=64, config=SchedulerConfig(plan_ahead=on, **options)) for on in (False, True)
    )


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, temperature=1, seed=4)])
def test_an_engine_that_plans_ahead_gives_the_same_outputs(params: SamplingParams) -> None:
    plain, early = engines(EchoModel, max_num_seqs=3, max_num_batched_tokens=16)
    prompts = [span(i, 5 + i) for i in range(8)]
    expected, outputs = plain.generate(prompts, params), early.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    early.check()
    assert early.pool.num_live == 0 and not early.has_work


def test_a_stop_string_is_found_while_the_next_step_runs_and_shows_no_more_text() -> None:
    from fakes import ByteTokenizer

    pieces = [b"", b"x", b"ab", b"cd", b"ef", b"gh"]
    texts = []
    for on in (False, True):
        model = ScriptModel([1, 2, 3, 4, 5, 1, 2], vocab_size=8)
        model.tokenizer = ByteTokenizer(pieces)
        engine = Engine(model, num_pages=16, config=SchedulerConfig(plan_ahead=on))
        stream = engine.stream(ScriptModel.prompt(5), SamplingParams(max_tokens=7, stop="cde"))
        texts.append("".join(event.text for event in stream))
        assert stream.output.finish_reason == "stop"
        while engine.advance():
            pass
        engine.check()
        assert engine.pool.num_live == 0
    assert texts == ["xab", "xab"]


def test_a_cancel_between_two_steps_is_heeded_at_once_and_its_pages_come_back() -> None:
    _, engine = engines(EchoModel)
    engine.submit(span(0, 9), SamplingParams(max_tokens=50), request_id="a")
    engine.submit(span(40, 9), SamplingParams(max_tokens=6), request_id="b")
    engine.step()
    assert engine.cancel("a") and not engine.cancel("a")
    engine.check()
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check()
    outputs = {event.request_id: event.output for event in events if event.finished}
    assert outputs["a"].finish_reason == "cancelled" and len(outputs["a"].token_ids) == 1
    assert outputs["b"].token_ids == engine.model.greedy(span(40, 9), 6)
    assert engine.pool.num_live == 0


def test_an_engine_closes_while_a_step_is_in_flight() -> None:
    _, engine = engines(EchoModel)
    engine.submit(span(0, 9), SamplingParams(max_tokens=50))
    engine.step()
    engine.close()
    engine.check()
    assert engine.pool.num_live == 0 and engine.pool.num_free == engine.pool.num_pages


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_model_that_fails_ahead_ends_the_requests_of_that_step_alone(at: int) -> None:
    _, engine = engines(EchoModel, max_num_seqs=2)
    real, calls = engine.model.forward, []

    def forward(batch, storage):
        calls.append(len(batch.tokens))
        if len(calls) == at:
            raise RuntimeError("the device is gone")
        return real(batch, storage)

    engine.model.forward = forward
    outputs = engine.generate([span(10 * i, 6) for i in range(6)], SamplingParams(max_tokens=3))
    bad = [o for o in outputs if o.finish_reason == "error"]
    assert 1 <= len(bad) <= 2 and all("the device is gone" in o.error for o in bad)
    for i, output in enumerate(outputs):
        if output not in bad:
            assert output.token_ids == engine.model.greedy(span(10 * i, 6), 3)
    engine.check()
    assert engine.pool.num_live == 0


# Who ends between the decision about a step and the step itself --------------------------------------------------


def crowded(**options) -> tuple[Engine, list[int]]:
    """An engine that plans ahead, and a long prompt."""
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=32, max_chunk_tokens=8, watermark=0.0, plan_ahead=True, **options
    )
    opening = np.random.default_rng(0).integers(0, 90, 80).tolist()
    return Engine(EchoModel(), page_size=4, num_pages=64, config=config), opening


def finish(engine: Engine) -> dict:
    outputs = {}
    while engine.has_work:
        outputs.update({event.request_id: event.output for event in engine.step() if event.output is not None})
        engine.check()
    return outputs


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("shared", [20, 24, 32])
def test_nobody_stands_on_pages_of_a_request_that_was_cancelled_between_two_steps(steps: int, shared: int) -> None:
    engine, opening = crowded()
    prompt = [*opening[:shared], 3]
    engine.submit(span(5, 3), SamplingParams(max_tokens=30))
    engine.submit(opening, SamplingParams(max_tokens=4), request_id="long")
    for _ in range(steps):
        engine.step()
    engine.submit(prompt, SamplingParams(max_tokens=4), request_id="short")
    engine.cancel("long")
    assert finish(engine)["short"].token_ids == engine.model.greedy(prompt, 4)
    again = engine.generate([prompt], SamplingParams(max_tokens=4))[0]
    assert again.token_ids == engine.model.greedy(prompt, 4)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("shared", [16, 20, 24, 32])
def test_nobody_stands_on_pages_of_a_request_whose_time_is_up_meanwhile(steps: int, shared: int) -> None:
    engine, opening = crowded()
    prompt, now, decided = [*opening[:shared], 3], [0.0], []
    scheduler = engine.scheduler
    scheduler.limits.clock = lambda: now[0]
    look_ahead = scheduler.look_ahead

    def late() -> None:
        look_ahead()
        decided.append(1)
        now[0] = 100.0 * (len(decided) >= steps)

    scheduler.look_ahead = late
    engine.submit(opening, SamplingParams(max_tokens=4), request_id="long", timeout_s=10.0)
    engine.submit(prompt, SamplingParams(max_tokens=4), request_id="short")
    assert finish(engine)["short"].token_ids == engine.model.greedy(prompt, 4)


def test_a_name_that_is_used_again_while_the_step_of_its_first_request_is_in_flight() -> None:
    engine, opening = crowded()
    other = [*span(40, 30), *span(3, 40)]
    engine.submit(span(5, 3), SamplingParams(max_tokens=60))
    engine.submit(opening, SamplingParams(max_tokens=4), request_id="p")
    engine.step(), engine.step()
    engine.cancel("p")
    engine.submit(other, SamplingParams(max_tokens=4), request_id="p")
    outputs = finish(engine)
    assert outputs["p"].token_ids == engine.model.greedy(other, 4)
    assert not engine.scheduler.sharing._expected and not engine.scheduler.sharing._owners


def test_rows_of_a_request_that_ends_in_flight_are_explained_once() -> None:
    engine, _ = crowded()
    engine.submit(span(0, 20), SamplingParams(max_tokens=9), request_id="a")
    engine.submit(span(30, 20), SamplingParams(max_tokens=9))
    for _ in range(3):
        engine.step()
    engine.cancel("a")
    account = engine.explain("a")["num_computed_tokens"]
    assert account == finish(engine)["a"].num_computed_tokens


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_rows_that_are_given_up_in_flight_are_counted_as_their_request_was_told(how: str) -> None:
    config = SchedulerConfig(plan_ahead=True)
    engine = Engine(EchoModel(), page_size=4, num_pages=64, config=config)
    stream = engine.stream(span(0, 9), SamplingParams(max_tokens=9))
    next(stream)
    stream.close() if how == "cancelled" else engine.close()
    assert stream.output is not None and stream.output.num_computed_tokens == 10
    assert engine.stats()["computed_tokens"] == 10


def test_a_step_that_fails_ahead_takes_no_tokens_from_the_one_before_it() -> None:
    """A stop string comes in the step before: that request has ended as it should."""
    ended = {}
    for ahead in (False, True):
        model = EchoModel()
        model.tokenizer = ByteTokenizer([bytes([33 + i]) for i in range(92)] + [b"!"] * 5)
        stop = model.tokenizer.decode(model.greedy([1, 2, 3], 4)[3:])
        engine, real, calls = Engine(model, num_pages=64, config=SchedulerConfig(plan_ahead=ahead)), model.forward, []

        def forward(batch, storage, real=real, calls=calls):
            calls.append(1)
            if len(calls) == 5:
                raise RuntimeError("gone")
            return real(batch, storage)

        model.forward = forward
        engine.submit([1, 2, 3], SamplingParams(max_tokens=9, stop=[stop]), request_id="a")
        engine.submit([5, 2, 3], SamplingParams(max_tokens=9), request_id="b")
        outputs = finish(engine)
        ended[ahead] = {name: (o.finish_reason, o.token_ids) for name, o in outputs.items()}
    assert ended[True] == ended[False] and ended[True]["a"][0] == "stop" and ended[True]["b"][0] == "error"


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_tokens_for_requests_that_have_ended_are_not_counted_as_generated(plan_ahead: bool) -> None:
    config = SchedulerConfig(plan_ahead=plan_ahead)
    engine = Engine(EchoModel(97), page_size=4, num_pages=60, config=config)
    names = [engine.submit(span(10 * i, 5), SamplingParams(max_tokens=6 + i)) for i in range(4)]
    outputs = []
    for step in range(40):
        outputs += [event.output for event in engine.step() if event.output is not None]
        if step in (2, 4):
            assert engine.cancel(names[step // 2 - 1])
    assert len(outputs) == 4 and not engine.has_work
    assert engine.stats()["generated_tokens"] == sum(len(output.token_ids) for output in outputs)
