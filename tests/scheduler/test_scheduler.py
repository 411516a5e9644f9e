"""Scheduler: steps, budgets, endings, failures, counters and check()."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import Hand, expect_check_fails, growing_pool, ids, span
from driver import Driver
from fakes import EchoModel

from paged.errors import CheckFailed, DuplicateRequest, InvalidRequest
from paged.sampling import SamplingParams
from scheduler.request import Request, RequestState

# What a step computes ---------------------------------------------------------------------------------------------


def test_the_budget_goes_to_prompts_in_order_and_the_last_gets_the_rest() -> None:
    driver = Driver(200, 16, max_num_batched_tokens=1024)
    for name, length in (("a", 800), ("b", 800), ("c", 10), ("d", 10)):
        driver.submit(name, [hash(name) % 90] * length)
    driver.step()
    assert driver.plans == [{"a": 800, "b": 224}]
    driver.step()
    assert driver.plans[1] == {"a": 1, "b": 576, "c": 10, "d": 10}
    driver.run()
    driver.expect_all_exact()


def test_a_cap_on_chunks_leaves_room_for_the_next_prompt() -> None:
    driver = Driver(200, 16, max_num_batched_tokens=1024, max_chunk_tokens=400)
    for i in range(3):
        driver.submit(f"r{i}", [i] * 800)
    for _ in range(3):
        driver.step()
    assert driver.plans == [
        {"r0": 400, "r1": 400, "r2": 224},
        {"r0": 400, "r1": 400, "r2": 224},
        {"r0": 1, "r1": 1, "r2": 352},
    ]
    driver.run()
    driver.expect_all_exact()


def test_decodes_come_before_chunks_and_each_gets_its_row() -> None:
    driver = Driver(200, 16, max_num_batched_tokens=8, max_num_seqs=4)
    for i in range(3):
        driver.submit(f"r{i}", [i + 1], 40)
    driver.step()
    driver.submit("long", span(0, 50))
    driver.step()
    assert driver.plans[1] == {"r0": 1, "r1": 1, "r2": 1, "long": 5}
    driver.run()
    driver.expect_all_exact()
    for plan in driver.plans:
        assert sum(plan.values()) <= 8
        running = {name for name in plan if name != "long"}
        assert all(plan[name] == 1 for name in running)


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16, 64, 512])
@pytest.mark.parametrize("cache", [True, False])
def test_outputs_do_not_depend_on_budget_batch_or_cache(budget: int, cache: bool) -> None:
    driver = Driver(120, 4, cache, max_num_batched_tokens=budget)
    for i in range(8):
        driver.submit(f"r{i}", [*span(0, 3 * i + 1), i], 5 + i)
    driver.run()
    driver.expect_all_exact()
    assert driver.pool.num_live == 0


@pytest.mark.parametrize("page_size", [1, 2, 5, 16])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_outputs_do_not_depend_on_page_size_or_groups(page_size: int, num_groups: int) -> None:
    driver = Driver(150 * num_groups, page_size, model=EchoModel(num_groups=num_groups), max_num_batched_tokens=20)
    for i in range(6):
        driver.submit(f"r{i}", [*span(0, 10), *span(20 * (i % 2), 4 + i)], 9)
    driver.run()
    driver.expect_all_exact()
    assert driver.pool.num_live == 0


def test_a_second_turn_computes_only_what_the_first_left_in_a_partial_page() -> None:
    driver = Driver(64, 16)
    prompt = span(0, 90) + span(3, 10)
    out = driver.solo("turn 1", prompt, 200)
    assert len(out) == 200
    driver.submit("turn 2", prompt + out, 5)
    driver.step()
    assert driver.plans[-1] == {"turn 2": 300 % 16}
    driver.run()
    driver.expect_all_exact()


def test_pages_are_taken_one_by_one_as_tokens_come() -> None:
    driver = Driver(64, 4)
    driver.submit("a", span(0, 6), 20)
    while driver.scheduler.has_work:
        driver.step()
        if driver.running():
            rows = driver.computed("a")
            assert len(driver.pages("a")) == -(-rows // 4)
    driver.expect_all_exact()


def test_a_pool_that_may_grow_serves_more_than_it_starts_with() -> None:
    model = EchoModel()
    driver = Driver(model=model, pool=growing_pool(model, 2, 80))
    for i in range(5):
        driver.submit(f"r{i}", [i] * 30, 20)
    driver.run()
    driver.expect_all_exact()
    assert driver.scheduler.stats.num_preemptions == 0
    assert 2 < driver.pool.num_pages <= 80


def test_nothing_to_do_is_no_step() -> None:
    driver = Driver()
    assert driver.scheduler.schedule() is None
    assert not driver.scheduler.has_work
    assert driver.scheduler.stats.num_steps == 0


# Endings ----------------------------------------------------------------------------------------------------------


def test_an_end_id_ends_with_stop_and_max_tokens_with_length() -> None:
    model = EchoModel()
    tokens = model.greedy(span(0, 5), 10)
    model.eos_token_ids = (tokens[4],)
    first = tokens.index(tokens[4])
    driver = Driver(model=model)
    driver.submit("stops", span(0, 5), 10)
    driver.submit("is cut", span(0, 5), first)
    driver.run()
    assert driver.outputs == {"stops": tokens[:first], "is cut": tokens[:first]}
    assert [driver.requests[n].finish_reason for n in ("stops", "is cut")] == ["stop", "length"]


def test_an_end_id_as_the_last_token_allowed_is_stop() -> None:
    model = EchoModel()
    tokens = model.greedy(span(0, 5), 3)
    driver = Driver(model=model)
    model.eos_token_ids = (tokens[2],)
    request = driver.submit("a", span(0, 5), 3)
    driver.run()
    assert request.finish_reason == "stop"


def test_ignore_eos_goes_on_and_stop_token_ids_still_end() -> None:
    model = EchoModel()
    tokens = model.greedy(span(0, 5), 8)
    model.eos_token_ids = (tokens[1],)
    driver = Driver(model=model)
    request = driver.submit("a", span(0, 5), 8, ignore_eos=True)
    driver.run()
    assert (driver.outputs["a"], request.finish_reason) == (tokens, "length")
    params = SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=[tokens[3]])
    limit = driver.scheduler.fit(5, 8)
    by_id = Request("b", ids(*span(0, 5)), params, 0, params.end_ids(model.eos_token_ids), limit)
    driver.scheduler.add(by_id)
    driver.outputs["b"] = []
    driver.run()
    assert by_id.finish_reason == "stop"
    assert driver.outputs["b"] == tokens[: tokens.index(tokens[3])]


def test_end_ids_are_not_heeded_before_min_tokens() -> None:
    model = EchoModel()
    tokens = model.greedy(span(0, 5), 6)
    model.eos_token_ids = tuple(set(tokens))  # every token of the run would end it
    driver = Driver(model=model)
    request = driver.submit("a", span(0, 5), 6, min_tokens=3)
    driver.run()
    assert driver.outputs["a"] == tokens[:3]
    assert request.finish_reason == "stop"


def test_the_known_tokens_of_an_ended_request_are_prompt_and_output() -> None:
    driver = Driver()
    request = driver.submit("a", span(0, 20), 5)
    driver.run()
    assert request.known.tolist() == span(0, 20) + driver.outputs["a"]
    assert (request.state, request.slot, request.cursor) == (RequestState.FINISHED, -1, None)


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding", "preempted", "finished"])
def test_ending_a_request_gives_everything_back_whenever_it_happens(when: str) -> None:
    driver = Driver(32, 4, max_num_batched_tokens=8, max_num_seqs=2)
    for name in "abc":
        driver.submit(name, [ord(name) - 90] * 20, 6)
    if when == "prefilling":
        driver.step()
        assert 0 < driver.computed("a") < 20
    elif when == "decoding":
        driver.step_until(lambda: len(driver.outputs["a"]) == 2)
    elif when == "preempted":
        driver.step_until(lambda: len(driver.outputs["a"]) == 2)
        driver.preempt("a")
    elif when == "finished":
        driver.step_until(lambda: driver.requests["a"].finish_reason == "length")
    if when == "finished":
        driver.scheduler.finish(driver.requests["a"], "cancelled")
        assert driver.requests["a"].finish_reason == "length"
    else:
        request = driver.requests["a"]
        driver.cancel("a")
        driver.scheduler.finish(request, "stop")
        assert request.finish_reason == "cancelled"
    driver.scheduler.check()
    driver.run()
    driver.expect_all_exact()
    assert driver.scheduler.requests == {}
    assert driver.pool.num_live == len(driver.scheduler.waiting) == driver.scheduler.waiting.num_tokens == 0
    assert driver.scheduler.stats.num_finished == 3


# Requests that are refused ----------------------------------------------------------------------------------------


def test_an_id_can_be_used_again_only_after_its_request_ended() -> None:
    driver = Driver()
    driver.submit("a", [1, 2, 3])
    first = driver.requests["a"]
    for _ in range(2):
        with pytest.raises(DuplicateRequest, match="'a' is still live"):
            driver.submit("a", [4, 5])
        assert driver.scheduler.requests == {"a": first}
        driver.step()
    driver.run()
    driver.expect_all_exact()
    driver.solo("a", [4, 5])
    driver.expect_all_exact()


@pytest.mark.parametrize(("prompt", "limit"), [(0, 5), (5, 5), (5, 3), (5, 10**6)])
def test_a_request_whose_limit_fit_would_not_give_is_refused(prompt: int, limit: int) -> None:
    driver = Driver()
    request = Request("a", ids(*span(0, prompt)), SamplingParams(), 0, (), limit)
    with pytest.raises(InvalidRequest, match="take the limit from fit"):
        driver.scheduler.add(request)
    assert not driver.scheduler.has_work
    driver.scheduler.check()


# A step that is in flight -----------------------------------------------------------------------------------------


def in_flight() -> tuple[Driver, object]:
    driver = Driver(32, 4)
    driver.submit("a", span(0, 9))
    driver.step()
    driver.submit("b", span(50, 9))
    plan = driver.scheduler.schedule()
    return driver, plan


def test_schedule_commit_and_abort_come_in_turns() -> None:
    driver, plan = in_flight()
    with pytest.raises(CheckFailed, match="again before commit"):
        driver.scheduler.schedule()
    driver.scheduler.abort(plan, "boom")
    for call in (lambda: driver.scheduler.commit(plan, ids(1, 2)), lambda: driver.scheduler.abort(plan, "boom")):
        with pytest.raises(CheckFailed, match="not in flight"):
            call()


def test_a_request_that_ends_in_flight_keeps_its_pages_until_the_step_is_over() -> None:
    driver, plan = in_flight()
    request, live = driver.requests["a"], driver.pool.num_live
    driver.scheduler.finish(request, "cancelled")
    driver.scheduler.check()
    assert (request.state, request.finish_reason, driver.pool.num_live) == (RequestState.FINISHED, "cancelled", live)
    assert "a" not in driver.scheduler.requests
    result = driver.scheduler.commit(plan, ids(1, 2))
    assert ([r.id for r in result.requests], result.tokens.tolist(), driver.running()) == (["b"], [2], ["b"])
    assert driver.pool.num_live == 3 and request.cursor is None
    driver.scheduler.check()


def test_a_request_is_not_preempted_while_a_step_writes_into_its_pages() -> None:
    driver, plan = in_flight()
    with pytest.raises(CheckFailed, match="a step writes into its pages"):
        driver.scheduler.preempt(driver.requests["a"])
    driver.scheduler.abort(plan, "boom")
    driver.scheduler.check()


def test_a_waiting_request_may_end_while_a_step_is_in_flight() -> None:
    driver = Driver(32, 4, max_num_seqs=1)
    driver.submit("a", span(0, 9))
    driver.submit("b", span(50, 9))
    plan = driver.scheduler.schedule()
    driver.scheduler.finish(driver.requests["b"], "cancelled")
    driver.scheduler.commit(plan, ids(1))
    driver.scheduler.check()


def test_a_request_that_does_not_run_cannot_be_preempted() -> None:
    driver = Driver(32, 4)
    request = driver.submit("a", span(0, 9))
    with pytest.raises(CheckFailed, match="does not run"):
        driver.scheduler.preempt(request)
    driver.run()
    driver.expect_all_exact()


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_commit_needs_a_token_for_each_row_that_asks_for_one(tokens: list[int]) -> None:
    driver, plan = in_flight()
    with pytest.raises(CheckFailed, match="one token for each"):
        driver.scheduler.commit(plan, np.array(tokens, np.int32))
    driver.scheduler.commit(plan, ids(1, 2))  # nothing had changed
    driver.scheduler.check()


# A step that failed -----------------------------------------------------------------------------------------------


def test_what_a_failed_step_wrote_is_never_matched() -> None:
    driver = Driver(32, 4, max_num_batched_tokens=12)
    driver.submit("a", span(0, 24))
    driver.step()
    plan = driver.scheduler.schedule()
    driver.model.forward(plan.batch, driver.pool.storage)
    driver.pool.storage.pages[driver.pages("a")[3:]] = float("nan")
    assert driver.scheduler.abort(plan, "boom") == [driver.requests["a"]]
    driver.scheduler.check()
    assert driver.requests["a"].error == "boom"
    assert driver.requests["a"].finish_reason == "error"
    assert driver.cache.match_len(span(0, 24)) == 12  # what the first step computed
    assert driver.pool.num_live == 0
    del driver.requests["a"]
    driver.solo("b", span(0, 24))
    driver.expect_all_exact()


def test_a_failed_step_ends_followers_too_and_spares_those_outside_it() -> None:
    driver = Driver(32, 4, max_num_batched_tokens=8, max_num_seqs=3)
    driver.submit("a", span(0, 8), 6)
    driver.submit("waits", [70] * 5, 4)
    driver.step()
    driver.submit("b", span(30, 10), 4)
    driver.submit("follows", [*span(30, 4), 1, 2], 4)
    plan = driver.scheduler.schedule()
    in_plan = [driver.scheduler.state.requests[s].id for s in plan.slots.tolist()]
    failed = driver.scheduler.abort(plan, "boom")
    assert [r.id for r in failed] == in_plan
    driver.scheduler.check()
    for request in failed:
        del driver.requests[request.id]
    driver.run()
    driver.expect_all_exact()
    assert driver.pool.num_live == 0


def test_requests_outside_the_failed_step_live() -> None:
    driver = Driver(64, 4, max_num_batched_tokens=4)
    driver.submit("a", span(0, 6))
    driver.step()
    driver.submit("b", span(50, 40))
    driver.step()
    driver.submit("c", span(20, 30))
    driver.step()
    assert driver.running() == ["a", "b"]
    driver.preempt("a")
    plan = driver.scheduler.schedule()
    assert [driver.scheduler.state.requests[s].id for s in plan.slots.tolist()] == ["b"]
    driver.scheduler.abort(plan, "boom")
    driver.requests.pop("b")
    driver.run()
    driver.expect_all_exact()


# Publishing -------------------------------------------------------------------------------------------------------


def test_pages_are_matched_as_soon_as_the_step_that_filled_them_is_committed() -> None:
    driver = Driver(32, 4, max_num_batched_tokens=6)
    driver.submit("a", span(0, 20), 9)
    seen = []
    for _ in range(4):
        plan = driver.scheduler.schedule()
        seen.append(driver.cache.match_len([*span(0, 20), 1]))
        logits = driver.model.forward(plan.batch, driver.pool.storage).numpy()
        driver.outputs["a"] += driver.scheduler.commit(plan, logits.argmax(axis=1).astype(np.int32)).tokens.tolist()
    assert seen == [0, 4, 12, 16]
    assert driver.cache.match_len([*span(0, 20), 1]) == 20
    driver.run()
    driver.expect_all_exact()


def test_output_pages_are_published_while_the_request_runs() -> None:
    driver = Driver(32, 4)
    driver.submit("a", span(0, 4), 20)
    driver.step_until(lambda: len(driver.outputs["a"]) == 9)
    known = span(0, 4) + driver.outputs["a"]
    assert driver.cache.match_len([*known, 1]) == 12
    driver.submit("b", [*known, 1, 2])
    driver.step()
    assert driver.pages("b")[:3] == driver.pages("a")[:3]
    driver.run()
    driver.expect_all_exact()


def test_pages_that_two_decoding_requests_fill_alike_become_one() -> None:
    driver = Driver(32, 4)
    for name in "ab":
        driver.submit(name, span(0, 6), 12)
    driver.step()
    assert driver.pages("a")[0] == driver.pages("b")[0]
    assert driver.pages("a")[1] != driver.pages("b")[1]
    driver.step_until(lambda: driver.computed("a") == 8)
    assert driver.pages("a")[:2] == driver.pages("b")[:2]
    assert driver.cache.stats.merged_pages == 1
    driver.run()
    driver.expect_all_exact()
    assert driver.pool.num_live == 0


# Counters ---------------------------------------------------------------------------------------------------------


def test_the_scheduler_counts_what_it_did() -> None:
    driver = Driver(64, 16)
    driver.solo("a", span(0, 60), 7)
    driver.solo("b", span(0, 60), 7)
    stats = driver.scheduler.stats
    assert (stats.num_admitted, stats.num_finished, stats.num_preemptions) == (2, 2, 0)
    assert (stats.prompt_tokens, stats.cached_tokens) == (120, 48)
    assert (stats.generated_tokens, stats.num_steps) == (14, 14)
    assert stats.computed_tokens == 60 + 12 + 2 * 6
    assert [driver.requests[n].num_cached_tokens for n in "ab"] == [0, 48]
    assert [driver.requests[n].num_computed_tokens for n in "ab"] == [66, 18]
    assert driver.cache.stats.hit_tokens == 48
    assert (driver.cache.stats.num_queries, driver.cache.stats.query_tokens) == (2, 120)


def test_peak_running_is_the_most_that_ran_at_once() -> None:
    driver = Driver(64, 4, max_num_seqs=3)
    for i in range(7):
        driver.submit(f"r{i}", [i] * 3, 2 + i)
    driver.run()
    assert driver.scheduler.stats.peak_running == 3


def test_pages_shared_within_a_step_count_as_cached_but_not_as_hits_of_the_cache() -> None:
    driver = Driver(64, 4)
    driver.submit("a", span(0, 9))
    driver.submit("b", span(0, 9))
    driver.run()
    assert driver.scheduler.stats.cached_tokens == 8
    assert driver.cache.stats.hit_tokens == 0
    assert driver.cache.stats.num_queries == 2


def test_a_request_that_waits_many_steps_is_counted_once() -> None:
    driver = Driver(8, 4, watermark=0.0)
    driver.submit("a", span(0, 16), 12)
    driver.step()
    driver.submit("b", span(50, 16), 12)
    driver.run()
    assert driver.cache.stats.num_queries == 2
    assert driver.cache.stats.query_tokens == driver.scheduler.stats.prompt_tokens == 32
    assert driver.scheduler.stats.num_admitted == 2


# check() ----------------------------------------------------------------------------------------------------------


def both_waiting_and_running(driver: Driver) -> None:
    driver.scheduler.waiting.add(driver.requests["a"])


def forgotten(driver: Driver) -> None:
    del driver.scheduler.requests["a"]


def made_up(driver: Driver) -> None:
    driver.scheduler.requests["ghost"] = driver.requests["a"]


def left_the_queue(driver: Driver) -> None:
    driver.scheduler.waiting.remove(driver.requests["c"])


def page_without_a_table(driver: Driver) -> None:
    driver.pool.alloc(1)


def page_with_too_few_references(driver: Driver) -> None:
    first, second = driver.scheduler.state.running.tolist()[:2]
    driver.scheduler.state.page_table[0, second, 2] = driver.scheduler.state.page_table[0, first, 2]


def broken_pool(driver: Driver) -> None:
    driver.pool._num_cached_only += 1


def broken_cache(driver: Driver) -> None:
    driver.cache.index.children[0] += 1


def broken_slots(driver: Driver) -> None:
    driver.scheduler.state._free.append(0)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (both_waiting_and_running, "both waiting and running"),
        (forgotten, "live requests"),
        (made_up, "live requests"),
        (left_the_queue, "live requests"),
        (page_without_a_table, "do not add up"),
        (page_with_too_few_references, "do not add up"),
        (broken_pool, "cached-only"),
        (broken_cache, "children count"),
        (broken_slots, "partition"),
    ],
)
def test_check_notices(corrupt, message: str) -> None:
    driver = Driver(32, 4, max_num_seqs=2)
    for name in "abc":
        driver.submit(name, [ord(name) - 90] * 9, 6)
    driver.step()
    driver.scheduler.check()
    corrupt(driver)
    expect_check_fails(driver.scheduler, message)


def test_a_session_by_hand_and_the_scheduler_may_take_turns_on_one_cache() -> None:
    hand = Hand(32, 4, vocab_size=97)
    driver = Driver(model=hand.model, pool=hand.pool, cache=False)
    driver.cache = driver.scheduler.cache = driver.scheduler.placer.cache = hand.cache
    driver.solo("a", span(0, 17), 8)
    hand.donate([*span(0, 16), *span(40, 8)])
    assert hand.cache.stats.hit_tokens == 16
    driver.solo("b", [*span(0, 16), *span(40, 8), 3])
    assert driver.requests["b"].num_cached_tokens == 24
    driver.expect_all_exact()
