"""Sampler: one token for each row of logits. A row's token never depends on the rows beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paged.draw import Row, TokenLogprob, edit, edits_logits, mask, pick, token_logprob, uniforms
from paged.errors import BadLogits, ProcessorFailed, check
from paged.matcher import Bool, GrammarMatcher, allowed_tokens
from paged.processors import process
from paged.sampling import SamplingParams

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_NO_IDS = np.zeros(0, np.int64)
_NOTHING_ASKED = SamplingParams()
_UNUSABLE = "must be finite or -inf and leave a token to draw, but hold NaN or +inf or nothing but -inf"


@dataclass(slots=True)
class TokenHistory:
    """The known tokens of every slot; penalties and min_tokens read it. The arrays may be views of the caller's.

    tokens       int32 [num_slots, max_len]  prompt, then output
    prompt_lens  int32 [num_slots]
    known        int32 [num_slots]           number of known tokens: prompt and output
    """

    tokens: Int32
    prompt_lens: Int32
    known: Int32


@dataclass(slots=True)
class Sampled:
    """tokens int32 [R]; logprobs: an entry a row, None where the row asks for none, or None if no row asks."""

    tokens: Int32
    logprobs: list[TokenLogprob | None] | None


class Sampler:
    """Draws the next token of each row of a step, by the parameters assigned to the row's slot.

    A row's logits go through, in this order: logit_bias (added), repetition_penalty (over prompt and output),
    presence_penalty and frequency_penalty (over output), logits_processors, tokens masked that its grammar does not
    allow, end ids masked while fewer than min_tokens are generated (unless they are all that can be drawn),
    temperature, top_k, top_p, min_p. Then one number u of [0, 1), a function of (seed, position) alone, picks the first
    id, in order of ids, at which the cumulative probability of the kept tokens exceeds u. A row at a time; bias
    and penalties in float64 (a processor sees and gives fp32), probabilities in fp32, sums of many in float64. Ties:
    arg-max, top_k and top_p prefer the lowest id. The logits are never modified.

    Cost of a step over R rows of V logits: greedy rows without bias, penalties or grammar (and past their min_tokens)
    O(R * V) in a fixed number of vectorised calls; every other row O(V), plus its length where it has penalties, plus
    its mask where it has a grammar.

    Invariant (`check()`): the parameter arrays say of each slot what its assigned parameters say.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._params: list[SamplingParams | None] = [None] * num_slots
        self._end_ids: list[Int64] = [_NO_IDS] * num_slots
        self._matchers: dict[int, GrammarMatcher] = {}  # by slot, where there is a grammar
        self._seeds = np.zeros(num_slots, np.uint64)
        self._assigned = np.zeros(num_slots, np.bool_)
        self._special = np.zeros(num_slots, np.bool_)  # more than the arg-max of its plain logits
        self._min_tokens = np.zeros(num_slots, np.int32)  # 0 where there is no end id to mask
        self._logprobs = np.full(num_slots, -1, np.int32)  # -1: none wanted

    def assign(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        end_ids: Iterable[int] = (),
        matcher: GrammarMatcher | None = None,
    ) -> None:
        """Rows of `slot` are drawn by `params` from now on. O(ids in params).

        `seed` is `params.seed`, or what `draw_seed` gave for a request without one. `end_ids` are the model's:
        min_tokens masks them (unless ignore_eos) and stop_token_ids. `matcher` is where the output stands in
        `params.grammar`; the caller gives it each token that was drawn, the sampler only asks it. InvalidRequest if
        `params` names ids outside the vocabulary; ValueError if one of grammar and matcher comes alone.
        """
        params.validate_for(self.vocab_size)
        if (params.grammar is None) != (matcher is None):
            raise ValueError("a grammar needs its matcher and a matcher its grammar: see GrammarCompiler.matcher")
        # An end id that the head has no row for can never be drawn.
        ends = [i for i in params.end_ids(end_ids) if 0 <= i < self.vocab_size]
        self._params[slot] = params
        self._end_ids[slot] = np.array(ends, np.int64)
        self._seeds[slot] = seed & (2**64 - 1)
        self._assigned[slot] = True
        self._special[slot] = not params.greedy or edits_logits(params) or matcher is not None
        self._matchers.pop(slot, None)
        if matcher is not None:
            self._matchers[slot] = matcher
        self._min_tokens[slot] = min(params.min_tokens, 2**31 - 1) if ends else 0
        self._logprobs[slot] = -1 if params.logprobs is None else params.logprobs

    def clear(self, slot: int) -> None:
        """Forget the parameters of `slot`; a second call does nothing."""
        self._params[slot] = None
        self._end_ids[slot] = _NO_IDS
        self._matchers.pop(slot, None)
        self._seeds[slot] = 0
        self._assigned[slot] = False
        self._special[slot] = False
        self._min_tokens[slot] = 0
        self._logprobs[slot] = -1

    def sample(
        self,
        logits: torch.Tensor,
        slots: Int32,
        positions: Int32,
        history: TokenHistory,
        known: Int32 | None = None,
    ) -> Sampled:
        """One token for each row of `logits [R, vocab_size]`; row r belongs to `slots[r]`.

        `positions[r]` is the position that the drawn token will have in its sequence, `known[r]` the number of its
        slot's tokens before it, `history.known` of the slot unless given: a slot may have several rows. Logits that
        are not fp32 on the CPU are copied there. BadLogits, naming every such row, if a row holds NaN or +inf or
        nothing but -inf, ProcessorFailed (a BadLogits) if a logits processor failed: then nothing was drawn, and the
        call can be repeated with the other rows.
        """
        if logits.ndim != 2 or logits.shape[1] != self.vocab_size or not len(slots) == len(positions) == len(logits):
            raise ValueError(
                f"logits must be [{len(slots)} slots, {self.vocab_size} tokens] with a position a row, "
                f"got {tuple(logits.shape)} and {len(positions)} positions"
            )
        if not self._assigned[slots].all():
            raise ValueError(f"slot {int(slots[int(self._assigned[slots].argmin())])} has no sampling parameters")
        rows: npt.NDArray[np.float32] = logits.detach().to("cpu", torch.float32).numpy()
        # numpy's arg-max is the first maximum, or the first NaN of a row that holds one: its value tells all.
        best = rows.argmax(axis=1)
        peaks = rows[np.arange(len(rows)), best]
        self._refuse(~np.isfinite(peaks), slots, positions, _UNUSABLE)
        tokens = best.astype(np.int32)
        if known is None:
            known = history.known[slots]
        num_output = known - history.prompt_lens[slots]
        special = np.flatnonzero(self._special[slots] | (num_output < self._min_tokens[slots]))
        if len(special):
            draws = uniforms(self._seeds[slots[special]], positions[special])
            masks = self._masks(slots[special]) if self._matchers else {}
            failed: dict[int, str] = {}
            for r, u in zip(special.tolist(), draws.tolist(), strict=True):
                slot = int(slots[r])
                seen = history.tokens[slot, : known[r]]
                try:
                    tokens[r] = self._draw(rows[r], slot, u, seen, int(history.prompt_lens[slot]), masks.get(slot))
                except ProcessorFailed as error:
                    failed[r] = str(error)
            if failed:
                raise ProcessorFailed(next(iter(failed.values())), tuple(failed), failed)
            if (tokens < 0).any():
                self._refuse_undrawn(tokens < 0, slots, positions)
        wanted = self._logprobs[slots]
        if not (wanted >= 0).any():
            return Sampled(tokens, None)
        logprobs: list[TokenLogprob | None] = [None] * len(rows)
        for r in np.flatnonzero(wanted >= 0).tolist():
            logprobs[r] = token_logprob(rows[r], int(tokens[r]), int(wanted[r]))
        return Sampled(tokens, logprobs)

    def _masks(self, slots: Int32) -> dict[int, Bool]:
        """What the grammars of those of `slots` that have one allow, by slot."""
        guided = [slot for slot in slots.tolist() if slot in self._matchers]
        if not guided:
            return {}
        return dict(zip(guided, allowed_tokens([self._matchers[slot] for slot in guided]), strict=True))

    def _refuse_undrawn(self, undrawn: Bool, slots: Int32, positions: Int32) -> None:
        """Rows without a grammar first: each refusal has one reason, and the caller comes again without its rows."""
        matchers = [self._matchers.get(slot) for slot in slots.tolist()]
        self._refuse(undrawn & np.array([matcher is None for matcher in matchers]), slots, positions, _UNUSABLE)
        errors = {matcher.error for r, matcher in enumerate(matchers) if undrawn[r] and matcher is not None} - {""}
        why = f": {'; '.join(sorted(errors))}" if errors else ""
        self._refuse(undrawn, slots, positions, f"must leave a token that the grammar allows, but do not{why}")

    def _refuse(self, bad: Bool, slots: Int32, positions: Int32, reason: str) -> None:
        if not bad.any():
            return
        found = np.flatnonzero(bad)
        r = int(found[0])
        more = f" (and {len(found) - 1} more rows)" if len(found) > 1 else ""
        raise BadLogits(
            f"the logits of row {r}{more}, slot {slots[r]}, position {positions[r]}, {reason}",
            tuple(found.tolist()),
        )

    def _draw(self, logits: Row, slot: int, u: float, seen: Int32, prompt_len: int, allowed: Bool | None) -> int:
        """The token of one row after `seen`, or -1 if bias, penalties and grammar left nothing finite to draw."""
        params = self._params[slot]
        assert params is not None  # sample() looked
        masked = len(seen) - prompt_len < self._min_tokens[slot]
        if masked or allowed is not None or edits_logits(params):
            row = edit(logits, params, seen, prompt_len)
            if params.logits_processors:
                row = process(params.logits_processors, seen, row)
            if allowed is not None:
                row[~allowed] = -np.inf
            if masked:
                mask(row, self._end_ids[slot])
            if not np.isfinite(row.max()):
                return -1
            logits = row
        return int(logits.argmax()) if params.greedy else pick(logits, params, u)

    def check(self) -> None:
        """Assert the invariants of the class docstring. O(num_slots)."""
        for slot, assigned in enumerate(self._params):
            check(bool(self._assigned[slot]) == (assigned is not None), f"slot {slot} is half assigned")
            params = assigned or _NOTHING_ASKED
            guided = slot in self._matchers
            check(guided == (params.grammar is not None), f"slot {slot}: a grammar without its matcher")
            special = not params.greedy or edits_logits(params) or guided
            check(bool(self._special[slot]) == special, f"slot {slot} would be drawn by the wrong path")
            least = min(params.min_tokens, 2**31 - 1) if len(self._end_ids[slot]) else 0
            check(int(self._min_tokens[slot]) == least, f"slot {slot}: min_tokens differ")
            wanted = -1 if params.logprobs is None else params.logprobs
            check(int(self._logprobs[slot]) == wanted, f"slot {slot}: logprobs differ")


def sample_one(
    logits: torch.Tensor,
    params: SamplingParams,
    seed: int,
    position: int,
    prompt: Sequence[int] | Int32,
    output: Sequence[int] | Int32,
    end_ids: Iterable[int] = (),
    matcher: GrammarMatcher | None = None,
) -> int:
    """The token that a Sampler draws for one row, `logits [vocab_size]`, after `prompt` and `output`.

    `matcher` has accepted `output`, and is only asked. O(vocab_size + len(prompt) + len(output)). Errors as those of
    `Sampler.assign` and `Sampler.sample`.
    """
    sampler = Sampler(1, logits.shape[-1])
    sampler.assign(0, params, seed, end_ids, matcher)
    tokens = np.concatenate([np.asarray(prompt, np.int32), np.asarray(output, np.int32)])[None]
    history = TokenHistory(tokens, np.array([len(prompt)], np.int32), np.array([tokens.shape[1]], np.int32))
    at = np.array([position], np.int32)
    return int(sampler.sample(logits.reshape(1, -1), np.zeros(1, np.int32), at, history).tokens[0])
