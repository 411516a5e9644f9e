"""StopSequences: sequences of token ids that end a generation and are left out of it."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from paged.errors import InvalidRequest
from paged.kv.pages import Int32
from paged.prefix.hashing import as_tokens

Stops = str | Sequence[str | Sequence[int] | Int32]


def texts_and_ids(stops: Stops, vocab_size: int) -> tuple[list[str], tuple[tuple[int, ...], ...]]:
    """The strings among what ends a generation, and the sequences of token ids.

    TypeError for what is neither, InvalidRequest for an id outside the vocabulary: nothing would ever end there.
    """
    expected = "a string, or a sequence of strings and of sequences of token ids"
    if isinstance(stops, str):
        stops = [stops]
    if not isinstance(cast("object", stops), Iterable) or isinstance(stops, (bytes, Mapping)):
        raise TypeError(f"stop_sequences must be {expected}, got {reprlib.repr(stops)}")
    texts, ids = list[str](), list[tuple[int, ...]]()
    for stop in stops:
        if isinstance(stop, str):
            texts.append(stop)
            continue
        try:
            sequence: list[int] = as_tokens(stop).tolist()
        except TypeError:
            raise TypeError(f"stop_sequences must be {expected}, got {reprlib.repr(stop)} in it") from None
        outside = [token for token in sequence if not 0 <= token < vocab_size]
        if outside:
            raise InvalidRequest(f"stop_sequences must hold token ids from 0 to {vocab_size - 1}, got {outside[0]}")
        ids.append(tuple(sequence))
    return texts, tuple(ids)


class StopSequences:
    """Takes tokens one by one and gives back those that cannot be part of a stop sequence any more.

    Of sequences that end with one token the longest is left out. O(longest sequence x sequences) a token.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        """ValueError for an empty sequence."""
        self._stops = sorted((tuple(sequence) for sequence in sequences), key=len, reverse=True)
        if any(not stop for stop in self._stops):
            raise ValueError("a stop sequence must hold at least one token id")
        self._held: list[int] = []
        self.ended = False

    def push(self, token: int) -> list[int]:
        """The tokens that are certain with this one; sets `ended` where it completes a stop sequence."""
        self._held.append(token)
        held = self._held
        for stop in self._stops:
            if tuple(held[-len(stop) :]) == stop:
                self.ended = True
                self._held = []
                return held[: -len(stop)]
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        certain, self._held = held[: len(held) - keep], held[len(held) - keep :]
        return certain

    def flush(self) -> list[int]:
        """What was held back, when nothing more comes."""
        held, self._held = self._held, []
        return held

    def _overlap(self, stop: tuple[int, ...]) -> int:
        """How many of the last tokens could be the beginning of `stop`."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if tuple(self._held[-n:]) == stop[:n]), 0)
