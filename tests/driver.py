"""Drives a Scheduler over an EchoModel, greedily, with every invariant checked after every step."""

from __future__ import annotations

import numpy as np
from fakes import EchoModel

from paged.kv.pages import PagePool
from paged.prefix.cache import PrefixCache
from paged.prefix.handles import PrefixHandle
from paged.prefix.hashing import page_hash
from paged.sampling import SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.drafts import Drafter
from scheduler.proposer import Proposer
from scheduler.request import PrefillStops, Request
from scheduler.scheduler import Scheduler
from scheduler.step import StepPlan


class Driver:
    def __init__(
        self,
        num_pages: int = 64,
        page_size: int = 16,
        cache: bool = True,
        model: EchoModel | None = None,
        max_pages: int = 0,
        hash_page=page_hash,
        pool: PagePool | None = None,
        partial: bool = False,
        max_states: int = 16,
        proposer: Proposer | None = None,
        **config,
    ) -> None:
        self.model = model or EchoModel()
        self.pool = pool or self.model.create_kv_pool(num_pages, page_size)
        self.cache = None
        if cache:
            self.cache = PrefixCache(self.pool, max_pages, max_states, partial=partial, hash_page=hash_page)
        limits = SchedulerConfig(**config)
        states = self.model.create_state_pool(limits.max_num_seqs)
        groups = self.model.spec.num_groups
        self.scheduler = Scheduler(self.pool, self.model.max_seq_len, limits, self.cache, groups, states)
        if proposer is not None:
            scheduler = self.scheduler
            scheduler.drafter = Drafter(
                proposer, limits.num_drafts, self.model.vocab_size, scheduler.state, scheduler.stats, scheduler.quotas
            )
        self.outputs: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.plans: list[dict[str, int]] = []  # rows of each request, step by step

    def submit(
        self,
        name: str,
        prompt,
        max_tokens: int | None = 8,
        namespace: str = "",
        stops: PrefillStops | None = None,
        loops: int | None = None,
        cache_window: int = 0,
        prefix: PrefixHandle | None = None,
        priority: int = 0,
        limits: dict[str, float] | None = None,
        **params,
    ) -> Request:
        ids = np.asarray(prompt, np.int32)
        view = self.model.view(loops, cache_window)
        limit = self.scheduler.fit(len(ids), max_tokens, view, namespace)
        settings = SamplingParams(max_tokens=max_tokens, **params)
        ends = () if settings.ignore_eos else self.model.eos_token_ids
        request = Request(
            name,
            ids,
            settings,
            0,
            ends,
            limit,
            namespace,
            stops=stops or PrefillStops(),
            view=view,
            prefix=prefix,
            priority=priority,
            **(limits or {}),
        )
        self.scheduler.add(request)
        self.outputs[name] = []
        self.requests[name] = request
        return request

    def step(self) -> StepPlan | None:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        if plan is None:
            return None
        rows = zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True)
        self.plans.append({scheduler.state.requests[slot].id: n for slot, n in rows})
        logits = self.model.forward(plan.batch, self.pool.storage).numpy()
        if scheduler.config.plan_ahead:
            scheduler.look_ahead()
            if scheduler.states is None:  # a state is at the end of the step already
                scheduler.check()
        result = scheduler.commit(plan, logits.argmax(axis=1).astype(np.int32))
        requests = result.requests
        for i, (request, token) in enumerate(zip(requests, result.tokens.tolist(), strict=True)):
            last = i + 1 == len(requests) or requests[i + 1] is not request
            if not (last and request in result.finished and request.finish_reason == "stop"):
                self.outputs[request.id].append(token)
        scheduler.check()
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            assert self.step() is not None, "there is work and nothing runs"
        raise AssertionError(f"not done after {max_steps} steps")

    def run_in_order(self) -> list[str]:
        """Run all to the end; returns who was admitted, resumes included, in order."""
        order: list[str] = []
        while self.scheduler.has_work:
            plan = self.step()
            assert plan is not None, "there is work and nothing runs"
            order += [request.id for request in plan.admitted]
        self.expect_all_exact()
        return order

    def step_until(self, condition, max_steps: int = 10_000) -> int:
        """Step until `condition()` holds; returns the number of steps."""
        for steps in range(max_steps):
            if condition():
                return steps
            assert self.step() is not None, "there is work and nothing runs"
        raise AssertionError(f"not so after {max_steps} steps")

    def solo(self, name: str, prompt, max_tokens: int | None = 8, **options) -> list[int]:
        """Submit one request and run all to the end; returns its tokens."""
        self.submit(name, prompt, max_tokens, **options)
        self.run()
        return self.outputs[name]

    def cancel(self, name: str) -> None:
        """End a request; what it got so far must be right."""
        request = self.requests.pop(name)
        self.scheduler.finish(request, "cancelled")
        self.scheduler.check()
        so_far = self.outputs.pop(name)
        assert so_far == self.greedy(request, len(so_far)), name

    def preempt(self, name: str) -> None:
        self.scheduler.preempt(self.requests[name])
        self.scheduler.check()

    def running(self) -> list[str]:
        """Names of the running requests, in order of admission."""
        return [self.scheduler.state.requests[slot].id for slot in self.scheduler.state.running.tolist()]

    def waiting(self) -> list[str]:
        return [request.id for request in self.scheduler.waiting]

    def pages(self, name: str) -> list[int]:
        """Page ids of a running request (group 0)."""
        return self.scheduler.state.pages(self.requests[name].slot)[0].tolist()

    def computed(self, name: str) -> int:
        """Rows of a running request that are in its pages."""
        return int(self.scheduler.state.computed[self.requests[name].slot])

    def expect_all_exact(self) -> None:
        """Every output is what the model gives without pages, batches or caches."""
        for name, request in self.requests.items():
            assert self.outputs[name] == self.exact(request), name

    def exact(self, request: Request) -> list[int]:
        """What the model gives a request without pages, batches or caches."""
        tokens = request.params.max_tokens or 10**9
        return self.greedy(
            request, min(tokens, self.scheduler.capacity_for(request.view, request.namespace) - request.num_prompt)
        )

    def greedy(self, request: Request, num_tokens: int) -> list[int]:
        view = request.view
        return self.model.greedy(request.prompt.tolist(), num_tokens, view.loops or None, view.cache_window)
