"""How a step is cut: every key of every row once, partials without a gap, prefixes shared where they are."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.ops.cuda_work import NARROW_ROWS, SPLIT, Cut, HostWork, build_work, shared_prefixes, table_offsets, wide_rows
from paged.ops.plan import AttendPlan, make_plan

WIDE, NARROW, SIMPLE = 0, 1, 2


def plan_of(kv_lens: list[int], q_lens: list[int], page_size: int = 16, shared: int = 0) -> AttendPlan:
    """Sequences on pages of their own, but for the first `shared` tokens, which lie on those of the first."""
    columns = [-(-n // page_size) for n in kv_lens]
    table = np.full((len(kv_lens), max([1, *columns])), -5, np.int32)
    for s, count in enumerate(columns):
        table[s, :count] = np.arange(count) + 1000 * s
        table[s, : min(count, shared // page_size)] = np.arange(min(count, shared // page_size))
    indptr = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    return make_plan(page_size, indptr, np.array(kv_lens, np.int32), table)


def kinds(work: HostWork) -> list[int]:
    return [WIDE] * work.num_wide + [NARROW] * work.num_narrow + [SIMPLE] * work.num_simple


def verify(plan: AttendPlan, work: HostWork, group: int, head_dim: int, window: int) -> None:
    """What the kernels rely on, row by row: the definition, in plain loops."""
    tables, _ = table_offsets(plan)
    seq_of = np.repeat(np.arange(plan.num_seqs), np.diff(plan.q_indptr))
    seen: Counter[tuple[int, int, int]] = Counter()  # (row, head in group, split) -> items
    whole: Counter[tuple[int, int]] = Counter()
    assert len(work.items) == len(kinds(work))
    for item, kind in zip(work.items.tolist(), kinds(work), strict=True):
        row_begin, flat_begin, flat_count, table, begin, end, partial, reserved = item
        assert reserved == 0
        assert 1 <= flat_count <= {WIDE: wide_rows(head_dim), NARROW: NARROW_ROWS, SIMPLE: group}[kind]
        if kind == SIMPLE:
            assert flat_begin == 0 and flat_count == group
        if partial:
            assert begin // SPLIT == (end - 1) // SPLIT and begin < end
        elif begin < end and begin // SPLIT != (end - 1) // SPLIT:
            assert work.folds
        visible: set[int] = set()
        for flat in range(flat_begin, flat_begin + flat_count):
            row = int(work.rows[row_begin + flat // group])
            position = int(plan.positions[row])
            low = max(0, position - window + 1) if window else 0
            keys = range(max(low, begin), min(position + 1, end))
            visible.update(keys)
            s = seq_of[row]
            if len(keys):  # the item's page table holds this row's pages
                pages = np.unique(np.array(keys) // plan.page_size)
                assert (tables[table + pages] == plan.page_table[s, pages]).all()
                assert (tables[table + pages] >= 0).all()
            if partial:
                split = begin // SPLIT
                if low < (split + 1) * SPLIT and position >= split * SPLIT:
                    assert keys == range(max(low, split * SPLIT), min(position + 1, (split + 1) * SPLIT))
                    seen[row, flat % group, split] += 1
            else:
                assert keys == range(low, position + 1)
                whole[row, flat % group] += 1
        assert visible == set(range(begin, end)), "an item loads keys that no row of it sees"
    merges = {row: (base, count) for row, base, count in work.merges.tolist()}
    assert len(merges) == len(work.merges)
    used: set[int] = set()
    for row in range(plan.num_rows):
        position = int(plan.positions[row])
        low = max(0, position - window + 1) if window else 0
        for head in range(group):
            assert whole[row, head] == (row not in merges)
        if row not in merges:
            continue
        base, count = merges[row]
        splits = range(low // SPLIT, position // SPLIT + 1) if position >= 0 else range(0)
        assert count == len(splits)
        for split in splits:
            assert all(seen[row, head, split] == 1 for head in range(group))
            number = int(work.part_base[row]) + split
            assert base <= number < base + count
            used.add(number)
    assert used == set(range(work.num_partials))
    assert sum(seen.values()) == work.num_partials * group


LENGTHS = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 70)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    group=st.sampled_from([1, 2, 3, 4, 8, 17, 71]),
    head_dim=st.sampled_from([64, 256]),
    page_size=st.sampled_from([1, 7, 16, 300]),
    window=st.sampled_from([0, 0, 1, 5, 256, 300]),
    shared=st.sampled_from([0, 256, 300, 512, 700]),
    cut=st.builds(
        Cut,
        min_blocks=st.sampled_from([0, 8, 1 << 20]),
        max_partials=st.sampled_from([1 << 20, 100, 0]),
        shared_prefix=st.booleans(),
        simple=st.booleans(),
    ),
)
def test_every_key_of_every_row_is_seen_once(lengths, group, head_dim, page_size, window, shared, cut) -> None:
    kv_lens = [kv for kv, _ in lengths]
    q_lens = [min(q, kv) if kv else min(q, 1) for kv, q in lengths]
    plan = plan_of(kv_lens, q_lens, page_size, shared)
    work = build_work(plan, heads=2 * group, kv_heads=2, head_dim=head_dim, window=window, cut=cut)
    verify(plan, work, group, head_dim, window)


@pytest.mark.parametrize(
    "kv_lens, q_lens, shared, page_size, want",
    [
        ([600, 600], [1, 1], 512, 16, [([0, 1], 2)]),
        ([600, 600], [1, 1], 511, 16, [([0, 1], 1)]),  # 31 whole pages are shared
        ([600, 600], [1, 1], 255, 16, []),
        ([600, 600], [1, 1], 512, 512, [([0, 1], 2)]),
        ([600, 600], [1, 1], 300, 300, [([0, 1], 1)]),
        ([600], [1], 512, 16, []),
        ([600, 600], [1, 300], 512, 16, [([0, 1], 1)]),  # the second one's first row, at 300, sees one split
        ([600, 600], [1, 400], 512, 16, []),  # its first row, at 200, does not see all of the first split
        ([512, 512], [1, 1], 512, 16, [([0, 1], 2)]),  # the row at 511 sees both splits
        ([511, 511], [1, 1], 496, 16, [([0, 1], 1)]),
        ([600, 0, 600], [1, 1, 1], 512, 16, [([0, 2], 2)]),
        ([600, 600, 600], [1, 0, 1], 512, 16, [([0, 2], 2)]),  # a sequence without rows takes no part
    ],
)
def test_prefixes_are_shared_in_whole_splits(kv_lens, q_lens, shared, page_size, want) -> None:
    plan = plan_of(kv_lens, q_lens, page_size, shared)
    got = shared_prefixes(plan, np.diff(plan.q_indptr) > 0)
    assert [(members.tolist(), splits) for members, splits in got] == want


def test_two_families_of_sequences_share_two_prefixes() -> None:
    plan = plan_of([600, 600, 600, 600], [1, 1, 1, 1], shared=0)
    plan.page_table[2, :16] = plan.page_table[0, :16]
    plan.page_table[3, :32] = plan.page_table[1, :32]
    got = shared_prefixes(plan, np.ones(4, bool))
    assert sorted((members.tolist(), splits) for members, splits in got) == [([0, 2], 1), ([1, 3], 2)]


def test_a_member_with_a_short_prefix_does_not_shorten_that_of_many() -> None:
    plan = plan_of([2000] * 5, [1] * 5, shared=1536)
    plan.page_table[4, 16:] = np.arange(109) + 9000  # shares one split of six
    got = shared_prefixes(plan, np.ones(5, bool))
    assert [(members.tolist(), splits) for members, splits in got] == [([0, 1, 2, 3], 6)]


def test_a_shared_prefix_is_read_once_for_all_rows() -> None:
    plan = plan_of([600] * 8, [1] * 8, shared=512)
    read = {}
    for shared in (True, False):
        cut = Cut(min_blocks=0, shared_prefix=shared)
        items = build_work(plan, heads=2, kv_heads=1, head_dim=64, window=0, cut=cut).items
        read[shared] = int((items[:, 5] - items[:, 4]).sum())
    assert read == {True: 512 + 8 * 88, False: 8 * 600}


def test_a_window_shares_no_prefix() -> None:
    plan = plan_of([600, 600], [1, 1], shared=512)
    work = build_work(plan, heads=1, kv_heads=1, head_dim=64, window=599, cut=Cut(min_blocks=0))
    assert len(work.merges) == 0 and len(work.items) == 2


def test_many_blocks_are_not_split_and_few_are() -> None:
    few, many = plan_of([2000], [1]), plan_of([2000] * 40, [1] * 40)
    for plan, partials in ((few, 8), (many, 0)):
        work = build_work(plan, heads=8, kv_heads=8, head_dim=128, window=0, cut=Cut(min_blocks=264))
        assert work.num_partials == partials
        assert work.folds == (partials == 0)


def test_no_more_partials_than_allowed() -> None:
    plan = plan_of([2000], [60])
    for limit, partials in ((60 * 8 * 4, 60 * 8), (60 * 8 * 4 - 1, 0)):
        cut = Cut(min_blocks=1 << 20, max_partials=limit)
        assert build_work(plan, heads=4, kv_heads=1, head_dim=64, window=0, cut=cut).num_partials == partials


def test_the_longest_item_comes_first() -> None:
    plan = plan_of([100, 900, 500], [1, 1, 1])
    items = build_work(plan, heads=1, kv_heads=1, head_dim=64, window=0, cut=Cut(min_blocks=0)).items
    assert (items[:, 5] - items[:, 4]).tolist() == [900, 500, 100]


def test_a_page_id_below_zero_is_refused_where_a_row_reads_it() -> None:
    plan = plan_of([40, 40], [1, 1])
    plan.page_table[1, 1] = -3
    with pytest.raises(ValueError, match="sequence 1 has a page id of -3 where its rows read"):
        build_work(plan, heads=1, kv_heads=1, head_dim=64, window=0, cut=Cut())
    build_work(plan, heads=1, kv_heads=1, head_dim=64, window=8, cut=Cut())  # rows read positions 32..39 only


def test_no_sequences_and_no_rows_give_no_work() -> None:
    for kv_lens, q_lens in (([], []), ([5], [0])):
        work = build_work(plan_of(kv_lens, q_lens), heads=2, kv_heads=1, head_dim=64, window=0, cut=Cut())
        assert len(work.items) == len(work.merges) == work.num_partials == 0
