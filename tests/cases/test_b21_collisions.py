"""Colliding page hashes: a collision is a miss, never another prompt's rows."""

from __future__ import annotations

import random

import pytest
from driver import Driver

from paged.prefix.hashing import page_hash

STUBS = {
    "always 7": lambda parent, tokens: 7,
    "four values": lambda parent, tokens: page_hash(parent if isinstance(parent, bytes) else b"", tokens)[0] % 4,
    "two bytes": lambda parent, tokens: page_hash(parent, tokens)[:1],
}


@pytest.mark.parametrize("stub", STUBS)
@pytest.mark.parametrize("budget", [16, 512])
def test_twenty_prompts_twice_each_and_mixed(stub: str, budget: int) -> None:
    rng = random.Random(stub)
    driver = Driver(120, 16, hash_page=STUBS[stub], max_num_batched_tokens=budget, max_num_seqs=6)
    opening = [rng.randrange(97) for _ in range(40)]
    prompts = [
        opening[: rng.randrange(41)] + [rng.randrange(97) for _ in range(rng.randrange(1, 50))] for _ in range(20)
    ]
    order = [(i, turn) for i in range(20) for turn in range(2)]
    rng.shuffle(order)
    for i, turn in order:
        driver.submit(f"{i}/{turn}", prompts[i], 6)
    driver.run()
    driver.expect_all_exact()
    for i in range(20):
        match = driver.cache.match_len(prompts[i])
        assert match % 16 == 0 and match < len(prompts[i])
    assert driver.cache.stats.num_collisions > 0
    assert driver.cache.held_pages <= {"always 7": 1, "four values": 4, "two bytes": 256}[stub]
