"""Admission: which waiting requests start in a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from paged.kv.state import StatePool
from paged.prefix.cache import PrefixCache
from scheduler.checkpointer import Checkpointer
from scheduler.chunking import NO_CAP
from scheduler.config import SchedulerConfig
from scheduler.placement import Placement, Placer
from scheduler.queue import WaitingQueue
from scheduler.quotas import Quotas
from scheduler.request import Request, RequestState
from scheduler.sharing import StepSharing
from scheduler.slots import Slots
from scheduler.stats import SchedulerStats


@dataclass(slots=True)
class Admitted:
    """What one pass over the queue did: the requests that got a slot, in order, and those that failed on the way."""

    requests: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, Exception]] = field(default_factory=list)


class Admission:
    """Starts waiting requests in the policy's order while slots, budget and pages last.

    A request that does not fit is passed by: up to `lookahead` such requests in one pass, and each in at most
    `max_bypass` passes; from then on every page that comes free is kept for it. Requests of a namespace that is at its
    quota are not looked at.
    """

    def __init__(
        self,
        placer: Placer,
        state: Slots,
        waiting: WaitingQueue,
        quotas: Quotas,
        states: StatePool | None,
        stats: SchedulerStats,
    ) -> None:
        self.placer = placer
        self.config: SchedulerConfig = placer.config
        self.cache: PrefixCache | None = placer.cache
        self.checkpointer: Checkpointer | None = placer.checkpointer
        self.state = state
        self.waiting = waiting
        self.sharing: StepSharing = placer.sharing
        self.quotas = quotas
        self.chunk_cap = NO_CAP  # rows of one request in this step
        self.states = states
        self.stats = stats

    def admit(self, budget: int) -> Admitted:
        """One pass; `budget` is the rows that this step still has."""
        done = Admitted()
        blocked: list[Request] = []
        passed = 0  # of these, before the last one that started
        self.placer.reserve.begin()
        closed = self.quotas.full()
        for request in self.waiting.policy.walk(self.waiting, closed):
            if budget <= 0 or not self.state.num_free:
                break
            if self.quotas.active and self.quotas.room_for(request) < 0:
                closed.add(request.namespace)
                continue
            try:
                placement = self.placer.place(request, not self.state.num_running)
                if placement is not None:
                    self._start(request, placement)
            except Exception as error:  # a copy of a page failed, or one of a state: this request's misfortune alone
                done.failed.append((request, error))
                continue
            if placement is not None:
                done.requests.append(request)
                passed = len(blocked)
                if self.quotas.is_full(request.namespace):
                    closed.add(request.namespace)
                budget -= self._announce(request, budget)
            else:
                blocked.append(request)
                if request.num_bypassed >= self.config.max_bypass or len(blocked) > self.config.lookahead:
                    break
        for request in blocked[:passed]:
            request.num_bypassed += 1
        return done

    def _announce(self, request: Request, budget: int) -> int:
        """Tell the rest of the pass which pages `request` fills; returns the rows that it computes in this step."""
        slot = request.slot
        need = int(min(self.state.known[slot], self.state.stop[slot]) - self.state.computed[slot])
        chunk = min(need, budget, self.chunk_cap)
        if self.checkpointer is None:
            self.sharing.offer(request, self.state, chunk)
            if chunk < need:
                self.sharing.expect(request)
        return chunk

    def _start(self, request: Request, placement: Placement) -> None:
        matched = placement.matched
        try:
            request.slot = self.state.place(request, placement.pages, matched)
        except Exception:
            self.placer.pool.release(placement.pages[placement.pages >= 0])
            raise
        self.waiting.remove(request)
        request.state = RequestState.RUNNING
        request.num_bypassed = 0
        self.placer.reserve.started(request)
        self.quotas.started(request)
        self.waiting.policy.started(request, 0 if request.num_preemptions else request.num_prompt - matched)
        if self.states is not None and placement.snapshot is not None:
            self.states.restore(request.slot, placement.snapshot)
        if self.checkpointer is not None:
            self.checkpointer.begin(request, matched)
        if request.num_preemptions:
            request.num_reattached_tokens += matched
            self.stats.reattached_tokens += matched
            return
        request.num_cached_tokens = matched
        self.stats.num_admitted += 1
        self.stats.prompt_tokens += request.num_prompt
        self.stats.cached_tokens += matched
        if self.cache is not None and request.cursor is not None and not request.scores:
            if self.checkpointer is not None:
                self.cache.count_checkpoint(request.num_prompt, matched)
            else:
                self.cache.count(request.cursor, request.num_prompt)

    def request_at(self, slot: int) -> Request:
        """The request that runs in `slot`."""
        request = self.state.requests[slot]
        assert request is not None
        return request
