"""Prompts one after the other through a PrefixCache, and a plain-Python cache of prefixes that must do the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paged.kv.pages import PagePool
from paged.prefix.cache import PrefixCache
from paged.prefix.eviction import GDSF, LFUDA, LRU, Shortest
from paged.prefix.retention import Retention

TURN_S = 10.0
EVEN_AT = 2  # for pages of one token: deep ones cost much more
LAST = 2**31 - 1  # the token that every prompt recomputes

Prefix = tuple[int, ...]


def make_policy(name: str):
    """Each policy with parameters under which tiny trees show a difference."""
    return {"lru": LRU, "lfu_da": LFUDA, "shortest": Shortest, "gdsf": lambda: GDSF(EVEN_AT)}[name]()


class Driver:
    """The real cache over `capacity` pages of one token each, without storage. Time stands still unless told."""

    def __init__(self, capacity: int, policy: str = "lru") -> None:
        self.pool = PagePool(capacity, 1)
        self.cache = PrefixCache(self.pool, policy=make_policy(policy))
        self.now = 0.0
        self.cache.queue.retentions.clock = lambda: self.now
        self.cache.queue.retentions.turn_s = TURN_S

    def request(self, chain, retention: Retention | None = None) -> int:
        """Attach, compute, donate, give back; returns the pages attached."""
        cursor, prompt = self.cache.cursor(), np.array([*chain, LAST], np.int32)
        hits = self.cache.seek(cursor, prompt)
        pages = self.cache.take(cursor)
        pages = np.concatenate([pages, self.pool.alloc(len(chain) - hits)[None]], axis=1)
        self.cache.publish(cursor, prompt, pages)
        self.cache.retain(cursor, retention)
        self.pool.release(pages[0])
        return hits

    def cached(self) -> set[Prefix]:
        """Every prefix that ends at a cached page."""
        index, out = self.cache.index, set()
        for node in np.flatnonzero(index.birth >= 0).tolist():
            tokens, at = [], node
            while at >= 0:
                tokens.append(int(index.tokens[at, 0]))
                at = int(index.parent[at])
            out.add(tuple(reversed(tokens)))
        return out

    def check(self) -> None:
        self.pool.check()
        self.cache.check()


@dataclass
class Entry:
    uses: int = 1
    last_use: int = 0
    worth: float = 0.0
    arrival: int = 0
    hint: str = "plain"  # or "none", "turn", "timed"
    keep_s: float = 0.0
    priority: int = 0
    until: float = 0.0
    kept: bool = False  # at its last arrival in the queue


class Oracle:
    """What Driver's cache must do, said without trees, queues or arrays: every choice looks at every prefix."""

    def __init__(self, capacity: int, policy: str = "lru") -> None:
        self.capacity = capacity
        self.policy = policy
        self.entries: dict[Prefix, Entry] = {}
        self.now = self.age = 0.0
        self.tick = self.arrivals = 0

    def request(self, chain, retention: Retention | None = None) -> int:
        path = [tuple(chain[: i + 1]) for i in range(len(chain))]
        hits = 0
        while hits < len(path) and path[hits] in self.entries:
            hits += 1
        for prefix in path[:hits]:
            entry = self.entries[prefix]
            entry.uses += 1
            if entry.hint == "none":
                entry.hint = "plain"
        while self.capacity - len(self.entries) < len(path) - hits:
            self.evict(set(path[:hits]))
        for prefix in path[hits:]:
            self.entries[prefix] = Entry()
        self.mark(path, hits, retention)
        self.tick += 1
        for prefix in path:
            entry = self.entries[prefix]
            entry.last_use, entry.until = self.tick, self.now + entry.keep_s
            entry.worth = self.age + entry.uses * (1 + (len(prefix) - 0.5) / EVEN_AT if self.policy == "gdsf" else 1.0)
            if not self.children(prefix):
                self.arrive(prefix)
        return hits

    def mark(self, path: list[Prefix], hits: int, retention: Retention | None) -> None:
        if retention is None:
            return
        own = len(path)  # from here on nothing else stands on the path
        while own and len(self.children(path[own - 1])) <= (own < len(path)):
            own -= 1
        for i, prefix in enumerate(path):
            entry = self.entries[prefix]
            if retention.keep == "none":
                if i < own or not (i >= hits or entry.hint == "turn"):
                    continue
                entry.hint, entry.keep_s = "none", 0.0
            elif retention.keep == "turn":
                if entry.hint == "timed":
                    continue
                entry.hint, entry.keep_s = "turn", TURN_S
            else:
                entry.hint, entry.keep_s = "timed", float(retention.keep)
            entry.priority = retention.priority

    def children(self, prefix: Prefix) -> list[Prefix]:
        return [p for p in self.entries if len(p) == len(prefix) + 1 and p[:-1] == prefix]

    def arrive(self, prefix: Prefix) -> None:
        self.arrivals += 1
        entry = self.entries[prefix]
        entry.arrival = self.arrivals
        entry.kept = entry.hint in ("turn", "timed") and entry.until > self.now

    def order(self, prefix: Prefix):
        entry = self.entries[prefix]
        rank = {"lru": entry.last_use, "shortest": len(prefix)}.get(self.policy, entry.worth)
        if entry.hint == "none":
            return 0, entry.priority, rank, entry.arrival
        if entry.hint != "plain" and entry.until > self.now:
            return 2, entry.priority, rank, entry.arrival
        return 1, 0, rank, entry.arrival

    def evict(self, in_use: set[Prefix]) -> None:
        self.expire()
        leaves = [p for p in self.entries if p not in in_use and not self.children(p)]
        victim = min(leaves, key=self.order)
        self.age = max(self.age, self.entries[victim].worth)
        del self.entries[victim]
        above = victim[:-1]
        if above and above not in in_use and not self.children(above):
            self.arrive(above)

    def expire(self) -> None:
        """A leaf whose time is over queues up anew, in the order in which the times ended."""
        late = [p for p, e in self.entries.items() if e.kept and e.until <= self.now]
        for prefix in sorted(late, key=lambda p: (self.entries[p].until, self.entries[p].arrival)):
            self.arrive(prefix)
