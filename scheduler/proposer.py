"""Proposers: who guesses the next tokens of a request, for one step to verify together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from scheduler.request import Int32


class Proposer(Protocol):
    """Guesses what follows. A guess costs time where it is wrong, and never changes a token."""

    def propose(self, tokens: Int32, most: int) -> Sequence[int] | Int32:
        """Up to `most` token ids that may follow `tokens` (prompt and output of one request, a view: do not keep it).

        Called once a step for each request that decodes.
        """
        ...


class PromptLookup:
    """Proposes what followed the last place where the text was as it is now: the longest run of last tokens, from
    `most_ngram` down to `least_ngram`, that stands earlier in prompt or output.

    Saxena, "Prompt lookup decoding", 2023. It pays where the output repeats its prompt: code edits, extraction,
    summaries. Nothing is kept between calls; a call compares one token with all known ones, O(tokens), about ten
    microseconds for 8000.
    """

    def __init__(self, most_ngram: int = 4, least_ngram: int = 2) -> None:
        if not 1 <= least_ngram <= most_ngram:
            raise ValueError(f"PromptLookup needs 1 <= least_ngram <= most_ngram, got {least_ngram} and {most_ngram}")
        self.most_ngram = most_ngram
        self.least_ngram = least_ngram

    def propose(self, tokens: Int32, most: int) -> Int32:
        """See `Proposer`."""
        last = len(tokens) - 1
        at = np.flatnonzero(tokens[:last] == tokens[last])  # where the last token stands earlier
        best = at[:0]
        for n in range(1, self.most_ngram):
            if n >= self.least_ngram:
                best = at
            at = at[at >= n]
            at = at[tokens[at - n] == tokens[last - n]]
            if not len(at):
                break
        else:
            best = at
        if not len(best):
            return tokens[:0]
        start = int(best[-1]) + 1
        guess = tokens[start : start + most]
        media = np.flatnonzero(guess < 0)  # ids that stand for media, which nobody draws
        return guess[: media[0]] if len(media) else guess


PROPOSERS = {"prompt_lookup": PromptLookup}


def get_proposer(proposer: str | Proposer | None) -> Proposer | None:
    """A proposer by its name, or the object itself. ValueError lists the names there are."""
    if proposer is None or not isinstance(proposer, str):
        return proposer
    try:
        return PROPOSERS[proposer]()
    except KeyError:
        raise ValueError(f"the proposer must be one of {', '.join(sorted(PROPOSERS))}, got {proposer!r}") from None
