"""Offline batches: many prompts in, their outputs in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from paged.errors import InvalidRequest
from paged.sampling import SamplingParams
from scheduler.output import RequestOutput
from scheduler.request import Request, RequestOptions

if TYPE_CHECKING:
    from scheduler.engine import Engine
    from scheduler.intake import Prompt


def as_batch(prompts: Any) -> list[Any]:
    """A list of prompts from one prompt or several; a flat list of ints and a flat array are one prompt."""
    if isinstance(prompts, str) or (isinstance(prompts, np.ndarray) and prompts.ndim == 1):
        return [prompts]
    batch = list(prompts)
    if batch and all(isinstance(item, (int, np.integer)) for item in batch):
        return [batch]
    return batch


def prepare_batch(
    engine: Engine,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    options: RequestOptions,
) -> list[list[Request]]:
    """The requests of each prompt, n of them. Every prompt is checked before any is queued; an error names the place
    of the prompt that it is about."""
    batch = as_batch(prompts)
    each = params if isinstance(params, Sequence) else [cast(SamplingParams, params)] * len(batch)
    if len(each) != len(batch):
        raise ValueError(f"{len(batch)} prompts need one SamplingParams or {len(batch)} of them, got {len(each)}")
    if options.get("request_id") is not None and sum(getattr(one, "n", 1) for one in each) > 1:
        raise InvalidRequest("request_id names one request, and this call makes several; leave it out")
    groups = []
    for i, (prompt, one) in enumerate(zip(batch, each, strict=True)):
        try:
            groups.append([engine.prepare(prompt, sample, **options) for sample in _samples(one)])
        except (ValueError, TypeError) as error:
            if len(batch) == 1:
                raise
            error.args = (f"prompt {i} of {len(batch)}: {error}",)
            raise
    return groups


def _samples(params: Any) -> Iterator[Any]:
    """The parameters of each output that one prompt asks for; what are no parameters is for `prepare` to refuse."""
    if not isinstance(params, SamplingParams) or params.n == 1:
        return iter([params])
    return map(params.sample, range(params.n))


def _join(outputs: list[RequestOutput]) -> RequestOutput:
    """The outputs of one prompt as one."""
    return replace(outputs[0], others=tuple(outputs[1:]))


def run_batch(
    engine: Engine,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    progress: bool,
    options: RequestOptions,
) -> list[RequestOutput]:
    """Run a batch to its end. Leaving early (an interrupt) cancels what is still live of it.

    The n requests of a prompt are queued one behind the other: whichever starts first computes the prompt, the others
    attach its full pages in the same step, or wait for them, and compute the rest of it, at most a page.
    """
    groups = prepare_batch(engine, prompts, params, options)
    lives = [engine.start(request, owned=True) for group in groups for request in group]
    bar = None
    if progress:
        from tqdm import tqdm

        bar = tqdm(total=len(lives), unit="req", desc="generate", smoothing=0.1)
    try:
        outputs: list[RequestOutput] = []
        stats = engine.scheduler.stats
        finished, generated = stats.num_finished, stats.generated_tokens
        for live in lives:
            while (output := live.output) is None:
                engine.drive_once(live)
                if bar is not None:
                    bar.set_postfix(tokens=stats.generated_tokens - generated, refresh=False)
                    bar.update(min(len(lives), stats.num_finished - finished) - bar.n)
            outputs.append(output)
        each = iter(outputs)
        return [_join([next(each) for _ in group]) for group in groups]
    finally:
        for live in lives:
            if live.output is None:
                engine.cancel(live.request.id)
        if bar is not None:
            bar.close()
