"""Sharing within a step: one opening is computed once, whoever arrives with it and whenever."""

from __future__ import annotations

import pytest
from byhand import span
from driver import Driver
from fakes import EchoAfter, EchoLooped, EchoModel


def beside(driver: Driver) -> None:
    """One that decodes meanwhile: a prefill that is alone is not cut into chunks."""
    driver.submit("z", [96], 60)
    driver.step()


# In one step ------------------------------------------------------------------------------------------------------


def test_two_identical_prompts_compute_100_and_4_rows_in_one_step() -> None:
    driver = Driver(64, 16)
    driver.submit("a", [*span(0, 97), 1, 2, 3])
    driver.submit("b", [*span(0, 97), 1, 2, 3])
    driver.step()
    assert driver.plans == [{"a": 100, "b": 4}]
    assert driver.pages("a")[:6] == driver.pages("b")[:6]
    assert driver.pages("a")[6] != driver.pages("b")[6]
    assert driver.requests["b"].num_cached_tokens == 96
    driver.run()
    driver.expect_all_exact()


@pytest.mark.parametrize(("length", "rows"), [(1, 1), (15, 15), (16, 16), (17, 1), (31, 15), (32, 16), (33, 1)])
def test_a_twin_computes_at_least_its_last_token(length: int, rows: int) -> None:
    driver = Driver(64, 16)
    driver.submit("a", span(0, length))
    driver.submit("b", span(0, length))
    driver.step()
    assert driver.plans == [{"a": length, "b": rows}]
    driver.run()
    driver.expect_all_exact()


def test_a_third_follows_pages_that_the_second_offers() -> None:
    driver = Driver(64, 4)
    driver.submit("a", span(0, 9))
    driver.submit("b", [*span(0, 8), *span(40, 8), 1])
    driver.submit("c", [*span(0, 8), *span(40, 8), 2])
    driver.step()
    assert driver.plans == [{"a": 9, "b": 9, "c": 1}]
    assert driver.pages("c")[:4] == driver.pages("b")[:4]
    driver.run()
    driver.expect_all_exact()


def test_pages_that_part_within_are_not_shared() -> None:
    driver = Driver(64, 16)
    driver.submit("a", span(0, 40))
    driver.submit("b", [*span(0, 20), *span(60, 20)])
    driver.step()
    assert driver.plans == [{"a": 40, "b": 24}]
    driver.run()
    driver.expect_all_exact()


def test_equal_pages_after_other_openings_are_not_shared() -> None:
    driver = Driver(64, 4)
    driver.submit("a", [*span(0, 4), *span(80, 8)])
    driver.submit("b", [*span(20, 4), *span(80, 8)])
    driver.step()
    assert driver.plans == [{"a": 12, "b": 12}]
    driver.run()
    driver.expect_all_exact()


def test_namespaces_do_not_share() -> None:
    driver = Driver(64, 4)
    driver.submit("a", span(0, 17), namespace="x")
    driver.submit("b", span(0, 17), namespace="y")
    driver.submit("c", span(0, 17), namespace="x")
    driver.step()
    assert driver.plans == [{"a": 17, "b": 17, "c": 1}]
    driver.run()
    driver.expect_all_exact()


def test_without_a_cache_nothing_is_shared() -> None:
    driver = Driver(64, 4, cache=False)
    driver.submit("a", span(0, 17))
    driver.submit("b", span(0, 17))
    driver.step()
    assert driver.plans == [{"a": 17, "b": 17}]
    driver.run()
    driver.expect_all_exact()


@pytest.mark.parametrize("num_groups", [2, 3])
def test_every_group_is_shared(num_groups: int) -> None:
    driver = Driver(90, 4, model=EchoModel(num_groups=num_groups))
    driver.submit("a", span(0, 17))
    driver.submit("b", span(0, 17))
    driver.step()
    state = driver.scheduler.state
    a, b = (state.pages(driver.requests[name].slot) for name in "ab")
    assert (a[:, :4] == b[:, :4]).all()
    driver.run()
    driver.expect_all_exact()
    assert driver.pool.num_live == 0


def test_a_prompt_that_ends_at_once_leaves_its_pages_to_its_follower() -> None:
    driver = Driver(64, 4)
    driver.submit("a", span(0, 16), 1)
    driver.submit("b", [*span(0, 16), 50], 6)
    driver.step()
    assert driver.plans == [{"a": 16, "b": 1}]
    assert driver.running() == ["b"]
    driver.run()
    driver.expect_all_exact()


def test_a_running_chunk_offers_the_pages_that_it_fills_now() -> None:
    driver = Driver(64, 4, max_num_batched_tokens=24, max_chunk_tokens=8)
    beside(driver)
    driver.submit("a", span(0, 32))
    driver.step()
    driver.submit("b", [*span(0, 16), 90])
    driver.step()
    assert driver.plans[1:] == [{"z": 1, "a": 8}, {"z": 1, "a": 8, "b": 1}]
    driver.run()
    driver.expect_all_exact()


# Over many steps --------------------------------------------------------------------------------------------------


def test_an_opening_that_is_prefilled_over_many_steps_is_computed_once() -> None:
    driver = Driver(200, 16, max_num_batched_tokens=64, max_num_seqs=8)
    opening = span(0, 90) * 7  # 630 tokens: ten steps
    for i in range(5):
        driver.submit(f"r{i}", [*opening, i, i + 1])
    driver.run()
    driver.expect_all_exact()
    computed = sum(r.num_computed_tokens for r in driver.requests.values())
    own = 632 % 16
    assert computed == 632 + 4 * own + 5 * 7  # one opening, four tails, and the decoded tokens but the last


def test_who_waits_for_an_opening_starts_in_the_step_that_completes_it() -> None:
    driver = Driver(64, 4, max_num_batched_tokens=8, max_num_seqs=4)
    driver.submit("a", span(0, 22))
    driver.submit("b", [*span(0, 20), 50])
    driver.step()
    driver.step()
    assert driver.waiting() == ["b"]
    driver.step()
    assert driver.plans == [{"a": 8}, {"a": 8}, {"a": 6, "b": 1}]
    assert not driver.scheduler.sharing._expected
    driver.run()
    driver.expect_all_exact()


def test_others_start_while_one_waits_for_an_opening() -> None:
    driver = Driver(64, 4, max_num_batched_tokens=16, max_chunk_tokens=8)
    driver.submit("a", span(0, 40))
    driver.submit("b", [*span(0, 40), 1])
    driver.submit("c", span(60, 5))
    driver.step()
    assert driver.plans == [{"a": 8, "c": 5}]
    driver.run()
    driver.expect_all_exact()
    assert driver.requests["b"].num_cached_tokens == 40


def test_a_prompt_that_leaves_the_opening_before_it_ends_does_not_wait_for_the_rest() -> None:
    driver = Driver(64, 4, max_num_batched_tokens=16, max_chunk_tokens=8)
    driver.submit("a", span(0, 40))
    driver.step()
    driver.submit("b", [*span(0, 8), *span(70, 4)])
    driver.step()
    assert driver.plans[1] == {"a": 8, "b": 4}
    driver.run()
    driver.expect_all_exact()


@pytest.mark.parametrize("how", ["cancel", "preempt"])
def test_who_waits_for_one_that_is_gone_computes_itself(how: str) -> None:
    driver = Driver(64, 4, max_num_batched_tokens=8, max_num_seqs=4)
    driver.submit("a", span(0, 40))
    driver.submit("b", [*span(0, 36), 50])
    driver.step()
    driver.step()
    assert driver.computed("a") == 16
    getattr(driver, how)("a")
    driver.run()
    driver.expect_all_exact()
    if how == "cancel":
        assert driver.requests["b"].num_cached_tokens == 16
    assert not driver.scheduler.sharing._expected and not driver.scheduler.sharing._owners


def test_who_waits_for_one_that_failed_computes_itself() -> None:
    driver = Driver(64, 4, max_num_batched_tokens=8, max_num_seqs=4)
    driver.submit("a", span(0, 40))
    driver.submit("b", [*span(0, 36), 50])
    driver.step()
    plan = driver.scheduler.schedule()
    assert plan is not None
    assert driver.scheduler.abort(plan, "boom") == [driver.requests.pop("a")]
    driver.run()
    driver.expect_all_exact()
    assert driver.requests["b"].num_cached_tokens == 8


def test_nobody_waits_for_pages_that_will_not_be_published() -> None:
    driver = Driver(64, 4, max_num_batched_tokens=13, max_chunk_tokens=6, max_pages=2)
    beside(driver)
    driver.submit("a", span(0, 40))
    driver.step()
    driver.step()
    driver.step()
    assert driver.running() == ["z", "a"]
    assert driver.requests["a"].cursor.closed  # the budget of two pages is spent
    driver.submit("b", [*span(0, 40), 1])
    driver.step()
    assert driver.plans[-1] == {"z": 1, "a": 6, "b": 6}
    assert driver.requests["b"].num_cached_tokens == 8
    driver.run()
    driver.expect_all_exact()


def test_waiting_is_no_deadlock_when_the_hash_sends_everyone_to_one_page() -> None:
    driver = Driver(64, 4, max_num_batched_tokens=8, hash_page=lambda parent, tokens: 7)
    for i in range(6):
        driver.submit(f"r{i}", span(10 * i, 21))
    driver.run()
    driver.expect_all_exact()


# A cache that is released while requests run ----------------------------------------------------------------------


def test_a_page_below_a_released_parent_is_not_offered_below_the_one_in_its_place() -> None:
    """The first page of `a` and, after the release, that of `y` would be the same node: `b` must not follow `a`."""
    driver = Driver(64, 8, max_num_batched_tokens=60, max_chunk_tokens=2)
    beside(driver)
    driver.submit("a", [1] * 8 + [9] * 8 + [5] * 24, 2)
    driver.step_until(lambda: driver.computed("a") == 4)
    driver.submit("y", [31] * 8 + [1], 1)
    driver.step_until(lambda: driver.computed("a") == 8)
    driver.cache.release()
    driver.step_until(lambda: driver.computed("a") == 14)
    driver.submit("b", [31] * 8 + [9] * 8 + [3] * 3, 4)
    driver.run()
    driver.expect_all_exact()


@pytest.mark.parametrize("why", ["released", "closed"])
def test_a_cursor_that_publishes_no_more_offers_nothing_and_is_not_awaited(why: str) -> None:
    driver = Driver(64, 4, max_num_batched_tokens=60, max_chunk_tokens=8)
    beside(driver)
    request = driver.submit("a", span(0, 40), 2)
    driver.step()
    sharing, state = driver.scheduler.sharing, driver.scheduler.state
    if why == "released":
        driver.cache.release()
    else:
        request.cursor.closed = True
    sharing.begin()
    sharing.offer(request, state, 8)
    assert sharing._offered == {}
    other = driver.submit("b", span(0, 40), 2)
    other.cursor = driver.cache.cursor()
    driver.cache.seek(other.cursor, other.known)
    assert not sharing.awaits(other, 2)
    sharing.expect(other)  # it takes over what the first one will not bring
    assert sharing.awaits(other, 2)
    sharing.settle([request, other])
    assert not sharing._expected


def test_rows_of_before_a_release_enter_no_page_of_the_cache() -> None:
    driver = Driver(64, 8, max_chunk_tokens=2)
    beside(driver)
    driver.submit("a", [7] * 20, 3)
    driver.step_until(lambda: driver.computed("a") == 4)
    mine = driver.pages("a")
    driver.pool.storage.pages[mine, 0, 0, 0, :4] += 1000.0  # rows of other weights
    driver.cache.release()
    driver.submit("b", [7] * 20, 3)  # follows nothing, waits for nobody
    driver.step()
    assert driver.plans[-1] == {"z": 1, "a": 2, "b": 2}
    driver.run()
    driver.requests.pop("a")  # it went on with the rows it had
    driver.solo("c", [7] * 20)
    driver.expect_all_exact()
    assert driver.requests["c"].num_cached_tokens == 16


def test_a_waiting_request_starts_anew_after_a_release() -> None:
    driver = Driver(64, 4, max_num_seqs=1)
    driver.solo("old", span(0, 16), 1)
    driver.submit("first", span(50, 8), 4)
    driver.submit("second", [*span(0, 16), 1], 4)
    driver.step()
    driver.cache.release()
    driver.run()
    driver.expect_all_exact()
    assert driver.requests["second"].num_cached_tokens == 0
    assert driver.cache.match_len([*span(0, 16), 2]) == 16


def test_a_release_between_schedule_and_commit_publishes_nothing_of_that_step() -> None:
    driver = Driver(64, 4)
    driver.submit("a", span(0, 16), 4)
    driver.submit("b", [*span(0, 16), 9], 4)
    plan = driver.scheduler.schedule()
    logits = driver.model.forward(plan.batch, driver.pool.storage).numpy()
    driver.cache.release()
    result = driver.scheduler.commit(plan, logits.argmax(axis=1).astype("int32"))
    for request, token in zip(result.requests, result.tokens.tolist(), strict=True):
        driver.outputs[request.id].append(token)
    driver.scheduler.check()
    assert driver.cache.held_pages == 0
    driver.run()
    driver.expect_all_exact()
    assert driver.pool.num_free == 64


# Depths and cache windows -----------------------------------------------------------------------------------------


def looped(num_pages: int = 200, kind=EchoLooped, **config) -> Driver:
    return Driver(num_pages, 4, model=kind(), **config)


@pytest.mark.parametrize("kind", [EchoLooped, EchoAfter])
def test_within_a_step_only_equal_depths_share(kind) -> None:
    driver = looped(kind=kind)
    for name, loops in (("a", 4), ("b", 4), ("c", 1), ("d", 1)):
        driver.submit(name, span(0, 9), loops=loops)
    driver.step()
    assert driver.plans == [{"a": 9, "b": 1, "c": 9, "d": 1}]
    driver.run()
    driver.expect_all_exact()


def test_what_is_shared_counts_no_page_of_a_group_that_is_not_in_use() -> None:
    driver = looped()
    driver.submit("a", span(0, 9), loops=1)
    driver.submit("b", span(0, 9), loops=1)
    driver.step()
    last = driver.pool.num_pages - 1
    assert driver.pool.refs[last] == 0
    driver.run()
    assert driver.pool.num_live == 0


def test_a_deeper_prefill_is_waited_for_and_a_shallower_one_is_not() -> None:
    driver = looped(max_num_batched_tokens=8)
    driver.submit("deep", span(0, 17), loops=3)
    driver.step()
    driver.submit("shallow", span(0, 17), loops=1)  # waits: the deep one will publish its next page
    driver.step_until(lambda: driver.requests["shallow"].num_cached_tokens > 0)
    assert driver.requests["shallow"].num_cached_tokens == 16
    driver.run()
    driver.expect_all_exact()
    driver = looped(max_num_batched_tokens=8, max_chunk_tokens=4)
    driver.submit("shallow", span(0, 17), 1, loops=1)
    driver.step()
    driver.submit("deep", span(0, 17), 1, loops=3)  # what the shallow one publishes is of no use to it
    driver.step()
    assert driver.plans[-1] == {"shallow": 4, "deep": 4}
    driver.run()
    assert driver.requests["deep"].num_cached_tokens == 0
    driver.expect_all_exact()


def test_windows_do_not_share() -> None:
    driver = Driver(64, 4)
    driver.submit("a", span(0, 9), cache_window=5)
    driver.submit("b", span(0, 9))
    driver.submit("c", span(0, 9), cache_window=5)
    driver.step()
    assert driver.plans == [{"a": 9, "b": 9, "c": 1}]
    driver.run()
    driver.expect_all_exact()
