"""StepPlan: what one step computes, decided before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paged.kv.pages import Int64
from paged.kv.state import StatePool
from paged.models.base import ForwardBatch
from scheduler.request import Int32, Request, RequestState
from scheduler.slots import Slots


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """`count` rows of a request from position `first` on; the logits of each say how likely the next token was."""

    request: Request
    first: int
    count: int


@dataclass(slots=True)
class Decision:
    """What a step will compute: `num_tokens[i]` more of the request that arrived as `arrivals[i]`, in `slots[i]`."""

    slots: Int32
    num_tokens: Int32
    arrivals: Int64
    admitted: list[Request]
    preempted: list[Request]

    def still_running(self, state: Slots, preempt: Callable[[Request], object]) -> Decision | None:
        """What is left of it after requests have ended; None if nothing is, or it has to be decided anew.

        That is where somebody ended who would have filled pages: others who were admitted for this step may stand on
        them, so these are preempted.
        """
        alive = np.isin(self.slots, state.running) & (state.arrival[self.slots] == self.arrivals)
        if (self.num_tokens[~alive] > 1).any() or any(
            request.state != RequestState.RUNNING for request in self.admitted
        ):
            self.withdraw(preempt)
            return None
        if not alive.any():
            return None
        if not alive.all():
            self.slots, self.num_tokens = self.slots[alive], self.num_tokens[alive]
        return self

    def withdraw(self, preempt: Callable[[Request], object]) -> None:
        """Call off the step: `preempt` those who were admitted for it."""
        for request in self.admitted:
            if request.state == RequestState.RUNNING:
                preempt(request)


@dataclass(slots=True)
class StepPlan:
    """One step over S running requests: their rows as a ragged batch, and which of them get a token.

    slots         int32 [S]   in the order of the batch
    num_tokens    int32 [S]   rows of each
    sample_slots  int32 [R]   the slots whose last known token is among the rows: each gets one new token; one with d
                              drafts stands there d + 1 times, and gets those tokens that no wrong draft precedes
    positions     int32 [R]   the position that the new token will have
    drafted       whether there is a draft among the rows
    scored                    whose prompt tokens are scored; their logits come behind the R rows, in this order
    """

    slots: Int32
    num_tokens: Int32
    batch: ForwardBatch
    sample_slots: Int32
    positions: Int32
    drafted: bool = False
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    scored: list[ScoredRows] = field(default_factory=list[ScoredRows])

    @property
    def num_rows(self) -> int:
        return len(self.batch.tokens)


@dataclass(slots=True)
class StepResult:
    """What a commit did: one new token for each of `requests`, and the requests that ended with it.

    A request whose drafts were right stands there once for each of its tokens, in order. `rows[i]` is the sampled row
    that token i came from; None: row i.
    """

    requests: list[Request]
    tokens: Int32
    rows: Int32 | None = None
    finished: list[Request] = field(default_factory=list)

    def leave_out(self, gone: list[Request]) -> None:
        """Drop the tokens of requests that had ended while the step ran."""
        kept = [i for i, request in enumerate(self.requests) if request not in gone]
        self.rows = np.array(kept, np.int32) if self.rows is None else self.rows[kept]
        self.requests, self.tokens = [self.requests[i] for i in kept], self.tokens[kept]


def build_plan(
    state: Slots,
    slots: Int32,
    num_tokens: Int32,
    page_size: int,
    states: StatePool | None = None,
    drafts: Int32 | None = None,
) -> StepPlan:
    """The plan that computes the next `num_tokens[i]` tokens of each of `slots`, of which the last `drafts[i]` are
    guesses. O(rows + pages), vectorised.

    Every array is a copy: the scheduler's own state may move on while a device still reads the plan.
    """
    computed = state.computed[slots]
    ends = computed + num_tokens
    q_indptr = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(num_tokens, out=q_indptr[1:])
    if int(q_indptr[-1]) == len(slots):  # decodes only
        tokens = state.tokens[slots, computed]
    else:
        rows = np.arange(q_indptr[-1], dtype=np.int32)
        positions = rows + np.repeat(computed - q_indptr[:-1], num_tokens)
        tokens = state.tokens[np.repeat(slots, num_tokens), positions]
    columns = int(-(-int(ends.max()) // page_size))
    tables = state.page_table[:, slots, :columns]
    if drafts is None:
        done = ends == state.known[slots]
        logit_rows, sample_slots, positions = (q_indptr[1:] - 1)[done], slots[done], ends[done]
    else:
        done = ends - drafts == state.known[slots]
        counts = drafts[done] + 1
        behind = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(int(counts.sum()), dtype=np.int32)
        logit_rows = (np.repeat((q_indptr[1:] - 1)[done], counts) - behind).astype(np.int32)
        sample_slots = np.repeat(slots[done], counts)
        positions = (np.repeat(ends[done], counts) - behind).astype(np.int32)
    batch = ForwardBatch(tokens, q_indptr, ends, np.ascontiguousarray(tables), logit_rows)
    loops, windows = state.loops[slots], state.cache_window[slots]
    if loops.any():
        batch.loops = loops
    if windows.any():
        batch.cache_windows = windows
    if states is not None:  # a request's slot is also that of its state
        batch.state_slots, batch.states = slots.copy(), states
    return StepPlan(slots, num_tokens, batch, sample_slots, positions, drafts is not None)
