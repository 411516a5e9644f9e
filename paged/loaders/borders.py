"""Where a tokenisation no longer depends on what follows: the places that no token of the vocabulary can span."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from paged.loaders.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paged.ops.plan import Int32

# Texts to put where a user's text goes: no two begin alike, each class of characters that tokenizers tell apart is
# there, and so is what templates look for in a user's text.
PROBES = (
    "Hello", "and then", "7 of 9", " two", "\nline", "\ttab", "(x)", "'s", "...", "\u65e5\u672c", "\u0301x", "",
    "<tool_response>\nx\n</tool_response>", "</think>x", "/no_think",
)  # fmt: skip


class Borders:
    """Finds how many leading tokens stay the same whatever text comes after a point; one a tokenizer.

    A byte pair encoding joins only what gives a piece of the vocabulary. So what is left of a place that no piece
    can span stays as it is, if the text there is cut into words as before; that it is, probes of each class of
    characters show. A control token cuts the text by itself.

    probes  texts that stand for every text a user may write: PROBES, and control tokens of the vocabulary
    """

    _known: ClassVar[WeakKeyDictionary[Tokenizer, Borders]] = WeakKeyDictionary()

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Reads and sorts the vocabulary, 0.1 s for 50000 pieces: `of` does it once a tokenizer."""
        pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self._spelled: list[bytes] = [piece or tokenizer.text_of(i).encode() for i, piece in enumerate(pieces)]
        self._control = np.array([piece != spelled for piece, spelled in zip(pieces, self._spelled, strict=True)])
        self._pieces = sorted(set(self._spelled))
        self._longest = max(map(len, self._pieces), default=0)
        normalizer = tokenizer.backend.normalizer
        self._composes = normalizer is not None and "\xe9" in normalizer.normalize_str("e\u0301")
        # Some control tokens swallow the spaces before them (lstrip): one of either kind.
        added = {token.lstrip: token.content for token in tokenizer.backend.get_added_tokens_decoder().values()}
        self.probes = (*PROBES, *(text + "x" for text in added.values()))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Borders:
        """The one of this tokenizer, made when it is first asked for."""
        known = cls._known.get(tokenizer)
        if known is None:
            known = cls._known[tokenizer] = cls(tokenizer)
        return known

    def controls_in(self, tokens: Int32) -> list[str]:
        """The control tokens among `tokens`, as a text spells them, each once. O(tokens)."""
        found: list[int] = tokens[self._control[tokens]].tolist()
        return [self._spelled[token].decode() for token in set(found)]

    def settled(self, prompts: Sequence[Int32]) -> int:
        """Leading tokens of `prompts`, int32 [n] each, that stand whatever text follows the place where they part.

        0 for fewer than two prompts: one alone does not tell the place. O(their common tokens), and for each token
        that is given up a search of the vocabulary, of which few are needed.
        """
        if len(prompts) < 2:
            return 0
        first = prompts[0]
        n = common_prefix(*prompts)
        follows = [np.frombuffer(self._after(prompt, n), np.uint8) for prompt in prompts]
        right = follows[0][: common_prefix(*follows)].tobytes()
        if self._composes:
            # What a user writes may compose with the character before it (NFC), which then is not known either.
            if not right and n and not self._control[first[n - 1]]:
                n -= 1
                right = self._spelled[int(first[n])]
            if not right[-1:].isspace():
                right = _without_last_character(right)
        while n and self._spans(self._before(first, n), right):
            n -= 1
            right = (self._spelled[int(first[n])] + right)[: self._longest]
        return n

    def _after(self, tokens: Int32, start: int) -> bytes:
        """What the tokens from `start` on stand for, as far as a piece reaches."""
        ids: list[int] = tokens[start : start + self._longest].tolist()
        return b"".join(self._spelled[token] for token in ids)[: self._longest]

    def _before(self, tokens: Int32, end: int) -> bytes:
        """What the tokens before `end` stand for, back to a control token or as far as a piece reaches."""
        ids: list[int] = tokens[max(0, end - self._longest) : end].tolist()
        start = max((i for i, token in enumerate(ids, 1) if self._control[token]), default=0)
        return b"".join(self._spelled[token] for token in ids[start:])[-self._longest :]

    def _spans(self, left: bytes, right: bytes) -> bool:
        """Whether a piece may begin in `left` and end past it, if `right` and then anything follows."""
        for size in range(1, len(left) + 1):
            start = left[-size:]
            longer = bisect_right(self._pieces, start)
            if not self._piece_at(longer).startswith(start):
                continue
            if self._piece_at(bisect_left(self._pieces, start + right, longer)).startswith(start + right):
                return True
            ends = (start + right[:end] for end in range(1, len(right)))
            if any(self._piece_at(bisect_left(self._pieces, end, longer)) == end for end in ends):
                return True
        return False

    def _piece_at(self, at: int) -> bytes:
        """The piece at a place of the sorted ones, b"" past the last."""
        return self._pieces[at] if at < len(self._pieces) else b""


def common_prefix(first: NDArray[np.generic], *others: NDArray[np.generic]) -> int:
    """Number of leading elements that all the arrays share. O(n) each."""
    n = len(first)
    for other in others:
        n = min(n, len(other))
        unequal = np.not_equal(first[:n], other[:n])
        n = int(unequal.argmax()) if unequal.any() else n
    return n


def _without_last_character(text: bytes) -> bytes:
    end = len(text) - 1
    while end > 0 and text[end] & 0xC0 == 0x80:
        end -= 1
    return text[: max(end, 0)]
