"""PrefixPool: registered prefixes, the longest of which a prompt starts from. After TinyLoop's class of that name."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from sortedcontainers import SortedKeyList

from paged.errors import check, require_integer
from paged.kv.pages import Int32
from paged.prefix.handles import PrefixHandle
from paged.prefix.hashing import as_tokens

Key = tuple[str, int, int, bytes]  # namespace, loops, cache_window, tokens


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """One registered prefix. `loops` is 0 for a model that does not loop."""

    id: int
    handle: PrefixHandle
    last_use: int
    num_hits: int = 0

    @property
    def loops(self) -> int:
        return self.handle.loops

    @property
    def cache_window(self) -> int:
        return self.handle.cache_window

    @property
    def tokens(self) -> Int32:
        return self.handle.tokens

    @property
    def num_tokens(self) -> int:
        return self.handle.num_tokens

    @property
    def num_bytes(self) -> int:
        return self.handle.num_bytes


def _shortest(entry: PrefixEntry) -> tuple[float, int]:
    return entry.num_tokens, entry.id


def _lru(entry: PrefixEntry) -> tuple[float, int]:
    return entry.last_use, entry.id


def _cost(entry: PrefixEntry) -> tuple[float, int]:
    return (1 + entry.num_hits) * entry.num_tokens / max(1, entry.num_bytes), entry.id


EVICTIONS: dict[str, Callable[[PrefixEntry], tuple[float, int]]] = {"shortest": _shortest, "lru": _lru, "cost": _cost}


class PrefixPool:
    """Up to `capacity` prefixes, each found by exactly its tokens, loops, cache window and namespace.

    A prompt that starts with all tokens of an entry matches it; of several the longest wins, and the whole prompt may
    match. What goes when a newcomer finds no room: "shortest" the entry with the fewest tokens, "lru" the one not
    registered or hit for longest, "cost" the one that saved least computing per byte (tokens times hits). A newcomer
    is never its own victim. `max_tokens` and `max_bytes` bound the sums over the entries as well (0: no bound).
    With `share_depths` an entry of a looped model serves smaller depths too; the longest wins, then the least deep.

    May be shared by threads. A look-up costs O(log entries + tokens) for each entry that the prompt leaves on the way.

    Invariants (`check()`): entries are ordered by key, no key twice, and counted by depth; the bounds hold, unless one
    entry alone exceeds them.
    """

    def __init__(
        self,
        capacity: int = 16,
        eviction: str = "shortest",
        max_tokens: int = 0,
        max_bytes: int = 0,
        share_depths: bool = False,
    ) -> None:
        """A capacity of 0 counts as 1. Takes no memory until something is registered."""
        capacity = require_integer("capacity", capacity)
        max_tokens, max_bytes = require_integer("max_tokens", max_tokens), require_integer("max_bytes", max_bytes)
        if capacity < 0 or max_tokens < 0 or max_bytes < 0:
            raise ValueError(
                f"capacity, max_tokens and max_bytes must be 0 or more, got {capacity}, {max_tokens} and {max_bytes}"
            )
        if eviction not in EVICTIONS:
            raise ValueError(f"eviction must be one of {', '.join(sorted(EVICTIONS))}, got {eviction!r}")
        self.capacity = max(1, capacity)
        self.eviction = eviction
        self.max_tokens = max_tokens
        self.max_bytes = max_bytes
        self.share_depths = share_depths
        self.num_evicted = 0
        self._entries: SortedKeyList = SortedKeyList(key=_key)
        self._depths: Counter[int] = Counter()  # entries of each depth
        self._lock = threading.RLock()
        self._next_id = 1
        self._tick = 0

    def size(self) -> int:
        """Registered prefixes."""
        return len(self._entries)

    def total_cached_tokens(self) -> int:
        """The sum of the entries' lengths; what entries share counts in each."""
        with self._lock:
            return sum(entry.num_tokens for entry in self._entries)

    def unique_cached_tokens(self) -> int:
        """Rows in distinct pages: what the entries share counts once. Rows of a page group count by themselves."""
        rows: dict[int, int] = {}
        with self._lock:
            for entry in self._entries:
                for page, n in entry.handle.rows_of_pages().items():
                    rows[page] = max(rows.get(page, 0), n)
        return sum(rows.values())

    def entries(self) -> list[PrefixEntry]:
        """The entries, longest first."""
        with self._lock:
            return sorted(self._entries, key=lambda entry: (-entry.num_tokens, entry.id))

    def find(self, tokens: object, loops: int = 0, cache_window: int = 0, namespace: str = "") -> PrefixEntry | None:
        """The entry of exactly these tokens. Touches nothing."""
        key = (namespace, loops, cache_window, _order(as_tokens(tokens)))
        with self._lock:
            return next(self._entries.irange_key(key, key), None)

    def register(self, handle: PrefixHandle) -> int:
        """Keep a prefix; returns the number of tokens that can match. A second one of the same key changes nothing.

        Under "lru" that counts as a use. ValueError for a handle without `share_depths` in a pool with it.
        """
        if self.share_depths and not handle.share_depths:
            raise ValueError("this pool shares depths: build the prefix with share_depths=True")
        with self._lock:
            found = self.find(handle.tokens, handle.loops, handle.cache_window, handle.namespace)
            if found is not None and found.handle.outdated:
                self._discard(found)
            elif found is not None:
                self._touch(found)
                return found.num_tokens
            entry = PrefixEntry(self._next_id, handle, 0)
            self._next_id += 1
            self._touch(entry)
            self._add(entry)
            while self._over_bounds() and len(self._entries) > 1:
                self._evict(entry)
            return entry.num_tokens

    def make_room(self) -> bool:
        """Evict the entry that one more would push out; False, and nothing happens, below capacity.

        For who has no pages for a new prefix as long as that one holds its own.
        """
        with self._lock:
            if not self._entries or len(self._entries) < self.capacity:
                return False
            self._evict()
            return True

    def _evict(self, spared: PrefixEntry | None = None) -> None:
        self._discard(min((e for e in self._entries if e is not spared), key=EVICTIONS[self.eviction]))
        self.num_evicted += 1

    def match(self, tokens: object, loops: int = 0, cache_window: int = 0, namespace: str = "") -> PrefixEntry | None:
        """The longest entry that `tokens` start with, counted as a hit; None if there is none."""
        with self._lock:
            entry = self._best(as_tokens(tokens), loops, cache_window, namespace)
            if entry is not None:
                entry.num_hits += 1
                self._touch(entry)
            return entry

    def match_len(self, tokens: object, loops: int = 0, cache_window: int = 0, namespace: str = "") -> int:
        """The tokens that `match` would find right now. Touches nothing."""
        with self._lock:
            entry = self._best(as_tokens(tokens), loops, cache_window, namespace)
            return 0 if entry is None else entry.num_tokens

    def remove(self, entry_id: int) -> bool:
        """Forget an entry; its pages go back once nothing uses them. False if there is none of that id."""
        with self._lock:
            for entry in self._entries:
                if entry.id == entry_id:
                    self._discard(entry)
                    return True
            return False

    def clear(self) -> None:
        """Forget every entry."""
        with self._lock:
            self._entries.clear()
            self._depths.clear()

    def _best(self, tokens: Int32, loops: int, cache_window: int, namespace: str) -> PrefixEntry | None:
        """The longest entry of that depth; of a pool that shares depths also of a greater one."""
        data = _order(tokens)
        best = self._longest(tokens, data, (namespace, loops, cache_window))
        if self.share_depths:
            for deeper in sorted(depth for depth in self._depths if depth > loops):
                other = self._longest(tokens, data, (namespace, deeper, cache_window))
                if other is not None and (best is None or other.num_tokens > best.num_tokens):
                    best = other
        return best

    def _longest(self, tokens: Int32, data: bytes, kind: tuple[str, int, int]) -> PrefixEntry | None:
        """Of the entries before the prompt in order the last one; whatever opens the prompt opens that one too."""
        n = len(tokens)
        while n:
            at = next(self._entries.irange_key((*kind, b""), (*kind, data[: 4 * n]), reverse=True), None)
            if at is None:
                return None
            shared = min(n, at.num_tokens)
            differs = at.tokens[:shared] != tokens[:shared]
            if differs.any():
                shared = int(differs.argmax())
            if shared == at.num_tokens:
                return at
            n = shared
        return None

    def _add(self, entry: PrefixEntry) -> None:
        self._entries.add(entry)
        self._depths[entry.loops] += 1

    def _discard(self, entry: PrefixEntry) -> None:
        self._entries.remove(entry)
        self._depths[entry.loops] -= 1
        if not self._depths[entry.loops]:
            del self._depths[entry.loops]

    def _touch(self, entry: PrefixEntry) -> None:
        self._tick += 1
        entry.last_use = self._tick

    def _over_bounds(self) -> bool:
        if len(self._entries) > self.capacity:
            return True
        if self.max_tokens and self.total_cached_tokens() > self.max_tokens:
            return True
        return bool(self.max_bytes) and sum(entry.num_bytes for entry in self._entries) > self.max_bytes

    def check(self) -> None:
        """Assert the invariants of the class docstring. O(tokens of all entries)."""
        with self._lock:
            keys = [_key(entry) for entry in self._entries]
            check(all(a < b for a, b in pairwise(keys)), "entries are out of order, or twice")
            check(self._depths == Counter(entry.loops for entry in self._entries), "entries are counted wrong")
            check(len(keys) <= 1 or not self._over_bounds(), "the pool holds more than its bounds")
            for entry in self._entries:
                entry.handle.check()


def _order(tokens: Int32) -> bytes:
    """Big-endian, so that bytes compare as the token ids do, and a prefix stands before what it opens."""
    return np.ascontiguousarray(tokens, ">i4").tobytes()


def _key(entry: PrefixEntry) -> Key:
    return entry.handle.namespace, entry.loops, entry.cache_window, _order(entry.tokens)
