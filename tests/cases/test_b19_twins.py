"""Equal prompts in the same step."""

from __future__ import annotations

import pytest
from byhand import span
from driver import Driver
from fakes import EchoModel


@pytest.mark.parametrize("budget", [16, 20, 64, 512])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_twins_and_a_cousin_beside_one_that_takes_every_free_page(budget: int, num_groups: int) -> None:
    driver = Driver(26 * num_groups, 16, model=EchoModel(num_groups=num_groups), max_num_batched_tokens=budget)
    driver.submit("one", span(0, 64), 50)
    driver.submit("twin", span(0, 64), 50)
    driver.submit("cousin", [*span(0, 40), *span(70, 24)], 50)
    driver.step()
    driver.submit("fourth", span(5, 90), 200)  # it grows until the pool is full
    shared = []
    while driver.scheduler.has_work:
        driver.step()
        if {"one", "twin"} <= set(driver.running()) and driver.computed("one") >= 64 <= driver.computed("twin"):
            shared.append(driver.pages("one")[:3] == driver.pages("twin")[:3])
    assert shared and all(shared)
    driver.expect_all_exact()
    assert driver.pool.num_live == 0


def test_twins_end_up_on_the_same_pages_and_compute_them_once() -> None:
    driver = Driver(26, 16, max_num_batched_tokens=16)
    driver.submit("one", span(0, 64), 50)
    driver.submit("twin", span(0, 64), 50)
    driver.run()
    driver.expect_all_exact()
    computed = [driver.requests[name].num_computed_tokens for name in ("one", "twin")]
    assert computed == [64 + 49, 16 + 49]
