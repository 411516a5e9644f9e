"""SavedTree: the cached pages of attention layers as arrays, parents before children."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from paged.kv.pages import Int32, Int64
from paged.media import holds_media
from paged.prefix.hashing import fields_of
from paged.prefix.index import NO_NODE, NO_PAGE
from paged.prefix.saved_file import Part, SavedFile
from paged.prefix.stats import PrefixChain
from paged.spec import KVView

if TYPE_CHECKING:
    from paged.prefix.cache import PrefixCache
    from paged.prefix.index import PrefixIndex


class ChainRecord(msgspec.Struct, forbid_unknown_fields=True):
    """A PrefixChain as it is saved."""

    preview: str
    born_at: float
    num_tokens: int
    num_hits: int
    last_hit_at: float


class SavedTree:
    """Nodes of a PrefixIndex; a node is named by its number here, a page by its number in the file.

    parent    int32 [nodes]              a smaller number; -1 - i below the root of namespace i
    rows      int32 [nodes]              page_size, or fewer for a tail, which has no children
    tokens    int32 [nodes, page_size]   -1 behind `rows`
    pages     int32 [nodes, groups]      -1 where a sliding window left the page behind
    chain     int32 [nodes]              which of `chains` brought it
    last_use  int32 [nodes]              in order of last use; nodes in use when it was saved come last
    """

    def __init__(
        self,
        namespaces: list[bytes],
        chains: list[ChainRecord],
        parent: Int32,
        rows: Int32,
        tokens: Int32,
        pages: Int32,
        chain: Int32,
        last_use: Int32,
    ) -> None:
        self.namespaces = namespaces
        self.chains = chains
        self.parent = parent
        self.rows = rows
        self.tokens = tokens
        self.pages = pages
        self.chain = chain
        self.last_use = last_use
        self.ids: Int32 = np.zeros(0, np.int32)  # the pool's id of each page, where it comes from a cache

    @property
    def rows_of_page(self) -> Int32:
        """Rows that each page holds, of a tree from a cache, where pages are numbered as they stand in `pages`."""
        return self.rows[np.nonzero(self.pages >= 0)[0]]

    @staticmethod
    def view_of(namespace: bytes, cache: PrefixCache) -> KVView:
        """What a sequence of a saved namespace uses, at the default depth."""
        return cache.spec.view(None, int(fields_of(namespace).get("cache_window", 0)))

    # Out of a cache -------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, cache: PrefixCache) -> SavedTree:
        """Every node of a cache, but for media and what stands on it: their ids mean something in this process alone.
        O(nodes log nodes)."""
        index = cache.index
        live = np.flatnonzero(index.birth >= 0)
        live = live[np.argsort(index.birth[live])]  # children are younger than their parents
        live = _without_media(index, live)
        number = np.full(len(index.birth), NO_NODE, np.int32)
        number[live] = np.arange(len(live))
        namespaces = index.namespaces()
        roots = {index._roots[namespace]: -1 - i for i, namespace in enumerate(namespaces)}
        above: list[int] = index.parent[live].tolist()
        parent = np.array([number[node] if node >= 0 else roots[node] for node in above], np.int32)
        ids = index.pages[live]
        in_use = (np.where(ids >= 0, cache.pool.refs[ids], 1) > 1).any(axis=1)
        _, last_use = np.unique(np.where(in_use, index.tick + 1, index.last_use[live]), return_inverse=True)
        pages = np.full(ids.shape, NO_PAGE, np.int32)
        pages[ids >= 0] = np.arange(np.count_nonzero(ids >= 0))
        names, chain = np.unique(index.chain[live], return_inverse=True)
        chains = {record.id: record for record in cache.chains()}
        saved = cls(
            namespaces,
            [_record(chains.get(name)) for name in names.tolist()],
            parent,
            index.rows[live],
            index.tokens[live],
            pages,
            chain.astype(np.int32),
            last_use.astype(np.int32),
        )
        saved.ids = ids[ids >= 0]
        return saved

    def parts(self) -> list[Part]:
        """The arrays as tensors of a file."""
        return [
            Part(f"node_{name}", torch.int32, array.shape, [torch.from_numpy(np.ascontiguousarray(array))])
            for name, array in self._arrays().items()
        ]

    def _arrays(self) -> dict[str, Int32]:
        return {
            "parent": self.parent,
            "rows": self.rows,
            "tokens": self.tokens,
            "pages": self.pages,
            "chain": self.chain,
            "last_use": self.last_use,
        }

    # Out of a file --------------------------------------------------------------------------------------------

    @classmethod
    def read(
        cls,
        file: SavedFile,
        cache: PrefixCache,
        namespaces: list[bytes],
        chains: list[ChainRecord],
        num_pages: int,
    ) -> SavedTree:
        """The nodes of a file, fit for `cache`. LoadError where they do not make a tree over `num_pages` pages."""
        (n,) = file.shape("node_parent", torch.int32, (None,))
        shapes = {"tokens": (n, cache.pool.page_size), "pages": (n, cache.num_groups)}
        names = ("parent", "rows", "tokens", "pages", "chain", "last_use")
        arrays = [file.tensor(f"node_{name}", torch.int32, shapes.get(name, (n,))).numpy() for name in names]
        saved = cls(namespaces, chains, *arrays)
        saved._verify(file, cache, num_pages)
        return saved

    def _verify(self, file: SavedFile, cache: PrefixCache, num_pages: int) -> None:
        n, size, expect = len(self.parent), cache.pool.page_size, file.expect
        before = self.parent < np.arange(n)
        expect(before.all(), "parents before their children", f"children of {self.parent[~before][:1]} before it")
        lowest, most = int(self.parent.min(initial=0)), len(self.namespaces)
        expect(lowest >= -most, f"{most} namespaces", f"a node of namespace {-1 - lowest}")
        bad = (self.rows < 1) | (self.rows > size)
        expect(not bad.any(), f"1 to {size} rows in each page", self.rows[bad][:1])
        short = self.rows[self.parent[self.parent >= 0]] < size
        expect(not short.any(), "full pages above others", "a partial page with a child")
        written = np.arange(size) < self.rows[:, None]
        expect((self.tokens[written] >= 0).all(), "token ids of 0 or more", int(self.tokens.min(initial=0)))
        expect((self.tokens[~written] == -1).all(), "no tokens behind the last row of a page", "some")
        pages = self.pages[self.pages >= 0]
        once = np.array_equal(np.sort(pages), np.arange(num_pages))
        expect(once, f"each of {num_pages} pages in one node", f"{len(np.unique(pages))} pages in {len(pages)} places")
        expect((self.pages >= NO_PAGE).all(), "page numbers of 0 or more", int(self.pages.min(initial=0)))
        firm = np.ones(self.pages.shape, np.bool_)
        namespace = [0] * n
        for i, above in enumerate(self.parent.tolist()):
            namespace[i] = namespace[above] if above >= 0 else -1 - above
        for i, key in enumerate(self.namespaces):
            rows = np.flatnonzero(np.equal(namespace, i))
            firm[rows[:, None], self.view_of(key, cache).loose] = False
        expect((self.pages[firm] >= 0).all(), "a page in every group that no prefix may lack", "a node that lacks one")
        chains = (self.chain >= 0) & (self.chain < len(self.chains))
        expect(chains.all(), f"{len(self.chains)} chains", self.chain[~chains][:1])
        expect((self.last_use >= 0).all(), "an order of last use from 0 on", int(self.last_use.min(initial=0)))
        both = np.column_stack([self.parent, self.tokens])
        expect(len(np.unique(both, axis=0)) == n, "different children below each page", "two with the same tokens")


def _without_media(index: PrefixIndex, live: Int64) -> Int64:
    """The nodes of `live`, parents first, in front of any media."""
    own = holds_media(index.tokens[live])
    if not own.any():
        return live
    gone = np.zeros(len(index.birth), np.bool_)
    gone[live] = own
    for node, parent in zip(live.tolist(), index.parent[live].tolist(), strict=True):
        gone[node] |= parent >= 0 and gone[parent]
    return live[~gone[live]]


def _record(chain: PrefixChain | None) -> ChainRecord:
    """Nothing is known of a chain whose every page has gone, though a place that it brought may stand."""
    if chain is None:
        return ChainRecord("", 0.0, 0, 0, 0.0)
    return ChainRecord(chain.preview, chain.born_at, chain.num_tokens, chain.num_hits, chain.last_hit_at)
