"""StepExtras: what some requests need of a step beside their rows."""

from __future__ import annotations

import numpy as np

from scheduler.request import Int32, Request
from scheduler.step import ScoredRows, StepPlan


class StepExtras:
    """The running requests that ask for more than their next token, and what each plan holds for them: logits of the
    rows that score a prompt, embeddings of media.

    A request is here until its prompt is computed. Costs nothing where there is none.
    """

    def __init__(self) -> None:
        self._of: dict[int, Request] = {}  # by slot

    def place(self, request: Request) -> None:
        """`request` has got a slot."""
        if request.scores or request.media:
            self._of[request.slot] = request

    def leave(self, slot: int) -> None:
        """The slot is free, or its prompt computed."""
        self._of.pop(slot, None)

    def extend(self, plan: StepPlan) -> None:
        """Add to a plan what its requests need. O(rows that are scored + media spans)."""
        if not self._of:
            return
        batch, rows = plan.batch, list[Int32]()
        for i in np.flatnonzero(np.isin(plan.slots, list(self._of))).tolist():
            slot, end = int(plan.slots[i]), int(batch.kv_lens[i])
            request, start = self._of[slot], end - int(plan.num_tokens[i])
            if start >= request.num_prompt:
                self.leave(slot)
                continue
            row = int(batch.q_indptr[i]) - start
            for span in request.media:
                at, values = span.rows(start, end)
                if len(values):
                    batch.media.append((row + at, values))
            first, last = max(start, len(request.scored)), min(end, request.num_prompt - 1)
            if request.scores and first < last:
                plan.scored.append(ScoredRows(request, first, last - first))
                rows.append(np.arange(row + first, row + last, dtype=np.int32))
        if rows:
            batch.logit_rows = np.concatenate([batch.logit_rows, *rows])
