"""A big waiting request, a long prefill, requests of equal rank, and two that do not fit together."""

from __future__ import annotations

from byhand import span
from driver import Driver
from fakes import EchoModel


def test_small_ones_run_while_a_big_head_waits_and_the_head_still_starts() -> None:
    driver = Driver(50, 16, watermark=0.0, max_num_batched_tokens=1024)
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


def test_a_running_decode_gets_a_token_in_each_step_of_a_long_prefill() -> None:
    driver = Driver(700, 16, model=EchoModel(max_seq_len=12_000), max_num_batched_tokens=512)
    driver.submit("decode", span(0, 5), 30)
    driver.step()
    driver.submit("long", [7] * 10_000, 2)
    while len(driver.outputs["decode"]) < 30:
        before = len(driver.outputs["decode"])
        driver.step()
        assert len(driver.outputs["decode"]) == before + 1
    driver.run()
    driver.expect_all_exact()


def test_requests_of_equal_rank_never_push_each_other_out() -> None:
    driver = Driver(64, 16, max_num_seqs=2)
    for i in range(4):
        driver.submit(f"r{i}", [i] * 20, 30)
    driver.run()
    driver.expect_all_exact()
    assert driver.scheduler.stats.num_preemptions == 0


def test_two_prompts_of_60_percent_compute_at_most_twice_their_tokens() -> None:
    for max_tokens in (1, 80):
        driver = Driver(50, 16, max_num_batched_tokens=128)
        for i in range(2):
            driver.submit(f"r{i}", [i + 1] * 480, max_tokens)
        driver.run()
        driver.expect_all_exact()
        prefill = driver.scheduler.stats.computed_tokens - 2 * (max_tokens - 1)
        assert prefill <= 2 * 2 * 480


def test_two_that_grow_past_the_pool_together_compute_at_most_twice_their_tokens() -> None:
    driver = Driver(40, 16, max_num_batched_tokens=128, watermark=0.0)
    for i in range(2):
        driver.submit(f"r{i}", [i + 1] * 256, 160)  # 40 % each, growing to 65 %
    driver.run()
    driver.expect_all_exact()
    assert driver.scheduler.stats.num_preemptions >= 1
    assert driver.scheduler.stats.computed_tokens <= 2 * 2 * (256 + 160)
