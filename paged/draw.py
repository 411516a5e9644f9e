"""The arithmetic of drawing one token: random numbers, and what is done to one row of logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paged.sampling import GREEDY_BELOW, SamplingParams

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Uint64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Row = npt.NDArray[np.floating]  # [vocab_size]: fp32 as the model gave it, or float64 once edited

LOGPROB_FLOOR = -9999.0  # reported in place of anything lower: JSON has no infinity

_MOST = float(np.finfo(np.float32).max)
_BLOCK = 256  # weights summed together before the cumulative sum
_HEAD = 256  # weights that top_p sorts at first
_GROUP = 32  # values whose maximum stands for them, at most, where the largest of all are looked for


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log probability of a token, drawn or of a prompt, and of the most likely ones as (id, log probability),
    best first.

    From the model's own logits, before bias, penalties and temperature. Never below -9999.0, so always finite.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def uniforms(seeds: Uint64, positions: Int32) -> Float64:
    """One number of [0, 1) with 53 random bits for each pair (seed, position); nothing else goes into it.

    Output number `position` of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
    OOPSLA 2014; constants of Vigna's splitmix64.c), started at the mixed seed so that nearby seeds, too, give
    unrelated streams. O(1) a pair, in any order.
    """
    steps = positions.astype(np.uint64) + np.uint64(1)
    bits = _mix(_mix(seeds) + steps * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: Uint64) -> Uint64:
    """SplitMix64's finaliser: a bijection of 64-bit words. Array arithmetic wraps without a warning."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def edits_logits(params: SamplingParams) -> bool:
    """Whether `edit`, or a logits processor, would change anything."""
    return (
        params.logit_bias is not None
        or len(params.logits_processors) > 0
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def edit(logits: Row, params: SamplingParams, known: Int32, prompt_len: int) -> Float64:
    """A float64 copy of one row with bias and penalties; `known` is prompt, then output. O(V + known log known)."""
    row = logits.astype(np.float64)
    with np.errstate(over="ignore"):
        for token_id, bias in (params.logit_bias or {}).items():
            row[token_id] += bias
        if params.repetition_penalty != 1.0:
            # A token that stands twice in `known` gets the same value twice. Ids below 0 stand for media.
            ids = known[known >= 0]
            seen = row[ids]
            row[ids] = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            ids, counts = np.unique(known[prompt_len:], return_counts=True)
            row[ids] -= params.presence_penalty + params.frequency_penalty * counts
    return row


def mask(row: Float64, end_ids: Int64) -> None:
    """Take the end ids out of `row`, in place, unless nothing else can be drawn."""
    ends = row[end_ids]
    row[end_ids] = -np.inf
    if row.max() == -np.inf:
        row[end_ids] = ends


def pick(logits: Row, params: SamplingParams, u: float) -> int:
    """Temperature, top_k, top_p and min_p on one row whose maximum is finite, then the draw. O(V)."""
    ids = None
    if 0 < params.top_k < len(logits):
        # Before the division by the temperature: it keeps their order.
        ids = largest(logits, params.top_k)
        logits = logits[ids]
    weights = _weights(logits, params.temperature)
    keep = None
    if params.top_p < 1.0:
        keep = _nucleus(logits, weights, params.top_p)
        weights = weights[keep]
    if params.min_p > 0.0:
        likely = np.flatnonzero(weights >= params.min_p)  # the most likely token weighs 1
        keep = likely if keep is None else keep[likely]
        weights = weights[likely]
    at = _inverse_cdf(weights, u)
    at = at if keep is None else int(keep[at])
    return at if ids is None else int(ids[at])


def _weights(logits: Row, temperature: float) -> Float32:
    """Probabilities of one row as multiples of the highest. fp32: a quarter of the time of float64."""
    with np.errstate(over="ignore", under="ignore"):
        weights = (logits - logits.max()).astype(np.float32, copy=False)
        if temperature != 1.0:
            # An infinite divisor would turn what is masked into NaN.
            weights /= np.float32(min(max(temperature, GREEDY_BELOW), _MOST))
        return np.exp(weights, out=weights)


def _block_sums(weights: Float32) -> Float32:
    """Sums of _BLOCK weights each, the last one of what is left. einsum takes a third of the time of sum(axis=1)."""
    whole = len(weights) // _BLOCK * _BLOCK
    sums = np.einsum("ij->i", weights[:whole].reshape(-1, _BLOCK))
    return sums if whole == len(weights) else np.append(sums, weights[whole:].sum())


def largest(values: Row, k: int) -> Int64:
    """The indices of the k largest values, ascending; of equal values at the edge, the first. O(V), k >= 1."""
    if k >= len(values):
        return np.arange(len(values))
    near = _near_top(values, k)
    close = values[near]
    edge = np.partition(close, len(close) - k)[len(close) - k]
    ids = near[close >= edge]
    excess = len(ids) - k
    return np.delete(ids, np.flatnonzero(values[ids] == edge)[-excess:]) if excess else ids


def _near_top(values: Row, k: int) -> Int64:
    """Indices, ascending, that hold the k largest values and few others, 1 <= k <= len(values).

    At least k values reach the k-th largest of the maxima of equal groups. So what is left to partition is short, and
    all of `values` is only compared: a third of the time of np.partition on a vocabulary.
    """
    size = min(_GROUP, len(values) // (4 * k))
    if size < 4:
        return np.arange(len(values))
    groups = len(values) // size
    peaks = values[: groups * size].reshape(size, groups).max(axis=0)
    return np.flatnonzero(values >= np.partition(peaks, groups - k)[groups - k])


def _nucleus(logits: Row, weights: Float32, top_p: float) -> Int64:
    """The ids, ascending, of the smallest set of most likely tokens that holds top_p of all weight, never empty.

    Few tokens carry most of it as a rule, so only the heaviest are sorted, and more of them while they do not do.
    """
    goal, size = top_p * float(_block_sums(weights).sum(dtype=np.float64)), min(_HEAD, len(weights))
    while True:
        near = _near_top(logits, size)
        head = np.sort(weights[near])[::-1][:size]
        enough = int(np.cumsum(head, dtype=np.float64).searchsorted(goal)) + 1
        if enough <= size or size == len(weights):
            return near[largest(logits[near], enough)]
        size = min(8 * size, len(weights))


def _inverse_cdf(weights: Float32, u: float) -> int:
    """The first index at which the cumulative share of `weights` exceeds u, 0 <= u < 1.

    Sums of fixed blocks first, then within one block: a third of the time of a cumulative sum over a vocabulary.
    """
    ends = np.cumsum(_block_sums(weights), dtype=np.float64)
    goal = u * ends[-1]
    block = int(ends.searchsorted(goal, side="right"))
    first = block * _BLOCK
    inside = np.cumsum(weights[first : first + _BLOCK], dtype=np.float64)
    before = ends[block - 1] if block else 0.0
    at = int(inside.searchsorted(goal - before, side="right"))
    # The two sums of a block may round apart: then its last index of any weight is meant.
    return first + min(at, int(inside.searchsorted(inside[-1])))


def token_logprob(logits: Row, token_id: int, num_top: int) -> TokenLogprob:
    """Log-softmax of one row at `token_id` and at its `num_top` highest logits, to 1e-6. O(V)."""
    log_total = float(logits.max()) + math.log(_block_sums(_weights(logits, 1.0)).sum(dtype=np.float64))

    def value(i: int) -> float:
        return max(LOGPROB_FLOOR, float(logits[i]) - log_total)

    ids = largest(logits, num_top) if num_top else np.zeros(0, np.int64)
    top = ids[np.argsort(-logits[ids], kind="stable")].tolist()
    return TokenLogprob(token_id, value(token_id), tuple((i, value(i)) for i in top))
