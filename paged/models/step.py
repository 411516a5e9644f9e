"""What the layers of one forward share, and where the rows of each of them lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from paged.kv.storage import PageStorage
from paged.models.base import ForwardBatch
from paged.models.rotary import Rotation
from paged.ops.dispatch import get_backend
from paged.ops.plan import AttendPlan, make_plan

if TYPE_CHECKING:
    from paged.models.dory import DoryModel
    from paged.models.llama import LlamaModel


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rows of a layer lie: its page group, its index in the group's pages, its window."""

    group: int
    index: int
    window: int


class Step:
    """The pages of a batch's rows, their rotation, and memory, so that large steps do not fetch fresh pages of memory
    in every operation."""

    __slots__ = ("_batch", "_kv_lens", "_plans", "_q_indptr", "_seqs", "act", "backend", "normed", "rotate", "storage")

    def __init__(
        self,
        model: LlamaModel | DoryModel,
        batch: ForwardBatch,
        storage: PageStorage,
        seqs: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Of all rows of the batch, or of those of the sequences marked in `seqs`, bool [S]."""
        self._batch, self._seqs = batch, seqs
        self._q_indptr, self._kv_lens = batch.q_indptr, batch.kv_lens
        if seqs is not None:
            self._q_indptr = np.append(0, np.diff(batch.q_indptr)[seqs].cumsum()).astype(np.int32)
            self._kv_lens = batch.kv_lens[seqs]
        config, rows = model.config, int(self._q_indptr[-1])
        self.backend = get_backend(model.device)
        self.storage = storage
        self._plans: dict[int, AttendPlan] = {}
        self.rotate = Rotation(model.rotary, self.plan(0).positions, config.num_heads + config.num_kv_heads)
        self.normed = torch.empty(rows, config.hidden_size, device=model.device)
        self.act = torch.empty(rows, config.intermediate_size, dtype=model.dtype, device=model.device)

    def plan(self, group: int) -> AttendPlan:
        """Where the rows lie in one page group; made when it is first asked for."""
        plan = self._plans.get(group)
        if plan is None:
            table = self._batch.page_tables[group]
            table = table if self._seqs is None else table[self._seqs]
            plan = make_plan(self.storage.page_size, self._q_indptr, self._kv_lens, table)
            self._plans[group] = plan
        return plan
