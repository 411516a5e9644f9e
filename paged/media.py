"""Media spans: positions of a prompt whose embeddings come from the caller, and what stands for them in a cache."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paged.errors import InvalidRequest

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

_REMEMBERED = 65_536  # contents whose ids are known again
_UNKNOWN = -3  # -1 and -2 mean nothing in the arrays of the project; -3 and -4 stand for a content nobody has seen
_MOST = 2**30 - 4  # contents whose ids int32 holds


@dataclass(frozen=True, slots=True, eq=False)
class MediaSpan:
    """Positions `start` to `start + num_tokens - 1` of a prompt: an image, a sound, whatever an encoder embedded.

    The token ids that the prompt has there are of no meaning. What a prefix cache goes by is the content: all values of
    `embeddings`, or `content_id`, which says that two spans with this id and as many tokens have equal embeddings.

    start       the first position
    embeddings  [num_tokens, hidden_size], an array of floats or a torch tensor; a copy is kept, in fp32
    content_id  None: the embeddings are hashed, about 1 ms a million values
    """

    start: int
    embeddings: Float32
    content_id: str | bytes | None = None
    digest: bytes = field(init=False, repr=False)  # names the content

    def __post_init__(self) -> None:
        if isinstance(self.start, bool) or not isinstance(self.start, (int, np.integer)):
            raise TypeError(f"MediaSpan.start must be an integer, got {self.start!r}")
        rows = _rows(self.embeddings)
        rows.flags.writeable = False
        object.__setattr__(self, "start", int(self.start))
        object.__setattr__(self, "embeddings", rows)
        object.__setattr__(self, "digest", _digest(rows, self.content_id))

    @property
    def num_tokens(self) -> int:
        return len(self.embeddings)

    @property
    def end(self) -> int:
        """The position behind the last."""
        return self.start + len(self.embeddings)

    def rows(self, first: int, last: int) -> tuple[int, Float32]:
        """Of positions first .. last - 1 those that are in the span: the first of them, and their embeddings."""
        low, high = max(first, self.start), min(last, self.end)
        return low, self.embeddings[low - self.start : max(low, high) - self.start]


def _rows(embeddings: Any) -> Float32:
    if hasattr(embeddings, "detach"):  # a tensor of torch, which this module does not import
        embeddings = embeddings.detach().float().cpu()
    rows: npt.NDArray[Any] = np.asarray(embeddings)
    if rows.dtype.kind != "f":
        raise TypeError(f"MediaSpan.embeddings must be floats [num_tokens, hidden_size], got values of {rows.dtype}")
    if rows.ndim != 2 or not rows.size:
        raise InvalidRequest(f"MediaSpan.embeddings must be [num_tokens, hidden_size], got shape {rows.shape}")
    with np.errstate(over="ignore"):
        rows = np.array(rows, np.float32, order="C")
    if not np.isfinite(rows).all():
        raise InvalidRequest("MediaSpan.embeddings must be finite in fp32, but hold NaN or infinity")
    return rows


def _digest(rows: Float32, content_id: object) -> bytes:
    """A cryptographic hash, since nothing compares the contents behind it. The number of tokens is part of it."""
    if content_id is None:
        kind, content = b"values", rows.astype("<f4", copy=False).tobytes()
    elif isinstance(content_id, str):
        kind, content = b"text", content_id.encode("utf-8", "surrogatepass")
    elif isinstance(content_id, bytes):
        kind, content = b"bytes", content_id
    else:
        raise TypeError(f"MediaSpan.content_id must be a str, bytes or None, got {type(content_id).__name__}")
    hashed = hashlib.blake2b(b"%s %d %d:" % (kind, *rows.shape), digest_size=32)
    hashed.update(content)
    return hashed.digest()


def check_spans(media: object, num_prompt: int, hidden_size: int, model: str) -> tuple[MediaSpan, ...]:
    """`media` in order of position. TypeError for what is no sequence of spans, InvalidRequest for a model that takes
    none (`hidden_size` 0), another hidden size, and spans that overlap or leave the prompt."""
    if not isinstance(media, Sequence) or not all(isinstance(span, MediaSpan) for span in media):
        raise TypeError(f"media must be a sequence of MediaSpan, got {type(media).__name__}")
    spans = sorted(media, key=lambda span: span.start)
    if spans and not hidden_size:
        raise InvalidRequest(f"{model or 'this model'} takes token ids alone; leave media out")
    end = 0
    for span in spans:
        if span.embeddings.shape[1] != hidden_size:
            raise InvalidRequest(
                f"the embeddings of a media span must have {hidden_size} values a token, got {span.embeddings.shape[1]}"
            )
        if span.start < 0 or span.end > num_prompt:
            raise InvalidRequest(
                f"a media span must lie within the {num_prompt} tokens of the prompt, "
                f"got positions {span.start} to {span.end - 1}"
            )
        if span.start < end:
            raise InvalidRequest(f"media spans must not overlap, got one from {span.start} that another one covers")
        end = span.end
    return tuple(spans)


class MediaIds:
    """Ids that stand for media in the tokens of a prompt, so that a cache which compares tokens compares contents.

    Each content (a digest) gets two ids below -4, one for the first position of a span and one for the others, which
    no other content ever gets: so pages of two contents never compare equal, however few of their positions lie in a
    page. Only the last 65,536 contents are recognised; one that comes again later gets new ids, and misses. May be
    shared by threads.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}  # by digest, least recently used first
        self._next = 1
        self._lock = threading.Lock()

    def keyed(self, tokens: Int32, spans: Sequence[MediaSpan], new: bool = True) -> Int32:
        """A copy of `tokens` with the ids of the spans in their places; the tokens themselves if there are none.

        With `new` False no content is remembered: one that was never seen gets ids that match nothing. InvalidRequest
        when all ids are used up, after 2**30 contents.
        """
        if not spans:
            return tokens
        tokens = np.array(tokens, np.int32)
        for span in spans:
            head = _UNKNOWN - 2 * self._number(span.digest, new)
            tokens[span.start] = head
            tokens[span.start + 1 : span.end] = head - 1
        return tokens

    def _number(self, digest: bytes, new: bool) -> int:
        """1 or more, the same for this digest as long as it is remembered; 0 for one that is not, without `new`."""
        with self._lock:
            if not new:
                return self._numbers.get(digest, 0)
            number = self._numbers.pop(digest, 0)
            if not number:
                if self._next > _MOST:
                    raise InvalidRequest(f"this engine has seen {_MOST} different media; make a new engine")
                number, self._next = self._next, self._next + 1
                if len(self._numbers) >= _REMEMBERED:
                    del self._numbers[next(iter(self._numbers))]
            self._numbers[digest] = number
            return number


def is_inside(token: int) -> bool:
    """Whether an id stands for a position of a span behind its first."""
    return token < _UNKNOWN and not token & 1


def span_start(tokens: Int32, position: int) -> int:
    """Where the span begins that `position` is inside of. O(position)."""
    before = tokens[:position]
    return int(np.flatnonzero((before <= _UNKNOWN) & (before & 1 == 1))[-1])


def holds_media(tokens: Int32) -> npt.NDArray[np.bool_]:
    """For each row of `tokens [n, width]` whether it stands for media somewhere."""
    return np.asarray(tokens.min(axis=1) <= _UNKNOWN)
