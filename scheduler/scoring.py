"""Scoring: from the logits of a step to the log probabilities of the prompt tokens that it computed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from paged.draw import TokenLogprob, token_logprob
from paged.errors import BadLogits
from scheduler.request import Request
from scheduler.step import ScoredRows, StepPlan

_BLOCK = 32  # rows that leave the device at once


def score_prompts(plan: StepPlan, logits: torch.Tensor) -> dict[Request, str]:
    """Take the log probabilities that `plan.scored` asks for out of the step's `logits`, whose rows for it come behind
    those that are sampled. Returns the requests whose rows are no logits, and what is wrong.

    O(vocab_size) a row, in float64, as for sampled tokens; rows are copied in small blocks.
    """
    bad: dict[Request, str] = {}
    at = len(logits) - sum(rows.count for rows in plan.scored)
    for rows in plan.scored:
        try:
            rows.request.scored.extend(_scores(rows, logits[at : at + rows.count]))
        except BadLogits as error:
            bad[rows.request] = f"BadLogits: {error}"
            if rows.request.cursor is not None:
                rows.request.cursor.closed = True  # nobody attaches rows that hold NaN
        at += rows.count
    return bad


def _scores(rows: ScoredRows, logits: torch.Tensor) -> Iterator[TokenLogprob | None]:
    """One a row; None where the next position is media, which has no probability."""
    request, num_top = rows.request, rows.request.params.prompt_logprobs or 0
    for start in range(0, rows.count, _BLOCK):
        block = logits[start : start + _BLOCK].detach().to("cpu", torch.float32).numpy()
        position = rows.first + start
        good = np.isfinite(block.max(axis=1))
        if not good.all():
            at = position + int(good.argmin())
            raise BadLogits(
                f"the logits at position {at} of the prompt must be finite or -inf, "
                "but hold NaN or +inf or nothing but -inf"
            )
        for row, token in zip(block, request.prompt[position + 1 :].tolist(), strict=False):
            yield token_logprob(row, token, num_top) if token >= 0 else None
