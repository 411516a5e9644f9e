"""Where the rows of one step lie: the part of a batch that the kernels read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class AttendPlan:
    """Layout of one step for one page group. S sequences, T new rows in all, prefill chunks and decodes alike.

    Row r of sequence s is `q_indptr[s] <= r < q_indptr[s + 1]`; the last of them has position `kv_lens[s] - 1`,
    so that causal masks align to the bottom right. Position p of sequence s lies in page
    `page_table[s, p // page_size]` at offset `p % page_size`.

    q_indptr    int32 [S + 1]
    kv_lens     int32 [S]             positions of the sequence once this step's rows are appended
    page_table  int32 [S, max_pages]  C-contiguous; columns past ceil(kv_len / page_size) are never read
    positions   int32 [T]
    slots       int64 [T]             page * page_size + offset of each new row; -1: the row is not stored
    """

    page_size: int
    q_indptr: Int32
    kv_lens: Int32
    page_table: Int32
    positions: Int32
    slots: Int64
    handle: Any = field(default=None)  # what a backend prepares once per step (device copies, work items)

    @property
    def num_seqs(self) -> int:
        return len(self.kv_lens)

    @property
    def num_rows(self) -> int:
        return len(self.positions)


def make_plan(page_size: int, q_indptr: Int32, kv_lens: Int32, page_table: Int32) -> AttendPlan:
    """The plan of a step from its lengths and page table; positions and slots follow from them. O(T)."""
    q_lens = np.diff(q_indptr)
    rows = int(q_indptr[-1])
    seq = np.repeat(np.arange(len(kv_lens)), q_lens)
    positions = (np.arange(rows) + np.repeat(kv_lens - q_indptr[1:], q_lens)).astype(np.int32)
    pages = page_table[seq, positions // page_size].astype(np.int64)
    slots = pages * page_size + positions % page_size
    return AttendPlan(page_size, q_indptr, kv_lens, page_table, positions, slots)
