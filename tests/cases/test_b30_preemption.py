"""Greedy output is unchanged by preemption; pages are always the rows, rounded up."""

from __future__ import annotations

import pytest
from byhand import span
from driver import Driver

from scheduler.policy import POLICIES


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("at", [16, 17, 31, 32, 33])
def test_preempted_by_hand_at_a_page_border(at: int, times: int, cache: bool, policy: str) -> None:
    driver = Driver(20, 16, cache, policy=policy)
    driver.submit("a", span(0, 12), 40)
    driver.submit("other", span(50, 12), 60)
    driver.step_until(lambda: 12 + len(driver.outputs["a"]) == at)
    for _ in range(times):
        seen = list(driver.outputs["a"])
        driver.preempt("a")
        driver.step()
        assert driver.outputs["a"][:-1] == seen  # one more token, none lost and none twice
    while driver.scheduler.has_work:
        driver.step()
        for name in driver.running():
            assert len(driver.pages(name)) == -(-driver.computed(name) // 16)
    driver.expect_all_exact()
    assert driver.requests["a"].num_preemptions == times
    assert driver.scheduler.stats.generated_tokens == 100


def test_the_hash_of_a_page_covers_its_output_tokens() -> None:
    driver = Driver(20, 16)
    driver.submit("a", span(0, 12), 40)
    driver.submit("b", span(0, 12), 40)
    driver.step_until(lambda: len(driver.outputs["a"]) == 25)
    driver.preempt("b")
    driver.step()
    assert driver.requests["b"].num_reattached_tokens == 32
    driver.run()
    driver.expect_all_exact()
