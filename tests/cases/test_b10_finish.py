"""Finishing returns each page exactly once."""

from __future__ import annotations

import pytest
from byhand import span
from driver import Driver
from fakes import EchoModel


def expect_idle(driver: Driver) -> None:
    driver.scheduler.check()
    pool = driver.pool
    assert pool.num_live == 0
    assert pool.num_free + pool.num_cached_only == pool.num_pages
    assert len(set(pool._free[: pool.num_free].tolist())) == pool.num_free
    if driver.cache is not None:
        assert driver.cache.held_pages == pool.num_cached_only


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("max_tokens", [200, 1])
def test_a_request_that_ends_by_length(page_size: int, cache: bool, max_tokens: int) -> None:
    driver = Driver(256 // page_size + 20, page_size, cache)
    driver.solo("a", span(0, 30), max_tokens)
    driver.expect_all_exact()
    expect_idle(driver)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_request_that_stops_on_its_first_token(page_size: int) -> None:
    model = EchoModel()
    model.eos_token_ids = (model.greedy(span(0, 30), 1)[0],)
    driver = Driver(64, page_size, model=model)
    assert driver.solo("a", span(0, 30), 50) == []
    assert driver.requests["a"].finish_reason == "stop"
    assert driver.requests["a"].num_computed_tokens == 30
    expect_idle(driver)


@pytest.mark.parametrize("page_size", [1, 16])
def test_ten_prompts_in_a_pool_that_holds_three(page_size: int) -> None:
    driver = Driver(3 * 64 // page_size, page_size)
    for i in range(10):
        driver.solo(f"r{i}", [i + 1] * 40, 24)
        expect_idle(driver)
    driver.expect_all_exact()
    assert driver.cache.stats.evicted_pages > 0


def test_the_row_of_the_last_token_is_never_computed() -> None:
    driver = Driver(8, 4)
    driver.solo("a", span(0, 8), 5)  # 13 tokens: the 13th would need a fourth page
    assert driver.requests["a"].num_computed_tokens == 12
    assert driver.cache.held_pages == 3
