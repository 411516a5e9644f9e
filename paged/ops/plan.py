"""Where the rows of one step lie: the part of a batch that the kernels read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paged.errors import UnsupportedShape

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_DTYPES = {"q_indptr": _INT32, "kv_lens": _INT32, "page_table": _INT32, "positions": _INT32, "slots": _INT64}


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
    """The plan of a step from its lengths and page table; positions and slots follow from them. O(T).

    A row at position -1 (a padding sequence of length 0), or whose page id is negative, gets slot -1.
    """
    q_lens = np.diff(q_indptr)
    rows = int(q_indptr[-1])
    seq = np.repeat(np.arange(len(kv_lens)), q_lens)
    positions = (np.arange(rows) + np.repeat(kv_lens - q_indptr[1:], q_lens)).astype(np.int32)
    pages = page_table[seq, np.maximum(positions, 0) // page_size].astype(np.int64)
    slots = np.where((positions < 0) | (pages < 0), -1, pages * page_size + positions % page_size)
    return AttendPlan(page_size, q_indptr, kv_lens, page_table, positions, slots)


def check_plan(plan: AttendPlan, num_pages: int) -> None:
    """Refuse a plan whose arrays have another dtype or shape than the class says, or that leaves the pool. O(T).

    TypeError for a dtype (int64 lengths are refused, never reinterpreted), UnsupportedShape for a shape or length,
    ValueError for a slot or a page id outside `0..num_pages - 1`. Page ids are checked where a kernel may read them;
    with a window that is decided by the call, so an id below 0 in front of a window is no error here.
    """
    for name, dtype in _DTYPES.items():
        array = getattr(plan, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype:
            raise TypeError(f"plan.{name} must be an {dtype.name} array, got {getattr(array, 'dtype', type(array))}")
        if not array.flags.c_contiguous:
            raise UnsupportedShape(f"plan.{name} must be C-contiguous; pass np.ascontiguousarray of it")
    seqs, rows = len(plan.kv_lens), len(plan.positions)
    table = plan.page_table
    if plan.q_indptr.shape != (seqs + 1,) or plan.slots.shape != (rows,) or table.ndim != 2 or len(table) != seqs:
        raise UnsupportedShape(
            f"a plan of {seqs} sequences and {rows} rows needs q_indptr [{seqs + 1}], slots [{rows}] and a page table "
            f"[{seqs}, pages], got {plan.q_indptr.shape}, {plan.slots.shape} and {table.shape}"
        )
    q_lens = np.diff(plan.q_indptr)
    if plan.q_indptr[0] != 0 or plan.q_indptr[-1] != rows or (seqs and int(q_lens.min()) < 0):
        raise UnsupportedShape(f"plan.q_indptr must rise from 0 to the {rows} rows, got {plan.q_indptr.tolist()[:8]}")
    if not seqs:
        return
    # A padding sequence has length 0 and one row at position -1; every other row has a position of its own.
    short = (plan.kv_lens < q_lens) & ~((plan.kv_lens == 0) & (q_lens == 1))
    if short.any():
        s = int(short.argmax())
        raise UnsupportedShape(f"sequence {s} has {q_lens[s]} new rows but a length of only {plan.kv_lens[s]}")
    longest = int(plan.kv_lens.max())
    if longest > table.shape[1] * plan.page_size:
        raise UnsupportedShape(
            f"{longest} positions need {-(-longest // plan.page_size)} pages, the page table has "
            f"{table.shape[1]} columns of {plan.page_size} tokens"
        )
    used = np.arange(table.shape[1]) * plan.page_size < plan.kv_lens[:, None]
    if int(table.max(where=used, initial=-1)) >= num_pages:
        raise ValueError(f"page ids must be below {num_pages}, got {int(table.max(where=used, initial=-1))}")
    if rows and (int(plan.slots.min()) < -1 or int(plan.slots.max()) >= num_pages * plan.page_size):
        raise ValueError(
            f"slots must be -1 or below {num_pages * plan.page_size}, got {plan.slots.min()} to {plan.slots.max()}"
        )
