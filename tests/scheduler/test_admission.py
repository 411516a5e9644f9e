"""Admission: what can never run, who starts when pages are short, and how long a request can be passed by."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import CountingLookup, span
from driver import Driver
from fakes import EchoModel

from paged.errors import PromptTooLong
from paged.prefix.hashing import page_hash

# What can never run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "limit"),
    [(63, 1, 64), (1, 63, 64), (60, 10, 64), (1, None, 64), (63, None, 64), (5, 3, 8)],
)
def test_the_limit_is_on_prompt_and_output_together(prompt: int, max_tokens: int | None, limit: int) -> None:
    driver = Driver(8, 16, model=EchoModel(max_seq_len=64))
    assert driver.scheduler.fit(prompt, max_tokens) == limit


@pytest.mark.parametrize("prompt", [64, 65, 1000])
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused_with_both_numbers(prompt: int) -> None:
    driver = Driver(8, 16, model=EchoModel(max_seq_len=64))
    with pytest.raises(PromptTooLong, match=rf"{prompt} tokens and max_seq_len is 64"):
        driver.submit("a", [1] * prompt)


def test_a_prompt_longer_than_the_pool_is_refused_and_others_go_on() -> None:
    driver = Driver(99, 16, model=EchoModel(max_seq_len=4096), max_num_batched_tokens=64)
    driver.submit("before", span(0, 20))
    for _ in range(3):
        with pytest.raises(PromptTooLong, match=r"3000 tokens and the whole pool holds 1584 \(99 pages of 16\)"):
            driver.submit("huge", [1] * 3000)
    driver.submit("after", span(30, 20))
    driver.run()
    driver.expect_all_exact()
    assert set(driver.outputs) == {"before", "after"}


@pytest.mark.parametrize(("num_groups", "held"), [(1, 40), (2, 20), (3, 12), (4, 8)])
def test_the_pool_is_divided_among_the_groups(num_groups: int, held: int) -> None:
    driver = Driver(10, 4, model=EchoModel(num_groups=num_groups))
    assert driver.scheduler.capacity == held
    with pytest.raises(PromptTooLong, match=f"the whole pool holds {held}"):
        driver.scheduler.fit(held, 1)
    driver.submit("a", [3] * (held - 1), 5)
    driver.run()
    driver.expect_all_exact()
    assert len(driver.outputs["a"]) == 1


def test_the_longest_prompt_that_fits_runs_in_a_pool_full_of_cached_pages() -> None:
    driver = Driver(10, 4)
    driver.solo("old", span(0, 30), 9)
    assert driver.pool.num_cached_only >= 9
    driver.solo("a", [7] * 39, 5)
    assert len(driver.outputs["a"]) == 1
    driver.expect_all_exact()


# Who waits, and for how long --------------------------------------------------------------------------------------


def short_of_pages(max_bypass: int = 64, lookahead: int = 16) -> Driver:
    """50 pages: `runs` holds 40 of them for 30 steps, and `head`, next in line, needs 40."""
    driver = Driver(50, 16, watermark=0.0, max_num_batched_tokens=2048, max_bypass=max_bypass, lookahead=lookahead)
    driver.submit("runs", [1] * 610, 30)
    driver.step()
    assert driver.pool.num_free == 11
    driver.submit("head", [2] * 640, 4)
    return driver


def test_small_requests_start_behind_a_head_that_does_not_fit() -> None:
    driver = short_of_pages()
    for i in range(10):
        driver.submit(f"small{i}", [3, i], 5)
    driver.step()
    assert driver.running() == ["runs", *(f"small{i}" for i in range(10))]
    assert driver.waiting() == ["head"]
    driver.run()
    driver.expect_all_exact()
    assert driver.scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize("max_bypass", [0, 1, 3])
def test_a_head_is_passed_by_in_at_most_max_bypass_steps(max_bypass: int) -> None:
    driver = short_of_pages(max_bypass)
    passes = 0
    for n in range(100):
        driver.submit(f"small{n}", [3, n % 90], 40)
        admitted = [request.id for request in driver.step().admitted]
        if "head" in admitted:
            break
        passes += bool(admitted)
    assert n == 29  # the step after the one in which `runs` ended
    assert passes == max_bypass
    driver.run()
    driver.expect_all_exact()


def test_a_head_that_waited_starts_as_soon_as_its_pages_are_free() -> None:
    driver = short_of_pages(max_bypass=2)
    for i in range(12):
        driver.submit(f"small{i}", [3, i], 3)
    driver.step_until(lambda: driver.requests["runs"].finish_reason is not None)
    driver.step()
    assert "head" in driver.running()
    driver.run()
    driver.expect_all_exact()


def test_the_count_of_bypasses_starts_anew_once_a_request_ran() -> None:
    driver = short_of_pages()
    driver.submit("small", [3], 5)
    driver.step()
    assert driver.requests["head"].num_bypassed == 1
    driver.step_until(lambda: "head" in driver.running())
    assert driver.requests["head"].num_bypassed == 0


def test_a_request_is_not_bypassed_by_those_before_it_or_by_nobody() -> None:
    driver = short_of_pages()
    for _ in range(5):
        driver.step()
    assert driver.requests["head"].num_bypassed == 0


@pytest.mark.parametrize(("lookahead", "starts"), [(0, False), (1, False), (2, True)])
def test_no_more_than_lookahead_requests_are_tried_behind_the_head(lookahead: int, starts: bool) -> None:
    driver = short_of_pages(lookahead=lookahead)
    driver.submit("big", [4] * 600, 4)
    driver.submit("small", [3], 4)
    driver.step()
    assert ("small" in driver.running()) == starts
    driver.run()
    driver.expect_all_exact()


def test_slots_bound_what_runs_and_the_rest_waits_in_order() -> None:
    driver = Driver(64, 4, max_num_seqs=2)
    for i in range(6):
        driver.submit(f"r{i}", [i] * 5, 3)
    order = []
    while driver.scheduler.has_work:
        plan = driver.step()
        order += [request.id for request in plan.admitted]
        assert len(driver.running()) <= 2
    assert order == [f"r{i}" for i in range(6)]
    assert driver.scheduler.stats.num_preemptions == 0
    driver.expect_all_exact()


# Pages that an admission counts -----------------------------------------------------------------------------------


def test_a_hit_on_an_idle_page_costs_the_page_it_makes_live() -> None:
    driver = Driver(3, 4, watermark=0.0, max_num_seqs=4)
    driver.solo("old", span(0, 4), 1)
    driver.submit("runs", [50], 4)
    driver.step()
    assert (driver.pool.num_free, driver.pool.num_cached_only) == (1, 1)
    driver.submit("two more", [*span(0, 4), *span(60, 5)], 1)  # its hit and two new pages: three of the two left
    driver.submit("one more", [*span(0, 4), 9], 1)
    driver.step()
    assert driver.waiting() == ["two more"]
    assert driver.pool.refs[0] == 1
    assert list(driver.plans[-1]) == ["runs", "one more"]
    assert driver.requests["one more"].num_cached_tokens == 4
    driver.run()
    driver.expect_all_exact()


def test_what_does_not_fit_takes_nothing() -> None:
    driver = short_of_pages()
    driver.step()
    before = (driver.pool.refs.tolist(), driver.cache.index.tick, driver.cache.stats.num_queries)
    plan = driver.scheduler.schedule()
    assert "head" not in [r.id for r in plan.admitted]
    after = (driver.pool.refs.tolist(), driver.cache.index.tick, driver.cache.stats.num_queries)
    assert before == after


@pytest.mark.parametrize(("watermark", "starts"), [(0.0, True), (0.1, True), (0.2, False)])
def test_the_watermark_keeps_its_share_free_while_others_run(watermark: float, starts: bool) -> None:
    driver = Driver(20, 4, watermark=watermark)
    driver.submit("runs", [1] * 40, 4)
    driver.step()
    assert driver.pool.num_free == 10
    driver.submit("a", [2] * 28, 1)  # seven pages: three stay free
    driver.step()
    assert ("a" in driver.plans[-1]) == starts
    driver.run()
    driver.expect_all_exact()


@pytest.mark.parametrize(("watermark", "starts"), [(0.1, True), (0.2, False)])
def test_idle_pages_that_a_request_attaches_are_not_free_any_more(watermark: float, starts: bool) -> None:
    driver = Driver(20, 4, watermark=watermark)
    driver.solo("old", span(0, 33), 1)
    driver.submit("runs", [50] * 20, 4)
    driver.step()
    assert driver.pool.num_available == 15
    driver.submit("hit", [*span(0, 32), *span(60, 16)], 1)  # eight idle pages and four more: three stay
    driver.step()
    assert ("hit" in driver.plans[-1]) == starts
    driver.run()
    assert driver.requests["hit"].num_cached_tokens == 32
    driver.expect_all_exact()


def test_the_watermark_does_not_hold_when_nothing_runs() -> None:
    driver = Driver(20, 4, watermark=0.9)
    driver.submit("a", [2] * 70, 4)
    driver.step()
    assert driver.running() == ["a"]
    driver.run()
    driver.expect_all_exact()


def test_a_fifth_long_prompt_waits_for_pages_instead_of_pushing_others_out() -> None:
    driver = Driver(90, 16, max_num_batched_tokens=512)
    for i in range(5):
        driver.submit(f"r{i}", [i] * 310, 6)
    driver.run()
    driver.expect_all_exact()
    assert driver.scheduler.stats.num_preemptions == 0
    assert driver.scheduler.stats.peak_running == 4


# Costs as counts --------------------------------------------------------------------------------------------------


def test_a_blocked_prompt_is_never_hashed_however_long_it_waits() -> None:
    calls = 0

    def spy(parent, tokens):
        nonlocal calls
        calls += 1
        return page_hash(parent, tokens)

    driver = Driver(50, 16, watermark=0.0, max_num_batched_tokens=2048, hash_page=spy)
    driver.cache.check = lambda: None  # it hashes every page
    driver.submit("runs", [1] * 560, 60)
    driver.step()
    driver.submit("head", [2] * 640, 4)
    calls = 0
    driver.step()
    assert calls == 0
    for _ in range(40):
        driver.step()
    assert "head" in driver.waiting()
    assert calls == 2  # the pages that `runs` filled meanwhile
    driver.run()
    driver.expect_all_exact()


def test_a_blocked_prompt_is_looked_up_once_a_step() -> None:
    driver = short_of_pages()
    driver.step()
    lookup = driver.cache.index.lookup = CountingLookup(driver.cache.index.lookup)
    for _ in range(3):
        lookup.calls = 0
        plan = driver.scheduler.schedule()
        assert lookup.calls == 1
        driver.scheduler.commit(plan, np.zeros(len(plan.sample_slots), np.int32))


def test_a_deep_queue_is_looked_at_no_further_than_lookahead() -> None:
    driver = short_of_pages(lookahead=4)
    for i in range(300):
        driver.submit(f"big{i}", [i % 80 + 10] * 500, 4)
    looked = []
    real = driver.scheduler.placer.place
    driver.scheduler.placer.place = lambda request, alone: looked.append(request.id) or real(request, alone)
    driver.step()
    assert looked == ["head", *(f"big{i}" for i in range(4))]
