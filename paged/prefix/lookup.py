"""PageLookup: from the parent and the tokens of a page to its node; native, and in plain Python."""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np

from paged.kv.pages import Int32


class PageLookup(Protocol):
    """The full pages of an index. A node is found by its parent (a node, or the negative number of a root) and by its
    tokens, which are compared."""

    def insert(self, node: int, parent: int, tokens: Int32) -> None:
        """Enter a node below a parent that is there, or below a root; `tokens` int32 [page_size]."""
        ...

    def insert_all(self, nodes: Int32, parents: Int32, tokens: Int32) -> None:
        """`insert` of each; `tokens` int32 [n, page_size], C-contiguous."""
        ...

    def erase(self, node: int) -> bool:
        """Forget a node; False if it is not there."""
        ...

    def clear(self) -> None:
        """Forget all."""
        ...

    def match(self, parent: int, tokens: Int32, num_pages: int, node_tokens: Int32, node_parent: Int32) -> Int32:
        """The nodes of as many of the first `num_pages` pages of `tokens` as are there one below another, int32 [n].

        node_tokens int32 [nodes, page_size] and node_parent int32 [nodes] are those of every node.
        """
        ...

    def __len__(self) -> int: ...


class PlainLookup:
    """The oracle of the native one: a dictionary from parent and tokens."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._nodes: dict[tuple[int, bytes], int] = {}
        self._keys: dict[int, tuple[int, bytes]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def insert(self, node: int, parent: int, tokens: Int32) -> None:
        """See PageLookup."""
        key = parent, tokens.tobytes()
        self._keys[node] = key
        self._nodes[key] = node

    def insert_all(self, nodes: Int32, parents: Int32, tokens: Int32) -> None:
        """See PageLookup."""
        for node, parent, page in zip(nodes.tolist(), parents.tolist(), tokens, strict=True):
            self.insert(node, parent, page)

    def erase(self, node: int) -> bool:
        """See PageLookup."""
        key = self._keys.pop(node, None)
        if key is None:
            return False
        del self._nodes[key]
        return True

    def clear(self) -> None:
        """See PageLookup."""
        self._nodes.clear()
        self._keys.clear()

    def match(self, parent: int, tokens: Int32, num_pages: int, node_tokens: Int32, node_parent: Int32) -> Int32:
        """See PageLookup."""
        data, step, found = tokens.tobytes(), 4 * self.page_size, list[int]()
        for column in range(num_pages):
            node = self._nodes.get((parent, data[column * step : (column + 1) * step]))
            if node is None:
                break
            found.append(node)
            parent = node
        return np.array(found, np.int32)


def make_lookup(page_size: int) -> PageLookup:
    """The native one; the plain one where PAGED_BACKEND=reference asks for no native code."""
    if os.environ.get("PAGED_BACKEND") == "reference":
        return PlainLookup(page_size)
    from paged._native import PageLookup as NativeLookup

    return NativeLookup(page_size, int.from_bytes(os.urandom(8), "little"))
