"""Delivery: from the tokens of a step to text, events and outputs, and what is remembered of requests that ended."""

from __future__ import annotations

from collections import deque
from typing import Any

from paged.errors import check
from paged.models.base import LanguageModel
from paged.sampler import Sampled
from paged.text import OutputText
from scheduler.live import Live
from scheduler.output import Event
from scheduler.request import Request
from scheduler.scheduler import Scheduler, StepResult

_EXPLAINED = 1000  # finished requests that explain() still knows


class Delivery:
    """Keeps one Live record a live request, and hands out its events: to the call that owns it, or to `events`.

    Invariant (`check()`): there is a record for exactly the live requests of the scheduler.
    """

    def __init__(self, scheduler: Scheduler, model: LanguageModel) -> None:
        self.scheduler = scheduler
        self.model = model
        self.live: dict[str, Live] = {}
        self.events: deque[Event] = deque()  # of requests that no generate or stream call waits for
        self.recent: deque[dict[str, Any]] = deque(maxlen=_EXPLAINED)

    def open(self, request: Request, owned: bool, keeps_events: bool) -> Live:
        """Begin the record of a request that was just queued."""
        text = None
        if self.model.tokenizer is not None:
            p = request.params
            text = OutputText(self.model.tokenizer.token_bytes, p.stop, p.include_stop, p.min_tokens)
        live = self.live[request.id] = Live(request, text, owned, keeps_events)
        return live

    def deliver(self, result: StepResult, sampled: Sampled, bad: dict[int, str]) -> None:
        """Turn a step's tokens into text and events, and end the requests that a stop string or a grammar ended.

        `bad` says of rows that held no usable logits what was wrong with them.
        """
        requests, rows = result.requests, result.rows
        event: Event | None = None
        for i, (request, token) in enumerate(zip(requests, result.tokens.tolist(), strict=True)):
            live = self.live.get(request.id)
            if live is None or live.request is not request:
                continue
            event = event or Event(request.id)
            row = i if rows is None else int(rows[i])
            last = i + 1 == len(requests) or requests[i + 1] is not request
            stopped = False
            if row in bad:
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
                self._hand_out(live, event)
            event = None

    def end(self, live: Live, reason: str, error: str = "") -> None:
        """End a live request now."""
        live.request.error = error
        self.scheduler.finish(live.request, reason)
        self._close(live, Event(live.request.id))

    def ended(self, request: Request) -> None:
        """The scheduler has ended this request: build its output and hand out the last event."""
        self._close(self.live[request.id], Event(request.id))

    def explain(self, request_id: str) -> dict[str, Any]:
        """Where a request's tokens came from. KeyError for one that is neither live nor of the last that ended."""
        live = self.live.get(request_id)
        if live is not None:
            return self._account(live.request)
        for record in reversed(self.recent):
            if record["request_id"] == request_id:
                return dict(record)
        raise KeyError(f"no live or recent request has the id {request_id!r}")

    def check(self) -> None:
        """Assert the invariant of the class docstring."""
        check(self.live.keys() == self.scheduler.requests.keys(), "delivery and scheduler disagree on what is live")

    def _fail(self, request: Request, error: str) -> None:
        request.error = error
        self.scheduler.finish(request, "error")
        request.finish_reason = "error"  # also where the same step had ended it otherwise

    def _close(self, live: Live, event: Event) -> None:
        request = live.request
        event.text += live.close(request.finish_reason or "error")
        event.output = live.output
        del self.live[request.id]
        self.recent.append(self._account(request))
        self._hand_out(live, event)

    def _hand_out(self, live: Live, event: Event) -> None:
        if live.keeps_events:
            live.events.append(event)
        elif not live.owned:
            self.events.append(event)

    def _account(self, request: Request) -> dict[str, Any]:
        running = int(self.scheduler.state.work[request.slot]) if request.slot >= 0 else 0
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
            "num_bypassed": request.num_bypassed,
        }
