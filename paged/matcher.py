"""GrammarMatcher: which tokens may come next so that an output keeps to its grammar. On the `llguidance` package."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from paged.errors import ExtraMissing, InvalidRequest
from paged.grammar import Grammar

if TYPE_CHECKING:
    import llguidance

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_COMPILED = 64  # grammars that a compiler keeps
_CONTROL = b"\xff"  # how llguidance marks a control token; no UTF-8 text holds this byte


class Spelling(Protocol):
    """What a compiler asks of a tokenizer; `paged.loaders.tokenizer.Tokenizer` has it."""

    def encode(self, text: str, add_special: bool = True, /) -> npt.NDArray[np.int32]: ...

    def token_bytes(self, token: int, /) -> bytes: ...

    def text_of(self, token: int, /) -> str: ...


class _Vocabulary:
    """The ids of a model as llguidance reads them, and behind the last one an id that stands for the end.

    So the end has an id of its own in every mask, whatever ends a request, and the model's end tokens are control
    tokens like others.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Spelling, vocab_size: int) -> None:
        self.eos_token_id = vocab_size
        self.tokens = [_spelling(tokenizer, i) for i in range(vocab_size)] + [_CONTROL + b"<|end of grammar|>"]
        self._tokenizer = tokenizer
        self._ids = {text: i for i, text in enumerate(self.tokens) if text and not text.startswith(_CONTROL)}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of text that the grammar forces: as the tokenizer cuts it, so that the model sees what it knows.

        A tokenizer may put a space before its text; behind a line break the text can be told from it. Text that the
        tokenizer still gives back otherwise (it spells a control token) is cut into the longest tokens.
        """
        # llguidance's wrapper tries bytes when it is made; if that failed, it gives a str.
        want = text.encode() if isinstance(text, str) else text
        for before in (b"", b"\n"):
            ids: list[int] = self._tokenizer.encode((before + want).decode(), False).tolist()
            pieces = [self.tokens[i] for i in ids]
            for first in range(len(pieces) if before else 1):
                if b"".join(pieces[first:]) == want:
                    return ids[first:]
        return self._greedy(want)

    def _greedy(self, text: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                raise InvalidRequest(f"the grammar forces {text[at : at + 1]!r}, which no token of this model spells")
            ids.append(self._ids[text[at:end]])
            at = end
        return ids


def _spelling(tokenizer: Spelling, token: int) -> bytes:
    """b"" for an id that no grammar can ask for."""
    text = tokenizer.token_bytes(token)
    if text:
        return b"" if text.startswith(_CONTROL) else text
    name = tokenizer.text_of(token)
    return _CONTROL + name.encode() if name else b""


class GrammarCompiler:
    """Makes matchers for the vocabulary of one model. May be shared by threads."""

    def __init__(self, tokenizer: Spelling | None, vocab_size: int) -> None:
        """O(vocabulary), 0.2 s for 50000 tokens. InvalidRequest without a tokenizer, ExtraMissing (an ImportError)
        without llguidance."""
        if tokenizer is None:
            raise InvalidRequest("a grammar needs the text of each token, and this model has no tokenizer")
        try:
            import llguidance
        except ImportError:
            raise ExtraMissing("a grammar needs the package llguidance: pip install 'paged[structured]'") from None
        self.vocab_size = vocab_size
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=vocab_size + 1)
        self._compiled = lru_cache(_COMPILED)(self._compile)

    def matcher(self, grammar: Grammar, end_ids: Iterable[int] = ()) -> GrammarMatcher:
        """A matcher at the beginning of an output that `end_ids` end.

        Compiling costs from a millisecond to a second, once for each of the last 64 grammars; then it is a copy.
        InvalidRequest if llguidance does not take the grammar.
        """
        ends = [i for i in end_ids if 0 <= i < self.vocab_size]
        return GrammarMatcher(self._compiled(grammar).deep_copy(), self.vocab_size, np.array(ends, np.int64))

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        import llguidance

        convert = getattr(llguidance.LLMatcher, f"grammar_from_{grammar.kind}")
        matcher = llguidance.LLMatcher(self._tokenizer, convert(grammar.text), log_level=0)
        if matcher.is_error():
            raise InvalidRequest(
                f"a grammar must be one that llguidance takes, found in this {grammar.kind}: "
                f"{_one_line(matcher.get_error())}"
            )
        return matcher


class GrammarMatcher:
    """How far one output has come in its grammar. Made by `GrammarCompiler.matcher`; depends on its tokens alone.

    `accept` takes each token as it is drawn; `allowed_tokens` says what may come next. One that was given a token that
    it had not allowed is in error, allows nothing, and stays so.
    """

    __slots__ = ("_end_ids", "_state", "vocab_size")

    def __init__(self, state: llguidance.LLMatcher, vocab_size: int, end_ids: Int64) -> None:
        self._state = state
        self.vocab_size = vocab_size
        self._end_ids = end_ids

    def accept(self, token: int) -> bool:
        """Take the next token of the output; returns whether the output is complete: nothing but an end may follow.

        An end id completes it. O(bytes of the token).
        """
        if token in self._end_ids:
            return True
        if not self._state.consume_token(token):
            return False
        if self._state.is_stopped():
            return True
        # Where the parser could go on, and no token of the vocabulary does, only an end id would tell.
        return not len(self._end_ids) and self._state.is_accepting() and not allowed_tokens([self]).any()

    @property
    def may_end(self) -> bool:
        """Whether the output so far is all that the grammar asks for."""
        return self._state.is_accepting()

    @property
    def error(self) -> str:
        """What went wrong, in one line; "" as a rule. A grammar can exceed llguidance's limits while it runs."""
        return _one_line(self._state.get_error()) if self._state.is_error() else ""

    def fork(self) -> GrammarMatcher:
        """Another matcher at the same place."""
        return GrammarMatcher(self._state.deep_copy(), self.vocab_size, self._end_ids)


def allowed_tokens(matchers: Sequence[GrammarMatcher]) -> Bool:
    """Which tokens each of `matchers` allows next, bool [len(matchers), vocab_size]; all of one compiler.

    End ids are allowed exactly where the output may end, whatever text they stand for. A matcher in error allows
    nothing. llguidance fills the masks, with several threads if there are several: microseconds each as a rule.
    """
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par

    end = matchers[0].vocab_size
    bits = allocate_token_bitmask(len(matchers), end + 1)
    if len(matchers) == 1:
        fill_next_token_bitmask(matchers[0]._state, bits)
    else:
        rows = [(matcher._state, i) for i, matcher in enumerate(matchers)]
        fill_next_token_bitmask_par(_executor(os.getpid()), rows, bits)
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=end + 1, bitorder="little").view(np.bool_)
    for row, matcher in zip(allowed, matchers, strict=True):
        row[matcher._end_ids] = row[end]
        if matcher._state.is_error():
            row[:] = False
    return allowed[:, :end]


@lru_cache(maxsize=1)
def _executor(pid: int) -> llguidance.LLExecutor:
    """Threads that fill masks; a forked child has none of its parent's, so it starts its own."""
    import llguidance

    return llguidance.LLExecutor()


def _one_line(message: str) -> str:
    """The beginning of llguidance's message, without the state of the parser that may follow."""
    return " ".join(message.split("\n<state>")[0].split())[:200]
