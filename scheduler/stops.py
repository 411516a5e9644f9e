"""StopSequences: sequences of token ids that end a generation and are left out of it."""

from __future__ import annotations

from collections.abc import Sequence


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
