"""Live: what the engine keeps for one request beside the scheduler: its text, its tokens, and who listens."""

from __future__ import annotations

from collections import deque

from paged.text import OutputText
from scheduler.output import Event, RequestOutput
from scheduler.request import Request


class Live:
    """One live request: output so far, and the events that its own reader has not taken yet.

    `owned` is set where a `generate` or `stream` call waits for it; its events then go there and nowhere else.
    """

    __slots__ = ("events", "keeps_events", "logprobs", "output", "owned", "request", "text", "token_ids")

    def __init__(self, request: Request, text: OutputText | None, owned: bool, keeps_events: bool) -> None:
        self.request = request
        self.text = text
        self.owned = owned
        self.keeps_events = keeps_events
        self.token_ids: list[int] = []
        self.logprobs: list[object] | None = None if request.params.logprobs is None else []
        self.events: deque[Event] = deque()
        self.output: RequestOutput | None = None

    def push(self, token: int, logprob: object) -> tuple[str, bool]:
        """Take one generated token; returns the text that it completed, and whether it ended the request: a stop
        string is there, or the grammar is complete."""
        self.token_ids.append(token)
        if self.logprobs is not None:
            self.logprobs.append(logprob)
        complete = self.request.matcher is not None and self.request.matcher.accept(token)
        text, stopped = self.text.push(token) if self.text is not None else ("", False)
        return text, stopped or complete

    def close(self, reason: str) -> str:
        """The request has ended: build its output; returns the text that was still held back."""
        request, rest = self.request, ""
        if self.text is not None:
            try:
                rest = self.text.flush()
            except Exception as error:  # what cannot be decoded ends this request alone
                reason, request.error = "error", f"{type(error).__name__}: {error}"
        self.output = RequestOutput(
            request_id=request.id,
            token_ids=self.token_ids,
            text=self.text.text if self.text is not None else "",
            finish_reason=reason,
            num_prompt_tokens=request.num_prompt,
            num_cached_tokens=request.num_cached_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_preemptions=request.num_preemptions,
            logprobs=self.logprobs,
            error=request.error,
        )
        return rest
