"""Twenty thousand requests in a pool that holds a tenth of them: all end, nothing leaks, nobody waits for ever."""

from __future__ import annotations

import pytest
from soak import Soak, live_requests

from scheduler.policy import POLICIES


@pytest.mark.slow
def test_twenty_thousand_requests_all_end_and_leave_nothing_behind() -> None:
    before = live_requests()
    soak = Soak(20_000).run()
    assert sum(soak.outcomes.values()) == 20_000 and not soak.asked
    assert set(soak.outcomes) == {"length", "cancelled", "error"} and min(soak.outcomes.values()) > 50
    assert soak.engine.pool.num_live == 0
    stats = soak.engine.stats()
    assert stats["num_preemptions"] > 100 and stats["cached_tokens"] > 0
    assert max(soak.objects[1:]) - min(soak.objects[1:]) < 1000  # one object for each fifteen requests would show
    assert soak.peak_kb[-1] - soak.peak_kb[0] < 16_000
    assert live_requests() == before


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"fcfs"}))
def test_every_policy_ends_all_of_a_crowd(policy: str) -> None:
    soak = Soak(400, policy).run()
    assert sum(soak.outcomes.values()) == 400 and not soak.asked
    assert soak.engine.pool.num_live == 0
