"""Preemption: who yields when pages run out, what it loses, and that nobody's tokens change."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import span
from driver import Driver
from fakes import EchoModel

from scheduler.policy.losses import tokens_lost

# Who yields -------------------------------------------------------------------------------------------------------


def test_of_two_equal_requests_in_a_full_pool_the_later_yields_and_resumes_from_its_pages() -> None:
    driver = Driver(10, 16)
    a, b = span(0, 80), span(10, 80)
    driver.submit("a", a, 16)
    driver.submit("b", b, 16)
    driver.step()
    assert driver.plans == [{"a": 80, "b": 80}]
    assert (driver.pages("a"), driver.pages("b")) == ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])
    assert [len(driver.outputs[n]) for n in "ab"] == [1, 1]  # the token in flight was delivered
    plan = driver.step()
    assert [r.id for r in plan.preempted] == ["b"]
    assert plan.admitted == []
    assert driver.plans[-1] == {"a": 1}
    assert driver.pages("a") == [0, 1, 2, 3, 4, 9]  # the deepest page of b went
    assert driver.cache.match_len(b) == 64
    driver.step_until(lambda: "b" in driver.running())
    assert driver.requests["b"].num_reattached_tokens == 64
    assert driver.pages("b")[:4] == [5, 6, 7, 8]
    driver.run()
    driver.expect_all_exact()
    stats = driver.scheduler.stats
    assert (stats.num_preemptions, stats.preempted_tokens, stats.reattached_tokens) == (1, 80, 64)
    assert stats.computed_tokens == 160 + 2 * 15 + 16  # one page was computed twice
    assert driver.requests["b"].num_preemptions == 1
    assert stats.num_admitted == 2
    assert driver.cache.stats.num_queries == 2  # a resume is not a query


def test_the_one_that_has_computed_least_yields_but_never_the_oldest() -> None:
    driver = Driver(24, 4, watermark=0.0)
    driver.submit("oldest", [1] * 7, 60)
    driver.submit("long", [2] * 31, 40)
    driver.submit("short", [3] * 15, 40)
    driver.submit("middle", [4] * 19, 40)
    driver.step()
    assert driver.running() == ["oldest", "long", "short", "middle"]
    order = []
    while driver.scheduler.has_work:
        plan = driver.step()
        order += [r.id for r in plan.preempted]
        assert "oldest" not in order
    assert order[0] == "short"
    driver.expect_all_exact()


def test_of_equals_the_latest_yields() -> None:
    driver = Driver(12, 4, watermark=0.0)
    for i in range(3):
        driver.submit(f"r{i}", [i + 1] * 14, 30)
    preempted = []
    while not preempted:
        preempted += [r.id for r in driver.step().preempted]
    assert preempted[0] == "r2"
    driver.run()
    driver.expect_all_exact()


def test_a_preempted_request_stands_before_every_later_one() -> None:
    driver = Driver(64, 4, max_num_seqs=3)
    for i in range(3):
        driver.submit(f"r{i}", [i] * 6, 9)
    driver.step()
    for name in ("late", "later"):
        driver.submit(name, [7], 2)
    driver.preempt("r1")
    assert driver.waiting() == ["r1", "late", "later"]
    plan = driver.step()
    assert [r.id for r in plan.admitted] == ["r1"]
    driver.run()
    driver.expect_all_exact()


def test_no_request_starts_in_a_step_that_took_pages_from_another() -> None:
    driver = Driver(10, 4, watermark=0.0)
    driver.submit("a", [1] * 16, 20)
    driver.submit("b", [2] * 16, 20)
    driver.step()
    driver.submit("small", [3], 3)
    plans = []
    while driver.scheduler.has_work:
        plans.append(driver.step())
    assert any(plan.preempted for plan in plans)
    assert not any(plan.preempted and plan.admitted for plan in plans)
    driver.expect_all_exact()


# Nobody's tokens change -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("at", [16, 17, 31, 32, 33])
def test_tokens_survive_a_preemption_at_any_length(at: int, cache: bool) -> None:
    driver = Driver(20, 16, cache)
    request = driver.submit("a", span(0, 10), 40)
    driver.step_until(lambda: len(driver.outputs["a"]) == at - 10)
    for _ in range(2):  # twice in a row, with nothing between
        driver.preempt("a")
        assert driver.pool.num_live == 0
        assert request.known.tolist() == span(0, 10) + driver.outputs["a"]
        driver.step()
        assert driver.computed("a") == request.num_prompt + len(driver.outputs["a"]) - 1
        assert len(driver.pages("a")) == -(-driver.computed("a") // 16)
    driver.run()
    driver.expect_all_exact()
    assert request.num_preemptions == 2
    assert request.num_reattached_tokens == ((at - 1) // 16 * 16 + at // 16 * 16 if cache else 0)


@pytest.mark.parametrize("chunk", [5, 8, 16])
def test_a_prefill_that_was_cut_short_goes_on_from_its_full_pages(chunk: int) -> None:
    driver = Driver(40, 8, max_num_batched_tokens=chunk)
    request = driver.submit("a", span(0, 60), 6)
    for _ in range(3):
        driver.step()
    done = driver.computed("a")
    driver.preempt("a")
    driver.run()
    driver.expect_all_exact()
    assert request.num_reattached_tokens == done // 8 * 8
    assert request.num_computed_tokens == 60 + 5 + done % 8


def test_pages_that_another_attached_in_the_same_step_outlive_the_one_who_computed_them() -> None:
    driver = Driver(40, 4, max_num_batched_tokens=24, max_chunk_tokens=12)
    driver.submit("a", span(0, 30), 6)
    driver.submit("b", [*span(0, 12), 70], 6)
    driver.step()
    assert driver.pages("b")[:3] == driver.pages("a")[:3]
    driver.preempt("a")
    assert driver.running() == ["b"]
    driver.cache.evict(100)
    driver.scheduler.check()
    driver.run()
    driver.expect_all_exact()


def test_a_follower_can_be_preempted_before_it_published_anything() -> None:
    driver = Driver(40, 8, max_num_batched_tokens=64)
    driver.submit("a", span(0, 17), 12)
    driver.submit("b", [*span(0, 16), 70], 12)
    driver.step()
    driver.preempt("b")
    driver.preempt("a")
    driver.run()
    driver.expect_all_exact()
    assert [driver.requests[n].num_reattached_tokens for n in "ab"] == [16, 16]


def test_pages_that_were_evicted_while_a_request_waited_are_computed_again() -> None:
    driver = Driver(20, 4)
    request = driver.submit("a", span(0, 30), 12)
    driver.step()
    driver.preempt("a")
    driver.cache.evict(3)
    driver.run()
    driver.expect_all_exact()
    assert request.num_reattached_tokens == 16  # of the seven full pages, four


def test_a_release_of_the_cache_while_a_request_waits_costs_time_and_no_token() -> None:
    driver = Driver(20, 4)
    request = driver.submit("a", span(0, 30), 12)
    driver.step()
    driver.preempt("a")
    driver.cache.release()
    driver.run()
    driver.expect_all_exact()
    assert request.num_reattached_tokens == 0
    assert driver.cache.match_len([*span(0, 30), *driver.outputs["a"]]) == 40


def test_a_preempted_request_that_is_cancelled_leaves_nothing() -> None:
    driver = Driver(20, 4)
    driver.submit("a", span(0, 30), 12)
    driver.step()
    driver.preempt("a")
    driver.cancel("a")
    assert not driver.scheduler.has_work
    assert driver.pool.num_live == 0


# What a victim would lose -----------------------------------------------------------------------------------------


def lost(driver: Driver, *names: str) -> list[int]:
    slots = np.array([driver.requests[name].slot for name in names], np.int32)
    return tokens_lost(driver.scheduler.state, slots).tolist()


def test_what_others_hold_too_is_not_lost() -> None:
    driver = Driver(64, 4, watermark=0.0)
    driver.submit("a", span(0, 22), 20)
    driver.submit("b", [*span(0, 20), 50, 51, 52], 20)
    driver.submit("c", span(60, 9), 20)
    driver.step()
    assert lost(driver, "a", "b", "c") == [2, 3, 9]
    driver.cancel("a")
    assert lost(driver, "b", "c") == [23, 9]


def test_the_one_whose_prompt_is_shared_yields_before_a_shorter_one_that_is_on_its_own() -> None:
    driver = Driver(19, 4, watermark=0.0)
    driver.submit("oldest", span(0, 40), 30)
    driver.submit("alone", span(60, 14), 30)
    driver.submit("shares", [*span(0, 40), 90], 30)
    yielded: list[str] = []
    while not yielded:
        yielded += [request.id for request in driver.step().preempted]
    assert driver.requests["shares"].num_prompt > 2 * driver.requests["alone"].num_prompt
    assert yielded == ["shares"]
    driver.run()
    driver.expect_all_exact()


@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_column_is_lost_where_one_of_its_groups_is(num_groups: int) -> None:
    driver = Driver(64 * num_groups, 4, model=EchoModel(num_groups=num_groups))
    driver.submit("a", span(0, 10), 20)
    driver.step()
    assert lost(driver, "a") == [10]
    shared = driver.scheduler.state.pages(driver.requests["a"].slot)[: num_groups - 1, 0].copy()
    driver.pool.share(shared)
    assert lost(driver, "a") == [10]
    if num_groups == 1:
        driver.pool.share(np.array(driver.pages("a")[:1], np.int32))
        assert lost(driver, "a") == [6]


def test_preempted_tokens_are_counted_and_mostly_found_again() -> None:
    driver = Driver(64, 4)
    driver.submit("a", span(0, 30), 20)
    for _ in range(4):
        driver.step()
    driver.preempt("a")
    stats = driver.scheduler.stats
    assert (stats.num_preemptions, stats.preempted_tokens) == (1, 33)
    driver.run()
    assert stats.reattached_tokens == 32
    driver.expect_all_exact()


# Storms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("cache", [True, False])
def test_a_pool_that_holds_two_of_eight_requests_finishes_all(page_size: int, num_groups: int, cache: bool) -> None:
    model = EchoModel(num_groups=num_groups)
    driver = Driver(num_groups * 96 // page_size, page_size, cache, model, max_num_batched_tokens=40, watermark=0.0)
    for i in range(8):
        driver.submit(f"r{i}", [*span(0, 8), i, *span(i, i)], 30)
    driver.run()
    driver.expect_all_exact()
    stats = driver.scheduler.stats
    assert stats.num_preemptions > 0
    assert stats.num_finished == 8
    assert driver.pool.num_live == 0
    if cache:
        assert stats.computed_tokens <= 2 * (stats.prompt_tokens + stats.generated_tokens)


def test_the_oldest_is_never_preempted_so_something_always_ends() -> None:
    driver = Driver(16, 4, watermark=0.0, max_num_batched_tokens=32)
    for i in range(10):
        driver.submit(f"r{i}", [i] * 20, 30)
    ended = []
    while driver.scheduler.has_work:
        plan = driver.step()
        oldest = min(
            (r for r in driver.requests.values() if r.finish_reason is None), key=lambda r: r.arrival, default=None
        )
        assert oldest is None or oldest not in plan.preempted
        ended = [r.id for r in driver.requests.values() if r.finish_reason]
    assert len(ended) == 10
    driver.expect_all_exact()


def test_pages_held_outside_stop_the_scheduler_but_lose_nothing() -> None:
    driver = Driver(10, 4)
    outside = driver.pool.alloc(4)
    driver.scheduler.check = lambda: None  # those pages are in no table
    driver.submit("a", span(0, 20), 20)
    driver.step_until(lambda: len(driver.outputs["a"]) == 5)
    assert driver.pool.num_available == 0
    assert driver.scheduler.schedule() is None
    assert driver.waiting() == ["a"]
    assert driver.scheduler.schedule() is None
    driver.pool.release(outside)
    driver.run()
    driver.expect_all_exact()
