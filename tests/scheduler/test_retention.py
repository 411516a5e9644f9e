"""Hints of requests reach the pages that they leave, and the policy that an engine was made with decides."""

from __future__ import annotations

import pytest
from byhand import span
from driver import Driver

from paged.errors import InvalidRequest
from paged.prefix.eviction import POLICIES
from paged.prefix.retention import Retention
from scheduler import Engine, SamplingParams, SchedulerConfig

A, B, C = span(0, 32), span(100, 32), span(200, 32)  # two pages of 16


def run(driver: Driver, name: str, prompt, retain: Retention | None, max_tokens: int = 1) -> None:
    driver.submit(name, prompt, max_tokens).retain = retain
    driver.run()


def cached(driver: Driver) -> list[bool]:
    assert driver.cache is not None
    return [driver.cache.match_len([*prompt, 1]) == 32 for prompt in (A, B, C)]


@pytest.mark.parametrize(
    ("hints", "left"),
    [
        ((None, None, None), [False, True, True]),
        (("turn", None, None), [True, False, True]),
        (("turn", "turn", None), [True, True, False]),
        ((None, None, "none"), [True, True, False]),
        ((60.0, "turn", Retention("turn", 1)), [False, True, True]),
    ],
)
@pytest.mark.parametrize("partial", [False, True])
def test_the_hints_of_requests_order_what_goes(partial: bool, hints, left: list[bool]) -> None:
    driver = Driver(20, 16, partial=partial)
    for name, prompt, hint in zip("abc", (A, B, C), hints, strict=True):
        run(driver, name, prompt, Retention.of(hint))
    assert cached(driver) == [True, True, True]
    driver.cache.evict(1)
    assert cached(driver) == left
    driver.scheduler.check()


def test_a_request_marks_what_it_generated_and_what_it_attached() -> None:
    driver = Driver(20, 16)
    run(driver, "first", A, Retention("turn"))
    run(driver, "last", [*A, *B], Retention("none"), max_tokens=20)
    run(driver, "other", C, None)
    assert driver.cache.held_pages == 7  # 2 + 2 + one page of the output + 2
    driver.cache.evict(5)
    assert cached(driver) == [False, False, True]


def test_what_a_preempted_request_leaves_is_not_over_yet() -> None:
    driver = Driver(10, 16)
    a, b = span(0, 80), span(10, 80)
    for name, prompt in (("a", a), ("b", b)):
        driver.submit(name, prompt, 16).retain = Retention("none")
    driver.step()
    assert [r.id for r in driver.step().preempted] == ["b"]
    assert not driver.cache.queue.retentions.used
    driver.run()
    driver.expect_all_exact()
    assert driver.requests["b"].num_reattached_tokens == 64


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_an_engine_takes_each_policy_and_gives_the_same_tokens(name: str) -> None:
    prompts = [[1, 2, 3] * 9, [1, 2, 3] * 9 + [4], [5] * 30]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with Engine("tiny:llama", num_pages=6, page_size=16, eviction=name) as engine:
        assert engine.cache is not None and engine.cache.queue.policy.name == name
        found = [engine.generate(prompts, params, retain=retain) for retain in (None, "turn", "none", 3)]
        engine.check()
    with Engine("tiny:llama", num_pages=6, page_size=16, prefix_cache=False) as engine:
        want = [output.token_ids for output in engine.generate(prompts, params)]
    assert [[output.token_ids for output in outputs] for outputs in found] == [want] * 4


def test_a_config_names_the_policy_too() -> None:
    with Engine("tiny:llama", num_pages=8, config=SchedulerConfig(eviction="gdsf")) as engine:
        assert engine.cache is not None and engine.cache.queue.policy.name == "gdsf"
    with pytest.raises(ValueError, match="the eviction policy must be one of gdsf, lfu_da, lru, shortest, got 'fifo'"):
        Engine("tiny:llama", num_pages=8, eviction="fifo")


def test_a_hint_that_means_nothing_refuses_the_request() -> None:
    with Engine("tiny:llama", num_pages=8) as engine:
        with pytest.raises(InvalidRequest, match='retain must be "none", "turn" or a number of seconds above 0, got'):
            engine.submit([1, 2, 3], retain="soon")
        with pytest.raises(TypeError, match="got list"):
            engine.submit([1, 2, 3], retain=[1])  # type: ignore[arg-type]
        assert not engine.has_work
