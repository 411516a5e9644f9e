"""A slice of a real trace through the cache and through a plain LRU; skips where the traces are not there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from evicting import Oracle

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"
spec = importlib.util.spec_from_file_location("replay", BENCH / "replay.py")
assert spec is not None and spec.loader is not None
replay = importlib.util.module_from_spec(spec)
sys.modules["replay"] = replay
spec.loader.exec_module(replay)

NEEDS_TRACES = pytest.mark.skipif(
    not (replay.FOLDER / "mooncake_synthetic.npz").exists(), reason=f"there are no traces in {replay.FOLDER}"
)


def chains_of(*chains) -> list[np.ndarray]:
    return [np.array(chain, np.int32) for chain in chains]


def test_the_next_use_of_each_block_is_the_next_request_with_it() -> None:
    uses = replay.next_uses(chains_of([0, 1], [0, 2], [], [0, 1, 3]))
    assert [u.tolist() for u in uses] == [[1, 3], [3, replay.NEVER], [], [replay.NEVER] * 3]
    assert [replay.hint(u).keep for u in uses] == ["turn", "none", "none", "none"]


def test_the_optimum_keeps_what_comes_back_soonest() -> None:
    chains = chains_of([0], [1], [2], [0], [1])  # LRU lets 0 and then 1 go

    class Trace:
        block, ts, in_len = 4, np.arange(5.0), np.full(5, 5)

    Trace.chains = chains
    assert replay.replay(Trace, 2, "lru").hit_tokens == 0
    run = replay.replay(Trace, 2, "optimum")
    assert (run.hit_tokens, run.prompt_tokens) == (4, 25)
    assert replay.replay(Trace, 2, "lru", hinted=True).hit_tokens == 4  # only 2 never comes back


@NEEDS_TRACES
@pytest.mark.parametrize(("policy", "capacity"), [("lru", 400), ("lru", 1500), ("lfu_da", 400), ("shortest", 400)])
def test_a_slice_of_a_trace_hits_what_the_oracle_hits(policy: str, capacity: int) -> None:
    trace = replay.load("mooncake_synthetic")
    run, oracle = replay.Replay(capacity, policy), FastOracle(capacity, policy)
    for chain in trace.chains[:150]:
        assert run.request(chain, len(chain)) == oracle.request(chain)
    run.cache.check()
    assert run.hit_tokens > 0
    assert run.cache.stats.evicted_pages > 100


class FastOracle(Oracle):
    """A block's id stands for its whole prefix in a trace, so a prefix needs no more than its last one."""

    def __init__(self, capacity: int, policy: str) -> None:
        super().__init__(capacity, policy)
        self.above: dict[int, int] = {}
        self.depth: dict[int, int] = {}

    def request(self, chain) -> int:
        ids = chain.tolist()
        hits = next((i for i, block in enumerate(ids) if block not in self.entries), len(ids))
        for i, block in enumerate(ids):
            self.above[block], self.depth[block] = (ids[i - 1] if i else -1), i + 1
        for block in ids[:hits]:
            self.entries[block].uses += 1
        used = set(ids[:hits])
        while self.capacity - len(self.entries) < len(ids) - hits:
            parents = {self.above[block] for block in self.entries}
            leaves = [block for block in self.entries if block not in used and block not in parents]
            victim = min(leaves, key=self.order)
            self.age = max(self.age, self.entries[victim].worth)
            del self.entries[victim]
            above = self.above[victim]
            if above in self.entries and above not in used and above not in {self.above[b] for b in self.entries}:
                self.arrive(above)
        self.tick += 1
        for block in ids:
            entry = self.entries.setdefault(block, type(self).entry())
            entry.last_use, entry.worth = self.tick, self.age + entry.uses
        if ids and ids[-1] not in {self.above[block] for block in self.entries}:
            self.arrive(ids[-1])
        return hits

    @staticmethod
    def entry():
        from evicting import Entry

        return Entry()

    def order(self, block):
        entry = self.entries[block]
        rank = {"lru": entry.last_use, "shortest": self.depth[block]}.get(self.policy, entry.worth)
        return rank, entry.arrival
