"""Offline batches: many prompts in, their outputs in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from paged.errors import InvalidRequest
from paged.sampling import SamplingParams
from scheduler.output import RequestOutput
from scheduler.request import RequestOptions
from scheduler.samples import Samples

if TYPE_CHECKING:
    from scheduler.engine import Engine
    from scheduler.intake import Prompt


def as_batch(prompts: Any) -> list[Any]:
    """A list of prompts from one prompt or several; a flat list of ints and a flat array are one prompt."""
    if isinstance(prompts, str) or (isinstance(prompts, np.ndarray) and prompts.ndim == 1):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray, Mapping, Set)):
        raise TypeError(f"prompts must be a prompt or a sequence of prompts, got {type(prompts).__name__}")
    batch = list(cast("Iterable[Any]", prompts))
    if batch and all(isinstance(item, (int, np.integer)) for item in batch):
        return [batch]
    return batch


def prepare_batch(
    engine: Engine,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    options: RequestOptions,
) -> list[Samples]:
    """The requests of each prompt. Every prompt is checked before any is queued; an error names the place of the
    prompt that it is about."""
    batch = as_batch(prompts)
    each = params if isinstance(params, Sequence) else [cast(SamplingParams, params)] * len(batch)
    if len(each) != len(batch):
        raise ValueError(f"{len(batch)} prompts need one SamplingParams or {len(batch)} of them, got {len(each)}")
    if options.get("request_id") is not None and len(batch) > 1:
        raise InvalidRequest(f"request_id names one request, and this call has {len(batch)} prompts; leave it out")
    groups: list[Samples] = []
    for i, (prompt, one) in enumerate(zip(batch, each, strict=True)):
        try:
            groups.append(engine.prepare(prompt, one, **options))
        except (ValueError, TypeError) as error:
            if len(batch) == 1:
                raise
            error.args = (f"prompt {i} of {len(batch)}: {error}",)
            raise
    return groups


def run_batch(
    engine: Engine,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    progress: bool,
    options: RequestOptions,
) -> list[RequestOutput]:
    """Run a batch to its end. Leaving early (an interrupt) cancels what is still live of it.

    A batch is queued whole, whatever the limits of the queue.
    """
    groups = prepare_batch(engine, prompts, params, options)
    total = sum(len(samples.requests) for samples in groups)
    bar = None
    if progress:
        from tqdm import tqdm

        bar = tqdm(total=total, unit="req", desc="generate", smoothing=0.1)
    try:
        outputs: list[RequestOutput] = []
        stats = engine.scheduler.stats
        finished, generated = stats.num_finished, stats.generated_tokens
        for samples in groups:
            engine.start(samples, bounded=False)
        for samples in groups:
            while (output := samples.output) is None:
                engine.drive(samples)
                if bar is not None:
                    bar.set_postfix(tokens=stats.generated_tokens - generated, refresh=False)
                    bar.update(min(total, stats.num_finished - finished) - bar.n)
            outputs.append(output)
        return outputs
    finally:
        for samples in groups:
            engine.cancel_call(samples)
        if bar is not None:
            bar.close()
