"""Samples: the outputs that one call asks for of one prompt, as one request to whoever asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from paged.sampling import SamplingParams
from scheduler.intake import make_request
from scheduler.output import Event, RequestOutput
from scheduler.request import Request, RequestOptions

if TYPE_CHECKING:
    from scheduler.engine import Engine
    from scheduler.intake import Prompt

Sink = Callable[[Event], object]


class Samples:
    """The n outputs of one prompt: n requests under one id, with one sequence of events and one output.

    Request i is what `params.sample(i)` asks for; its events carry `index` i. The last event of all carries the
    output, whose `others` are samples 1 to n - 1. `sink` is called with each event in the thread that ran the step;
    None where nobody wants more than the output.

    Whichever request starts first computes the prompt; the others attach its full pages in the same step, or wait for
    them, and compute the rest of it, at most a page.
    """

    __slots__ = ("__weakref__", "_ended", "ending", "output", "requests", "sink")

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.sink: Sink | None = None
        self.ending = "cancelled"  # the finish_reason of what is left when the reader goes
        self.output: RequestOutput | None = None
        self._ended: dict[int, RequestOutput] = {}

    @property
    def id(self) -> str:
        """The id of the call, which is also that of request 0."""
        return self.requests[0].id

    def hand_out(self, index: int, event: Event, output: RequestOutput | None) -> None:
        """Pass on an event of request `index`; `output` is there with its last one."""
        event.request_id, event.index = self.id, index
        if output is not None:
            self._ended[index] = output
            if len(self._ended) == len(self.requests):
                outputs = [self._ended[i] for i in range(len(self.requests))]
                event.output = self.output = replace(outputs[0], others=tuple(outputs[1:]))
        sink = self.sink
        if self.output is not None:
            self.sink = None  # which may hold this object
        if sink is not None:
            sink(event)


def sample_id(name: str, i: int) -> str:
    """The id of request i of the call `name`: `name`, `name/1`, `name/2` and so on."""
    return f"{name}/{i}" if i else name


def make_samples(
    engine: Engine, name: str, prompt: Prompt, params: SamplingParams | None, options: RequestOptions
) -> Samples:
    """The requests of one call, checked in every way; `name` is its id unless the options have one.

    The requests of n > 1 are named after it, see `sample_id`.
    """
    if not isinstance(params, SamplingParams) or params.n == 1:
        return Samples([make_request(engine, name, prompt, params, options)])
    tokens = engine.tokens_of(prompt)  # once for all
    requests = [make_request(engine, name, tokens, params.sample(0), options)]
    for i in range(1, params.n):
        named = {**options, "request_id": sample_id(requests[0].id, i)}
        requests.append(make_request(engine, name, tokens, params.sample(i), cast(RequestOptions, named)))
    return Samples(requests)
