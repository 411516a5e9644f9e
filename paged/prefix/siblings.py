"""Siblings: the children of each cached page in the order of their tokens, to find the one closest to a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from sortedcontainers import SortedList

from paged.errors import check
from paged.prefix.hashing import Int32

if TYPE_CHECKING:
    from paged.prefix.index import PrefixIndex

_Entry = tuple[bytes, int]  # a page's tokens, and its node


class Siblings:
    """For each parent of an index (a node, or a namespace's root) its children, sorted by their tokens.

    Of all the children of a parent, the one that shares most leading tokens with a prompt stands next to where the
    prompt would be inserted. Most parents have one child: it is kept as a plain number, and sorted only when a second
    one comes. Adding, removing and asking cost O(log children).

    Invariants (`check()`): the entries of each parent are exactly its children, with their tokens.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._of: dict[int, int | SortedList] = {}

    def add(self, parent: int, node: int) -> None:
        """`node` was entered below `parent`."""
        found = self._of.get(parent)
        if found is None:
            self._of[parent] = node
        elif isinstance(found, int):
            self._of[parent] = SortedList([self._entry(found), self._entry(node)])
        else:
            found.add(self._entry(node))

    def remove(self, parent: int, node: int) -> None:
        """`node` is about to leave `parent`; its tokens must still be there."""
        found = self._of[parent]
        if isinstance(found, int):
            del self._of[parent]
            return
        found.remove(self._entry(node))
        if len(found) == 1:
            self._of[parent] = found[0][1]

    def closest(self, parent: int, tokens: Int32) -> tuple[int, int]:
        """The child of `parent` that shares most leading tokens with `tokens`, and how many; (-1, 0) if none does."""
        found = self._of.get(parent)
        if found is None or not len(tokens):
            return -1, 0
        if isinstance(found, int):
            rows = self._shared(found, tokens)
            return (found, rows) if rows else (-1, 0)
        at = found.bisect_left((_sortable(tokens), -1))
        best, most = -1, 0
        for _, node in found[max(0, at - 1) : at + 1]:
            rows = self._shared(node, tokens)
            if rows > most:
                best, most = node, rows
        return best, most

    def clear(self) -> None:
        self._of.clear()

    def _shared(self, node: int, tokens: Int32) -> int:
        rows = min(int(self._index.rows[node]), len(tokens))
        differs = self._index.tokens[node, :rows] != tokens[:rows]
        return int(differs.argmax()) if differs.any() else rows

    def _entry(self, node: int) -> _Entry:
        return _sortable(self._index.tokens[node, : self._index.rows[node]]), node

    def check(self) -> None:
        """Assert the invariants of the class docstring. O(nodes log nodes)."""
        index = self._index
        children: dict[int, set[_Entry]] = {}
        nodes: list[int] = np.flatnonzero(index.birth >= 0).tolist()
        for node in nodes:
            children.setdefault(int(index.parent[node]), set()).add(self._entry(node))
        found = {p: {self._entry(f)} if isinstance(f, int) else set(f) for p, f in self._of.items()}
        check(found == children, "the sorted children of a page are not its children")


def _sortable(tokens: Int32) -> bytes:
    """Big-endian, so that bytes compare as the token ids (0 or more) do."""
    return tokens.astype(">i4").tobytes()
