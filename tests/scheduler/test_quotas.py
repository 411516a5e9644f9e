"""Quotas: what a namespace may run and hold, and that nobody else pays for it."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import expect_check_fails, span
from driver import Driver
from fakes import EchoLooped, EchoModel

from paged.errors import PromptTooLong
from scheduler.config import SchedulerConfig
from scheduler.policy import POLICIES
from scheduler.quota import Quota


def driver(num_pages: int = 64, model: EchoModel | None = None, cache: bool = True, **config) -> Driver:
    return Driver(num_pages, 4, cache, model, **{"watermark": 0.0, **config})


def held(d: Driver, namespace: str) -> int:
    state = d.scheduler.state
    slots = [r.slot for r in d.scheduler.requests.values() if r.slot >= 0 and r.namespace == namespace]
    return sum(len(state.page_ids(slot)) for slot in slots)


def running(d: Driver, namespace: str) -> int:
    return sum(r.slot >= 0 and r.namespace == namespace for r in d.scheduler.requests.values())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_namespace_runs_no_more_requests_than_it_may(policy: str) -> None:
    d = driver(policy=policy, quota=Quota(max_running=2), max_num_seqs=8)
    for i in range(12):
        d.submit(f"r{i}", [i] * 5, 4, "ab"[i % 2])
    most = 0
    while d.scheduler.has_work:
        d.step()
        most = max(most, running(d, "a"))
        assert running(d, "a") <= 2 and running(d, "b") <= 2
    assert most == 2
    d.expect_all_exact()


def test_a_flood_at_its_quota_holds_up_nobody_behind_it() -> None:
    d = driver(quotas={"flood": Quota(max_running=1)}, max_num_seqs=4, lookahead=2)
    for i in range(50):
        d.submit(f"f{i}", [1, i], 6, "flood")
    d.submit("other", [2], 6, "calm")
    assert [r.id for r in d.step().admitted] == ["f0", "other"]
    assert d.requests["f1"].num_bypassed == 0
    d.run()
    d.expect_all_exact()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("cache", [True, False])
def test_a_namespace_never_holds_more_pages_than_it_may(policy: str, cache: bool) -> None:
    rng = np.random.default_rng(3)
    d = driver(60, cache=cache, policy=policy, quotas={"a": Quota(max_pages=12)}, max_num_seqs=6)
    for i in range(24):
        opening = span(0, int(rng.integers(0, 12)))
        d.submit(f"r{i}", [*opening, i], int(rng.integers(1, 24)), "ab"[i % 2])
    while d.scheduler.has_work:
        assert d.step() is not None
        assert held(d, "a") <= 12
    d.expect_all_exact()


def test_one_that_outgrows_its_quota_makes_its_own_latest_yield_and_no_other() -> None:
    d = driver(60, quotas={"a": Quota(max_pages=8)}, max_num_seqs=6)
    d.submit("other", [9] * 4, 30, "b")
    for i in range(2):
        d.submit(f"a{i}", [i] * 14, 16, "a")  # four pages each, growing to eight
    preempted = []
    while d.scheduler.has_work:
        preempted += [r.id for r in d.step().preempted]
    assert set(preempted) == {"a1"}
    d.expect_all_exact()


def test_a_request_that_waits_for_its_quota_lets_none_of_its_namespace_pass() -> None:
    d = driver(60, quotas={"a": Quota(max_pages=10)}, max_num_seqs=6)
    d.submit("runs", [1] * 26, 6, "a")
    d.submit("big", [2] * 20, 4, "a")
    d.submit("small", [3], 4, "a")
    d.submit("other", [4], 4, "b")
    d.step()
    assert d.running() == ["runs", "other"]
    d.run()
    d.expect_all_exact()


def test_nobody_yields_to_a_second_request_that_the_quota_holds_back_behind_the_first() -> None:
    d = driver(18, policy="priority", quotas={"a": Quota(max_pages=8)}, max_num_seqs=2)
    d.submit("x", [1] * 8, 12, priority=1)
    d.submit("y", [2] * 8, 12, priority=1)
    d.step()
    d.submit("first", [3] * 18, 4, "a")  # five of the eight pages
    d.submit("second", [4] * 18, 4, "a")
    step = d.step()
    assert [r.id for r in step.preempted] == ["y"]
    assert [r.id for r in step.admitted] == ["first"]
    assert d.running() == ["x", "first"]
    d.run()
    d.expect_all_exact()


def test_a_prompt_longer_than_the_quota_is_refused_with_both_numbers() -> None:
    d = driver(quotas={"a": Quota(max_pages=5)})
    with pytest.raises(PromptTooLong, match=r"has 20 tokens and the quota of namespace 'a' holds 20 \(5 pages of 4\)"):
        d.submit("long", [1] * 20, 4, "a")
    d.submit("fits", [1] * 19, 40, "a")
    d.submit("elsewhere", [1] * 20, 4, "b")
    d.run()
    d.expect_all_exact()
    assert len(d.outputs["fits"]) == 1  # it ends with "length" where its quota does


def test_a_quota_above_the_pool_is_the_pool() -> None:
    d = driver(8, quota=Quota(max_pages=1000))
    with pytest.raises(PromptTooLong, match="the whole pool holds 32"):
        d.submit("long", [1] * 32)


def test_shared_pages_count_for_each_request_that_has_them() -> None:
    d = driver(60, quota=Quota(max_pages=12), max_num_seqs=6)
    for i in range(3):
        d.submit(f"r{i}", [*span(0, 16), i], 3)
    d.step()
    assert d.running() == ["r0", "r1"]  # five pages each
    assert d.pool.num_live == 6
    d.run()
    d.expect_all_exact()


def test_a_reserve_counts_towards_the_quota() -> None:
    d = driver(60, quota=Quota(max_pages=12), max_num_seqs=6, reserve="max_tokens")
    for i in range(3):
        d.submit(f"r{i}", [i] * 8, 16)  # two pages each, growing to six
    d.step()
    assert d.running() == ["r0", "r1"]
    d.run()
    d.expect_all_exact()
    assert d.scheduler.stats.num_preemptions == 0


def test_what_the_new_one_reserves_counts_too() -> None:
    d = driver(60, quota=Quota(max_pages=11), max_num_seqs=6, reserve="max_tokens")
    for i in range(2):
        d.submit(f"r{i}", [i] * 8, 16)  # six pages each in the end
    d.step()
    assert d.running() == ["r0"]
    d.run()
    d.expect_all_exact()


def test_each_group_of_a_model_counts() -> None:
    d = driver(60, EchoLooped(), quota=Quota(max_pages=20), max_num_seqs=6)
    groups = d.model.view(2).num_groups
    for i in range(6):
        d.submit(f"r{i}", [i] * 7, 1, loops=2)
    d.step()
    assert len(d.running()) == 0 or held(d, "") == 2 * groups * len(d.running()) <= 20
    d.run()
    d.expect_all_exact()


def test_namespaces_that_come_and_go_leave_nothing_behind() -> None:
    d = driver(quota=Quota(max_running=1, max_pages=20), max_num_seqs=3)
    for i in range(50):
        d.submit(f"r{i}", [i], 3, f"user{i}")
    d.run()
    assert not d.scheduler.quotas._index and len(d.scheduler.quotas._free) == 3
    assert not d.scheduler.waiting.lanes and not d.scheduler.waiting.fronts


def test_without_quotas_there_is_one_lane_and_nothing_is_counted() -> None:
    d = driver(max_num_seqs=3)
    for i in range(5):
        d.submit(f"r{i}", [i], 3, f"user{i}")
    assert list(d.scheduler.waiting.lanes) == [""]
    d.step()
    assert not d.scheduler.quotas.active and not d.scheduler.quotas._index


def test_check_notices_what_a_quota_would_not_allow() -> None:
    d = driver(quota=Quota(max_running=2, max_pages=10), max_num_seqs=4)
    for i in range(2):
        d.submit(f"r{i}", [i] * 5, 9)
    d.step()
    quotas = d.scheduler.quotas
    quotas.of = lambda namespace: Quota(max_running=1)
    expect_check_fails(d.scheduler, "runs too many")
    quotas.of = lambda namespace: Quota(max_pages=3)
    expect_check_fails(d.scheduler, "holds 4 pages")
    quotas._running[quotas._index[""]] = 7
    expect_check_fails(d.scheduler, "runs another number")


@pytest.mark.parametrize("field", ["max_pages", "max_running"])
def test_a_quota_below_zero_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} of a quota must be 0 or more, got -1"):
        Quota(**{field: -1})


@pytest.mark.parametrize("value", [1.5, float("nan"), "8", None, True])
def test_a_quota_that_is_no_integer_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="max_pages of a quota must be an integer, got"):
        Quota(max_pages=value)
    with pytest.raises(TypeError, match="quota must be a Quota, and quotas a mapping of them by namespace, got"):
        SchedulerConfig(quotas={"a": value})


def test_a_named_quota_stands_instead_of_the_default() -> None:
    config = SchedulerConfig(quota=Quota(max_running=1), quotas={"gold": Quota(max_pages=9)})
    assert config.quota_of("any") == Quota(max_running=1)
    assert config.quota_of("gold") == Quota(max_pages=9)
