"""PrefixIndex: the tree of cached pages. Arrays indexed by node, and a dictionary from page hash to node."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from weakref import WeakValueDictionary

import numpy as np

from paged.errors import check
from paged.prefix.cursor import NO_NODE, Cursor, Epoch
from paged.prefix.hashing import Int32, PageHash, root_hash
from paged.prefix.lookup import PageLookup, make_lookup
from paged.prefix.siblings import Siblings
from paged.spec import KVView

NO_PAGE = -1


class PrefixIndex:
    """Cached pages as a tree: a node is one page position of one prefix, with a page for each page group.

    Node n holds `pages[n]` (int32 [num_groups]), `tokens[n]` (int32 [page_size]), its parent, the number of its
    children, the tick at which its last user left, and `end[n]`, the tokens of its prefix, its own included. The
    parent of a first page is a negative number that stands for its namespace. A look-up follows parents and tokens (see
    PageLookup): a hash routes it and never decides. Keys, the chained hashes of pages, are names for the world outside
    (events, files, what was evicted) and nothing else.

    A node with fewer than page_size `rows` is a tail: the last, partial page of a donation, which never has children.
    A node may lack the page of a group with a sliding window (NO_PAGE): then a prefix can continue through it, and a
    match can end behind it only as far away as the window reaches. And it may lack those of the deeper iterations of
    a looped model: then it serves sequences of less depth. `window[n]` is the cache window of its namespace.

    Invariants (`check()`): each key leads to a live node and back; the key is the hash of the parent's key and the
    node's tokens; parents are live and full; children counts are exact; no page id stands twice; each full node, and no
    other, is found by its parent and tokens; those of `siblings`.
    """

    def __init__(self, page_size: int, num_groups: int, hash_page: PageHash, num_pages: int = 64) -> None:
        self.page_size = page_size
        self.num_groups = num_groups
        self.hash_page = hash_page
        self.by_key: dict[Hashable, int] = {}
        self.keys: list[Hashable] = []
        self.tick = 0
        self.num_pages = 0  # page ids in all nodes
        self.siblings = Siblings(self)
        self.lookup: PageLookup = make_lookup(page_size)
        self._epochs: WeakValueDictionary[bytes, Epoch] = WeakValueDictionary()  # of the namespaces with cursors
        self._next_birth = 1
        self._free: list[int] = []
        self._roots: dict[bytes, int] = {}
        self._root_children: dict[int, int] = {}
        self._root_of: dict[int, bytes] = {}
        self._next_root = -2
        self._allocate(64)
        self.node_of_page = np.full(num_pages, NO_NODE, np.int32)

    def _allocate(self, capacity: int) -> None:
        self.parent = np.full(capacity, NO_NODE, np.int32)
        self.children = np.zeros(capacity, np.int32)
        self.birth = np.full(capacity, -1, np.int64)
        self.last_use = np.zeros(capacity, np.int64)
        self.chain = np.zeros(capacity, np.int64)
        self.rows = np.zeros(capacity, np.int32)
        self.end = np.zeros(capacity, np.int32)
        self.window = np.zeros(capacity, np.int32)
        self.pages = np.zeros((capacity, self.num_groups), np.int32)
        self.tokens = np.zeros((capacity, self.page_size), np.int32)

    def __len__(self) -> int:
        return len(self.by_key)

    def cursor(self, namespace: bytes, view: KVView) -> Cursor:
        """A cursor at the root of `namespace`, for a sequence that uses what `view` says."""
        epoch = self._epochs.get(namespace)
        if epoch is None:
            epoch = self._epochs[namespace] = Epoch()
        return Cursor(self, namespace, root_hash(namespace), view, epoch)

    def closest(self, cursor: Cursor, tokens: Int32) -> tuple[int, int]:
        """The page right below the cursor that shares most leading tokens with `tokens`, and how many; (-1, 0): none.

        O(log children).
        """
        parent = cursor.last if cursor.depth else self._roots.get(cursor.namespace)
        return (NO_NODE, 0) if parent is None else self.siblings.closest(parent, tokens[: self.page_size])

    def seek(self, cursor: Cursor, tokens: Int32, limit: int) -> int:
        """Move the cursor as deep as the first `limit` pages of `tokens` are cached; returns the pages matched.

        Touches nothing. O(pages not looked up before), in one native call; when nothing changed since the last, O(1).
        """
        if cursor.depth > limit:
            cursor.cut(limit)
        if not cursor.alive:
            gone = self.birth[cursor.nodes] != cursor.births
            cursor.cut(int(gone.argmax()))
        start = cursor.depth
        if start < limit:
            parent = cursor.last if start else self._roots.get(cursor.namespace)
            if parent is not None:
                rest = tokens[start * self.page_size : limit * self.page_size]
                found = self.lookup.match(parent, rest, limit - start, self.tokens, self.parent)
                cursor.extend(found, self.birth[found])
        return cursor.depth

    def add(self, cursor: Cursor, key: Hashable, tokens: Int32, pages: Int32) -> int:
        """Insert a page below the cursor's last node and move the cursor to it. O(log siblings) amortised.

        With fewer tokens than a page it is a tail, and the cursor stays above it.
        """
        if not self._free:
            self._grow()
        node = self._free.pop()
        parent = cursor.last if cursor.depth else self._root(cursor.namespace)
        self.by_key[key] = node
        self.keys[node] = key
        self.parent[node] = parent
        if parent >= 0:
            self.children[parent] += 1
        else:
            self._root_children[parent] += 1
        self.children[node] = 0
        self.birth[node] = self._next_birth
        self.chain[node] = cursor.chain
        self.window[node] = cursor.view.cache_window
        self.pages[node] = NO_PAGE
        rows = self.rows[node] = len(tokens)
        self.end[node] = rows + (self.end[parent] if parent >= 0 else 0)
        self.tokens[node, :rows] = tokens
        self.tokens[node, rows:] = -1
        for group, page in enumerate(pages.tolist()):
            if page >= 0:
                self.fill(node, group, page)
        self.siblings.add(parent, node)
        if rows == self.page_size:
            self.lookup.insert(node, parent, self.tokens[node])
            cursor.push(node, self._next_birth)
        self._next_birth += 1
        return node

    def add_pages(self, cursors: Sequence[Cursor], keys: Sequence[Hashable], tokens: Int32, pages: Int32) -> None:
        """`add` of a full page below the last node of each cursor; different keys, and parents without children.

        tokens int32 [n, page_size], pages int32 [num_groups, n]. The arrays are written once for all.
        """
        count = len(cursors)
        while len(self._free) < count:
            self._grow()
        nodes = [self._free.pop() for _ in range(count)]
        parents = [cursor.last for cursor in cursors]
        births = range(self._next_birth, self._next_birth + count)
        self._next_birth += count
        for cursor, key, node, birth in zip(cursors, keys, nodes, births, strict=True):
            self.by_key[key] = node
            self.keys[node] = key
            cursor.push(node, birth)
        at = np.array(nodes, np.int32)
        self.parent[at] = parents
        np.add.at(self.children, parents, 1)
        self.children[at] = 0
        self.birth[at] = births
        self.chain[at] = [cursor.chain for cursor in cursors]
        self.window[at] = [cursor.view.cache_window for cursor in cursors]
        self.rows[at] = self.page_size
        self.end[at] = self.end[parents] + self.page_size
        self.tokens[at] = tokens
        self.lookup.insert_all(at, np.array(parents, np.int32), np.ascontiguousarray(tokens))
        for parent, node in zip(parents, nodes, strict=True):
            self.siblings.add(parent, node)
        self.pages[at] = np.moveaxis(pages, 0, 1)
        present = pages >= 0
        own = pages[present]
        if len(own) and int(own.max()) >= len(self.node_of_page):
            self._grow_pages(int(own.max()))
        self.node_of_page[own] = np.broadcast_to(at, pages.shape)[present]
        self.num_pages += len(own)

    def fill(self, node: int, group: int, page: int) -> None:
        """Give `node` the page of a group that it lacks. O(1) amortised."""
        if page >= len(self.node_of_page):
            self._grow_pages(page)
        self.pages[node, group] = page
        self.node_of_page[page] = node
        self.num_pages += 1

    def hollow(self, node: int, groups: Int32) -> Int32:
        """Take the pages of `groups` out of a node that stays; returns their ids."""
        pages = self.pages[node, groups].copy()
        self.node_of_page[pages] = NO_NODE
        self.pages[node, groups] = NO_PAGE
        self.num_pages -= len(pages)
        return pages

    def remove(self, node: int) -> int:
        """Take a leaf out; returns its parent (negative: it was a first page). O(1)."""
        check(int(self.children[node]) == 0, "a page was evicted whose child stands")
        pages = _present(self.pages[node])
        self.node_of_page[pages] = NO_NODE
        self.num_pages -= len(pages)
        parent = self._unlink(int(node))
        self._lose_child(parent)
        return parent

    def remove_run(self, run: Sequence[int]) -> list[int]:
        """Take out a leaf and nodes above it, each the only child of the next; returns their pages. One page group.
        O(nodes): a few places and a dictionary entry each, which numpy would write no faster for runs of this length.
        """
        check(not self.children[run[0]], "a page was evicted whose child stands")
        children, places = self.children, self.pages[:, 0]
        pages: list[int] = []
        parent = NO_NODE
        for node in run:
            check(parent in (node, NO_NODE) and children[node] < 2, "a run of pages must follow one branch")
            page = int(places[node])
            self.node_of_page[page] = NO_NODE
            pages.append(page)
            children[node] = 0
            parent = self._unlink(node)
        self.num_pages -= len(run)
        self._lose_child(parent)
        return pages

    def _unlink(self, node: int) -> int:
        """Nobody finds `node` any more, and its place is free; returns its parent, which still counts it."""
        parent = int(self.parent[node])
        self.siblings.remove(parent, node)
        if self.rows[node] == self.page_size:
            self.lookup.erase(node)
        del self.by_key[self.keys[node]]
        self.keys[node] = None
        self.birth[node] = -1
        self._free.append(node)
        return parent

    def _lose_child(self, parent: int) -> None:
        if parent >= 0:
            self.children[parent] -= 1
            return
        self._root_children[parent] -= 1
        if not self._root_children[parent]:
            del self._root_children[parent]
            del self._roots[self._root_of.pop(parent)]

    def below(self, namespace: bytes) -> Int32:
        """Every node of a namespace. O(nodes log depth)."""
        root = self._roots.get(namespace)
        if root is None:
            return np.zeros(0, np.int32)
        live = np.flatnonzero(self.birth >= 0).astype(np.int32)
        above: Int32 = np.array(self.parent, np.int32)
        while (inner := live[above[live] >= 0]).size:
            above[inner] = above[above[inner]]
        return live[above[live] == root]

    def drop(self, namespace: bytes) -> Int32:
        """Forget a namespace at once, in use or not; returns the page ids it held. Its epoch ends."""
        nodes = self.below(namespace)
        pages = _present(self.pages[nodes])
        for node in nodes[np.argsort(-self.birth[nodes])].tolist():  # children are younger than their parents
            self.remove(node)
        epoch = self._epochs.pop(namespace, None)
        if epoch is not None:
            epoch.over = True
        return pages

    def clear(self) -> Int32:
        """Forget every node at once; returns the page ids they held. Ticks and births go on, all epochs end."""
        for epoch in list(self._epochs.values()):
            epoch.over = True
        self._epochs.clear()
        live = np.flatnonzero(self.birth >= 0)
        pages = _present(self.pages[live])
        self.node_of_page[pages] = NO_NODE
        self.birth[live] = -1
        self.num_pages = 0
        self.by_key.clear()
        self.lookup.clear()
        self.siblings.clear()
        self._roots.clear()
        self._root_children.clear()
        self._root_of.clear()
        self.keys = list[Hashable]([None]) * len(self.birth)
        self._free = list(range(len(self.birth) - 1, -1, -1))
        return pages

    def namespaces(self) -> list[bytes]:
        """The namespaces that have pages."""
        return list(self._roots)

    def known_namespaces(self) -> list[bytes]:
        """The namespaces that have pages, or a cursor that may bring some."""
        return list(dict.fromkeys([*self._roots, *self._epochs]))

    def _root(self, namespace: bytes) -> int:
        root = self._roots.get(namespace)
        if root is None:
            root = self._next_root
            self._next_root -= 1
            self._roots[namespace] = root
            self._root_of[root] = namespace
            self._root_children[root] = 0
        return root

    def _grow_pages(self, page: int) -> None:
        grown = np.full(max(2 * len(self.node_of_page), page + 1), NO_NODE, np.int32)
        grown[: len(self.node_of_page)] = self.node_of_page
        self.node_of_page = grown

    def _grow(self) -> None:
        old, used = len(self.keys), self.__dict__.copy()
        new = max(64, 2 * old)
        self._allocate(new)
        for name in ("parent", "children", "birth", "last_use", "chain", "rows", "end", "window", "pages", "tokens"):
            getattr(self, name)[:old] = used[name][:old]
        self.keys.extend([None] * (new - old))
        self._free.extend(range(new - 1, old - 1, -1))

    def check(self) -> None:
        """Assert the invariants of the class docstring. O(nodes)."""
        live = np.flatnonzero(self.birth >= 0)
        check(len(live) == len(self.by_key), f"{len(live)} live nodes, {len(self.by_key)} keys")
        pages = _present(self.pages[live])
        check(len(np.unique(pages)) == len(pages), "a page id stands twice in the index")
        check(len(pages) == self.num_pages, f"{len(pages)} pages in the nodes, counted {self.num_pages}")
        children = np.zeros(len(self.birth), np.int64)
        roots: dict[int, int] = {}
        nodes: list[int] = live.tolist()
        for node in nodes:
            parent = int(self.parent[node])
            key = self.keys[node]
            check(self.by_key.get(key, NO_NODE) == node, "a key leads to another node")
            own = _present(self.pages[node])
            check(bool((self.node_of_page[own] == node).all()), "a page leads to another node")
            if parent >= 0:
                check(int(self.birth[parent]) >= 0, "the parent of a cached page is not cached")
                check(int(self.birth[parent]) < int(self.birth[node]), "a child is older than its parent")
                check(int(self.rows[parent]) == self.page_size, "a partial page has a child")
                children[parent] += 1
                above = self.keys[parent]
            else:
                roots[parent] = roots.get(parent, 0) + 1
                above = root_hash(self._root_of[parent])
            want = self.hash_page(above, self.tokens[node, : self.rows[node]].astype("<i4", copy=False).tobytes())
            check(key == want, "a key is not the hash of its page's tokens")
            if self.rows[node] == self.page_size:
                found = self.lookup.match(parent, self.tokens[node], 1, self.tokens, self.parent).tolist()
                check(found == [node], "a page is not found by its parent and tokens")
        full = int((self.rows[live] == self.page_size).sum())
        check(len(self.lookup) == full, f"{full} full pages, {len(self.lookup)} can be found")
        check(bool((children[live] == self.children[live]).all()), "a children count is wrong")
        check(roots == self._root_children, "a namespace's count of first pages is wrong")
        self.siblings.check()


def _present(pages: Int32) -> Int32:
    return pages[pages >= 0].ravel()
