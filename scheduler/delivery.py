"""Delivery: from the tokens of a step to text, events and outputs, and what is remembered of requests that ended."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

from paged.errors import DuplicateRequest, check
from paged.models.base import LanguageModel
from paged.sampler import Sampled
from paged.text import OutputText
from scheduler.events import Subscribers
from scheduler.latency import Latencies
from scheduler.live import Live
from scheduler.output import Event
from scheduler.request import Request, RequestState
from scheduler.samples import Samples
from scheduler.scheduler import Scheduler
from scheduler.step import StepPlan, StepResult

_EXPLAINED = 1000  # finished requests that explain() still knows


class Delivery:
    """Keeps one Live record a live request, and hands its events to the call that it belongs to.

    While a step runs, its requests cannot end: what is cancelled then, by a callback of the step or by the garbage
    collector, ends as soon as the step has.

    Invariants (`check()`): there is a record for exactly the live requests of the scheduler; a call is known by its id
    as long as one of its requests is live.
    """

    def __init__(self, scheduler: Scheduler, model: LanguageModel) -> None:
        self.scheduler = scheduler
        self.model = model
        self.live: dict[str, Live] = {}
        self.calls: dict[str, Samples] = {}
        self.events: deque[Event] = deque()  # of submitted requests, until `step` hands them out
        self.doomed: deque[Samples] = deque()  # cancelled where nothing may be touched; appended to from anywhere
        self.stepping = False
        self.recent: deque[dict[str, Any]] = deque(maxlen=_EXPLAINED)
        self.subscribers = Subscribers(scheduler.stats, scheduler.cache)
        self.latencies = Latencies()

    def add(self, samples: Samples) -> None:
        """Know a call by its id. DuplicateRequest while another one has it, or that of one of its samples."""
        for request in samples.requests:  # before any is queued, so that nobody hears of one that is not to run
            self.require_new(request.id)
        self.calls[samples.id] = samples

    def require_new(self, request_id: str) -> None:
        """DuplicateRequest while a call, or one of its samples, has this id."""
        if request_id in self.calls or request_id in self.live:
            raise DuplicateRequest(f"a request with id {request_id!r} is still live; choose another id")

    def open(self, samples: Samples, index: int) -> Live:
        """Begin the record of a request that was just queued."""
        text, request = None, samples.requests[index]
        if self.model.tokenizer is not None:
            p = request.params
            text = OutputText(self.model.tokenizer.token_bytes, p.stop, p.include_stop, p.min_tokens)
        live = self.live[request.id] = Live(samples, index, text)
        return live

    def begin_step(self) -> None:
        """Until `end_step` nothing but the step touches its requests. RuntimeError if one runs already."""
        if self.stepping:
            raise RuntimeError("a step was begun from within a step; what a step calls must not run the engine")
        self.end_doomed()
        self.stepping = True

    def end_step(self) -> None:
        """The step is over: end what was cancelled meanwhile."""
        self.stepping = False
        self.end_doomed()

    def end_doomed(self) -> None:
        """End what was cancelled where that could not be done."""
        while self.doomed:
            self.cancel(self.doomed.popleft())

    def cancel(self, samples: Samples) -> bool:
        """End what is live of a call as its `ending` says, after the step that runs, if one does; False: nothing is."""
        if self.calls.get(samples.id) is not samples:
            return False
        if self.stepping:
            self.doomed.append(samples)
        else:
            self.end_call(samples, samples.ending)
        return True

    def end_call(self, samples: Samples, reason: str, error: str = "") -> None:
        """End now what is live of a call."""
        for request in samples.requests:
            live = self.live.get(request.id)
            if live is not None and live.samples is samples:
                self.end(live, reason, error)
        if self.calls.get(samples.id) is samples:  # of a call that was refused half way not every request ended
            del self.calls[samples.id]

    def planned(self, plan: StepPlan) -> None:
        """A step was planned: note who starts with it and who had to give way. Costs nothing where nobody does."""
        if plan.preempted and self.subscribers.requests:  # first: who was pushed out may start again at once
            for request in plan.preempted:
                self.subscribers.preempted(request)
        if plan.admitted:
            now, computed = perf_counter(), self.scheduler.state.computed
            for request in plan.admitted:
                live = self.live[request.id]
                resumed = bool(live.times.admitted)  # its preemptions do not tell: a step may be called off
                live.times.admitted = live.times.admitted or now
                if self.subscribers.requests:
                    self.subscribers.admitted(request, int(computed[request.slot]), resumed)

    def deliver(self, result: StepResult, sampled: Sampled, bad: dict[int, str]) -> None:
        """Turn a step's tokens into text and events, and end the requests that a stop string or a grammar ended.

        `bad` says of rows that held no usable logits what was wrong with them.
        """
        requests, rows = result.requests, result.rows
        event: Event | None = None
        now = perf_counter()
        for i, (request, token) in enumerate(zip(requests, result.tokens.tolist(), strict=True)):
            live = self.live.get(request.id)
            if live is None or live.request is not request:
                self.scheduler.stats.generated_tokens -= 1  # it ended in front of this guess
                continue
            event = event or Event(request.id)
            row = i if rows is None else int(rows[i])
            if not live.token_ids and row not in bad:
                live.times.first_token = now
            last = i + 1 == len(requests) or requests[i + 1] is not request
            stopped = False
            if row in bad:
                self.scheduler.stats.generated_tokens -= 1  # what the commit took for its token was not drawn
                self._fail(request, bad[row])
            elif not (last and request.finish_reason == "stop") or request.params.include_stop:
                event.token_ids.append(token)
                try:
                    text, stopped = live.push(token, sampled.logprobs[row] if sampled.logprobs is not None else None)
                    event.text += text
                except Exception as error:
                    self._fail(request, f"{type(error).__name__}: {error}")
                if stopped:
                    self.scheduler.finish(request, "stop")
                    request.finish_reason = "stop"
            if stopped or request.finish_reason == "error":
                self._close(live, event)
            elif not last:
                continue
            elif request.finish_reason is not None:
                self._close(live, event)
            else:
                live.samples.hand_out(live.index, event, None)
            event = None

    def end(self, live: Live, reason: str, error: str = "") -> None:
        """End a live request now."""
        live.request.error = error
        if reason == "stop":
            live.stopped_by = "the reader"
        self.scheduler.finish(live.request, reason)
        self._close(live, Event(live.request.id))

    def fail(self, request: Request, error: str) -> None:
        """The step that was committed went wrong for this request: it ends, or has ended, with "error"."""
        live = self.live.get(request.id)
        if live is not None and live.request is request:  # else it was ended while the step ran
            self._fail(request, error)
            self._close(live, Event(request.id))

    def ended(self, request: Request) -> None:
        """The scheduler has ended this request: build its output and hand out the last event."""
        self._close(self.live[request.id], Event(request.id))

    def refuse(self, samples: Samples) -> None:
        """A call whose requests could not all be queued: end those that were, and tell nobody but the caller."""
        samples.sink = None
        self.end_call(samples, "error", "another sample of its prompt was refused")
        for request in samples.requests:
            if self.scheduler.requests.get(request.id) is request:
                self.scheduler.finish(request, "error")

    def explain(self, request_id: str) -> dict[str, Any]:
        """Where a request's tokens and its time went. KeyError for one that is neither live nor of the last that ended.

        num_evicted_tokens were computed for it, given up by a preemption, and evicted before it resumed.
        """
        live = self.live.get(request_id)
        if live is not None:
            return self._account(live)
        for record in reversed(self.recent):
            if record["request_id"] == request_id:
                return dict(record)
        raise KeyError(f"no live or recent request has the id {request_id!r}")

    def check(self) -> None:
        """Assert the invariant of the class docstring."""
        check(self.live.keys() == self.scheduler.requests.keys(), "delivery and scheduler disagree on what is live")
        live = {id(live.samples) for live in self.live.values()}
        check(live == {id(samples) for samples in self.calls.values()}, "a call is known that has no live request")

    def _fail(self, request: Request, error: str) -> None:
        request.error = error
        self.scheduler.finish(request, "error")
        request.finish_reason = "error"  # also where the same step had ended it otherwise

    def _close(self, live: Live, event: Event) -> None:
        request = live.request
        rest, output = live.close(request.finish_reason or "error")
        event.finish_reason = request.finish_reason = output.finish_reason
        event.text += rest
        del self.live[request.id]
        live.times.ended = perf_counter()
        self.recent.append(self._account(live))
        self.latencies.record(live.times, len(live.token_ids), event.finish_reason in ("stop", "length"))
        if self.subscribers.requests:
            self.subscribers.finished(request, event.finish_reason, len(live.token_ids))
        live.samples.hand_out(live.index, event, output)
        if live.samples.output is not None:
            del self.calls[live.samples.id]

    def _account(self, live: Live) -> dict[str, Any]:
        request, times = live.request, live.times
        running = int(self.scheduler.state.work[request.slot]) if request.state == RequestState.RUNNING else 0
        return {
            "request_id": request.id,
            "state": request.state.name.lower(),
            "finish_reason": request.finish_reason,
            "error": request.error,
            "num_prompt_tokens": request.num_prompt,
            "num_cached_tokens": request.num_cached_tokens,
            "num_computed_tokens": request.num_computed_tokens + running,
            "num_preemptions": request.num_preemptions,
            "num_reattached_tokens": request.num_reattached_tokens,
            "num_evicted_tokens": max(0, request.num_preempted_tokens - request.num_reattached_tokens),
            "num_bypassed": request.num_bypassed,
            "stop_reason": _stop_reason(live),
            "wait_s": times.wait_s,
            "time_to_first_token_s": times.first_token_s,
            "end_to_end_s": times.end_to_end_s,
        }


def _stop_reason(live: Live) -> str | None:
    """What ended a request: its token, text or limit; None while it runs, and where `finish_reason` says all."""
    request = live.request
    if request.finish_reason == "length":
        return f"limit of {request.limit} tokens"
    if request.finish_reason == "stop":
        return live.stopped_by or (f"token {request.known[-1]}" if request.slot < 0 else "token")
    return None
