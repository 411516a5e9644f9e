"""32-bit page offsets: a page id times the values of a page must not wrap."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import ids

from paged.errors import UnsupportedShape
from paged.kv.page_table import PageTable
from paged.kv.pages import MAX_PAGES, PagePool
from paged.ops.plan import make_plan


@pytest.mark.parametrize("page", [5_461, 65_530, 65_536, 65_545, 131_072, 2**26, 2**27 + 3, MAX_PAGES - 1])
@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_a_slot_is_page_times_page_size_in_64_bits(page: int, page_size: int) -> None:
    table = PageTable(PagePool(1, page_size))
    table._rows = ids(page, page - 1)[None]
    want = [page * page_size, (page - 1) * page_size + page_size - 1]
    assert [table.slot(0), table.slot(2 * page_size - 1)] == want
    assert isinstance(table.slot(0), int)
    table._rows = np.zeros((1, 0), np.int32)


@pytest.mark.parametrize("page", [65_536, 2**27 + 3, MAX_PAGES - 1])
def test_the_slots_of_a_step_are_64_bits_too(page: int) -> None:
    plan = make_plan(16, ids(0, 3), ids(18), ids(page, page - 1)[None])
    assert plan.slots.dtype == np.int64
    assert plan.slots.tolist() == [page * 16 + 15, (page - 1) * 16, (page - 1) * 16 + 1]


def test_more_pages_than_ids_are_refused_with_the_limit() -> None:
    with pytest.raises(UnsupportedShape, match=str(2**31 - 1)):
        PagePool(2**31)
