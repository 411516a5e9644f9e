"""A big waiting request, a long prefill, requests of equal rank, and two that do not fit together."""

from __future__ import annotations

import pytest
from byhand import span
from driver import Driver
from fakes import EchoModel

from scheduler.policy import POLICIES

every_policy = pytest.mark.parametrize("policy", sorted(POLICIES))


@every_policy
def test_small_ones_run_while_a_big_head_waits_and_the_head_still_starts(policy: str) -> None:
    driver = Driver(50, 16, watermark=0.0, max_num_batched_tokens=1024, policy=policy)
    driver.submit("runs", [1] * 630, 8)  # 40 pages: 10 are free
    driver.step()
    driver.submit("head", [2] * 630, 5)
    for i in range(10):
        driver.submit(f"small{i}", [3, i], 12)
    driver.step()
    assert driver.running() == ["runs", *(f"small{i}" for i in range(10))]
    assert driver.step_until(lambda: "head" in driver.running()) <= 20
    driver.run()
    driver.expect_all_exact()


@every_policy
def test_a_running_decode_gets_a_token_in_each_step_of_a_long_prefill(policy: str) -> None:
    driver = Driver(700, 16, model=EchoModel(max_seq_len=12_000), max_num_batched_tokens=512, policy=policy)
    driver.submit("decode", span(0, 5), 30)
    driver.step()
    driver.submit("long", [7] * 10_000, 2)
    while len(driver.outputs["decode"]) < 30:
        before = len(driver.outputs["decode"])
        driver.step()
        assert len(driver.outputs["decode"]) == before + 1
    driver.run()
    driver.expect_all_exact()


@every_policy
@pytest.mark.parametrize("priority", [0, 7])
def test_requests_of_equal_rank_never_push_each_other_out(policy: str, priority: int) -> None:
    driver = Driver(64, 16, max_num_seqs=2, policy=policy)
    for i in range(4):
        driver.submit(f"r{i}", [i] * 20, 30, priority=priority)
        driver.step()
    driver.run()
    driver.expect_all_exact()
    assert driver.scheduler.stats.num_preemptions == 0


@every_policy
@pytest.mark.parametrize("reserve", ["prompt", "max_tokens", "expected"])
def test_two_prompts_of_60_percent_compute_at_most_twice_their_tokens(policy: str, reserve: str) -> None:
    for max_tokens in (1, 80):
        driver = Driver(50, 16, max_num_batched_tokens=128, policy=policy, reserve=reserve)
        for i in range(2):
            driver.submit(f"r{i}", [i + 1] * 480, max_tokens)
        driver.run()
        driver.expect_all_exact()
        prefill = driver.scheduler.stats.computed_tokens - 2 * (max_tokens - 1)
        assert prefill <= 2 * 2 * 480


@every_policy
@pytest.mark.parametrize("cache", [True, False])
def test_two_that_grow_past_the_pool_together_compute_at_most_twice_their_tokens(policy: str, cache: bool) -> None:
    driver = Driver(40, 16, cache, max_num_batched_tokens=128, watermark=0.0, policy=policy)
    for i in range(2):
        driver.submit(f"r{i}", [i + 1] * 256, 160)  # 40 % each, growing to 65 %
    driver.run()
    driver.expect_all_exact()
    assert driver.scheduler.stats.num_preemptions >= 1
    assert driver.scheduler.stats.computed_tokens <= 2 * 2 * (256 + 160)


@every_policy
def test_an_urgent_prompt_pushes_out_what_it_needs_once_and_all_ends(policy: str) -> None:
    """60 % each again, but the second one is more urgent: whoever yields computes its prompt at most twice."""
    driver = Driver(50, 16, max_num_batched_tokens=128, policy=policy)
    driver.submit("first", [1] * 480, 10, priority=1)
    for _ in range(3):
        driver.step()
    driver.submit("urgent", [2] * 480, 10, priority=0)
    driver.run()
    driver.expect_all_exact()
    assert driver.scheduler.stats.num_preemptions == (policy == "priority")
    assert driver.scheduler.stats.computed_tokens - 2 * 9 <= 2 * 2 * 480
