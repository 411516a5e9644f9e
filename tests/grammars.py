"""What the tests of grammars share: a small vocabulary, and finite languages as their own oracle."""

from __future__ import annotations

from collections.abc import Sequence

from fakes import ByteTokenizer, EchoModel

from paged.matcher import GrammarCompiler, GrammarMatcher

# Every byte, some longer pieces, then control tokens: <s> never ends anything, <eos> and <eot> do.
PIECES = [bytes([i]) for i in range(256)]
PIECES += [b'{"', b'":', b'"}', b"ab", b"aba", b"bb", b" a", b"true", b"\xc3\xa9", b"10", b"-0", b"2024"]
BOS, EOS, EOT = range(len(PIECES), len(PIECES) + 3)
NAMES = {BOS: "<s>", EOS: "<eos>", EOT: "<eot>"}
PIECES += [b""] * 3
VOCAB = len(PIECES) + 5  # the head has rows that stand for nothing


def tokenizer() -> ByteTokenizer:
    return ByteTokenizer(PIECES, NAMES)


def compiler(pieces: Sequence[bytes] = PIECES, vocab_size: int = VOCAB) -> GrammarCompiler:
    return GrammarCompiler(ByteTokenizer(list(pieces), NAMES), vocab_size)


def model(eos: tuple[int, ...] = (EOS, EOT), **kwargs) -> EchoModel:
    """An EchoModel that speaks this vocabulary."""
    made = EchoModel(VOCAB, eos=eos, **kwargs)
    made.tokenizer = tokenizer()  # type: ignore[assignment]
    return made


def text_of(tokens: Sequence[int]) -> bytes:
    return b"".join(PIECES[t] if t < len(PIECES) else b"" for t in tokens)


def feed(matcher: GrammarMatcher, tokens: Sequence[int]) -> list[bool]:
    """What `accept` said of each."""
    return [matcher.accept(token) for token in tokens]


class Words:
    """A finite language, and what may follow in it."""

    def __init__(self, words: set[bytes]) -> None:
        self.words = words

    def rest(self, output: bytes) -> list[bytes]:
        return [word[len(output) :] for word in self.words if word.startswith(output)]

    def allowed(self, output: bytes, pieces: Sequence[bytes]) -> set[int]:
        rest = self.rest(output)
        return {i for i, piece in enumerate(pieces) if piece and any(r.startswith(piece) for r in rest)}

    def forced(self, output: bytes) -> bool:
        """Whether the next byte is known, so that the text to come may be cut into tokens in one way only."""
        return len({rest[:1] for rest in self.rest(output)}) == 1
