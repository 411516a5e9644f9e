"""TreeIntake: which pages of a file a cache takes in, and how they enter its tree."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from paged.kv.pages import Int32
from paged.prefix.cursor import NO_NODE, Cursor
from paged.prefix.events import PagesStored
from paged.prefix.hashing import root_hash
from paged.prefix.saved_tree import SavedTree

if TYPE_CHECKING:
    from paged.prefix.cache import PrefixCache


class TreeIntake:
    """What a cache takes in of a SavedTree, decided before anything changes: `pages`, numbers in the file, ascending.

    Keys are computed anew from the tokens, and a node counts as cached where tokens and parents agree. Of the rest at
    most `room` pages enter, a prefix before what stands on it, what was used last first. Left out are what finds no
    room, what has the key of other tokens, and what is of no use: a tail where the cache matches whole pages only, or
    has all of its rows; a node without pages that nothing stands on.
    """

    def __init__(self, saved: SavedTree, cache: PrefixCache, room: int) -> None:
        self.saved = saved
        self.cache = cache
        n = len(saved.parent)
        self.node = np.full(n, NO_NODE, np.int32)  # of the cache
        self.new = np.zeros(n, np.bool_)
        self.keys: list[Hashable] = []
        self._look_up()
        self.wanted = saved.pages >= 0  # [nodes, groups]
        known = np.flatnonzero(self.node >= 0)
        self.wanted[known] &= cache.index.pages[self.node[known]] < 0
        self._choose(min(room, cache.max_pages - cache.held_pages) if cache.max_pages else room)
        self.pages: Int32 = np.sort(saved.pages[self.wanted])

    def _look_up(self) -> None:
        index, saved = self.cache.index, self.saved
        roots = [root_hash(namespace) for namespace in saved.namespaces]
        data, step = saved.tokens.astype("<i4").tobytes(), 4 * index.page_size
        for i, (parent, rows) in enumerate(zip(saved.parent.tolist(), saved.rows.tolist(), strict=True)):
            above = self.keys[parent] if parent >= 0 else roots[-1 - parent]
            key = index.hash_page(above, data[i * step : i * step + 4 * rows])
            self.keys.append(key)
            node = index.by_key.get(key, NO_NODE)
            if node >= 0 and index.parent[node] == self._above(i) and (index.tokens[node] == saved.tokens[i]).all():
                self.node[i] = node

    def _above(self, i: int) -> int:
        """What node i stands on in the cache: a node or the number of a root; NO_NODE where the cache lacks it."""
        parent = int(self.saved.parent[i])
        if parent >= 0:
            return int(self.node[parent])
        return self.cache.index._roots.get(self.saved.namespaces[-1 - parent], NO_NODE)

    def _choose(self, room: int) -> None:
        saved, wanted, stats = self.saved, self.wanted, self.cache.stats
        parents: list[int] = saved.parent.tolist()
        counts: list[int] = wanted.sum(axis=1).tolist()
        last_use: list[int] = saved.last_use.tolist()
        for i in reversed(range(len(parents))):  # a page was used whenever what stands on it was
            if parents[i] >= 0:
                last_use[parents[i]] = max(last_use[parents[i]], last_use[i])
        taken = set[Hashable]()
        for i in sorted(range(len(parents)), key=lambda i: (-last_use[i], i)):
            if self.node[i] < 0:
                if self._useless(i):
                    wanted[i] = False
                    continue
                collides = self.keys[i] in self.cache.index.by_key or self.keys[i] in taken
                stats.num_collisions += collides
                above = parents[i] < 0 or self.new[parents[i]] or self.node[parents[i]] >= 0
                self.new[i] = above and not collides and counts[i] <= room
            if self.new[i]:
                taken.add(self.keys[i])
            if self.new[i] or (self.node[i] >= 0 and counts[i] <= room):
                room -= counts[i]
            else:
                wanted[i] = False
                stats.load_refused += counts[i]
        stood_on: set[int] = set()
        for i in reversed(range(len(parents))):
            self.new[i] &= counts[i] > 0 or i in stood_on
            if self.new[i]:
                stood_on.add(parents[i])

    def _useless(self, i: int) -> bool:
        """Whether node i is a tail that no prompt would gain by."""
        rows = int(self.saved.rows[i])
        if rows == self.cache.pool.page_size:
            return False
        above = self._above(i)
        known = 0 if above == NO_NODE else self.cache.index.siblings.closest(above, self.saved.tokens[i, :rows])[1]
        return not self.cache.exact or known == rows

    def enter(self, ids: Int32) -> None:
        """Enter the pool's pages `ids`, which hold `pages` with one reference each; then only the cache holds them.

        They count as used now, in the order of their last use.
        """
        saved, cache = self.saved, self.cache
        page_of = np.full(int(saved.pages.max(initial=-1)) + 2, -1, np.int32)  # the last place stays -1
        page_of[self.pages] = ids
        pages = page_of[np.where(self.wanted, saved.pages, -1)]  # [nodes, groups]
        namespace: list[bytes] = []
        chains: dict[int, int] = {}
        for i, (parent, chain) in enumerate(zip(saved.parent.tolist(), saved.chain.tolist(), strict=True)):
            namespace.append(namespace[parent] if parent >= 0 else saved.namespaces[-1 - parent])
            if self.new[i]:
                cursor = self._cursor(namespace[i], parent)
                cursor.chain = chains.get(chain, 0)
                tokens = saved.tokens[i, : saved.rows[i]]
                cache._enter(cursor, self.keys[i], tokens, pages[i], saved.chains[chain].preview)
                chains[chain] = cursor.chain
                self.node[i] = cache.index.by_key[self.keys[i]]
                if cache.listen is not None:
                    above = self.keys[parent] if parent >= 0 else None
                    cache.listen(PagesStored(namespace[i], above, (self.keys[i],), tokens.copy()))
            elif self.wanted[i].any():
                cache._merge(int(self.node[i]), pages[i])
        self._label(chains)
        for tick in np.unique(saved.last_use[self.wanted.any(axis=1)]).tolist():
            own = pages[saved.last_use == tick]
            cache.pool.release(own[own >= 0])

    def _cursor(self, namespace: bytes, parent: int) -> Cursor:
        index = self.cache.index
        cursor = self.cache.cursor_of(namespace, self.saved.view_of(namespace, self.cache))
        if parent >= 0:
            node = int(self.node[parent])
            cursor.push(node, int(index.birth[node]))
        return cursor

    def _label(self, chains: dict[int, int]) -> None:
        """Give the chains that were opened (number in the file -> id) what the file knows of them."""
        for number, name in chains.items():
            chain, record = self.cache._chains[name], self.saved.chains[number]
            chain.born_at, chain.last_hit_at = record.born_at, record.last_hit_at
            chain.num_tokens, chain.num_hits = record.num_tokens, record.num_hits
            if not chain.num_pages:
                del self.cache._chains[name]
