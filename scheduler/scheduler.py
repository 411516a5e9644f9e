"""Scheduler: decides each step which requests compute how many tokens, and on which pages."""

from __future__ import annotations

from typing import cast

import numpy as np

from paged.errors import DuplicateRequest, InvalidRequest, OutOfPages, check
from paged.kv.pages import PagePool
from paged.kv.state import StatePool
from paged.prefix.cache import PrefixCache
from paged.spec import KVSpec, KVView
from scheduler.admission import Admission
from scheduler.bounds import Bounds
from scheduler.checkpointer import Checkpointer
from scheduler.chunking import NO_CAP, chunk_cap
from scheduler.config import SchedulerConfig
from scheduler.displacement import displaced
from scheduler.drafts import Drafter, kept_rows
from scheduler.extras import StepExtras
from scheduler.limits import Pace, TimeLimits
from scheduler.placement import Placer
from scheduler.policy import Policy, get_policy
from scheduler.publishing import donate, publish_step
from scheduler.queue import WaitingQueue
from scheduler.quotas import Quotas
from scheduler.request import Int32, Request, RequestState
from scheduler.reserve import Reserve
from scheduler.sharing import StepSharing
from scheduler.slots import Slots
from scheduler.stats import SchedulerStats
from scheduler.step import Decision, StepPlan, StepResult, build_plan


class Scheduler:
    """Continuous batching over one page pool, with one token budget a step.

    There is no prefill phase and no decode phase: in every step each running request computes some of the tokens it
    knows but has not computed, decodes first, then prefill chunks in order of admission, then new requests as the
    policy orders them. `schedule()` decides and takes pages; `commit()` takes the new tokens; between the two the
    caller runs the model. Pages are taken for all known tokens at admission, and one page at a time while decoding;
    when the pool is out, the running request that the policy names yields (mostly the one that loses least, never the
    oldest one), its full pages stay in the cache, and it resumes from them.

    Invariants (`check()`): those of the pool, the cache, the slots, the queue and the quotas; a live request is in the
    queue or in a slot, never both; every live page is in some slot's table or pinned, as often as it is referenced.
    """

    def __init__(
        self,
        pool: PagePool,
        max_seq_len: int,
        config: SchedulerConfig | None = None,
        cache: PrefixCache | None = None,
        num_groups: int = 1,
        states: StatePool | None = None,
    ) -> None:
        """`states` holds the recurrent state of a model that has one: a slot for each of `max_num_seqs` requests."""
        self.pool = pool
        self.config = config or SchedulerConfig()
        self.cache = cache
        spec = pool.storage.spec if pool.storage is not None else KVSpec(1, 1, 1, num_groups, (0,) * num_groups)
        self.view = spec.view()  # of a request that says nothing else
        self.max_seq_len = max_seq_len
        self.bounds = Bounds(pool, max_seq_len, self.config)
        shallow = spec.view(1 if spec.loop is not None else None)
        self.capacity = self.bounds.in_pages(pool.max_pages, shallow)  # tokens of one request
        self.state = Slots(self.config.max_num_seqs, self.capacity, pool, num_groups)
        self.sharing = StepSharing(pool.page_size)
        self.states = states
        self.checkpointer: Checkpointer | None = None
        if states is not None and cache is not None and cache.checkpoints is not None:
            self.checkpointer = Checkpointer(cache, cache.checkpoints, states, self.state)
        self.reserve = Reserve(self.config, self.state)
        self.quotas = Quotas(self.config, self.state, self.reserve)
        self.placer = Placer(pool, self.config, cache, num_groups, self.sharing, self.checkpointer, self.reserve)
        self.stats = SchedulerStats()
        self.extras = StepExtras()
        policy = get_policy(self.config.policy)
        policy.bind(self.state, self.stats, self.placer)
        self.waiting = WaitingQueue(policy, self.quotas.active)
        self.admission = Admission(self.placer, self.state, self.waiting, self.quotas, states, self.stats)
        self.limits = TimeLimits()
        self.pace = Pace()
        self.requests: dict[str, Request] = {}
        self.failed: list[Request] = []  # ended while a step was planned; the caller takes them out
        self.drafter: Drafter | None = None  # set by whoever knows the model's vocabulary
        self._arrivals = 0
        self._in_flight: StepPlan | None = None
        self._ahead: Decision | None = None  # for the step behind the one in flight
        self._leaving: list[Request] = []  # ended while a step writes into their pages
        self._ended: list[Request] = []  # by a commit that has not come to its end

    # Requests in and out --------------------------------------------------------------------------------------

    def capacity_for(self, view: KVView, namespace: str = "") -> int:
        """Tokens that one request of this view can hold, alone in the pool and within the quota of its namespace."""
        return self.bounds.capacity(view, namespace)

    def fit(self, num_prompt: int, max_tokens: int | None, view: KVView | None = None, namespace: str = "") -> int:
        """The number of tokens at which a request ends with "length"; PromptTooLong if it can never run."""
        return self.bounds.fit(num_prompt, max_tokens, view or self.view, namespace)

    def add(self, request: Request) -> None:
        """Queue a request. DuplicateRequest while another one with its id is live.

        InvalidRequest if it has no prompt, a limit that `fit` would not give, or a view of another model.
        """
        if len(request.view.uses) != len(self.view.uses):
            raise InvalidRequest(
                f"the request has a view of {len(request.view.uses)} page groups, this model has "
                f"{len(self.view.uses)}; take it from model.view()"
            )
        capacity = self.capacity_for(request.view, request.namespace)
        if not 0 < request.num_prompt < request.limit <= capacity:
            raise InvalidRequest(
                f"a request needs at least one prompt token and a limit above it of at most {capacity} tokens, "
                f"got {request.num_prompt} prompt tokens and limit {request.limit}; take the limit from fit()"
            )
        if request.id in self.requests:
            raise DuplicateRequest(f"a request with id {request.id!r} is still live; choose another id")
        if not len(request.known):
            request.known = request.prompt
        self.stamp(request)
        self._arrivals += 1
        self.limits.watch(request)
        self.requests[request.id] = request
        self.waiting.add(request)

    def stamp(self, request: Request) -> None:
        """Note when a request arrives: after all others, in this step, now."""
        request.arrival, request.arrival_step = self._arrivals, self.stats.num_steps
        request.submitted = self.limits.clock()

    def require_room(self, num_requests: int, num_tokens: int) -> None:
        """QueueFull if so many more requests and prompt tokens may not wait."""
        self.bounds.require_room(self.waiting, num_requests, num_tokens)

    def set_policy(self, policy: str | Policy) -> None:
        """Go on with another policy, by its name or the object itself. O(requests log requests)."""
        policy = get_policy(policy)
        policy.bind(self.state, self.stats, self.placer)
        for slot in self.state.running.tolist():
            policy.started(self.request_at(slot), 0)
        self.waiting.set_policy(policy)

    @property
    def policy(self) -> Policy:
        """Who starts next and who yields."""
        return self.waiting.policy

    def finish(self, request: Request, reason: str) -> None:
        """End a live request now; its pages go back, its full pages stay cached. Nothing if it has ended already.

        Where a step is in flight that writes into its pages, they go back when that step is over.
        """
        if request.state == RequestState.FINISHED:
            return
        slot = request.slot
        if reason in ("stop", "length"):
            known = int(self.state.known[slot]) if slot >= 0 else len(request.known)
            self.reserve.finished(request, known - request.num_prompt)
        if request.state == RequestState.WAITING:
            self.waiting.remove(request)
            if self.checkpointer is not None:
                self.checkpointer.forget(request)
        elif self.state.rows_ahead[slot]:
            request.num_computed_tokens += int(self.state.work[slot] + self.state.rows_ahead[slot])
            self.state.limit[slot] = 0  # no step behind that one computes for it, and nobody counts on its pages
            self._leaving.append(request)
        else:
            request.num_computed_tokens += int(self.state.work[slot])
            self._vacate(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        if request.slot < 0:
            request.cursor = request.prefix = None  # whoever keeps the request keeps no pages
        request.media = ()
        del self.requests[request.id]
        self.stats.num_finished += 1
        self.stats.num_cancelled += reason == "cancelled"

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # A step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run. Must be followed by `commit` or `abort` of the plan."""
        check(self._in_flight is None, "schedule() was called again before commit() or abort()")
        for request in self.limits.due():
            self.finish(request, "cancelled")
            self.failed.append(request)
        decision, self._ahead = self._ahead, None
        if decision is not None:
            decision = decision.still_running(self.state, self.preempt)
        if decision is None:
            decision = self._decide()
        if decision is None:
            return None
        slots, num_tokens, drafts = decision.slots, decision.num_tokens, None
        if self.drafter is not None and self.states is None:
            drafts = self.drafter.draft(slots, num_tokens, self.config.max_num_batched_tokens - int(num_tokens.sum()))
            drafts = drafts if drafts.any() else None
            num_tokens = num_tokens if drafts is None else num_tokens + drafts
        plan = build_plan(self.state, slots, num_tokens, self.pool.page_size, self.states, drafts)
        plan.admitted, plan.preempted = decision.admitted, decision.preempted
        self.extras.extend(plan)
        self._in_flight = plan
        self.pace.begin()
        self.state.launch(plan.slots, plan.num_tokens, plan.sample_slots)
        self.stats.num_steps += 1
        self.stats.peak_running = max(self.stats.peak_running, self.state.num_running)
        return plan

    @property
    def plans_ahead(self) -> bool:
        """Whether a step may be decided, and started, while the one before it is in flight."""
        return self.config.plan_ahead and self.states is None and self.drafter is None

    def look_ahead(self) -> None:
        """Decide the step behind the one in flight, before the tokens of that one are known.

        The next `schedule()` builds on it: it drops the requests that have ended meanwhile and fills in the tokens, so
        that only this is left to do between two steps. Nothing is decided where the step in flight may change what
        there is to do: with drafts, with recurrent state (whose checkpoints are taken at a commit), and where a
        request would have to be preempted.
        """
        if self.plans_ahead and self._in_flight is not None and self._ahead is None:
            self._ahead = self._decide()

    def commit(self, plan: StepPlan, tokens: Int32) -> StepResult:
        """Take the step's new tokens, one for each of `plan.sample_slots`; publish full pages; end what has ended.

        If it raises, the plan is still in flight, and is to be aborted.
        """
        check(plan is self._in_flight, "commit() of a plan that is not in flight")
        check(len(tokens) == len(plan.sample_slots), "commit() needs one token for each of plan.sample_slots")
        self.pace.end()
        state = self.state
        state.land(plan.slots)
        before = state.computed[plan.slots]
        after = before + plan.num_tokens
        sampled, rows = plan.sample_slots, None
        if plan.drafted:
            rows = kept_rows(plan, tokens, state)
            wrong = np.bincount(np.delete(sampled, rows), minlength=len(state.known))
            after -= wrong[plan.slots].astype(np.int32)
            if self.drafter is not None:
                self.drafter.learn(plan, rows)
            sampled, tokens = sampled[rows], tokens[rows]
            known = plan.positions[rows]
        else:
            known = state.known[sampled]
        state.computed[plan.slots] = after
        state.work[plan.slots] += plan.num_tokens
        self.stats.computed_tokens += plan.num_rows
        state.tokens[sampled, known] = tokens
        self._publish(plan.slots, before, after)
        state.leave(plan.slots)
        known += 1
        state.known[sampled] = known  # of a slot that stands there several times the last one counts
        if plan.drafted:
            state.shrink(plan.slots)
        at = state.requests
        requests = cast("list[Request]", [at[slot] for slot in sampled.tolist()])
        self.sharing.settle(requests)
        result = StepResult(requests, tokens, rows)
        ended = (state.end_ids[sampled] == tokens[:, None]).any(axis=1) & (known > state.min_known[sampled])
        full = known >= state.limit[sampled]
        self._ended = result.finished
        for i in np.flatnonzero(ended | full).tolist():
            if requests[i].state == RequestState.RUNNING:
                self.finish(requests[i], "stop" if ended[i] else "length")
                result.finished.append(requests[i])
        if self._leaving:
            result.leave_out(self._leaving)
            self._let_go()
        self.stats.generated_tokens += len(result.tokens)
        self._in_flight, self._ended = None, []
        return result

    def abort(self, plan: StepPlan, error: str) -> list[Request]:
        """The step's computation failed: every request in it ends with "error"; nothing that it wrote is published."""
        check(plan is self._in_flight, "abort() of a plan that is not in flight")
        self._in_flight = None
        self.state.land(plan.slots)
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.withdraw(self.preempt)  # they may stand on pages that this step filled
        self.failed += self._ended  # nobody was told
        self._ended = []
        placed = [self.state.requests[slot] for slot in plan.slots.tolist()]
        failed = [request for request in placed if request is not None and request.state == RequestState.RUNNING]
        for request in failed:
            request.error = error
            self.finish(request, "error")
        self._let_go()
        return failed

    def _publish(self, slots: Int32, before: Int32, after: Int32) -> None:
        """Enter in the cache what a step computed. Where that fails, its requests go on, and are cached no further."""
        try:
            if self.checkpointer is not None:
                for slot in slots[after == self.state.stop[slots]].tolist():
                    self.checkpointer.reached(self.request_at(slot))
            elif self.cache is not None:
                publish_step(self.cache, self.state, slots, before, after)
        except Exception:
            self.stats.cache_errors += 1
            for request in map(self.request_at, slots.tolist()):
                if request.cursor is not None:
                    request.cursor.closed = True
                if self.checkpointer is not None:
                    self.checkpointer.abandon(request)

    def _let_go(self) -> None:
        """Take the pages of the requests that ended while the step that is over now wrote into them."""
        while self._leaving:
            request = self._leaving.pop()
            self._vacate(request)
            request.cursor = request.prefix = None

    # Parts of schedule ----------------------------------------------------------------------------------------

    def _decide(self) -> Decision | None:
        """Which requests compute how many tokens next, on pages that they get now; None if nothing can run.

        Counts what a step in flight computes as computed. None, too, where that step has to be over first.
        """
        state, config = self.state, self.config
        preempted: list[Request] = []
        if not self._extend_tables(preempted):
            return None
        pushed_out: list[Request] = []
        if self.policy.displaces and len(self.waiting) and state.num_running and not preempted:
            wanted = np.zeros(config.max_num_seqs, np.int32)
            wanted[state.running] = np.minimum(self._need(state.running), config.max_chunk_tokens or NO_CAP)
            pushed_out = displaced(self.admission, wanted)
            if pushed_out and self._in_flight is not None:
                return None
            for request in pushed_out:
                self.preempt(request)
        slots = state.running
        num_tokens = self._share_budget(slots)
        budget = config.max_num_batched_tokens - int(num_tokens.sum())
        admitted: list[Request] = []
        if len(self.waiting) and budget and state.num_free and not preempted:
            self.sharing.begin()
            for i in np.flatnonzero(num_tokens > 1).tolist() if self.checkpointer is None else ():
                self.sharing.offer(self.request_at(int(slots[i])), state, int(num_tokens[i]))
            done = self.admission.admit(budget)
            admitted = done.requests
            for request in admitted:
                self.extras.place(request)
            for request, error in done.failed:
                self._fail(request, error)
        if admitted:
            new = state.running[len(slots) :]
            slots, num_tokens = state.running, np.concatenate([num_tokens, self._chunks(new, budget)])
        active = num_tokens > 0
        if not active.all():
            slots, num_tokens = slots[active], num_tokens[active]
        if not len(slots):
            return None
        return Decision(slots, num_tokens, state.arrival[slots], admitted, preempted + pushed_out)

    def _extend_tables(self, preempted: list[Request]) -> bool:
        """One more page for every request whose next row needs it, preempting others where the pool is out; False if
        that has to wait for the step in flight."""
        state, size = self.state, self.pool.page_size
        while True:
            slots = state.running
            known = state.known[slots] + state.tokens_ahead[slots]
            slots = slots[(known > state.num_pages[slots] * size) & (known < state.limit[slots])]
            crowd = self.quotas.overdrawn()
            if crowd is None:
                if not len(slots):
                    return True
                if int(np.count_nonzero(state.uses[:, slots])) <= self.pool.num_available and self._extend(slots):
                    return True
            if self._in_flight is not None:
                return False
            victim = self.request_at(self.policy.victim(state.running if crowd is None else crowd))
            preempted.append(victim)
            self.preempt(victim)

    def _extend(self, slots: Int32) -> bool:
        """One more page for each of `slots`; False where idle pages turn out to be none, since their children are in
        use. What fails otherwise is tried one by one, and ends the requests that it fails for."""
        try:
            self.state.extend(slots)
        except OutOfPages:
            return False
        except Exception as error:
            if len(slots) > 1:
                return all(self._extend(slots[i : i + 1]) for i in range(len(slots)))
            self._fail(self.request_at(int(slots[0])), error)
        return True

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = f"{type(error).__name__}: {error}"
        self.finish(request, "error")
        self.failed.append(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's pages and queue it again at its old place; its full pages stay in the cache."""
        check(request.state == RequestState.RUNNING, "preempt() of a request that does not run")
        self.stats.num_preemptions += 1
        given_up = int(self.state.computed[request.slot])
        self.stats.preempted_tokens += given_up
        request.num_preempted_tokens += given_up
        request.num_preemptions += 1
        request.num_computed_tokens += int(self.state.work[request.slot])
        self._vacate(request, preempted=True)
        request.state = RequestState.WAITING
        if request.cursor is not None:
            request.cursor.restart()
        self.waiting.add(request)

    def _share_budget(self, slots: Int32) -> Int32:
        """Rows for each running slot: one for each decode, then chunks in order until the budget is spent."""
        need, config = self._need(slots), self.config
        chunks = need > 1
        num_prefills, num_free = int(chunks.sum()), self.state.num_free
        self.admission.chunk_cap = chunk_cap(config, len(slots), num_prefills, len(self.waiting), num_free)
        if not num_prefills:
            return need
        which, budget = np.flatnonzero(chunks), config.max_num_batched_tokens - int((~chunks).sum())
        order = self.policy.row_order(slots[which])
        which = which if order is None else which[order]
        need[which] = self._chunks(slots[which], budget)
        return need

    def _need(self, slots: Int32) -> Int32:
        """Rows that each slot could compute next, up to its next stop. None for one that the step in flight ends."""
        state = self.state
        known = state.known[slots] + state.tokens_ahead[slots]
        need = np.minimum(known, state.stop[slots]) - state.computed[slots] - state.rows_ahead[slots]
        return need if self._in_flight is None else np.where(known < state.limit[slots], need, 0)

    def _chunks(self, slots: Int32, budget: int) -> Int32:
        need = np.minimum(self._need(slots), self.admission.chunk_cap)
        return np.clip(budget - (np.cumsum(need) - need), 0, need).astype(np.int32)

    def _vacate(self, request: Request, preempted: bool = False) -> None:
        check(not self.state.rows_ahead[request.slot], "a request lost its slot while a step writes into its pages")
        self.sharing.settle([request])
        self.policy.stopped(request)
        self.quotas.stopped(request)
        try:
            if self.checkpointer is not None:
                self.checkpointer.leave(request, preempted)
            elif self.cache is not None:
                donate(self.cache, self.state, request, preempted)
        except Exception:  # its pages must go back whatever happens
            self.stats.cache_errors += 1
        self.extras.leave(request.slot)
        request.known = self.state.vacate(request.slot)
        request.slot = -1

    def request_at(self, slot: int) -> Request:
        """The request that runs in `slot`."""
        request = self.state.requests[slot]
        assert request is not None
        return request

    def check(self) -> None:
        """Assert the invariants of the class docstring. O(pages + requests)."""
        if self.cache is not None:
            self.cache.check()
        self.state.check()
        self.waiting.check()
        self.quotas.check()
        placed = {r.id for r in self.state.requests if r is not None} - {r.id for r in self._leaving}
        queued = {r.id for r in self.waiting}
        check(not placed & queued, "a request is both waiting and running")
        check(placed | queued == set(self.requests), "the live requests are not those waiting and running")
        if self.checkpointer is not None:
            self.checkpointer.check()
        self.pool.check()  # last: it takes back what sessions held that were collected during the others
        refs = self.pool.held.astype(np.int32)
        if self.cache is not None:
            refs += self.cache.pins.refs()
        for holder in list(self.pool.holders):  # the slots, and what is driven by hand beside them
            holder.count(refs)
        check(bool((refs == self.pool.refs).all()), "references and page tables do not add up")
