"""What the sampler's tests share: one row in a call of its own, and the drawing of it in plain loops."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from paged.sampler import TokenHistory, sample_one
from paged.sampling import SamplingParams

INF = math.inf


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def history_of(*sequences: tuple[Sequence[int], Sequence[int]]) -> TokenHistory:
    """One slot for each (prompt, output)."""
    known = int32(*(len(p) + len(o) for p, o in sequences))
    tokens = np.full((len(sequences), max(int(known.max()), 1) + 3), -1, np.int32)  # -1: must never be read
    for slot, (prompt, output) in enumerate(sequences):
        tokens[slot, : known[slot]] = [*prompt, *output]
    return TokenHistory(tokens, int32(*(len(p) for p, _ in sequences)), known)


def one(
    row: Sequence[float],
    params: SamplingParams,
    seed: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    end_ids: Iterable[int] = (),
) -> int:
    """The token of a single row through `sample_one`, at the position that follows the known tokens."""
    logits = torch.tensor(row, dtype=torch.float32)
    return sample_one(logits, params, seed, len(prompt) + len(output), prompt, output, end_ids)


def kept_weights(
    row: list[float], p: SamplingParams, prompt: list[int], output: list[int], ends: list[int]
) -> tuple[dict[int, float], float]:
    """The weights that the draw is made from, by id in ascending order, and how near a threshold came to deciding
    otherwise. Plain loops over Python floats, in the documented order."""
    x = [float(v) for v in row]
    margin = INF
    for i, bias in (p.logit_bias or {}).items():
        x[i] += bias
    for i in set(prompt + output):
        x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
    for i, count in Counter(output).items():
        x[i] -= p.presence_penalty + p.frequency_penalty * count
    if len(output) < p.min_tokens and any(v > -INF for i, v in enumerate(x) if i not in ends):
        for i in ends:
            x[i] = -INF
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.temperature < 1e-6:
        return {order[0]: 1.0}, margin
    if p.top_k > 0:
        order = order[: p.top_k]
    weight = {i: math.exp((x[i] - x[order[0]]) / p.temperature) for i in order}
    if p.top_p < 1.0:
        total, mass, kept = math.fsum(weight.values()), 0.0, []
        for i in order:
            if kept and mass >= p.top_p * total:
                break
            kept.append(i)
            mass += weight[i]
            margin = min(margin, abs(mass / total - p.top_p))
        order = kept
    if p.min_p > 0.0:
        margin = min(margin, *(abs(weight[i] - p.min_p) if weight[i] != 1.0 else INF for i in order), INF)
        order = [i for i in order if weight[i] >= p.min_p]
    return {i: weight[i] for i in sorted(order)}, margin


def oracle(
    row: list[float], p: SamplingParams, u: float, prompt: list[int], output: list[int], ends: list[int]
) -> tuple[int, float]:
    """The token, and how near a threshold came to deciding otherwise."""
    weight, margin = kept_weights(row, p, prompt, output, ends)
    total, mass, token = math.fsum(weight.values()), 0.0, -1
    for i, w in weight.items():
        mass += w
        margin = min(margin, abs(mass / total - u)) if len(weight) > 1 else margin
        if token < 0 and mass / total > u:
            token = i
    return token, margin
