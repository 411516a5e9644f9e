"""Five thousand requests an engine, in pools that hold a tenth of those that are live: all end, nothing leaks, nobody
waits for ever."""

from __future__ import annotations

import pytest
from soak import Soak, live_requests

from scheduler.policy import POLICIES, Policy
from scheduler.policy.deadline import Deadline
from scheduler.policy.fair_share import FairShare
from scheduler.policy.fcfs import FCFS
from scheduler.policy.longest_prefix import LongestPrefix
from scheduler.policy.priority import Priority
from scheduler.policy.shortest_remaining import ShortestRemaining

ORDERED = [FCFS(), Priority(40), ShortestRemaining(2.0), Deadline(), LongestPrefix(30), FairShare({"a": 2.0})]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_requests_under_changing_policies_all_end_and_leave_nothing_behind(seed: int) -> None:
    before = live_requests()
    soak = Soak(5000, seed=seed, switch=tuple(POLICIES)).run()
    assert sum(soak.outcomes.values()) == 5000 and not soak.asked
    assert set(soak.outcomes) == {"length", "cancelled", "error"} and min(soak.outcomes.values()) > 50
    assert soak.engine.pool.num_live == 0
    stats = soak.engine.stats()
    assert stats["num_preemptions"] > 100 and stats["cached_tokens"] > 0
    assert max(soak.objects[1:]) - min(soak.objects[1:]) < 1000  # one object for each three requests would show
    assert soak.peak_kb[-1] - soak.peak_kb[0] < 16_000
    assert live_requests() == before


@pytest.mark.slow
@pytest.mark.parametrize("policy", ORDERED, ids=lambda policy: policy.name)
def test_nobody_waits_longer_than_the_policy_says(policy: Policy) -> None:
    soak = Soak(800, policy, options={"max_bypass": 5}).run()
    assert sum(soak.outcomes.values()) == 800 and not soak.asked
    assert 0 < soak.bypassed <= 5
    assert soak.engine.pool.num_live == 0
