"""Cursor: where one token sequence stands in the tree of cached pages."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paged.prefix.hashing import Int32, extend_keys

if TYPE_CHECKING:
    from paged.prefix.index import PrefixIndex
    from paged.spec import KVView

NO_NODE = -1


class Epoch:
    """The time between two clearings of a namespace. Rows computed in one that is over may be of other weights."""

    __slots__ = ("__weakref__", "over")

    def __init__(self) -> None:
        self.over = False


class Cursor:
    """The nodes that the leading pages of one token sequence match, and the keys of those behind them.

    A scheduler keeps one for each request, so that nothing is hashed or looked up twice. `births` tells a node from
    a later one in the same place. A closed cursor publishes no more (a collision, or its chain was evicted); nor does
    one of an epoch that is over, whose nodes may even be other pages by now.

    depth  pages matched
    near   the page below the last node that shares `rows` more tokens
    keys   of the leading pages, as far as somebody asked (`keys_to`)
    """

    __slots__ = (
        "_births",
        "_index",
        "_nodes",
        "chain",
        "closed",
        "depth",
        "epoch",
        "keys",
        "namespace",
        "near",
        "root",
        "rows",
        "view",
    )

    def __init__(self, index: PrefixIndex, namespace: bytes, root: Hashable, view: KVView, epoch: Epoch) -> None:
        self._index = index
        self.namespace = namespace
        self.root = root
        self.view = view
        self.epoch = epoch
        self.keys: list[Hashable] = []
        self.near = NO_NODE
        self.rows = 0
        self.chain = 0
        self.closed = False
        self.depth = 0
        self._nodes: Int32 = np.zeros(8, np.int32)
        self._births: npt.NDArray[np.int64] = np.zeros(8, np.int64)

    @property
    def nodes(self) -> Int32:
        """int32 [depth]; a view."""
        return self._nodes[: self.depth]

    @property
    def births(self) -> npt.NDArray[np.int64]:
        """int64 [depth]; a view."""
        return self._births[: self.depth]

    @property
    def last(self) -> int:
        """The deepest node; NO_NODE at the root."""
        return int(self._nodes[self.depth - 1]) if self.depth else NO_NODE

    @property
    def open(self) -> bool:
        """Whether pages computed below this cursor may still enter the index."""
        return not (self.closed or self.epoch.over)

    @property
    def alive(self) -> bool:
        """Whether the deepest node is still what it was."""
        return not self.depth or bool(self._index.birth[self.last] == self._births[self.depth - 1])

    def push(self, node: int, birth: int) -> None:
        """One page deeper. O(1) amortised."""
        if self.depth == len(self._nodes):
            self._reserve(self.depth + 1)
        self._nodes[self.depth] = node
        self._births[self.depth] = birth
        self.depth += 1

    def extend(self, nodes: Int32, births: npt.NDArray[np.int64]) -> None:
        """Several pages deeper."""
        end = self.depth + len(nodes)
        if end > len(self._nodes):
            self._reserve(end)
        self._nodes[self.depth : end] = nodes
        self._births[self.depth : end] = births
        self.depth = end

    def cut(self, depth: int) -> None:
        """Back up to `depth` pages."""
        self.depth = depth

    def restart(self) -> None:
        """Back to the root, for a sequence that lost its pages; its page keys are kept."""
        self.depth = 0
        self.rows = 0
        self.closed = False

    def keys_to(self, tokens: Int32, end: int) -> list[Hashable]:
        """The keys of at least the first `end` pages of the sequence. O(keys not known before)."""
        keys, index = self.keys, self._index
        if len(keys) < min(end, self.depth):
            keys.extend(index.keys[node] for node in self._nodes[len(keys) : min(end, self.depth)].tolist())
        if len(keys) < end:
            size = index.page_size
            extend_keys(keys, self.root, tokens[: end * size], size, index.hash_page)
        return keys

    def key_above(self) -> Hashable:
        """What the key of the next page is chained to."""
        return self._index.keys[self.last] if self.depth else self.root

    def _reserve(self, depth: int) -> None:
        size = max(2 * len(self._nodes), depth)
        nodes, births = self._nodes, self._births
        self._nodes, self._births = np.zeros(size, np.int32), np.zeros(size, np.int64)
        self._nodes[: len(nodes)] = nodes
        self._births[: len(births)] = births
