"""Ending a long prompt in the middle of its chunked prefill."""

from __future__ import annotations

import numpy as np
import pytest
from driver import Driver
from fakes import EchoModel

from scheduler import Engine, SamplingParams

PROMPT = np.random.default_rng(11).integers(0, 97, 3872).tolist()


@pytest.mark.parametrize("chunk", [128, 100])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 3, 38])
def test_pages_come_back_but_for_full_donated_ones(steps: int, cache: bool, chunk: int) -> None:
    driver = Driver(300, 16, cache, max_num_batched_tokens=chunk)
    request = driver.submit("a", PROMPT, 5)
    steps = min(steps, -(-3872 // chunk))
    done = 0
    for _ in range(steps):
        driver.step()
        done = min(3872, done + chunk)
    finished_prefill = done == 3872
    driver.cancel("a")
    driver.scheduler.finish(request, "cancelled")  # again: nothing happens
    assert (request.finish_reason, driver.scheduler.stats.num_finished) == ("cancelled", 1)
    assert driver.pool.num_live == 0
    assert driver.pool.num_free == 300 - (done // 16 if cache else 0)
    assert not finished_prefill or steps > 1
    driver.solo("b", PROMPT[:1000], 5)
    driver.expect_all_exact()
    assert driver.requests["b"].num_cached_tokens == (min(done, 999) // 16 * 16 if cache else 0)


def test_no_token_comes_after_the_end() -> None:
    driver = Driver(300, 16, max_num_batched_tokens=128)
    request = driver.submit("a", PROMPT, 5)
    driver.submit("other", [1, 2, 3], 40)
    for _ in range(10):
        driver.step()
    driver.scheduler.finish(request, "cancelled")
    seen = len(driver.outputs["a"])
    del driver.requests["a"]
    driver.run()
    assert len(driver.outputs["a"]) == seen
    driver.expect_all_exact()


@pytest.mark.parametrize("chunk", [128, 100])
def test_a_request_that_opts_out_of_the_cache_completes_and_leaves_nothing_there(chunk: int) -> None:
    engine = Engine(EchoModel(), num_pages=300, page_size=16, max_num_batched_tokens=chunk, max_num_seqs=4)
    for _ in range(2):
        [output] = engine.generate([PROMPT], SamplingParams(max_tokens=5), cache=False)
        assert (output.finish_reason, output.num_cached_tokens) == ("length", 0)
        assert output.token_ids == engine.model.greedy(PROMPT, 5)
        assert engine.pool.num_free == 300 and engine.cache.held_pages == 0
    engine.submit(PROMPT, SamplingParams(max_tokens=5), request_id="cancelled", cache=False)
    for _ in range(3):
        engine.step()
    assert engine.cancel("cancelled") and not engine.cancel("cancelled")
    engine.check()
    assert engine.pool.num_free == 300
