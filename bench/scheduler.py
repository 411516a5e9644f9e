"""What the scheduler costs without a model: microseconds of schedule and commit per running request, and admissions.

    python bench/scheduler.py --json --save

Decode steps at 16 to 1024 running requests, one new page each every 16 steps; the same with a head of the queue that
does not fit, of 130k tokens, whose prefix is not cached; the same under each policy with 100 requests waiting, none of
which fits; admissions of prompts of 32k and 128k tokens, cold and warm; `match_len` of a cached 32k prompt. Tokens are
made up; pages have no storage. Medians over repeats. Where vLLM's scheduler can be imported, it takes the same decode
steps (`vllm`), and `ratio` is its mean step over ours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import record
from peer_scheduler import VllmBench

from paged.kv.pages import PagePool
from paged.prefix.cache import PrefixCache
from paged.sampling import SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.policy import POLICIES
from scheduler.request import Request
from scheduler.scheduler import Scheduler

PAGE_SIZE = 16


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    out = call()
    return time.perf_counter() - start, out


class Bench:
    """A scheduler over pages without storage, whose model is a random number generator."""

    def __init__(self, num_seqs: int, max_seq_len: int, num_pages: int, budget: int, policy: str = "fcfs") -> None:
        self.pool = PagePool(num_pages, PAGE_SIZE)
        self.cache = PrefixCache(self.pool, partial=True)
        config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget, policy=policy)
        self.scheduler = Scheduler(self.pool, max_seq_len, config, self.cache)
        self.rng = np.random.default_rng(0)
        self.count = 0

    def submit(self, prompt: np.ndarray, max_tokens: int, **options: Any) -> Request:
        limit = self.scheduler.fit(len(prompt), max_tokens)
        request = Request(f"r{self.count}", prompt, SamplingParams(max_tokens=max_tokens), 0, (), limit, **options)
        self.count += 1
        self.scheduler.add(request)
        return request

    def prompt(self, n: int) -> np.ndarray:
        return self.rng.integers(0, 50_000, n).astype(np.int32)

    def ask(self, num_tokens: int, max_tokens: int, **options: Any) -> None:
        """Submit a made-up prompt."""
        self.submit(self.prompt(num_tokens), max_tokens, **options)

    def step(self) -> float:
        """Seconds of schedule and commit; the tokens in between are not counted."""
        schedule, plan = timed(self.scheduler.schedule)
        assert plan is not None
        tokens = self.rng.integers(0, 50_000, len(plan.sample_slots)).astype(np.int32)
        commit, _ = timed(lambda: self.scheduler.commit(plan, tokens))
        return schedule + commit

    @property
    def num_running(self) -> int:
        return self.scheduler.state.num_running

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_left(self) -> int:
        """Pages that a new request could take."""
        return self.pool.num_available


def decode(
    make: Callable[..., Any], running: int, steps: int, head: bool = False, waiting: int = 0
) -> dict[str, float]:
    """Microseconds a step and a request, everything decoding; with `head`, a prompt waits that cannot be admitted.

    With `waiting`, so many of 50 namespaces wait for a slot that is free and for pages that are not. `make(num_seqs,
    max_seq_len, num_pages, budget)` gives what is measured: a Bench, or a peer that looks like one.
    """
    own = -(-(96 + steps) // PAGE_SIZE)  # pages that a running request comes to hold
    bench = make(running + 1, 140_000, running * own + 8, 64 * running)
    for i in range(running):
        bench.ask(48, steps + 40, **({"namespace": f"n{i % 50}"} if waiting else {}))
    while bench.num_running < running:
        bench.step()
    for _ in range(16):
        bench.step()
    too_long = (bench.num_left + 1) * PAGE_SIZE
    if head:
        bench.ask(min(130_000, too_long), 8)
    for i in range(waiting):
        bench.ask(too_long, 8, namespace=f"n{i % 50}", priority=i % 3)
    seconds = [bench.step() for _ in range(steps)]
    assert (bench.num_running, bench.num_waiting) == (running, head + waiting)
    step_us = statistics.median(seconds) * 1e6
    mean_us = statistics.fmean(seconds) * 1e6  # with the steps in which pages are taken and published
    return {
        "step_us": round(step_us, 1),
        "mean_step_us": round(mean_us, 1),
        "us_a_request": round(mean_us / running, 3),
    }


def peer_decode(running: int, steps: int, head: bool, ours: float) -> dict[str, Any]:
    """The same of vLLM's scheduler, or why it was left out: a peer is never needed."""
    try:
        figures = decode(partial(VllmBench, PAGE_SIZE), running, steps, head)
    except Exception as error:  # not installed, or another version
        return {"left_out": f"{type(error).__name__}: {error}"}
    return {**figures, "ratio": round(figures["us_a_request"] / ours, 1)}


def admission(num_tokens: int, repeat: int) -> dict[str, float]:
    """Milliseconds of the pass that admits a prompt, cold and when all of it is cached, and of asking for its match."""
    cold, warm, ask = [], [], []
    for _ in range(repeat):
        bench = Bench(4, num_tokens + 64, 2 * num_tokens // PAGE_SIZE + 64, num_tokens + 64)
        assert bench.cache is not None
        prompt, match_len = bench.prompt(num_tokens), bench.cache.match_len
        bench.submit(prompt, 1)
        seconds, plan = timed(bench.scheduler.schedule)
        cold.append(seconds)
        bench.scheduler.commit(plan, np.zeros(1, np.int32))
        ask.append(statistics.median(timed(partial(match_len, prompt))[0] for _ in range(5)))
        for again in range(3):
            bench.submit(prompt, 1)
            seconds, plan = timed(bench.scheduler.schedule)
            bench.scheduler.commit(plan, np.zeros(1, np.int32))
            if again:  # the first one still touches the memory of a slot for the first time
                warm.append(seconds)
    return {
        "cold_ms": round(statistics.median(cold) * 1e3, 3),
        "warm_ms": round(statistics.median(warm) * 1e3, 3),
        "match_us": round(statistics.median(ask) * 1e6, 1),
    }


def main() -> None:
    p = record.parser(__doc__ or "")
    p.add_argument("--running", type=int, nargs="*", default=[16, 64, 256, 1024], help="running requests")
    p.add_argument("--steps", type=int, default=96, help="decode steps (default: %(default)s)")
    p.add_argument("--repeat", type=int, default=5, help="repeats of an admission (default: %(default)s)")
    args = p.parse_args()
    figures: dict[str, Any] = {"decode": {}, "decode_with_blocked_head": {}, "admission": {}}
    for running in args.running:
        for name, head in (("decode", False), ("decode_with_blocked_head", True)):
            row = decode(Bench, running, args.steps, head)
            figures[name][running] = {**row, "vllm": peer_decode(running, args.steps, head, row["us_a_request"])}
            print(f"{name:26} {running:5d} running {figures[name][running]}", flush=True)
    figures["policies"] = {}
    for policy in POLICIES:
        figures["policies"][policy] = decode(partial(Bench, policy=policy), 256, args.steps, waiting=100)
        print(f"{policy:26}   256 running, 100 waiting {figures['policies'][policy]}", flush=True)
    for tokens in (32_768, 131_072):
        figures["admission"][tokens] = admission(tokens, args.repeat)
        print(f"admission of {tokens:7d} tokens {figures['admission'][tokens]}", flush=True)
    record.report("scheduler", figures, args)


if __name__ == "__main__":
    main()
