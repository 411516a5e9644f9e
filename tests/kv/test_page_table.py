"""PageTable: columns, copy-on-write forks, and where a position lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from byhand import expect_check_fails, ids

from paged.errors import OutOfPages
from paged.kv.page_table import PageTable
from paged.kv.pages import PagePool
from paged.kv.storage import PageStorage
from paged.spec import KVSpec

SPEC = KVSpec(layers=2, num_kv_heads=1, head_dim=8)


def stored_pool(num_pages: int, page_size: int = 4, max_pages: int | None = None) -> PagePool:
    """A pool with storage in which page p is filled with the number p + 1."""
    storage = PageStorage(SPEC, num_pages, page_size)
    storage.pages[:] = torch.arange(1, num_pages + 1).view(-1, 1, 1, 1, 1, 1)
    return PagePool(num_pages, page_size, storage, max_pages)


@pytest.mark.parametrize(("tokens", "columns"), [(0, 0), (1, 1), (4, 1), (5, 2), (9, 3)])
def test_a_table_has_a_column_for_each_started_page(tokens: int, columns: int) -> None:
    table = PageTable(PagePool(8, 4))
    table.ensure(0, tokens)
    assert table.num_pages == columns
    assert table.rows.tolist() == [list(range(columns))]
    table.check()


def test_ensure_takes_only_what_is_missing() -> None:
    pool = PagePool(8, 4)
    table = PageTable(pool)
    for end, columns in ((1, 1), (9, 3), (2, 3), (9, 3), (12, 3), (13, 4)):
        table.ensure(0, end)
        assert table.num_pages == columns
        assert pool.num_free == 8 - columns


def test_ensure_that_cannot_succeed_changes_nothing() -> None:
    pool = PagePool(3, 4)
    table = PageTable(pool)
    table.ensure(0, 6)
    with pytest.raises(OutOfPages):
        table.ensure(6, 17)
    assert table.rows.tolist() == [[0, 1]]
    assert pool.num_free == 1


def test_each_group_has_a_row_of_its_own() -> None:
    pool = PagePool(10, 4)
    table = PageTable(pool, num_groups=3)
    table.ensure(0, 5)
    assert table.rows.tolist() == [[0, 3], [1, 4], [2, 5]]
    table.ensure(5, 9)
    assert table.rows.tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert table.rows.flags.c_contiguous
    table.check()
    table.release()
    assert pool.num_free == 10


# Copy on write ----------------------------------------------------------------------------------------------------


def test_a_fork_shares_every_page_and_takes_none() -> None:
    pool = PagePool(8, 4)
    table = PageTable(pool)
    table.ensure(0, 7)
    fork = table.fork()
    assert fork.rows.tolist() == table.rows.tolist() == [[0, 1]]
    assert pool.refs[:3].tolist() == [2, 2, 0]
    assert pool.num_free == 6


def test_writing_into_a_shared_partial_page_copies_it_with_its_rows() -> None:
    pool = stored_pool(8)
    storage = pool.storage
    assert storage is not None
    table = PageTable(pool)
    table.ensure(0, 6)
    fork = table.fork()
    fork.ensure(6, 7)
    assert fork.rows.tolist() == [[0, 2]]
    assert table.rows.tolist() == [[0, 1]]
    assert pool.refs[:3].tolist() == [2, 1, 1]
    assert bool((storage.pages[2] == 2).all())  # what page 1 held
    fork.ensure(6, 7)  # it is its own by now
    assert fork.rows.tolist() == [[0, 2]]
    table.ensure(6, 8)  # nobody else is left on page 1
    assert table.rows.tolist() == [[0, 1]]


def test_appending_after_a_full_page_copies_nothing() -> None:
    pool = PagePool(8, 4)
    table = PageTable(pool)
    table.ensure(0, 8)
    fork = table.fork()
    fork.ensure(8, 9)
    table.ensure(8, 9)
    assert (table.rows.tolist(), fork.rows.tolist()) == ([[0, 1, 3]], [[0, 1, 2]])


def test_looking_at_nothing_copies_nothing() -> None:
    pool = PagePool(8, 4)
    table = PageTable(pool)
    table.ensure(0, 6)
    fork = table.fork()
    fork.ensure(6, 6)
    assert fork.rows.tolist() == [[0, 1]]


def test_a_copy_and_new_columns_are_taken_together_or_not_at_all() -> None:
    pool = stored_pool(4)
    table = PageTable(pool)
    table.ensure(0, 6)
    fork = table.fork()
    with pytest.raises(OutOfPages, match="3 pages were asked for, 2"):
        fork.ensure(6, 13)
    assert fork.rows.tolist() == [[0, 1]]
    assert pool.refs[:2].tolist() == [2, 2]
    fork.ensure(6, 12)
    assert fork.rows.tolist() == [[0, 2, 3]]
    fork.check()


def test_a_copy_that_fails_gives_its_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = stored_pool(8)
    table = PageTable(pool)
    table.ensure(0, 6)
    fork = table.fork()

    class Broken:
        def copy_pages(self, *_: object) -> None:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr("paged.kv.page_table.get_backend", lambda _: Broken())
    with pytest.raises(RuntimeError, match="the device is gone"):
        fork.ensure(6, 13)
    assert fork.rows.tolist() == [[0, 1]]
    assert pool.num_free == 6
    pool.check()


def test_all_groups_of_a_shared_column_are_copied() -> None:
    pool = PagePool(8, 4)
    table = PageTable(pool, 2)
    table.ensure(0, 3)
    fork = table.fork()
    fork.ensure(3, 5)
    assert fork.rows.tolist() == [[2, 4], [3, 5]]
    assert table.rows.tolist() == [[0], [1]]
    assert pool.refs[:6].tolist() == [1] * 6


def test_a_reader_keeps_the_rows_it_was_given() -> None:
    pool = PagePool(8, 4)
    table = PageTable(pool)
    table.ensure(0, 6)
    fork = table.fork()
    before = fork.rows
    pool.exchange(0, ids(0), pool.alloc(1))
    assert fork.rows.tolist() == table.rows.tolist() == [[2, 1]]
    assert before.tolist() == [[0, 1]]
    fork.ensure(6, 7)
    assert fork.rows.tolist() == [[2, 0]]
    assert before.tolist() == [[0, 1]]


def test_a_copy_survives_growth_of_the_pool() -> None:
    pool = stored_pool(2, max_pages=8)
    storage = pool.storage
    assert storage is not None
    table = PageTable(pool)
    table.ensure(0, 7)
    fork = table.fork()
    fork.ensure(7, 9)
    assert storage.num_pages == pool.num_pages == 4
    assert fork.rows.tolist() == [[0, 2, 3]]
    assert bool((storage.pages[2] == 2).all())


# Moving, cutting, releasing ---------------------------------------------------------------------------------------


def test_an_exchange_moves_the_references_of_every_holder() -> None:
    pool = PagePool(8, 4)
    mine, theirs = PageTable(pool), PageTable(pool)
    mine.ensure(0, 8)
    theirs.ensure(0, 8)
    fork = mine.fork()
    pool.exchange(1, mine.rows[:, 1].copy(), theirs.rows[:, 1].copy())
    assert mine.rows.tolist() == fork.rows.tolist() == [[0, 3]]
    assert theirs.rows.tolist() == [[2, 3]]
    assert pool.refs[:4].tolist() == [2, 0, 1, 3]
    pool.check()


def test_an_exchange_leaves_other_columns_groups_and_places_alone() -> None:
    pool = PagePool(8, 4)
    mine, short = PageTable(pool, 2), PageTable(pool, 2)
    mine.ensure(0, 8)  # [[0, 2], [1, 3]]
    short.ensure(0, 4)  # [[4], [5]]
    before = pool.refs.copy()
    pool.exchange(0, np.array([2, 3], np.int32), np.array([4, 5], np.int32))  # they stand in column 1
    pool.exchange(1, np.array([2, -1], np.int32), np.array([2, 5], np.int32))  # equal, and a place that is left
    assert mine.rows.tolist() == [[0, 2], [1, 3]]
    assert np.array_equal(pool.refs, before)
    pool.exchange(0, np.array([0, -1], np.int32), np.array([4, 5], np.int32))
    assert mine.rows.tolist() == [[4, 2], [1, 3]]
    assert pool.refs[:6].tolist() == [0, 1, 1, 1, 2, 1]


def test_append_takes_over_references_that_were_taken_for_it() -> None:
    pool = PagePool(8, 4)
    table = PageTable(pool, 2)
    table.append(pool.alloc(4).reshape(2, 2))
    assert table.rows.tolist() == [[0, 1], [2, 3]]
    assert pool.refs[:4].tolist() == [1] * 4
    table.check()


def test_truncate_gives_back_the_columns_behind() -> None:
    pool = PagePool(8, 4)
    table = PageTable(pool, 2)
    table.ensure(0, 12)
    table.truncate(1)
    assert table.rows.tolist() == [[0], [1]]
    assert pool.num_free == 6
    table.truncate(5)
    assert table.num_pages == 1
    assert table.rows.flags.c_contiguous


def test_releasing_twice_gives_back_once() -> None:
    pool = PagePool(8, 4)
    table = PageTable(pool)
    table.ensure(0, 12)
    fork = table.fork()
    for _ in range(2):
        table.release()
        assert (table.num_pages, pool.num_free) == (0, 5)
    fork.release()
    assert pool.num_free == 8
    pool.check()


def test_a_released_table_can_be_used_again() -> None:
    table = PageTable(PagePool(4, 4))
    table.ensure(0, 4)
    table.release()
    table.ensure(0, 5)
    assert table.num_pages == 2


# Where a position lies --------------------------------------------------------------------------------------------


def test_positions_follow_the_table_and_not_the_ids_of_their_neighbours() -> None:
    pool = PagePool(16, 16)
    pool.alloc(16)
    table = PageTable(pool)
    table.append(ids(12, 4, 9, 3, 7)[None])
    for position in range(80):
        assert table.slot(position) == [12, 4, 9, 3, 7][position // 16] * 16 + position % 16


def test_two_allocations_never_overlap() -> None:
    pool = PagePool(6, 4)
    first, second = PageTable(pool), PageTable(pool)
    first.ensure(0, 9)
    second.ensure(0, 9)
    slots = [table.slot(p) for table in (first, second) for p in range(12)]
    assert len(set(slots)) == 24
    assert [s for s in slots if s % 4 == 0] == [0, 4, 8, 12, 16, 20]


# check() ----------------------------------------------------------------------------------------------------------


def test_check_notices_a_page_that_stands_twice() -> None:
    table = PageTable(PagePool(4, 4), 2)
    table.ensure(0, 8)
    table._rows[1, 1] = table._rows[0, 0]
    expect_check_fails(table, "twice")


def test_check_notices_a_freed_page() -> None:
    pool = PagePool(4, 4)
    table = PageTable(pool)
    table.ensure(0, 8)
    pool.release(table.rows[0, :1])
    expect_check_fails(table, "freed")


def test_an_empty_table_is_sound() -> None:
    table = PageTable(PagePool(4, 4), 3)
    table.check()
    assert table.rows.shape == (3, 0)
    assert table.rows.dtype == np.int32


# Groups that a sequence uses --------------------------------------------------------------------------------------


def some_groups(*groups: int, num_groups: int = 4, pages: int = 12) -> tuple[PagePool, PageTable]:
    pool = PagePool(pages, 4)
    return pool, PageTable(pool, num_groups, ids(*groups))


def test_only_the_groups_in_use_get_pages() -> None:
    pool, table = some_groups(0, 2)
    table.ensure(0, 7)
    assert table.rows.tolist() == [[0, 2], [-1, -1], [1, 3], [-1, -1]]
    assert table.ids.tolist() == [0, 2, 1, 3] and pool.num_free == 8
    table.check()


def test_a_copy_is_made_in_the_groups_in_use_alone() -> None:
    pool, table = some_groups(1, 3)
    table.ensure(0, 6)
    fork = table.fork()
    assert fork.groups.tolist() == [1, 3]
    fork.ensure(6, 9)
    assert table.rows.tolist() == [[-1, -1], [0, 2], [-1, -1], [1, 3]]
    assert fork.rows.tolist() == [[-1] * 3, [0, 4, 6], [-1] * 3, [1, 5, 7]]
    assert pool.refs[:8].tolist() == [2, 2, 1, 1, 1, 1, 1, 1]
    for one in (table, fork):
        one.check()


def test_narrowing_gives_back_the_pages_of_the_other_groups() -> None:
    pool, table = some_groups(0, 1, 2)
    table.ensure(0, 8)
    fork = table.fork()
    table.narrow(ids(0, 1))
    assert table.rows.tolist() == [[0, 3], [1, 4], [-1, -1], [-1, -1]]
    assert fork.rows.tolist() == [[0, 3], [1, 4], [2, 5], [-1, -1]]
    assert pool.refs[:6].tolist() == [2, 2, 1, 2, 2, 1]
    table.ensure(8, 9)
    assert table.rows[:, 2].tolist() == [6, 7, -1, -1]
    table.check()


def test_widening_takes_fresh_pages_in_every_column() -> None:
    pool, table = some_groups(0)
    table.ensure(0, 8)
    table.widen(ids(0, 2, 3))
    assert table.rows.tolist() == [[0, 1], [-1, -1], [2, 3], [4, 5]]
    assert table.groups.tolist() == [0, 2, 3]
    table.check()
    table.release()
    assert pool.num_free == 12


def test_widening_without_room_changes_nothing() -> None:
    pool, table = some_groups(0, pages=5)
    table.ensure(0, 8)
    with pytest.raises(OutOfPages):
        table.widen(ids(0, 1, 2))
    assert table.rows.tolist() == [[0, 1], *[[-1, -1]] * 3]
    assert table.groups.tolist() == [0] and pool.num_free == 3


def test_columns_behind_go_in_the_groups_in_use() -> None:
    pool, table = some_groups(0, 3)
    table.ensure(0, 12)
    table.truncate(1)
    assert table.rows.tolist() == [[0], [-1], [-1], [1]]
    assert pool.num_free == 10


def test_check_notices_a_page_of_a_group_that_is_not_in_use() -> None:
    _, table = some_groups(0, 2)
    table.ensure(0, 4)
    table.groups = ids(0)
    expect_check_fails(table, "a group that it does not use")
