"""What the layers of one forward share, and where the rows of each of them lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from paged.kv.storage import PageStorage
from paged.models.base import ForwardBatch
from paged.models.rotary import Rotation
from paged.ops.dispatch import get_backend
from paged.ops.plan import AttendPlan, Int32, make_plan

if TYPE_CHECKING:
    from paged.models.dory import DoryModel
    from paged.models.hybrid import HybridModel
    from paged.models.llama import LlamaModel
    from paged.models.store_h import Projection


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rows of a layer lie: its page group, its index in the group's pages, its window."""

    group: int
    index: int
    window: int


@dataclass(slots=True)
class _Part:
    """The sequences of a batch that have one cache window, their rows, and where those lie, by page group.

    Of the only part of a batch the window is all that is used.
    """

    window: int
    seqs: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    plans: dict[int, AttendPlan] = field(default_factory=dict[int, AttendPlan])


def _narrower(window: int, other: int) -> int:
    """The smaller of two windows; 0 is none."""
    return min(window, other) if window and other else window or other


class Step:
    """The pages of a batch's rows, their rotation, and memory, so that large steps do not fetch fresh pages of memory
    in every operation."""

    __slots__ = (
        "_batch",
        "_parts",
        "_plans",
        "_seqs",
        "act",
        "backend",
        "cache_windows",
        "kv_lens",
        "normed",
        "projections",
        "q_indptr",
        "rotate",
        "storage",
    )

    def __init__(
        self,
        model: LlamaModel | DoryModel | HybridModel,
        batch: ForwardBatch,
        storage: PageStorage,
        seqs: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Of all rows of the batch, or of those of the sequences marked in `seqs`, bool [S]."""
        self._batch, self._seqs = batch, seqs
        self.q_indptr, self.kv_lens = batch.q_indptr, batch.kv_lens
        if seqs is not None:
            self.q_indptr = np.append(0, np.diff(batch.q_indptr)[seqs].cumsum()).astype(np.int32)
            self.kv_lens = batch.kv_lens[seqs]
        config, rows = model.config, int(self.q_indptr[-1])
        self.backend = get_backend(model.device)
        self.storage = storage
        self._plans: dict[int, AttendPlan] = {}
        self.cache_windows = (
            batch.cache_windows if seqs is None or batch.cache_windows is None else batch.cache_windows[seqs]
        )
        self._parts = self._by_window(self.cache_windows)
        self.projections: dict[int, Projection] = {}  # by page group, where pages hold the inputs of blocks
        self.rotate = Rotation(model.rotary, self.plan(0).positions, config.num_heads + config.num_kv_heads)
        self.normed = torch.empty(rows, config.hidden_size, device=model.device)
        self.act = torch.empty(rows, config.intermediate_size, dtype=model.dtype, device=model.device)

    def _by_window(self, windows: Int32 | None) -> list[_Part]:
        """The sequences of each cache window; mostly all have one."""
        if windows is None:
            return [_Part(0)]
        found: list[int] = np.unique(windows).tolist()
        if len(found) == 1:
            return [_Part(found[0])]
        counts = np.diff(self.q_indptr)
        parts: list[_Part] = []
        for window in found:
            seqs = windows == window
            parts.append(_Part(window, seqs, torch.from_numpy(np.flatnonzero(np.repeat(seqs, counts)))))
        return parts

    def attend(self, q: torch.Tensor, place: Place, scale: float) -> torch.Tensor:
        """Attention of `q [T, heads, head_dim]` over the pages of a layer, each sequence within its cache window."""
        attend, storage = self.backend.attend, self.storage
        if len(self._parts) == 1:
            window = _narrower(place.window, self._parts[0].window)
            return attend(q, storage, place.index, self.plan(place.group), scale=scale, window=window)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in self._parts:
            plan = part.plans.get(place.group)
            if plan is None:
                table = self.table(place.group)[part.seqs]
                indptr = np.append(0, np.diff(self.q_indptr)[part.seqs].cumsum()).astype(np.int32)
                plan = make_plan(self.storage.page_size, indptr, self.kv_lens[part.seqs], table)
                part.plans[place.group] = plan
            rows = part.rows.to(q.device)
            window = _narrower(place.window, part.window)
            mixed = attend(q.index_select(0, rows), storage, place.index, plan, scale=scale, window=window)
            out.index_copy_(0, rows, mixed)
        return out

    def table(self, group: int) -> Int32:
        """Page ids of the sequences in one group, int32 [S, columns]."""
        table = self._batch.page_tables[group]
        return table if self._seqs is None else table[self._seqs]

    def plan(self, group: int) -> AttendPlan:
        """Where the rows lie in one page group; made when it is first asked for."""
        plan = self._plans.get(group)
        if plan is None:
            plan = make_plan(self.storage.page_size, self.q_indptr, self.kv_lens, self.table(group))
            self._plans[group] = plan
        return plan
