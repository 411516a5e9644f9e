"""How a step is cut into work for the CUDA kernels: items, partials, merges. Plain numpy, no device.

The layouts are those of `csrc/cuda/api.h`. Keys are folded in splits of `SPLIT` positions counted from position 0,
from left to right, whether one block walks all splits of a row (a whole item) or one block each (partial items and a
merge). How a step is cut therefore changes its speed and never a bit of its result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paged.ops.plan import AttendPlan, Int32

SPLIT = 256  # kSplit
NARROW_ROWS = 16  # kNarrowRows
SIMPLE_GROUP = 3  # the largest group of the kernel without tensor cores


def wide_rows(head_dim: int) -> int:
    """Flat rows (query rows times the query heads of a kv head) of a wide item."""
    return 32 if head_dim > 128 else 64


@dataclass(frozen=True, slots=True)
class Cut:
    """What decides how a step is cut.

    min_blocks      split the keys of a step that would fill fewer blocks than this
    max_partials    no more partials than this (one a row, split and query head); 0: never split
    shared_prefix   compute splits that several sequences share, page for page, once for all their rows
    simple          decode rows of groups up to 3 without tensor cores. Their products are exact in fp32, but a row's
                    bits then depend on whether it came alone or in a chunk, so it is off unless asked for.
    """

    min_blocks: int = 264
    max_partials: int = 1 << 20
    shared_prefix: bool = True
    simple: bool = False


@dataclass(slots=True)
class HostWork:
    """The work of one step for one (group, window).

    items        int32 [num_wide + num_narrow + num_simple, 8], in this order
    merges       int32 [num_merges, 3]
    rows         int32: 0..T - 1, then the row lists of shared prefixes
    part_base    int32 [T]
    """

    items: Int32
    num_wide: int
    num_narrow: int
    num_simple: int
    merges: Int32
    rows: Int32
    part_base: Int32
    num_partials: int
    folds: bool


@dataclass(slots=True)
class _Tiles:
    """Row blocks before they are split: parallel arrays, one entry a block."""

    row_begin: Int32
    flat_begin: Int32
    flat_count: Int32
    table: Int32
    key_begin: Int32
    key_end: Int32
    kind: Int32  # 0 wide, 1 narrow, 2 simple
    owner: Int32  # the sequence, or -1 for a shared prefix


def table_offsets(plan: AttendPlan) -> tuple[Int32, Int32]:
    """The used part of the page table as one array, and where each sequence's part begins. O(pages)."""
    used = -(-plan.kv_lens // plan.page_size)
    tables = plan.page_table[np.arange(plan.page_table.shape[1]) < used[:, None]]
    return tables, (np.cumsum(used) - used).astype(np.int32)


def shared_prefixes(plan: AttendPlan, allowed: np.ndarray) -> list[tuple[Int32, int]]:
    """Groups of sequences whose first splits lie on the same pages: `[(sequences, number of shared splits)]`.

    A split is shared if every row of every member sees all of it. Members are found by their pages of the first split
    and cut to the number of splits that saves most reads. O(sequences * pages).
    """
    first_rows = plan.kv_lens - np.diff(plan.q_indptr)  # position of each sequence's first row
    seqs = np.flatnonzero(allowed & (first_rows + 1 >= SPLIT))
    if len(seqs) < 2:
        return []
    pages = -(-SPLIT // plan.page_size)
    _, which = np.unique(plan.page_table[seqs, :pages], axis=0, return_inverse=True)
    groups: list[tuple[Int32, int]] = []
    for g in np.flatnonzero(np.bincount(which.reshape(-1)) > 1):
        members = seqs[which.reshape(-1) == g]
        columns = -(-int(plan.kv_lens[members].max()) // plan.page_size)
        table = plan.page_table[members, :columns]
        same = table == table[0]
        common = np.where(same.all(axis=1), columns, same.argmin(axis=1)) * plan.page_size
        splits = np.minimum(common, first_rows[members] + 1) // SPLIT
        # Members with at least c splits share c of them: c * (members - 1) reads are saved.
        count = np.array([(splits >= c).sum() for c in splits])
        best = int(np.argmax(splits * (count - 1)))
        if splits[best] > 0 and count[best] > 1:
            groups.append((members[splits >= splits[best]].astype(np.int32), int(splits[best])))
    return groups


def _tiles(plan: AttendPlan, group: int, head_dim: int, window: int, offsets: Int32, simple: bool) -> _Tiles:
    """The row blocks of every sequence, each with the range of keys that its rows see."""
    q_lens = np.diff(plan.q_indptr)
    flat = q_lens * group
    kind = np.where(flat > NARROW_ROWS, 0, 1)
    if simple and group <= SIMPLE_GROUP:
        kind[q_lens == 1] = 2
    size = np.array([wide_rows(head_dim), NARROW_ROWS, group])[kind]
    count = -(-flat // size)
    owner = np.repeat(np.arange(plan.num_seqs), count)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    flat_begin = number * size[owner]
    flat_count = np.minimum(size[owner], flat[owner] - flat_begin)
    first = (plan.kv_lens - q_lens)[owner]  # position of the sequence's first row
    key_end = np.maximum(first + (flat_begin + flat_count - 1) // group + 1, 0)
    key_begin = np.zeros_like(key_end)
    if window:
        key_begin = np.clip(first + flat_begin // group - window + 1, 0, key_end)
    columns = (plan.q_indptr[owner], flat_begin, flat_count, offsets[owner], key_begin, key_end, kind[owner], owner)
    return _Tiles(*(c.astype(np.int32) for c in columns))


def _shared_tiles(
    plan: AttendPlan, groups: list[tuple[Int32, int]], group: int, head_dim: int, offsets: Int32
) -> tuple[_Tiles, Int32]:
    """The row blocks of shared prefixes, and their row lists one after the other."""
    lists: list[Int32] = []
    blocks: list[list[int]] = []
    row_begin = plan.num_rows
    for members, splits in groups:
        ranges = [(int(plan.q_indptr[s]), int(plan.q_indptr[s + 1])) for s in members]
        rows = np.concatenate([np.arange(begin, end, dtype=np.int32) for begin, end in ranges])
        flat = len(rows) * group
        kind = 0 if flat > NARROW_ROWS else 1
        size = NARROW_ROWS if kind else wide_rows(head_dim)
        table = int(offsets[members[0]])
        for begin in range(0, flat, size):
            blocks.append([row_begin, begin, min(size, flat - begin), table, 0, splits * SPLIT, kind, -1])
        lists.append(rows)
        row_begin += len(rows)
    columns = np.array(blocks, dtype=np.int32).reshape(-1, 8).T
    return _Tiles(*columns), np.concatenate([np.empty(0, np.int32), *lists])


def _split(tiles: _Tiles, partial: np.ndarray) -> np.ndarray:
    """Items `[n, 8]` and their kinds in the last column: a partial tile becomes one item a split."""
    first = tiles.key_begin // SPLIT
    count = np.where(partial, (tiles.key_end - 1) // SPLIT - first + 1, 1)
    count = np.where(partial & (tiles.key_end <= tiles.key_begin), 0, count)  # a partial tile without keys: no item
    tile = np.repeat(np.arange(len(first)), count)
    split = first[tile] + np.arange(len(tile)) - np.repeat(np.cumsum(count) - count, count)
    flag = partial[tile]
    begin = np.where(flag, np.maximum(tiles.key_begin[tile], split * SPLIT), tiles.key_begin[tile])
    end = np.where(flag, np.minimum(tiles.key_end[tile], (split + 1) * SPLIT), tiles.key_end[tile])
    return np.stack(
        [
            tiles.row_begin[tile],
            tiles.flat_begin[tile],
            tiles.flat_count[tile],
            tiles.table[tile],
            begin,
            end,
            flag,
            tiles.kind[tile],
        ],
        axis=1,
    )


def build_work(plan: AttendPlan, *, heads: int, kv_heads: int, head_dim: int, window: int, cut: Cut) -> HostWork:
    """Cut a step into work for `heads` query heads over `kv_heads`. O(rows + items), in numpy.

    ValueError if a page id is negative where a row of its sequence reads.
    """
    group = heads // kv_heads
    tables, offsets = table_offsets(plan)
    _check_tables(plan, tables, offsets, window)
    q_lens = np.diff(plan.q_indptr)
    simple = cut.simple and group <= SIMPLE_GROUP
    tiles = _tiles(plan, group, head_dim, window, offsets, simple)

    # The splits of each row, and so its partials if it has any.
    low = np.maximum(plan.positions - window + 1, 0) if window else np.zeros_like(plan.positions)
    first_split = low // SPLIT
    per_row = np.where(plan.positions < 0, 0, plan.positions // SPLIT - first_split + 1)
    per_seq = np.add.reduceat(np.append(per_row, 0), plan.q_indptr[:-1]) if plan.num_seqs else per_row[:0]
    per_seq = np.where(q_lens > 0, per_seq, 0)

    groups: list[tuple[Int32, int]] = []
    if cut.shared_prefix and not window:
        groups = shared_prefixes(plan, (q_lens > 0) & ~(simple & (q_lens == 1)))
    shared_splits = np.zeros(plan.num_seqs, np.int32)
    for members, splits in groups:
        shared_splits[members] = splits
    partial_seq = shared_splits > 0
    if len(tiles.owner) * kv_heads < cut.min_blocks:
        many = np.zeros(plan.num_seqs, bool)
        many[tiles.owner[(tiles.key_end - 1) // SPLIT > tiles.key_begin // SPLIT]] = True
        partial_seq |= many
    if int(per_seq[partial_seq].sum()) * heads > cut.max_partials:
        groups, partial_seq = [], np.zeros(plan.num_seqs, bool)
        shared_splits[:] = 0

    tiles.key_begin = np.maximum(tiles.key_begin, shared_splits[tiles.owner] * SPLIT)
    shared, shared_rows = _shared_tiles(plan, groups, group, head_dim, offsets)
    items = np.concatenate([_split(shared, np.ones(len(shared.owner), bool)), _split(tiles, partial_seq[tiles.owner])])
    length = items[:, 5] - items[:, 4]
    kind = items[:, 7].copy()
    items[:, 7] = 0
    order = np.lexsort((-length, kind))  # the longest first, so that no long item starts last
    whole = items[:, 6] == 0
    folds = bool((whole & (length > 0) & ((items[:, 5] - 1) // SPLIT > items[:, 4] // SPLIT)).any())

    rows = np.flatnonzero(np.repeat(partial_seq, q_lens))
    count = per_row[rows]
    base = np.cumsum(count) - count
    part_base = np.zeros(plan.num_rows, np.int32)
    part_base[rows] = base - first_split[rows]
    return HostWork(
        items=np.ascontiguousarray(items[order], dtype=np.int32),
        num_wide=int((kind == 0).sum()),
        num_narrow=int((kind == 1).sum()),
        num_simple=int((kind == 2).sum()),
        merges=np.stack([rows, base, count], axis=1).astype(np.int32),
        rows=np.concatenate([np.arange(plan.num_rows, dtype=np.int32), shared_rows]),
        part_base=part_base,
        num_partials=int(count.sum()),
        folds=folds,
    )


def _check_tables(plan: AttendPlan, tables: Int32, offsets: Int32, window: int) -> None:
    """Page ids must be 0 or more from the first key that a row of the sequence sees."""
    if not len(tables) or int(tables.min()) >= 0:
        return
    q_lens = np.diff(plan.q_indptr)
    start = np.maximum(plan.kv_lens - q_lens - window + 1, 0) if window else np.zeros_like(plan.kv_lens)
    at = np.flatnonzero(tables < 0)
    seq = np.searchsorted(offsets, at, side="right") - 1
    read = (at - offsets[seq] >= start[seq] // plan.page_size) & (q_lens[seq] > 0)
    if read.any():
        bad = int(read.argmax())
        raise ValueError(
            f"sequence {seq[bad]} has a page id of {tables[at[bad]]} where its rows read; expected 0 or more"
        )
