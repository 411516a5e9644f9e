"""What callers get back: events while a request runs, one RequestOutput when it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestOutput:
    """One finished request.

    token_ids holds every generated token; an end id is left out unless `include_stop` asks for it. text ends where a
    stop string begins, token_ids do not: usage counts what was generated. logprobs, if asked for, has one TokenLogprob
    for each of token_ids; prompt_logprobs one for each token of the prompt, None for the first and for media (fewer
    where the request ended before its prompt was computed). num_cached_tokens of the prompt were attached instead of
    computed; num_computed_tokens counts rows, recomputation after preemptions included.

    All of it is plain values: `json.dumps(dataclasses.asdict(output), allow_nan=False)` is valid JSON.

    others are outputs 1 to n - 1 of the same prompt, where n > 1 asked for several; this one is output 0. Each is what
    the same request gives alone with `params.sample(i)`, and has a request_id of its own.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: str  # "stop" | "length" | "cancelled" | "error"
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    logprobs: list[Any] | None = None
    prompt_logprobs: list[Any] | None = None
    error: str = ""
    others: tuple[RequestOutput, ...] = ()

    @property
    def samples(self) -> tuple[RequestOutput, ...]:
        """All n outputs of the prompt, this one first; with n = 1 it is the only one."""
        return (self, *self.others)


@dataclass(slots=True)
class Event:
    """What one step did to one request: new tokens, the text that they completed, and the output if it has ended.

    text may lag behind the tokens: it holds whole characters only, and nothing that could still become a stop string.
    With n > 1 an event is about sample `index`. finish_reason is there in the last event of each sample, the output,
    and with it all that is to be counted, in the last event of all.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    output: RequestOutput | None = None
    index: int = 0
    finish_reason: str | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last event of the request, with all of its samples."""
        return self.output is not None

    def absorb(self, later: Event) -> None:
        """Become what this event and a later one of the same sample say together."""
        self.token_ids += later.token_ids
        self.text += later.text
        self.output = later.output
        self.finish_reason = later.finish_reason
