"""Drafts: guessed tokens that a step computes behind a decode, and which of them it keeps."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from scheduler.proposer import Proposer
from scheduler.quotas import Quotas
from scheduler.request import Int32, Request
from scheduler.slots import Slots
from scheduler.stats import SchedulerStats
from scheduler.step import StepPlan


@dataclass
class Drafter:
    """Puts a proposer's guesses behind the last known tokens of requests that decode.

    A draft takes what the step leaves: rows of the token budget after every chunk, and free pages, for which nothing
    is evicted or preempted and no quota exceeded. It never reaches the limit of its request. A proposer that fails, or
    names an id outside the vocabulary, is counted (`proposer_errors`) and proposes nothing for that request in that
    step. Requests with a grammar are not drafted for: what may follow depends on each token before it.

    Each request is drafted for as its guesses deserve: twice as many after a step whose guesses all were right, one
    more than were right after any other, and after n steps in a row with none right a pause of 2**n - 1 steps, at most
    63. So text that never repeats itself costs a handful of rows, not some in every step.
    """

    proposer: Proposer
    num_drafts: int
    vocab_size: int
    state: Slots
    stats: SchedulerStats
    quotas: Quotas

    def __post_init__(self) -> None:
        num_slots = len(self.state.known)
        self._arrival = np.full(num_slots, -1, np.int64)  # of the request that the rest is about
        self._width = np.zeros(num_slots, np.int32)  # guesses in the next draft
        self._misses = np.zeros(num_slots, np.int32)  # drafts in a row without a right guess
        self._pause = np.zeros(num_slots, np.int32)  # steps without a draft

    def draft(self, slots: Int32, num_tokens: Int32, budget: int) -> Int32:
        """Guess for those of `slots` that decode; returns the rows to add to each, int32 [len(slots)].

        The guesses stand in `state.tokens` behind `known`, on pages that the slots hold.
        """
        state, added = self.state, np.zeros(len(slots), np.int32)
        known = state.known[slots]
        self._meet(slots)
        most = np.minimum(state.limit[slots] - known - 1, self._width[slots])
        decodes = (num_tokens == 1) & (known == state.computed[slots] + 1) & (most > 0)
        paused = self._pause[slots] > 0
        self._pause[slots[decodes & paused]] -= 1
        decodes &= ~paused
        for i in np.flatnonzero(decodes).tolist():
            if budget <= 0:
                break
            slot, n = int(slots[i]), int(known[i])
            request = state.requests[slot]
            if request is None or request.matcher is not None:
                continue
            guess = self._guess(request, state.tokens[slot, :n], min(int(most[i]), budget))
            count = min(len(guess), self._room(slot, n + len(guess)) - n)
            if count > 0:
                state.tokens[slot, n : n + count] = guess[:count]
                added[i] = count
                budget -= count
        self.stats.drafted_tokens += int(added.sum())
        return added

    def learn(self, plan: StepPlan, rows: Int32) -> None:
        """Of the step's sampled rows those of `rows` were kept (see `kept_rows`): how good were the guesses?"""
        num_slots = len(self._width)
        drafted = np.bincount(plan.sample_slots, minlength=num_slots) - 1
        slots = np.flatnonzero(drafted > 0)
        right = (np.bincount(plan.sample_slots[rows], minlength=num_slots) - 1)[slots]
        width = np.where(right == drafted[slots], 2 * self._width[slots], right + 1)
        self._width[slots] = np.minimum(width, self.num_drafts)
        misses = np.where(right == 0, self._misses[slots] + 1, 0)
        self._misses[slots] = misses
        self._pause[slots] = 2 ** np.minimum(misses, 6) - 1
        self.stats.accepted_tokens += int(right.sum())

    def _meet(self, slots: Int32) -> None:
        """Begin anew with requests that came into their slots since the last step."""
        new = slots[self._arrival[slots] != self.state.arrival[slots]]
        self._arrival[new] = self.state.arrival[new]
        self._width[new] = self.num_drafts
        self._misses[new] = self._pause[new] = 0

    def _guess(self, request: Request, tokens: Int32, most: int) -> Int32:
        view = tokens.view()
        view.flags.writeable = False
        try:
            guess = np.asarray(self.proposer.propose(view, most), np.int32).reshape(-1)[:most]
        except Exception:
            self.stats.proposer_errors += 1
            return tokens[:0]
        if len(guess) and (int(guess.min()) < 0 or int(guess.max()) >= self.vocab_size):
            self.stats.proposer_errors += 1
            return tokens[:0]
        return guess

    def _room(self, slot: int, wanted: int) -> int:
        """Tokens that the pages of a slot hold, once free pages were added up to `wanted`."""
        state, pool = self.state, self.state.pool
        columns = int(np.count_nonzero(state.uses[:, slot]))
        at = np.array([slot], np.int32)
        with suppress(Exception):  # a page that cannot be had is no reason to end a request that can do without
            while wanted > int(state.num_pages[slot]) * pool.page_size and pool.num_free >= columns:
                if not self.quotas.may_take(slot, columns):
                    break
                state.extend(at)
        return int(state.num_pages[slot]) * pool.page_size


def kept_rows(plan: StepPlan, tokens: Int32, state: Slots) -> Int32:
    """The sampled rows whose tokens count, ascending: of each slot those up to and with the first that is not its
    draft, or that ends the request.

    The token of a row is drawn as if all drafts before it were right, by (seed, position) alone: as long as they are,
    it is the token of plain decoding. O(rows), vectorised.
    """
    num_rows = len(tokens)
    firsts = np.flatnonzero(np.diff(plan.sample_slots, prepend=-1))
    last = np.zeros(num_rows, np.bool_)
    last[np.append(firsts[1:], num_rows) - 1] = True
    after = plan.batch.tokens[np.minimum(plan.batch.logit_rows[:num_rows] + 1, len(plan.batch.tokens) - 1)]
    ended = (state.end_ids[plan.sample_slots] == tokens[:, None]).any(axis=1)
    ended &= plan.positions + 1 > state.min_known[plan.sample_slots]
    stops = last | (tokens != after) | ended
    rows = np.arange(num_rows)
    bound = np.minimum.reduceat(np.where(stops, rows, num_rows), firsts)
    counts = np.diff(np.append(firsts, num_rows))
    return rows[rows <= np.repeat(bound, counts)].astype(np.int32)
