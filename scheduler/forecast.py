"""Forecast: what would become of a request if it were submitted now; nothing is touched to find out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paged.errors import Closed, DuplicateRequest, PagedError, QueueFull
from paged.sampling import SamplingParams
from scheduler.intake import Prompt, make_request
from scheduler.request import Request, RequestOptions
from scheduler.samples import sample_id

if TYPE_CHECKING:
    from scheduler.engine import Engine
    from scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Forecast:
    """What `Engine.admit` says of a request.

    num_prompt_tokens   of the prompt
    num_matched_tokens  of these, attached instead of computed, if it started now
    pages_needed        pages that it would take of those to be had, with what is reserved for its output
    pages_available     pages that an admission may take now
    num_ahead           waiting requests that would start before it, as the policy sees things now; an estimate under
                        "fair_share", since what the others will be charged is not known
    wait_steps          steps until it starts, estimated from what runs and what waits; 0: in the next one; None where
                        it cannot be said, or it would be refused
    wait_s              the same in seconds, at the pace of the latest steps; None before the first step
    reason              why it would be refused, in one sentence; "" if it would be accepted
    """

    num_prompt_tokens: int = 0
    num_matched_tokens: int = 0
    pages_needed: int = 0
    pages_available: int = 0
    num_ahead: int = 0
    wait_steps: int | None = None
    wait_s: float | None = None
    reason: str = ""

    @property
    def accepted(self) -> bool:
        """Whether `submit` would take it."""
        return not self.reason


def dry_run(engine: Engine, prompt: Prompt, params: SamplingParams | None, options: RequestOptions) -> Forecast:
    """See `Engine.admit`. The caller holds the lock."""
    scheduler, num_outputs = engine.scheduler, 1
    if isinstance(params, SamplingParams) and params.n > 1:
        params, num_outputs = params.sample(0), params.n
    try:
        request = make_request(engine, "", prompt, params, options, new=False)
    except Closed:
        raise
    except (PagedError, ValueError) as error:
        return Forecast(reason=str(error))
    try:  # in the order in which submit finds them
        scheduler.require_room(num_outputs, num_outputs * request.num_prompt)
        for i in range(num_outputs if options.get("request_id") is not None else 0):
            engine.delivery.require_new(sample_id(request.id, i))
        reason = ""
    except QueueFull as error:
        reason = str(error)
    except DuplicateRequest as error:
        return Forecast(reason=str(error))
    request.known = request.prompt
    if engine.runner.has_first(request):  # submit gives it the token at once, whichever it is: it attaches the prompt
        request.known = np.append(request.prompt, np.int32(0))
    try:
        return forecast(scheduler, request, reason)
    finally:
        if scheduler.checkpointer is not None:
            scheduler.checkpointer.forget(request)


def forecast(scheduler: Scheduler, request: Request, reason: str = "") -> Forecast:
    """What would become of a request that was checked but not queued. O(match + running log running)."""
    placer, state = scheduler.placer, scheduler.state
    scheduler.stamp(request)
    placer.reserve.begin()
    demand = placer.demand(request)
    pages = demand.num_pages
    available = scheduler.pool.num_available
    if state.num_running:
        pages += placer.reserve.growth(request)
        available = max(0, available - placer.spare)
    ahead = scheduler.policy.num_before(request, scheduler.waiting)
    steps = None if reason else _wait(scheduler, request, pages - available, ahead)
    pace = scheduler.pace.step_s
    seconds = None if steps is None or (pace is None and steps) else steps * (pace or 0.0)
    return Forecast(request.num_prompt, demand.matched, pages, available, ahead, steps, seconds, reason)


def _wait(scheduler: Scheduler, request: Request, pages_short: int, ahead: int) -> int | None:
    """Steps until enough running requests have ended for its slot and its pages, and the prompts ahead are computed.

    Each is taken to go on to its limit, or to what outputs of the namespace came to; the waiting ones are taken to be
    like the running ones.
    """
    state, waiting, size = scheduler.state, scheduler.waiting, scheduler.pool.page_size
    tokens_ahead = waiting.num_tokens * ahead // max(1, len(waiting))
    slots_short = ahead + 1 - state.num_free
    pages_short += -(-tokens_ahead // size) * request.view.num_groups
    quotas = scheduler.quotas
    held_back = quotas.active and (quotas.is_full(request.namespace) or quotas.room_for(request) < 0)
    slots = state.running
    if pages_short <= 0 and slots_short <= 0 and not held_back:
        return tokens_ahead // scheduler.config.max_num_batched_tokens
    if not len(slots):
        return None
    expected = scheduler.reserve.lengths.expected(request.namespace)
    reach = state.limit[slots]
    if expected is not None:
        reach = np.minimum(reach, np.maximum(state.prompt_len[slots] + expected, state.known[slots] + 1))
    left = np.maximum(reach - state.computed[slots], 1)
    order = np.argsort(left, kind="stable")
    left = left[order]
    freed = np.cumsum((state.uses[:, slots] * state.num_pages[slots]).sum(axis=0)[order])
    by_pages = int(np.searchsorted(freed, pages_short % int(freed[-1]))) if pages_short > 0 else -1
    rounds = max(0, pages_short) // int(freed[-1]), max(0, slots_short - 1) // len(left)
    by_slots = (slots_short - 1) % len(left) if slots_short > 0 else -1
    steps = [
        turns * int(left[-1]) + (int(left[i]) if i >= 0 else 0)
        for turns, i in zip(rounds, (by_pages, by_slots), strict=True)
    ]
    return max(*steps, int(left[0]), tokens_ahead // scheduler.config.max_num_batched_tokens)
