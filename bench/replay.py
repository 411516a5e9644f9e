"""Replays a trace of prompts over a PrefixCache whose pages have no storage: what would have been cached."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paged.kv.pages import Int32, PagePool
from paged.prefix.cache import PrefixCache
from paged.prefix.eviction import EvictionPolicy
from paged.prefix.index import PrefixIndex
from paged.prefix.retention import Retention

FOLDER = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"
NEVER = np.iinfo(np.int32).max
END = np.int32(NEVER)  # stands for the last token of a prompt, which is always recomputed


def load(name: str, folder: Path = FOLDER) -> Any:
    """A trace by the loader that lies with the data: `block`, `ts` (seconds), `in_len`, `chains`, `unique`.

    chains[i] are the ids of the full prefix blocks of prompt i; an id stands for the whole prefix.
    """
    spec = importlib.util.spec_from_file_location("traces", folder / "traces.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind, _, which = name.partition("_")
    return getattr(module, kind)(which) if which else getattr(module, kind)()


def next_uses(chains: Sequence[Int32]) -> list[Int32]:
    """For each block of each chain the number of the next request that begins with it; NEVER if none does."""
    num_blocks = 1 + max((int(chain.max()) for chain in chains if len(chain)), default=0)
    upcoming = np.full(num_blocks, NEVER, np.int32)
    out: list[Int32] = []
    for i in range(len(chains) - 1, -1, -1):
        out.append(upcoming[chains[i]])
        upcoming[chains[i]] = i
    return out[::-1]


def hint(upcoming: Int32) -> Retention:
    """What the caller of a request could have said: "turn" if a later prompt goes on from its last block."""
    return Retention("turn" if len(upcoming) and upcoming[-1] != NEVER else "none")


class Optimum:
    """The offline optimum among caches that evict leaves: what is needed again last goes first. It reads the future.

    Belady's rule (L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal
    5(2), 1966). A prefix is needed whenever what stands on it is, so the rule keeps to leaves by itself.
    """

    name = "optimum"

    def __init__(self) -> None:
        self.next_use: dict[int, int] = {}  # block -> number of the next request with it

    def rank(self, index: PrefixIndex, node: int) -> float:
        return -float(self.next_use[int(index.tokens[node, 0])])


class Replay:
    """One cache of `capacity` pages; `request` sends one prompt through it, one after the other.

    A page stands for a block of the trace and holds one token, the block's id, so that hashing costs little.
    """

    def __init__(self, capacity: int, policy: str | EvictionPolicy = "lru", block: int = 1) -> None:
        self.pool = PagePool(capacity, 1)
        self.cache = PrefixCache(self.pool, policy=policy)
        self.block = block
        self.now = 0.0
        self.cache.queue.retentions.clock = lambda: self.now
        self.prompt_tokens = 0
        self.hit_tokens = 0

    def request(self, chain: Int32, num_tokens: int, now: float = 0.0, retention: Retention | None = None) -> int:
        """Attach what is cached of a prompt, compute the rest, donate it and give all back; returns the blocks hit."""
        self.now = now
        cache, pool = self.cache, self.pool
        cursor, prompt = cache.cursor(), np.append(chain, END)
        hits = cache.seek(cursor, prompt)
        pages = cache.take(cursor)
        pages = np.concatenate([pages, pool.alloc(len(chain) - hits)[None]], axis=1)
        cache.publish(cursor, prompt, pages)
        cache.retain(cursor, retention)
        pool.release(pages[0])
        self.prompt_tokens += num_tokens
        self.hit_tokens += hits * self.block
        return hits

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were attached."""
        return self.hit_tokens / max(1, self.prompt_tokens)


def replay(trace: Any, capacity: int, policy: str, hinted: bool = False) -> Replay:
    """A whole trace; `policy` may also be "optimum"."""
    uses = next_uses(trace.chains)
    optimum = Optimum() if policy == "optimum" else None
    run = Replay(capacity, optimum or policy, trace.block)
    for chain, length, now, upcoming in zip(trace.chains, trace.in_len.tolist(), trace.ts.tolist(), uses, strict=True):
        if optimum is not None:
            optimum.next_use.update(zip(chain.tolist(), upcoming.tolist(), strict=True))
        run.request(chain, length, now, hint(upcoming) if hinted else None)
    return run
