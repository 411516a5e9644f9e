"""A prompt that is cached whole still computes at least one row."""

from __future__ import annotations

import pytest
from byhand import Hand, span
from driver import Driver
from fakes import EchoModel
from token_api import opened

from paged import PrefixPool

LENGTHS = {1: 0, 15: 0, 16: 0, 17: 16, 31: 16, 32: 16, 33: 32, 48: 32, 49: 48}


@pytest.mark.parametrize(("length", "matched"), LENGTHS.items())
def test_the_second_time_matches_whole_pages_short_of_the_last_token(length: int, matched: int) -> None:
    driver = Driver(32, 16)
    cold = driver.solo("cold", span(0, length), 20)
    warm = driver.solo("warm", span(0, length), 20)
    assert warm == cold
    driver.expect_all_exact()
    assert driver.requests["warm"].num_cached_tokens == matched
    assert driver.requests["warm"].num_computed_tokens == length - matched + 19


@pytest.mark.parametrize(("length", "matched"), LENGTHS.items())
def test_by_hand_it_is_the_same(length: int, matched: int) -> None:
    hand = Hand(16, 16)
    hand.donate(span(0, length))
    session = hand.session()
    assert hand.cache.attach(session, span(0, length)) == matched
    hand.expect_exact(session, span(0, length), session.eval(span(matched, length - matched)))


def test_the_last_page_of_a_whole_prompt_enters_the_cache() -> None:
    driver = Driver(32, 16)
    driver.solo("a", span(0, 32), 1)
    assert driver.cache.match_len(span(0, 33)) == 32


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_registered_prefix_that_is_the_whole_prompt_generates_from_its_stored_logits(
    length: int, page_size: int
) -> None:
    """The pool's rule is another one: it matches at exactly its length, whatever the page size."""
    model, prompt = EchoModel(97), span(0, length)
    with opened(model, num_pages=64, page_size=page_size, prefix_cache=False) as api:
        pool = PrefixPool()
        assert api.register_prefix(pool, prompt) == length == pool.match_len(prompt)
        before = model.num_forwards
        out = api.generate_with_pool(pool, prompt, max_tokens=1, temperature=0.0)
        assert model.num_forwards == before
        assert out == prompt + model.greedy(prompt, 1)
        for more in ({"temperature": 0.0}, {"seed": 3}):
            with opened(EchoModel(97), num_pages=64) as cold:
                want = cold.generate(prompt, max_tokens=20, **{"temperature": 1.0, **more})
            assert api.generate_with_pool(pool, prompt, max_tokens=20, **more) == want
        assert (api.stats.pool_hits, api.stats.pool_misses) == (3, 0)
