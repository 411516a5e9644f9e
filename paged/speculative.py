"""Self-speculative decoding: a looped model drafts at a small depth and verifies at its full one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from paged.matcher import GrammarMatcher
from paged.prefix.hashing import Int32
from paged.sampler import Sampler, TokenHistory
from paged.sampling import SamplingParams
from paged.session import Session


@dataclass(slots=True)
class DraftStats:
    """Tokens that the small depth proposed, and those of them that the full depth kept."""

    drafted: int = 0
    accepted: int = 0


class SpeculativeDecoder:
    """Decodes a session of a looped model; the tokens are those of plain decoding, greedy and seeded.

    Each round drafts `num_draft` tokens at `draft_loops` iterations. The full depth then runs the iterations that are
    missing over all of them at once, from the residual that drafting left: what was drafted is never computed twice,
    whether it is kept or not. A draft is kept as long as it is the token that the full depth draws at that position,
    which depends on (seed, position) alone. Rows of rejected drafts are written over.

    Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, with the draft model inside
    the target; there a draft is kept by chance, so that only the distribution stays, here only if it is equal.
    """

    def __init__(
        self,
        session: Session,
        params: SamplingParams,
        seed: int,
        draft_loops: int,
        num_draft: int = 4,
        num_prompt: int | None = None,
        end_ids: Iterable[int] = (),
        lock: AbstractContextManager[object] | None = None,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        """`num_prompt` of the session's tokens are prompt (default: all), for the penalties that look at output alone.

        `lock` is held while pages and model are touched. With `params.grammar` comes the `matcher` that has accepted
        the output so far; the decoder goes on with it. ValueError unless 1 <= draft_loops < the session's depth and
        num_draft >= 1.
        """
        if not 1 <= draft_loops < session.view.loops:
            raise ValueError(
                f"draft_loops must be at least 1 and below the {session.view.loops} loops of the session, "
                f"got {draft_loops}"
            )
        if num_draft < 1:
            raise ValueError(f"num_draft must be at least 1, got {num_draft}")
        if session.logits is None:
            raise RuntimeError("there are no logits to sample from: eval() at least one token first")
        self.session = session
        self.draft_loops = draft_loops
        self.num_draft = num_draft
        self.stats = DraftStats()
        self._lock = lock or nullcontext()
        self._sampler = Sampler(1, session.model.vocab_size)
        self._matcher = matcher
        self._assign = partial(self._sampler.assign, 0, params, seed, tuple(end_ids))
        self._assign(matcher)
        self._known: list[int] = session.tokens.tolist()
        self._taken = len(self._known)  # known tokens that the caller has
        self._complete = False  # the grammar, with what is known
        self._num_prompt = len(self._known) if num_prompt is None else num_prompt

    def tokens(self, max_tokens: int) -> Iterator[int]:
        """The next `max_tokens` tokens, each as soon as it is known; fewer where the grammar is complete before.

        Called again, it goes on behind the last token that was taken. The caller stops where it sees an end id.
        PromptTooLong at the model's length, OutOfPages if the pool is full.
        """
        for left in range(max_tokens, 0, -1):
            if self._taken == len(self._known):
                if self._complete:
                    return
                with self._lock:
                    new, self._complete = self._next(left)
                self._known += new
            self._taken += 1
            yield self._known[self._taken - 1]

    def _next(self, most: int) -> tuple[list[int], bool]:
        """1 to `most` tokens that follow the known ones, and whether the grammar is complete with them."""
        logits = self.session.logits
        if logits is not None and self.session.n_past == len(self._known):  # nothing was drawn from them yet
            token = self._draw(logits, [])
            return [token], _accept(self._matcher, token)
        return self._round(min(self.num_draft, most - 1))

    def _round(self, num_draft: int) -> tuple[list[int], bool]:
        """One draft and its verification: the tokens that follow the known ones, 1 to 1 + num_draft, and whether the
        grammar is complete with them."""
        session = self.session
        first = np.array(self._known[session.n_past :], np.int32)  # the last known token, which has no rows yet
        session.admit(np.zeros(1 + num_draft, np.int32))
        before = session.table.num_pages
        session.table.ensure(session.n_past, session.n_past + 1 + num_draft)
        try:
            drafts, residual = self._draft(first, num_draft)
            batch = session.batch(drafts, num_logits=len(drafts))
            logits, _ = session.model.run_loops(batch, session.storage, residual, self.draft_loops)
            new, complete = self._verify(drafts, logits)
        except BaseException:
            session.table.truncate(before)
            raise
        self.stats.drafted += len(drafts) - 1
        self.stats.accepted += len(new) - 1
        session.logits = logits[len(new) - 1]
        session.advance(drafts[: len(new)])
        session.table.truncate(-(-session.n_past // session.pool.page_size))
        return new, complete

    def _verify(self, drafts: Int32, logits: torch.Tensor) -> tuple[list[int], bool]:
        """What the full depth draws behind each of `drafts`, up to the first that is not the next of them."""
        new: list[int] = []
        for i in range(len(drafts)):
            new.append(self._draw(logits[i], new))
            if _accept(self._matcher, new[-1]):
                return new, True
            if i + 1 < len(drafts) and new[-1] != int(drafts[i + 1]):
                break
        return new, False

    def _draft(self, first: Int32, num_draft: int) -> tuple[Int32, torch.Tensor]:
        """`first` and the tokens drafted behind it, [n], and the residual of their rows at the small depth."""
        session, drafts, residuals = self.session, first, list[torch.Tensor]()
        matcher = None if self._matcher is None else self._matcher.fork()
        self._assign(matcher)
        while True:
            batch = session.batch(drafts[-1:], ahead=len(drafts) - 1, loops=self.draft_loops)
            logits, residual = session.model.run_loops(batch, session.storage)
            residuals.append(residual)
            if len(drafts) > num_draft:
                break
            token = self._draw(logits[0], drafts[1:].tolist())
            if _accept(matcher, token):
                num_draft = len(drafts)  # nothing can follow
            drafts = np.append(drafts, np.int32(token))
        self._assign(self._matcher)
        return drafts, torch.cat(residuals)

    def _draw(self, logits: torch.Tensor, more: list[int]) -> int:
        """The token behind the known ones and `more`."""
        tokens = np.array([*self._known, *more], np.int32)
        history = TokenHistory(tokens[None], np.array([self._num_prompt], np.int32), np.array([len(tokens)], np.int32))
        at = np.array([len(tokens)], np.int32)
        return int(self._sampler.sample(logits.reshape(1, -1), np.zeros(1, np.int32), at, history).tokens[0])


def _accept(matcher: GrammarMatcher | None, token: int) -> bool:
    """Whether a grammar is complete with `token`."""
    return matcher is not None and matcher.accept(token)
