"""Policies: in which order requests start, and the bound on waiting that each promises."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from byhand import span
from driver import Driver
from fakes import EchoHybrid, EchoModel

from scheduler.lane import Lane
from scheduler.policy import POLICIES, Deadline, FairShare, LongestPrefix, ShortestRemaining, get_policy
from scheduler.policy.tenants import KEPT, Tenants


def driver(policy, num_pages: int = 200, page_size: int = 4, **config) -> Driver:
    return Driver(num_pages, page_size, policy=policy, **{"watermark": 0.0, **config})


def steps(d: Driver, n: int) -> None:
    for _ in range(n):
        d.step()


# All of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("pages", [24, 200])
def test_a_crowd_ends_under_every_policy_with_its_own_tokens(name: str, pages: int) -> None:
    rng = np.random.default_rng(7)
    d = driver(name, pages, max_num_seqs=3, max_num_batched_tokens=20)
    for i in range(40):
        shared = span(0, int(rng.integers(0, 16)))
        namespace, priority = "ab"[i % 2], int(rng.integers(0, 3))
        d.submit(f"r{i}", [*shared, i], int(rng.integers(1, 12)), namespace, priority=priority)
        if i % 2:
            d.step()
    d.run(max_steps=800)
    d.expect_all_exact()
    assert d.pool.num_live == 0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_equal_requests_of_one_namespace_start_in_order_of_submission(name: str) -> None:
    d = driver(name, max_num_seqs=2)
    for i in range(7):
        d.submit(f"r{i}", [i] * 5, 3)
    assert d.run_in_order() == [f"r{i}" for i in range(7)]
    assert d.scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(sorted(POLICIES), 2)))
def test_a_policy_may_be_changed_while_requests_run_and_wait(before: str, after: str) -> None:
    d = driver(before, 30, max_num_seqs=2, max_num_batched_tokens=8)
    for i in range(10):
        d.submit(f"r{i}", [i] * (3 + i % 4), 6, "ab"[i % 2], priority=i % 3)
    steps(d, 5)
    d.scheduler.set_policy(after)
    d.scheduler.check()
    assert d.scheduler.policy.name == after
    waiting = d.scheduler.waiting
    assert len(waiting) == 8 - sum(r.finish_reason is not None for r in d.requests.values())
    assert waiting.num_tokens == sum(len(request.known) for request in waiting)
    d.run()
    d.expect_all_exact()


def test_a_change_of_policy_reorders_what_waits() -> None:
    d = driver("fcfs", max_num_seqs=1)
    d.submit("runs", [1] * 4, 8)
    d.step()
    for name, priority in (("a", 2), ("b", 1), ("c", 0)):
        d.submit(name, [2] * 4, 2, priority=priority)
    assert d.waiting() == ["a", "b", "c"]
    d.scheduler.set_policy("priority")
    assert d.waiting() == ["c", "b", "a"]
    d.scheduler.set_policy("fcfs")
    assert d.waiting() == ["a", "b", "c"]


def test_a_new_policy_knows_what_runs_already() -> None:
    d = driver("fcfs", max_num_seqs=3)
    for name, priority in (("a", 1), ("b", 4), ("c", 2)):
        d.submit(name, [priority] * 4, 20, priority=priority)
    d.step()
    d.scheduler.set_policy("priority")
    d.submit("urgent", [9] * 4, 2, priority=0)
    assert [request.id for request in d.step().preempted] == ["b"]
    d.run()
    d.expect_all_exact()


def test_an_unknown_policy_changes_nothing() -> None:
    d = driver("priority")
    for none in (None, 5, object()):
        with pytest.raises(TypeError, match=r"policy must be a name or a scheduler\.Policy, got "):
            get_policy(none)
    with pytest.raises(ValueError, match="must be one of deadline, fair_share, fcfs, longest_prefix, priority"):
        d.scheduler.set_policy("random")
    assert d.scheduler.policy.name == "priority"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_says_what_it_replaces_and_what_bounds_waiting(name: str) -> None:
    doc = type(get_policy(name)).__doc__
    assert "eplaces" in doc
    assert "ound" in doc or "Ageing" in doc


# Shortest remaining -----------------------------------------------------------------------------------------------


def test_the_least_prompt_and_output_starts_first() -> None:
    d = driver("shortest_remaining", max_num_seqs=1)
    for name, prompt, output in (("a", 30, 9), ("b", 4, 20), ("c", 10, 10), ("d", 2, 3)):
        d.submit(name, [1] * prompt, output)
    assert d.run_in_order() == ["d", "c", "b", "a"]


def test_a_preempted_request_counts_only_what_it_has_left() -> None:
    d = driver(ShortestRemaining(ageing=0.001), max_num_seqs=1)
    d.submit("a", [1] * 20, 20)
    steps(d, 15)
    d.preempt("a")  # five tokens left
    d.submit("b", [2] * 3, 4)  # seven
    d.submit("c", [3] * 3, 1)  # four
    assert d.waiting() == ["c", "a", "b"]
    d.run()
    d.expect_all_exact()


@pytest.mark.parametrize(("late", "first"), [(9, "short"), (10, "long"), (11, "long")])
def test_a_long_request_waits_for_no_shorter_one_that_comes_its_tokens_by_ageing_later(late: int, first: str) -> None:
    d = driver(ShortestRemaining(ageing=4.0), max_num_seqs=1)
    d.submit("runs", [1], 30)
    d.step()
    d.submit("long", [1] * 30, 15)  # 45 tokens
    steps(d, late)
    d.submit("short", [1] * 3, 2)  # 5: 40 fewer, ten steps
    assert d.run_in_order()[0] == first


def test_an_endless_stream_of_short_requests_does_not_starve_a_long_one() -> None:
    d = driver(ShortestRemaining(ageing=2.0), max_num_seqs=1)
    d.submit("long", [1] * 30, 10)
    for n in range(200):
        d.submit(f"s{n}", [2, n % 90], 2)
        d.step()
        if d.requests["long"].finish_reason is not None:
            break
    assert d.requests["long"].finish_reason == "length"


@pytest.mark.parametrize("ageing", [0.0, -1.0, float("nan")])
def test_an_ageing_that_is_none_is_refused(ageing: float) -> None:
    with pytest.raises(ValueError, match="ageing must be above 0"):
        ShortestRemaining(ageing)


# Deadline ---------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def with_clock(policy, **config) -> tuple[Driver, Clock]:
    d, clock = driver(policy, **config), Clock()
    d.scheduler.limits.clock = clock
    return d, clock


def test_the_earliest_deadline_starts_first_and_a_later_submission_may_have_it() -> None:
    d, clock = with_clock("deadline", max_num_seqs=1)
    d.submit("relaxed", [1] * 4, 2, limits={"deadline_s": 30.0})
    d.submit("soon", [2] * 4, 2, limits={"deadline_s": 5.0})
    clock.now += 20.0
    d.submit("later", [3] * 4, 2, limits={"deadline_s": 9.0})  # due at 129, a second before the first
    assert d.run_in_order() == ["soon", "later", "relaxed"]


def test_those_without_a_deadline_go_by_arrival_and_are_due_in_their_turn() -> None:
    d, clock = with_clock(Deadline(default_s=10.0), max_num_seqs=1)
    d.submit("a", [1] * 4, 2)
    clock.now += 1.0
    d.submit("b", [2] * 4, 2)
    d.submit("hurried", [3] * 4, 2, limits={"deadline_s": 2.0})
    d.submit("lazy", [4] * 4, 2, limits={"deadline_s": 60.0})
    assert d.run_in_order() == ["hurried", "a", "b", "lazy"]


def test_nothing_that_comes_after_a_request_is_due_goes_before_it() -> None:
    d, clock = with_clock(Deadline(default_s=10.0), max_num_seqs=1)
    d.submit("plain", [1] * 4, 2)
    order = []
    for n in range(30):  # one a second, each as urgent as can be
        d.submit(f"u{n}", [2, n], 2, limits={"deadline_s": 0.0})
        order += [request.id for request in d.step().admitted]
        clock.now += 1.0
        if "plain" in order:
            break
    assert order.index("plain") <= 10
    d.run()


def test_a_default_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="default_s must be 0 or more seconds"):
        Deadline(-1.0)


# Longest prefix ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [EchoModel, EchoHybrid])
def test_the_longest_match_starts_first(model) -> None:
    d = driver("longest_prefix", max_num_seqs=1, model=model(windows=(0,)))
    d.solo("old", span(0, 24), 2)
    d.solo("older", span(40, 33), 2)
    d.submit("none", span(80, 12), 2)
    d.submit("short", [*span(0, 24), *span(60, 3)], 2)
    d.submit("long", [*span(40, 33), 5, 6], 2)
    assert d.run_in_order() == ["long", "short", "none"]


def test_of_two_with_one_opening_the_second_goes_last() -> None:
    d = driver("longest_prefix", max_num_seqs=1)
    d.submit("a", [*span(0, 12), 90], 2)
    d.submit("twin", [*span(0, 12), 91], 2)
    d.submit("b", span(50, 12), 2)
    first = d.step()
    assert [r.id for r in first.admitted] == ["a"]
    d.step_until(lambda: not d.running())
    assert d.run_in_order() == ["twin", "b"]  # by now it matches twelve tokens


def test_the_second_of_an_opening_waits_for_those_that_match_nothing() -> None:
    d = driver("longest_prefix", max_num_seqs=2, max_num_batched_tokens=512)
    for name, tokens in (("a", [*span(0, 12), 90]), ("twin", [*span(0, 12), 91]), ("b", span(50, 12))):
        d.submit(name, tokens, 2)
    assert [r.id for r in d.step().admitted] == ["a", "b"]


@pytest.mark.parametrize(("waiting", "sorts"), [(128, True), (129, False)])
def test_beyond_128_waiting_requests_it_goes_by_arrival(waiting: int, sorts: bool) -> None:
    d = driver("longest_prefix", num_pages=600, max_num_seqs=1)
    d.solo("old", span(0, 24), 2)
    for i in range(waiting - 1):
        d.submit(f"r{i}", [i % 90, 1, i // 90], 1)
    d.submit("hit", [*span(0, 24), 90], 1)
    assert [request.id for request in d.step().admitted] == ["hit" if sorts else "r0"]


@pytest.mark.parametrize("patience", [3, 8])
def test_who_has_waited_long_enough_goes_before_every_match(patience: int) -> None:
    d = driver(LongestPrefix(patience), max_num_seqs=1)
    d.solo("old", span(0, 24), 2)
    begun = d.scheduler.stats.num_steps
    d.submit("cold", [90] * 6, 2)
    for n in range(40):
        d.submit(f"hit{n}", [*span(0, 24), n], 2)
        d.submit(f"more{n}", [*span(0, 24), n, 1], 2)
        d.step()
        if "cold" in d.running():
            break
    assert patience <= d.scheduler.stats.num_steps - begun <= patience + 2  # whoever runs ends first
    d.run()
    d.expect_all_exact()


def test_a_pass_looks_up_sixteen_matches_however_many_wait() -> None:
    d = driver("longest_prefix", max_num_seqs=2)
    d.submit("runs", [1], 40)
    for i in range(100):
        d.submit(f"r{i}", [i % 90, 2, i // 90], 30)
    looked = []
    placer = d.scheduler.placer
    real = placer.next_page
    placer.next_page = lambda request: looked.append(request.id) or real(request)
    steps(d, 1)
    assert len(looked) == 16
    steps(d, 3)  # no slot is free: nobody asks
    assert len(looked) == 16


def test_a_patience_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="patience must be 0 or more steps"):
        LongestPrefix(-1)


# Fair share -------------------------------------------------------------------------------------------------------


def served(d: Driver, namespace: str) -> int:
    """Prompt tokens, and two for each token that it was given."""
    return sum(
        (r.num_prompt if r.slot >= 0 or r.finish_reason else 0) + 2 * len(d.outputs[name])
        for name, r in d.requests.items()
        if r.namespace == namespace
    )


def test_who_sends_a_flood_gets_no_more_than_who_sends_enough() -> None:
    d = driver("fair_share", cache=False, max_num_seqs=2)
    for i in range(60):
        d.submit(f"flood{i}", [1, i], 4, "flood")
    for i in range(10):
        d.submit(f"own{i}", [2, i], 4, "own")
    order = []
    while len(order) < 20:
        order += [request.id for request in d.step().admitted]
    assert sum(name.startswith("own") for name in order[:20]) == 10


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75)])
def test_the_shares_follow_the_weights(weight: float, share: float) -> None:
    d = driver(FairShare({"gold": weight}), cache=False, max_num_seqs=1)
    for i in range(80):
        d.submit(f"g{i}", [1, i], 3, "gold")
        d.submit(f"p{i}", [2, i], 3, "plain")
    steps(d, 240)
    gold, plain = served(d, "gold"), served(d, "plain")
    assert abs(gold / (gold + plain) - share) < 0.02


@pytest.mark.parametrize("slots", [1, 3])
def test_the_counters_of_two_that_both_wait_stay_within_the_bound(slots: int) -> None:
    policy, rng = FairShare(), np.random.default_rng(slots)
    d = driver(policy, cache=False, max_num_seqs=slots, max_num_batched_tokens=64)
    longest, most = 40, 12
    bound = longest + 2.0 * slots * most
    count = itertools.count()
    for _ in range(400):
        for namespace, size in (("small", 4), ("large", longest)):
            while sum(r.namespace == namespace for r in d.scheduler.waiting) < 3:
                length = int(rng.integers(1, size + 1))
                d.submit(f"r{next(count)}", [3] * length, int(rng.integers(1, most + 1)), namespace)
        d.step()
        assert abs(policy.counter("small") - policy.counter("large")) <= bound
    assert min(served(d, "small"), served(d, "large")) > 5 * bound


def test_a_namespace_that_comes_back_has_saved_nothing_up() -> None:
    policy = FairShare()
    d = driver(policy, cache=False, max_num_seqs=1)
    d.submit("once", [1] * 4, 2, "idle")
    d.run()
    for i in range(60):
        d.submit(f"b{i}", [2, i], 4, "busy")
    steps(d, 120)
    for i in range(10):
        d.submit(f"i{i}", [3, i], 4, "idle")
    assert policy.counter("idle") == policy.counter("busy") > 200
    order = []
    while len(order) < 10:
        order += [request.id for request in d.step().admitted]
    assert sum(name.startswith("i") for name in order) == 5


def test_a_namespace_that_comes_back_to_an_empty_queue_stands_where_the_last_one_stood() -> None:
    policy = FairShare()
    d = driver(policy, cache=False, max_num_seqs=1)
    d.solo("busy", [1] * 20, 10, namespace="busy")
    d.submit("new", [2] * 4, 2, "new")
    assert policy.counter("new") == policy.counter("busy") == 20 + 2 * 10


def test_a_namespace_that_comes_back_is_lifted_to_the_least_of_those_that_wait() -> None:
    policy = FairShare({"slow": 0.25})
    d = driver(policy, cache=False, max_num_seqs=2)
    for i in range(9):
        d.submit(f"f{i}", [1, i], 4, "fast")
        d.submit(f"s{i}", [2, i], 4, "slow")

    def least() -> float:
        return min(policy.counter("slow"), policy.counter("fast"))

    d.step_until(lambda: policy.tenants.counters[policy._last] > least() > 0)  # the last to start is ahead of another
    d.submit("new", [3], 4, "new")
    assert policy.counter("new") == least()


def test_cached_tokens_cost_nothing_and_neither_does_what_is_computed_again() -> None:
    policy = FairShare()
    d = driver(policy, max_num_seqs=4)
    d.solo("a", span(0, 20), 2, namespace="n")
    assert policy.counter("n") == 20 + 2 * 2
    d.submit("b", span(0, 20), 6, "n")
    steps(d, 3)
    d.preempt("b")
    d.cache.release()
    d.run()
    assert policy.counter("n") == 24 + 4 + 2 * 6


def test_the_requests_of_a_namespace_keep_their_order() -> None:
    d = driver("fair_share", max_num_seqs=1)
    for i in range(6):
        d.submit(f"{'ab'[i % 2]}{i}", [i] * 4, 3, "ab"[i % 2])
    order = d.run_in_order()
    for namespace in "ab":
        mine = [name for name in order if name.startswith(namespace)]
        assert mine == sorted(mine)


def test_a_request_that_does_not_fit_holds_up_its_own_namespace_before_others() -> None:
    d = driver("fair_share", 50, 16, max_num_batched_tokens=2048)
    d.submit("runs", [1] * 610, 30, "runs")
    d.step()
    d.submit("big", [2] * 600, 4, "a")
    d.submit("behind", [3], 4, "a")
    d.submit("other", [4], 4, "b")
    assert [r.id for r in d.step().admitted] == ["other", "behind"]


@pytest.mark.parametrize("num_waiting", [5, 1000])
def test_of_namespaces_that_were_served_alike_the_first_to_come_starts_first(num_waiting: int) -> None:
    d = driver("fair_share", max_num_seqs=1, cache=False, lookahead=2)
    d.scheduler.check = lambda: None
    order = []
    for i in range(num_waiting + 30):
        d.submit(f"r{i}", [1] * 5, 1, f"user{i}")
        if i >= num_waiting:
            order += [int(request.id[1:]) for request in d.step().admitted]
    assert order == [*range(30)]


def test_a_pass_opens_no_more_namespaces_than_may_start() -> None:
    d = driver("fair_share", max_num_seqs=4, cache=False)
    for i in range(300):
        d.submit(f"r{i}", [1] * 5, 1, f"user{i}")
    opened, walk = [], Lane.walk

    def counted(lane: Lane, closed: set[str]):
        opened.append(lane.name)
        return walk(lane, closed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "walk", counted)
        d.step()
    assert opened == [f"user{i}" for i in range(len(opened))]
    assert len(opened) <= 6


def test_thousands_of_idle_namespaces_are_forgotten() -> None:
    policy = FairShare()
    d = driver(policy, num_pages=8, cache=False, max_num_seqs=4, max_num_batched_tokens=4)
    d.scheduler.check = lambda: None
    for i in range(2 * KEPT + 400):
        d.submit(f"r{i}", [1], 1, f"user{i}")
        d.step()
    assert KEPT <= len(policy.tenants) <= 2 * KEPT + 1


@pytest.mark.parametrize("weights", [({"a": 0.0}, 1.0), ({}, -1.0)])
def test_weights_that_make_no_sense_are_refused(weights) -> None:
    with pytest.raises(ValueError, match="weights must be above 0"):
        FairShare(*weights)


def test_forgotten_namespaces_begin_anew_and_live_ones_stay() -> None:
    tenants = Tenants(lambda name: 2.0)
    for i in range(2 * KEPT + 1):
        at = tenants.enter(f"n{i}")
        tenants.counters[at] = float(i)
        tenants.num_live[at] = i < 5
    tenants.forget_idle(keep=tenants.enter("n7"))
    assert tenants.value("n3") == 3.0 and tenants.value("n7") == 7.0
    assert tenants.value("n8") == 0.0 and len(tenants) == KEPT + 6
    assert tenants.value(f"n{2 * KEPT}") == 2.0 * KEPT
    again = tenants.enter("n8")
    assert tenants.counters[again] == 0.0 and tenants.weights[again] == 2.0 and not tenants.num_live[again]
