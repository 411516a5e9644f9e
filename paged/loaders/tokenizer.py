"""Text to token ids and back, on the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from paged.errors import InvalidRequest, LoadError

if TYPE_CHECKING:
    from paged.ops.plan import Int32

_MOST_IDS = 1 << 24  # a list of all ids is made, and a damaged file may name one of some billions


class Tokenizer:
    """A byte-level BPE, or a SentencePiece BPE with byte fallback.

    Special tokens written in the text are recognised. Nothing changes after construction, so that one tokenizer
    may be used by any number of threads.

    vocab_size  one more than the highest id
    bos_id      id that starts a text, or None
    eos_ids     ids that end a generation, the usual one first
    add_bos     `encode` puts bos_id first, unless the text begins with it
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        token_bytes: Mapping[int, bytes],
        special: Mapping[int, str],
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
        strip_space: bool = False,
        source: str = "tokenizer",
    ) -> None:
        """`token_bytes`: the text of each id; `special`: control tokens, which stand for no text; `strip_space`:
        the backend puts a space before the text, and `decode` takes it away."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.vocab_size = max([*token_bytes, *special], default=-1) + 1
        if self.vocab_size > _MOST_IDS:
            raise LoadError(f"{source}: expected token ids below {_MOST_IDS}, found {self.vocab_size - 1}")
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.add_bos = add_bos and bos_id is not None
        self._strip_space = strip_space
        self._special = dict(special)
        self._bytes = [b"" if i in special else token_bytes.get(i, b"") for i in range(self.vocab_size)]
        for name, token in (("bos", bos_id), *(("eos", eos) for eos in self.eos_ids)):
            if token is not None and not 0 <= token < self.vocab_size:
                raise LoadError(f"{source}: the {name} token must be an id below {self.vocab_size}, found {token}")

    @property
    def bos_token(self) -> str:
        """Text of the BOS token, "" if there is none."""
        return "" if self.bos_id is None else self.text_of(self.bos_id)

    @property
    def eos_token(self) -> str:
        """Text of the usual end token, "" if there is none."""
        return self.text_of(self.eos_ids[0]) if self.eos_ids else ""

    def encode(self, text: str, add_special: bool = True) -> Int32:
        """Token ids `int32 [n]`; with `add_special`, exactly one BOS comes first where the model wants one.

        A byte-level vocabulary may lack a few bytes (SmolLM2 has no token for 0x04): these stand for nothing, as in
        the model's own tokenizer.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"text must be valid Unicode, found a lone surrogate at {error.start}") from None
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if add_special and self.add_bos and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return np.array(ids, np.int32)

    def decode(self, ids: Iterable[int] | NDArray[np.integer[Any]], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. Ids above the vocabulary stand for no text."""
        pieces = []
        for token in ids.tolist() if isinstance(ids, np.ndarray) else ids:
            if not skip_special and token in self._special:
                pieces.append(self._special[token].encode())
            else:
                pieces.append(self.token_bytes(token))
        text = b"".join(pieces).decode("utf-8", "replace")
        return text[1:] if self._strip_space and text.startswith(" ") else text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one id stands for, which may be part of a character; b"" for control tokens."""
        if token < 0:
            raise InvalidRequest(f"a token id must be at least 0, got {token}")
        return self._bytes[token] if token < self.vocab_size else b""

    def text_of(self, token: int) -> str:
        """How the vocabulary spells an id: control tokens as they are written in a text."""
        return self._special[token] if token in self._special else self.token_bytes(token).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        """Id of a token in the vocabulary's own spelling, None if there is none."""
        return self.backend.token_to_id(token)
