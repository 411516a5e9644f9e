"""Live: what the engine keeps for one request beside the scheduler: its text, its tokens, and who listens."""

from __future__ import annotations

from time import perf_counter

from paged.text import OutputText
from scheduler.latency import Times
from scheduler.output import RequestOutput
from scheduler.request import Request
from scheduler.samples import Samples


class Live:
    """One live request: its output so far, and the call that it belongs to as sample `index`.

    `times` are when it was queued, first admitted, got its first token, and ended, in seconds of `perf_counter`; 0.0
    for what has not happened.
    """

    __slots__ = ("index", "logprobs", "request", "samples", "stopped_by", "text", "times", "token_ids")

    def __init__(self, samples: Samples, index: int, text: OutputText | None) -> None:
        self.samples = samples
        self.index = index
        self.request: Request = samples.requests[index]
        self.text = text
        self.times = Times(perf_counter())
        self.stopped_by = ""  # "stop string", "grammar" or "the reader", where one of them ended it
        self.token_ids: list[int] = []
        self.logprobs: list[object] | None = None if self.request.params.logprobs is None else []

    def push(self, token: int, logprob: object) -> tuple[str, bool]:
        """Take one generated token; returns the text that it completed, and whether it ended the request: a stop
        string is there, or the grammar is complete."""
        self.token_ids.append(token)
        if self.logprobs is not None:
            self.logprobs.append(logprob)
        complete = self.request.matcher is not None and self.request.matcher.accept(token)
        text, stopped = self.text.push(token) if self.text is not None else ("", False)
        if stopped or complete:
            self.stopped_by = "stop string" if stopped else "grammar"
        return text, stopped or complete

    def close(self, reason: str) -> tuple[str, RequestOutput]:
        """The request has ended: the text that was still held back, and its output."""
        request, rest = self.request, ""
        if self.text is not None:
            try:
                rest = self.text.flush()
            except Exception as error:  # what cannot be decoded ends this request alone
                if reason != "cancelled":
                    reason, request.error = "error", f"{type(error).__name__}: {error}"
        output = RequestOutput(
            request_id=request.id,
            token_ids=self.token_ids,
            text=self.text.text if self.text is not None else "",
            finish_reason=reason,
            num_prompt_tokens=request.num_prompt,
            num_cached_tokens=request.num_cached_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_preemptions=request.num_preemptions,
            logprobs=self.logprobs,
            prompt_logprobs=[None, *request.scored] if request.scores else None,
            error=request.error,
        )
        return rest, output
