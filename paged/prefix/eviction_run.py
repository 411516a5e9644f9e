"""Evicting chains: the pages of one branch that go one after the other, taken out together."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from paged.kv.pages import Int32
from paged.prefix.events import PageRemoved

if TYPE_CHECKING:
    from paged.prefix.tree import PageTree


def run_up(tree: PageTree, leaf: int, most: int) -> list[int]:
    """The idle `leaf`, which goes now, and the nodes above it that would go right after it, up to `most`, in order.

    A prompt falls idle as a whole, so that under LRU its pages leave the cache in one run. O(nodes), without a push
    and a pop each. Where hints of retention or several page groups are in use, the leaf alone.
    """
    index, queue = tree.index, tree.queue
    queue.gone(leaf)
    run = [leaf]
    if tree.num_groups > 1 or tree.ever_loose:
        return run
    parents, children, pages, refs = index.parent, index.children, index.pages, tree.pool.refs
    node = leaf
    while len(run) < most:
        node = int(parents[node])
        if node < 0 or children[node] != 1:
            break
        page = pages[node, 0]
        if page < 0 or refs[page] != 1 or not queue.goes_next(node):
            break
        queue.gone(node)
        run.append(node)
    return run


def take_out(tree: PageTree, run: list[int]) -> Int32:
    """Take a run out of the index; what is above it may become the next to go. Returns its pages, still held."""
    index = tree.index
    keys = [index.keys[node] for node in run]
    for key in keys:
        if len(tree.evicted) >= tree.remembered:
            del tree.evicted[next(iter(tree.evicted))]
        tree.evicted[key] = None
        if tree.listen is not None:
            tree.listen(PageRemoved(key))
    top, chains = int(index.parent[run[-1]]), index.chain
    if tree.num_groups == 1 and not tree.ever_loose:
        pages = np.array(index.remove_run(run), np.int32)
    else:
        pages = index.pages[run[0]]
        pages = pages[pages >= 0]
        index.remove(run[0])
    tree.stats.evicted_pages += len(pages)
    if len(run) == 1:
        tree.forget(int(chains[run[0]]), len(pages))
    else:
        for chain, count in Counter(int(chains[node]) for node in run).items():
            tree.forget(chain, count)
    if top >= 0 and not index.children[top] and tree.idle(top):
        tree.queue.push(top)
    return pages
