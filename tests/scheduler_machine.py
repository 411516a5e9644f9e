"""A hypothesis machine: a scheduler whose every output must be the model's own greedy tokens."""

from __future__ import annotations

from cache_machine import HASHES
from driver import Driver
from fakes import EchoHybrid, EchoModel
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from paged.errors import PromptTooLong
from scheduler.request import PrefillStops

VOCABULARY = 5
BASE = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 2, 4, 1, 3, 0, 0, 1, 1, 2, 2]  # prompts open like this, but for the first token


class SchedulerMachine(RuleBasedStateMachine):
    """Driver.step() runs every check() after each step; the end compares every output."""

    hashes = tuple(HASHES)
    page_sizes = (1, 2, 4, 8)
    budgets = (1, 3, 8, 64)

    @initialize(
        data=st.data(),
        kind=st.sampled_from([EchoModel, EchoModel, EchoHybrid]),
        windows=st.lists(st.sampled_from([0, 0, 0, 3, 5, 9]), min_size=1, max_size=3),
        partial=st.booleans(),
        states=st.sampled_from([0, 1, 3, 16]),
        room=st.integers(28, 90),
        chunk=st.sampled_from([0, 0, 2, 3]),
        slots=st.integers(1, 5),
        cache=st.sampled_from([True, True, True, False]),
        bound=st.sampled_from([0, 0, 3]),
    )
    def start(self, data, kind, windows, partial, states, room: int, chunk: int, slots: int, cache: bool, bound: int):
        page_size = data.draw(st.sampled_from(self.page_sizes))
        num_groups = len(windows)
        model = kind(VOCABULARY, windows=tuple(windows), eos=(4,) if room % 2 else ())
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
            max_bypass=2,
            lookahead=3,
            watermark=0.0,
        )
        self.count = 0

    @rule(
        first=st.integers(0, 1),
        shared=st.integers(0, len(BASE)),
        tail=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8),
        max_tokens=st.integers(1, 12),
        namespace=st.sampled_from(["", "", "", "other"]),
        twins=st.integers(1, 3),
        marks=st.lists(st.integers(0, 30), min_size=4, max_size=4),
    )
    def submit(self, first: int, shared: int, tail: list[int], max_tokens: int, namespace: str, twins: int, marks):
        prompt = [first, *BASE[1:shared], *tail]
        stops = PrefillStops(*sorted(m if m < len(prompt) else 0 for m in marks))
        for _ in range(twins):
            if len(self.driver.scheduler.requests) < 8:
                try:
                    self.driver.submit(f"r{self.count}", prompt, max_tokens, namespace, stops)
                except PromptTooLong:
                    assert len(prompt) >= self.driver.scheduler.capacity
                self.count += 1

    @precondition(lambda self: self.driver.scheduler.has_work)
    @rule()
    def step(self) -> None:
        assert self.driver.step() is not None, "there is work and nothing runs"

    @precondition(lambda self: self.driver.scheduler.has_work)
    @rule(n=st.integers(2, 6))
    def steps(self, n: int) -> None:
        for _ in range(n):
            if self.driver.scheduler.has_work:
                self.step()

    @precondition(lambda self: self.driver.running())
    @rule(
        kind=st.sampled_from(["cancel", "preempt", "preempt", "fail", "evict", "forget", "reload"]), n=st.integers(0, 9)
    )
    def disturb(self, kind: str, n: int) -> None:
        getattr(self, kind)(n)
        self.driver.scheduler.check()

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
            most = min(request.params.max_tokens, self.driver.scheduler.capacity - request.num_prompt)
            return model.greedy(request.prompt.tolist(), most)
        finally:
            model.weights = now

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        while driver.scheduler.has_work:
            assert driver.step() is not None, "there is work and nothing runs"
        driver.expect_all_exact()
        assert driver.pool.num_live == 0
        sharing = driver.scheduler.sharing
        assert not sharing._expected and not sharing._owners
        if driver.cache is not None:
            driver.cache.release()
        assert driver.pool.num_free == driver.pool.num_pages
