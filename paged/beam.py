"""Beam search: the most likely continuations of a sequence, its beams sharing their pages."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from paged.batch import eval_batch
from paged.session import Session


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation. `score` is its log probability over its length (end id included) to the length penalty."""

    token_ids: tuple[int, ...]  # without the end id
    score: float
    finish_reason: str  # "stop" or "length"


@dataclass(slots=True)
class _Live:
    tokens: tuple[int, ...]
    log_prob: float
    session: Session


class BeamSearch:
    """The best `num_beams` continuations of a session, which stays as it is.

    Beams are forks: they share all pages but those they write. One step costs one forward over the live beams, and
    a partial sort of their `num_beams` x vocabulary candidates. Equal scores are kept in order of beam and token id,
    so that the result depends on the logits alone. With one beam it is greedy decoding.
    """

    def __init__(
        self,
        session: Session,
        num_beams: int,
        end_ids: Iterable[int] = (),
        length_penalty: float = 1.0,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """`lock` is held while pages and model are touched. ValueError unless num_beams >= 1."""
        if num_beams < 1:
            raise ValueError(f"num_beams must be at least 1, got {num_beams}")
        if session.logits is None:
            raise RuntimeError("there are no logits to search from: eval() at least one token first")
        self.num_beams = num_beams
        self.length_penalty = length_penalty
        self._ends = frozenset(end_ids)
        self._lock = lock or nullcontext()
        self._logits = session.logits[None]
        with self._lock:
            self._live = [_Live((), 0.0, session.fork())]
        self._done: list[Beam] = []

    def run(self, max_tokens: int) -> list[Beam]:
        """At most `max_tokens` tokens each, best first; to be called once.

        The search ends early when no live beam, if it ended now, could still beat the worst of `num_beams` ended ones.
        """
        try:
            for length in range(1, max_tokens + 1):
                chosen = self._choose(length)
                if self._decided(chosen, length):
                    break
                if length == max_tokens:
                    for b, token, log_prob in chosen:
                        tokens = (*self._live[b].tokens, token)
                        self._done.append(Beam(tokens, self._score(log_prob, length), "length"))
                    break
                with self._lock:
                    self._live = self._fork(chosen)
                    last = [beam.tokens[-1] for beam in self._live]
                    self._logits = eval_batch([beam.session for beam in self._live], last)
            return self._ranked()
        finally:
            with self._lock:
                for beam in self._live:
                    beam.session.release()

    def _choose(self, length: int) -> list[tuple[int, int, float]]:
        """The (beam, token, log probability) to go on with; those that end among the best `num_beams` are done."""
        scores = torch.log_softmax(self._logits.double().cpu(), dim=-1).numpy()
        scores = scores + np.array([beam.log_prob for beam in self._live])[:, None]
        flat, vocab = scores.ravel(), scores.shape[1]
        count = min(len(flat), self.num_beams * (1 + len(self._ends)))  # so many that num_beams of them do not end
        edge = np.partition(flat, len(flat) - count)[len(flat) - count]
        found = np.flatnonzero(flat >= edge)
        found = found[np.argsort(-flat[found], kind="stable")][:count]
        chosen: list[tuple[int, int, float]] = []
        for rank, at in enumerate(found[np.isfinite(flat[found])].tolist()):
            b, token = divmod(at, vocab)
            if token not in self._ends:
                chosen.append((b, token, float(flat[at])))
            elif rank < self.num_beams:
                self._done.append(Beam(self._live[b].tokens, self._score(float(flat[at]), length), "stop"))
        return chosen[: self.num_beams]

    def _decided(self, chosen: list[tuple[int, int, float]], length: int) -> bool:
        if not chosen:
            return True
        if len(self._done) < self.num_beams:
            return False
        return self._ranked()[-1].score >= self._score(max(log_prob for _, _, log_prob in chosen), length)

    def _fork(self, chosen: list[tuple[int, int, float]]) -> list[_Live]:
        """The next beams: a parent goes on in its own session once, its other children in forks."""
        kept: set[int] = set()
        out: list[_Live] = []
        for b, token, log_prob in chosen:
            parent = self._live[b]
            session = parent.session.fork() if b in kept else parent.session
            kept.add(b)
            out.append(_Live((*parent.tokens, token), log_prob, session))
        for b, beam in enumerate(self._live):
            if b not in kept:
                beam.session.release()
        return out

    def _score(self, log_prob: float, length: int) -> float:
        return log_prob / length**self.length_penalty

    def _ranked(self) -> list[Beam]:
        return sorted(self._done, key=lambda beam: -beam.score)[: self.num_beams]
