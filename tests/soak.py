"""A soak: thousands of requests of every kind through one engine whose pool holds a tenth of what they want at once."""

from __future__ import annotations

import gc
import resource
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from fakes import EchoModel

from scheduler import Engine, SamplingParams, SchedulerConfig
from scheduler.output import RequestOutput
from scheduler.policy import Policy
from scheduler.request import Request, RequestState

PAGE, PAGES, LIVE = 4, 48, 10  # the requests that are live want LIVE times the pool
VOCAB = 61


class Flaky(EchoModel):
    """Fails now and then: the whole step, or the logits of one row."""

    def __init__(self, seed: int) -> None:
        super().__init__(VOCAB, max_seq_len=160)
        self.rng = np.random.default_rng(seed)

    def forward(self, batch, storage) -> torch.Tensor:
        logits = super().forward(batch, storage)
        chance = self.rng.random()
        if chance < 0.002:
            raise RuntimeError("the device is gone")
        if chance < 0.01 and len(logits):
            logits[int(self.rng.integers(len(logits)))] = float("nan")
        return logits


@dataclass
class Asked:
    """What was asked for, and when it was: the number of steps run, and of requests that had come."""

    prompt: np.ndarray
    max_tokens: int
    step: int
    priority: int
    namespace: str
    pages: int
    admitted_at: int = -1


@dataclass
class Soak:
    """Runs `num_requests`; `outcomes` counts how they ended, `waits` has the longest wait of each priority, in steps
    from submit to the first admission."""

    num_requests: int
    policy: str | Policy = "fcfs"
    seed: int = 0
    switch: tuple[str, ...] = ()  # policies that take turns, each for 500 steps
    options: dict = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    waits: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.model = Flaky(self.seed)
        config = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=48, watermark=0.02, **self.options)
        self.engine = Engine(self.model, page_size=PAGE, num_pages=PAGES, config=config)
        self.engine.set_policy(self.policy)
        self.asked: dict[str, Asked] = {}
        self.wanted = 0  # pages that the live requests want
        self.steps = 0
        self.num_submitted = 0
        self.checked = 0
        self.bypassed = 0  # the most that anybody was passed by
        self.objects: list[int] = []  # at each fifth of the way
        self.peak_kb: list[int] = []

    def run(self) -> Soak:
        while self.num_submitted < self.num_requests or self.engine.has_work:
            while self.num_submitted < self.num_requests and self.wanted < LIVE * PAGES:
                self.submit()
            if self.rng.random() < 0.05 and self.asked:
                live = list(self.asked)
                self.engine.cancel(live[int(self.rng.integers(len(live)))])
            if self.switch and self.steps % 500 == 0:
                self.engine.set_policy(self.switch[self.steps // 500 % len(self.switch)])
            before = self.engine.scheduler.stats.num_finished, self.engine.scheduler.stats.generated_tokens
            waiting = {request: request.num_bypassed for request in self.engine.scheduler.waiting}
            events = self.engine.step()
            self.steps += 1
            self.expect_order(waiting)
            self.engine.check()
            for event in events:
                if event.output is not None:
                    self.ended(event.output)
            now = self.engine.scheduler.stats.num_finished, self.engine.scheduler.stats.generated_tokens
            moved = now != before or events or self.engine.scheduler.state.num_running
            assert moved or not self.engine.has_work, "nothing moves"
            self.note_admissions()
            if self.num_submitted >= (len(self.objects) + 1) * self.num_requests // 5:
                gc.collect()
                self.objects.append(len(gc.get_objects()))
                self.peak_kb.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return self

    def submit(self) -> None:
        rng = self.rng
        shared, own = int(rng.integers(0, 60)), int(rng.integers(1, 30))
        opening = int(rng.integers(0, 4))
        prompt = np.concatenate([(np.arange(shared) * (7 + opening)) % VOCAB, rng.integers(0, VOCAB, own)])
        asked = Asked(
            prompt.astype(np.int32),
            int(rng.integers(1, 24)),
            self.steps,
            int(rng.integers(0, 4)),
            ("", "a", "b")[int(rng.integers(0, 3))],
            0,
        )
        asked.pages = -(-(len(prompt) + asked.max_tokens) // PAGE)
        name = f"r{self.num_submitted}"
        self.num_submitted += 1
        params = SamplingParams(max_tokens=asked.max_tokens)
        self.engine.submit(asked.prompt, params, request_id=name, priority=asked.priority, namespace=asked.namespace)
        self.asked[name] = asked
        self.wanted += asked.pages

    def expect_order(self, waiting: dict[Request, int]) -> None:
        """Who started before another one whose turn it was: that one was passed by, which is counted and bounded.

        `waiting` is who waited before the step, and how often each had been passed by.
        """
        scheduler = self.engine.scheduler
        policy, most = scheduler.policy, scheduler.config.max_bypass
        started = [request for request in waiting if request.state == RequestState.RUNNING]
        left = [request for request in waiting if request.state == RequestState.WAITING]
        for request in left:
            self.bypassed = max(self.bypassed, request.num_bypassed)
            assert request.num_bypassed <= most, f"{request.id} was passed by {request.num_bypassed} times"
            if request.num_bypassed == waiting[request] and started and not request.num_preemptions:
                late = [other.id for other in started if self.comes_before(policy, request, other)]
                assert not late, f"{late} started before {request.id}, which was not passed by"

    def comes_before(self, policy: Policy, request: Request, other: Request) -> bool:
        """Whether the policy's bound says that `request` starts first."""
        now = self.engine.scheduler.stats.num_steps - 1
        if policy.name == "fair_share":
            return request.namespace == other.namespace and request.arrival < other.arrival
        if policy.name == "longest_prefix":
            waited = [now - each.arrival_step >= policy.patience for each in (request, other)]
            return waited[0] and (not waited[1] or request.arrival < other.arrival)
        if request.num_preemptions or other.num_preemptions:
            return False  # the key of one that ran may have changed since
        return policy.key(request) < policy.key(other)

    def note_admissions(self) -> None:
        requests = self.engine.scheduler.state.requests
        for slot in self.engine.scheduler.state.running.tolist():
            request = requests[slot]
            asked = self.asked.get(request.id) if request is not None else None
            if asked is not None and asked.admitted_at < 0:
                asked.admitted_at = self.steps
                self.waits[asked.priority] = max(self.waits[asked.priority], self.steps - asked.step)

    def ended(self, output: RequestOutput) -> None:
        asked = self.asked.pop(output.request_id)
        self.wanted -= asked.pages
        self.outcomes[output.finish_reason] += 1
        assert output.num_prompt_tokens == len(asked.prompt)
        if output.finish_reason == "error":
            assert "device is gone" in output.error or "BadLogits" in output.error, output.error
        elif output.finish_reason == "length":
            assert len(output.token_ids) == asked.max_tokens
        self.checked += 1
        if self.checked % 7 == 0:  # the model's own tokens, computed without pages; a seventh of all, for time
            right = self.model.greedy(asked.prompt, len(output.token_ids))
            assert output.token_ids == right, output.request_id


def live_requests() -> int:
    """Request objects that something still holds."""
    gc.collect()
    return sum(type(each) is Request for each in gc.get_objects())
