"""A hypothesis machine: a scheduler whose every output must be the model's own greedy tokens."""

from __future__ import annotations

from functools import partial

import numpy as np
from cache_machine import HASHES
from driver import Driver
from fakes import EchoAfter, EchoHybrid, EchoLooped, EchoModel
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from promises import expect_promises

from paged.errors import OutOfPages, PromptTooLong, QueueFull
from paged.prefix.handles import PrefixHandle
from paged.session import Session
from scheduler.policy import POLICIES, LongestPrefix, Policy, Priority
from scheduler.proposer import PromptLookup
from scheduler.quota import Quota
from scheduler.request import PrefillStops

VOCABULARY = 5
BASE = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 2, 4, 1, 3, 0, 0, 1, 1, 2, 2]  # prompts open like this, but for the first token
KINDS = {
    "attention": EchoModel,
    "recurrent": EchoHybrid,
    "looped": partial(EchoLooped, max_loops=3),
    "layers after": partial(EchoAfter, max_loops=3),
}


class SchedulerMachine(RuleBasedStateMachine):
    """Driver.step() runs every check() after each step; the end compares every output.

    Requests differ in depth, where the model loops, and in cache window; some start from a prefix that was computed
    beside them.
    """

    kinds: tuple[str, ...] = ("attention", "attention", "recurrent", "looped", "layers after")
    cache_windows: tuple[tuple[int, ...], ...] = ((0,), (0, 3), (0, 2, 5))
    hashes = tuple(HASHES)
    page_sizes = (1, 2, 4, 8)
    budgets = (1, 3, 8, 64)
    aheads: tuple[str, ...] = ("no", "no", "plan", "draft")
    policies: tuple[str, ...] = ("fcfs", "fcfs", *sorted(POLICIES), "priority")

    @initialize(
        data=st.data(),
        windows=st.lists(st.sampled_from([0, 0, 0, 3, 5, 9]), min_size=1, max_size=3),
        partial=st.booleans(),
        states=st.sampled_from([0, 1, 3, 16]),
        room=st.integers(28, 90),
        chunk=st.sampled_from([0, 0, 2, 3]),
        slots=st.integers(1, 5),
        cache=st.sampled_from([True, True, True, False]),
        bound=st.sampled_from([0, 0, 3]),
    )
    def start(self, data, windows, partial, states, room: int, chunk: int, slots: int, cache: bool, bound: int):
        ahead = data.draw(st.sampled_from(self.aheads))
        page_size, kind = data.draw(st.sampled_from(self.page_sizes)), data.draw(st.sampled_from(self.kinds))
        self.windows = data.draw(st.sampled_from(self.cache_windows))
        self.looped = KINDS[kind] not in (EchoModel, EchoHybrid)
        model = KINDS[kind](VOCABULARY) if self.looped else KINDS[kind](VOCABULARY, windows=tuple(windows))
        model.eos_token_ids = (4,) if room % 2 else ()
        num_groups = model.spec.num_groups
        self.handles: list[PrefixHandle] = []
        self.driver = Driver(
            num_pages=-(-room // page_size) * num_groups,
            page_size=page_size,
            cache=cache,
            model=model,
            max_pages=bound * num_groups,
            partial=partial,
            max_states=states,
            hash_page=HASHES[data.draw(st.sampled_from(self.hashes))],
            max_num_batched_tokens=data.draw(st.sampled_from(self.budgets)),
            max_num_seqs=slots,
            max_chunk_tokens=chunk,
            adaptive_chunks=slots % 2 == 0,
            max_bypass=2,
            lookahead=3,
            watermark=0.0,
            policy=self.draw_policy(data),
            max_queue_requests=data.draw(st.sampled_from([0, 0, 4])),
            reserve=data.draw(st.sampled_from(["prompt", "prompt", "max_tokens", "expected"])),
            quotas=data.draw(st.sampled_from(self.quotas(num_groups))),
            plan_ahead=ahead == "plan",
            proposer=PromptLookup(2, 1) if ahead == "draft" and kind != "recurrent" else None,
            num_drafts=data.draw(st.sampled_from([1, 3, 9])),
        )
        self.count = 0

    @staticmethod
    def quotas(num_groups: int) -> list[dict[str, Quota]]:
        """What the namespaces may have; by pages only where they hold any prompt that comes, or it is refused."""
        tight = Quota(max_pages=14 * num_groups, max_running=2)
        return [{}, {}, {"": Quota(max_running=1)}, {"other": tight, "": Quota(max_running=3)}, {"": tight}]

    def draw_policy(self, data) -> str | Policy:
        """A policy whose bounds come up within a short run."""
        name = data.draw(st.sampled_from(self.policies))
        short = {"priority": Priority(ageing=6), "longest_prefix": LongestPrefix(patience=5)}
        return short.get(name, name)

    @rule(
        first=st.integers(0, 1),
        shared=st.integers(0, len(BASE)),
        tail=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8),
        max_tokens=st.integers(1, 12),
        namespace=st.sampled_from(["", "", "", "other"]),
        twins=st.integers(1, 3),
        marks=st.lists(st.integers(0, 30), min_size=4, max_size=4),
        data=st.data(),
    )
    def submit(
        self, first: int, shared: int, tail: list[int], max_tokens: int, namespace: str, twins: int, marks, data
    ):
        prompt = [first, *BASE[1:shared], *tail]
        stops = PrefillStops(*sorted(m if m < len(prompt) else 0 for m in marks))
        for _ in range(twins):
            loops, window = self.draw_view(data)
            priority = data.draw(st.integers(0, 2))
            self.ask(prompt, max_tokens, namespace, stops, loops=loops, cache_window=window, priority=priority)

    def ask(self, prompt: list[int], max_tokens: int, namespace: str, stops: PrefillStops | None, **options) -> None:
        scheduler = self.driver.scheduler
        if len(scheduler.requests) == 8:
            return
        most = scheduler.config.max_queue_requests
        try:
            scheduler.require_room(1, len(prompt))
            assert not most or len(scheduler.waiting) < most
        except QueueFull:
            assert most and len(scheduler.waiting) >= most  # more where some were preempted
            return
        try:
            self.driver.submit(f"r{self.count}", prompt, max_tokens, namespace, stops, **options)
        except PromptTooLong:
            view = self.driver.model.view(options["loops"], options["cache_window"])
            assert len(prompt) >= self.driver.scheduler.capacity_for(view, namespace)
        self.count += 1

    def draw_view(self, data) -> tuple[int | None, int]:
        """A depth and a cache window."""
        loops = data.draw(st.sampled_from([None, 1, 2, 3])) if self.looped else None
        return loops, data.draw(st.sampled_from(self.windows))

    @precondition(lambda self: self.handles)
    @rule(
        n=st.integers(0, 1),
        tail=st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
        max_tokens=st.integers(1, 8),
        loops=st.sampled_from([None, None, 1, 2]),
    )
    def submit_behind(self, n: int, tail: list[int], max_tokens: int, loops: int | None) -> None:
        """A request that starts from a kept prefix, at its depth or at a smaller one; it may be no longer than that."""
        handle = self.handles[n % len(self.handles)]
        if loops is None or not handle.share_depths or loops > handle.loops:
            loops = handle.loops or None
        options = {"loops": loops, "cache_window": handle.cache_window, "prefix": handle}
        self.ask([*handle.tokens.tolist(), *tail], max_tokens, handle.namespace, None, **options)

    @precondition(lambda self: len(self.handles) < 2)
    @rule(length=st.integers(1, len(BASE)), namespace=st.sampled_from(["", "", "other"]), data=st.data())
    def keep(self, length: int, namespace: str, data) -> None:
        """Compute a prefix beside the requests, and keep it for some of them."""
        driver, (loops, window) = self.driver, self.draw_view(data)
        session = Session(driver.model, driver.pool, loops, window, namespace)
        tokens = np.array(BASE[:length], np.int32)
        try:
            if driver.cache is not None:
                driver.cache.attach(session, tokens)
            session.eval(tokens[session.n_past :])
        except OutOfPages:
            return
        if driver.cache is not None and data.draw(st.booleans()):
            driver.cache.insert(session, tokens)
        loop = driver.model.spec.loop
        self.handles.append(PrefixHandle(session, loop is not None and loop.after_group is None))
        session.release()
        driver.scheduler.check()

    @precondition(lambda self: self.driver.scheduler.has_work)
    @rule()
    def step(self) -> None:
        plan = self.driver.step()
        if plan is None:  # what is kept may be in the way
            self.let_prefixes_go()
            plan = self.driver.step()
        assert plan is not None, "there is work and nothing runs"
        expect_promises(self.driver, plan)

    def let_prefixes_go(self) -> None:
        self.handles.clear()
        for request in self.driver.scheduler.requests.values():
            request.prefix = None

    @precondition(lambda self: self.driver.scheduler.has_work)
    @rule(n=st.integers(2, 6))
    def steps(self, n: int) -> None:
        for _ in range(n):
            if self.driver.scheduler.has_work:
                self.step()

    @precondition(lambda self: self.driver.running())
    @rule(
        kind=st.sampled_from(["cancel", "preempt", "preempt", "fail", "evict", "forget", "reload", "change"]),
        n=st.integers(0, 9),
    )
    def disturb(self, kind: str, n: int) -> None:
        getattr(self, kind)(n)
        self.driver.scheduler.check()

    def change(self, n: int) -> None:
        """Another policy from now on."""
        self.driver.scheduler.set_policy(sorted(POLICIES)[n % len(POLICIES)])

    def cancel(self, n: int) -> None:
        live = self.driver.scheduler.requests
        name = list(live)[n % len(live)]
        if name in self.driver.requests:
            self.driver.cancel(name)
        else:  # begun under other weights
            self.driver.scheduler.finish(live[name], "cancelled")

    def preempt(self, n: int) -> None:
        running = self.driver.running()
        self.driver.scheduler.preempt(self.driver.scheduler.requests[running[n % len(running)]])

    def fail(self, n: int) -> None:
        """A step is planned, writes nothing, and is given up."""
        plan = self.driver.scheduler.schedule()
        if plan is not None:
            if self.driver.scheduler.config.plan_ahead and n % 2:
                self.driver.scheduler.look_ahead()
            for request in self.driver.scheduler.abort(plan, "the device is gone"):
                self.driver.requests.pop(request.id, None)

    def evict(self, n: int) -> None:
        if self.driver.cache is not None:
            self.driver.cache.evict(n)

    def forget(self, n: int) -> None:
        if self.driver.cache is not None:
            self.driver.cache.release()

    def reload(self, n: int) -> None:
        """The weights change, and the cache is told: what had begun ends unlike anything else."""
        if self.driver.cache is None:
            return
        self.driver.cache.release()
        self.let_prefixes_go()
        self.driver.model.weights += 1
        for name, request in list(self.driver.requests.items()):
            if request.finish_reason is not None:
                assert self.driver.outputs[name] == self.exact(name, self.driver.model.weights - 1), name
            elif request.slot < 0 and len(request.known) == request.num_prompt:
                continue  # it has not begun
            del self.driver.requests[name]

    def exact(self, name: str, weights: int) -> list[int]:
        """What request `name` must have given under these weights."""
        model, request = self.driver.model, self.driver.requests[name]
        now, model.weights = model.weights, weights
        try:
            return self.driver.exact(request)
        finally:
            model.weights = now

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        while driver.scheduler.has_work:
            self.step()
        self.let_prefixes_go()
        driver.expect_all_exact()
        assert driver.pool.num_live == 0
        sharing = driver.scheduler.sharing
        assert not sharing._expected and not sharing._owners
        if driver.cache is not None:
            driver.cache.release()
        assert driver.pool.num_free == driver.pool.num_pages
