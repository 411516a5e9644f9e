"""Reserve: what an admission keeps free for output, and that it is enough."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import span
from driver import Driver
from fakes import EchoLooped, EchoModel

from paged.kv.pages import PagePool
from paged.prefix.cache import PrefixCache
from paged.sampling import SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.reserve import FEWEST, NAMESPACES, SAMPLES, OutputLengths
from scheduler.scheduler import Scheduler


def driver(num_pages: int, reserve: str, page_size: int = 4, model: EchoModel | None = None, **config) -> Driver:
    config = {"watermark": 0.0, "max_num_batched_tokens": 512, **config}
    return Driver(num_pages, page_size, model=model, reserve=reserve, **config)


# max_tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reserve", "starts"), [("prompt", 5), ("max_tokens", 4)])
def test_the_fifth_of_a_pool_for_four_and_a_half_waits_instead_of_thrashing(reserve: str, starts: int) -> None:
    """Four requests of 100k tokens with their output in a pool for 4.5 of them."""
    pool = PagePool(4 * 6250 + 3125, 16)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=60_000, reserve=reserve, watermark=0.0)
    scheduler = Scheduler(pool, 101_000, config, PrefixCache(pool))
    rng = np.random.default_rng(0)
    for i in range(5):
        prompt = rng.integers(0, 50_000, 88_000).astype(np.int32)
        scheduler.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=12_000), 0, (), 100_000))
    for _ in range(12):
        plan = scheduler.schedule()
        scheduler.commit(plan, np.ones(len(plan.sample_slots), np.int32))
    assert scheduler.state.num_running == starts
    assert scheduler.stats.num_preemptions == 0
    if reserve == "max_tokens":
        scheduler.finish(scheduler.requests["r1"], "cancelled")
        scheduler.schedule()
        assert scheduler.state.num_running == 4


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_with_everything_reserved_nobody_is_ever_preempted(cache: bool, groups: int) -> None:
    rng = np.random.default_rng(5)
    model = EchoModel(num_groups=groups)
    d = Driver(30 * groups, 4, cache, model, reserve="max_tokens", watermark=0.0, max_num_batched_tokens=24)
    for i in range(30):
        d.submit(f"r{i}", [*span(0, int(rng.integers(0, 20))), i], int(rng.integers(1, 60)))
    d.run()
    d.expect_all_exact()
    assert d.scheduler.stats.num_preemptions == 0
    assert d.scheduler.stats.peak_running > 1


def test_the_same_crowd_is_preempted_where_nothing_is_reserved() -> None:
    rng = np.random.default_rng(5)
    d = driver(30, "prompt", max_num_batched_tokens=24)
    for i in range(30):
        d.submit(f"r{i}", [*span(0, int(rng.integers(0, 20))), i], int(rng.integers(1, 60)))
    d.run()
    assert d.scheduler.stats.num_preemptions > 0


def test_what_running_requests_may_still_take_shrinks_as_they_take_it() -> None:
    d = driver(40, "max_tokens")
    d.submit("a", [1] * 8, 32)  # two pages now, ten at its limit
    seen = []
    for _ in range(31):
        d.step()
        d.scheduler.reserve.begin()
        seen.append(d.scheduler.reserve.outstanding)
    assert seen[0] == 8 and seen[-1] == 0 and seen == sorted(seen, reverse=True)


def test_a_request_alone_starts_whatever_it_reserves() -> None:
    d = driver(10, "max_tokens", watermark=0.9)
    d.submit("a", [1] * 30, 10)
    d.step()
    assert d.running() == ["a"]
    d.run()
    d.expect_all_exact()


def test_a_window_gives_back_what_it_takes_so_it_reserves_no_more_than_the_window() -> None:
    d = driver(60, "max_tokens", model=EchoModel(windows=(8,)))
    request = d.submit("a", [1] * 4, 80)
    assert d.scheduler.reserve.growth(request) == 2  # 21 pages in all, three at once
    d.step()
    d.scheduler.reserve.begin()
    assert d.scheduler.reserve.outstanding == 2
    for i in range(9):
        d.submit(f"b{i}", [2 + i] * 4, 80)
    d.run()
    d.expect_all_exact()
    assert d.scheduler.stats.num_preemptions == 0


def test_a_looped_request_reserves_in_the_groups_of_its_depth() -> None:
    d = driver(200, "max_tokens", model=EchoLooped())
    shallow = d.submit("a", [1] * 4, 16, loops=1)
    deep = d.submit("b", [1] * 4, 16, loops=4)
    reserve = d.scheduler.reserve
    assert reserve.growth(shallow) == 4 * shallow.view.num_groups
    assert reserve.growth(deep) == 4 * deep.view.num_groups
    d.step()
    reserve.begin()
    assert reserve.outstanding == 4 * (shallow.view.num_groups + deep.view.num_groups)


def test_an_unknown_reserve_is_refused() -> None:
    with pytest.raises(ValueError, match="reserve must be one of prompt, max_tokens, expected, got 'all'"):
        SchedulerConfig(reserve="all")


# expected ---------------------------------------------------------------------------------------------------------


def test_nothing_is_expected_before_eight_outputs_ended_then_what_nine_of_ten_stayed_below() -> None:
    lengths = OutputLengths()
    for n in range(1, FEWEST):
        lengths.add("a", n)
        assert lengths.expected("a") is None
    lengths.add("a", FEWEST)
    assert lengths.expected("a") == 7
    for _ in range(SAMPLES):
        lengths.add("a", 50)
    assert lengths.expected("a") == 50


def test_a_namespace_of_which_little_is_known_is_like_all_others() -> None:
    lengths = OutputLengths()
    for _ in range(FEWEST):
        lengths.add("chat", 20)
    assert lengths.expected("new") == 20
    for _ in range(FEWEST):
        lengths.add("new", 300)
    assert (lengths.expected("new"), lengths.expected("chat")) == (300, 20)


def test_the_namespaces_that_are_remembered_are_bounded() -> None:
    lengths = OutputLengths()
    for i in range(NAMESPACES + 50):
        lengths.add(f"user{i}", 1)
    assert len(lengths._of) == NAMESPACES


def test_short_answers_to_long_limits_let_more_run_than_their_limits_would() -> None:
    def crowd(reserve: str) -> int:
        d = driver(40, reserve, model=EchoModel(eos=(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)))
        for i in range(FEWEST):
            d.solo(f"w{i}", [i, 20, 30], 100)
        d.scheduler.stats.peak_running = 0
        for i in range(12):
            d.submit(f"r{i}", [i, 40, 50, 60], 100)
        d.run()
        d.expect_all_exact()
        return d.scheduler.stats.peak_running

    assert crowd("max_tokens") == 1
    assert crowd("expected") > 2


def test_before_anything_is_known_the_limit_is_expected() -> None:
    d = driver(40, "expected")
    request = d.submit("a", [1] * 4, 100)
    assert d.scheduler.reserve.reach(request) == 104


def test_a_cancelled_request_teaches_nothing_and_a_preempted_one_once() -> None:
    d = driver(40, "expected")
    d.submit("a", [1] * 4, 10)
    d.step()
    d.preempt("a")
    d.submit("b", [2] * 4, 10)
    d.step()
    d.cancel("b")
    d.run()
    assert list(d.scheduler.reserve.lengths._all) == [10]


def test_who_outlives_what_was_expected_reserves_nothing_more() -> None:
    d = driver(40, "expected")
    for i in range(FEWEST):
        d.solo(f"w{i}", [i] * 4, 4)
    request = d.submit("long", [9] * 4, 40)
    assert d.scheduler.reserve.reach(request) == 8
    for _ in range(20):
        d.step()
        d.scheduler.reserve.begin()
    assert d.scheduler.reserve.outstanding == 0
    d.run()
    d.expect_all_exact()
