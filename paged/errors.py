"""Every exception that paged and scheduler raise on purpose.

    PagedError
    ├── LoadError (ValueError)            a model file or folder cannot be used
    │   └── MissingTensor                 a checkpoint lacks a tensor, or has it in another shape
    ├── UnsupportedShape (ValueError)     a head size, ratio, dtype or page size that no kernel computes
    ├── InvalidRequest (ValueError)       a request is refused at submit; nothing else is touched
    │   ├── PromptTooLong                 longer than the model, or than the whole pool, can hold
    │   │   └── ContextTooLong            prompt and max_tokens exceed max_seq_len; a RuntimeError as well
    │   └── DuplicateRequest              the id is still live
    ├── QueueFull (RuntimeError)          as many requests or tokens wait as may; the same request may come again later
    ├── OutOfPages (RuntimeError)         the pool has fewer free and evictable pages than asked for
    ├── GeometryMismatch (RuntimeError)   pool, session and cache were built for different models
    ├── BadLogits (RuntimeError)          rows of logits that no token can be drawn from
    │   └── ProcessorFailed               a logits processor raised, or gave such a row
    ├── SessionInUse (RuntimeError)       attach was called on a session that already holds context
    ├── StateMismatch (RuntimeError)      rows at a position that the recurrent state of their slot has not reached
    ├── LoopsMismatch (RuntimeError)      a handle was built at another depth
    ├── Closed (RuntimeError)             the model or engine was closed
    ├── Draining (RuntimeError)           the engine finishes what it has and takes nothing new
    ├── RequestFailed (RuntimeError)      a request ended with "error"; the message says why
    ├── NativeMissing (ImportError)       the compiled module is not there, or not loadable
    ├── ExtraMissing (ImportError)        an optional package is asked for and not installed
    └── CheckFailed (AssertionError)      check() found a broken invariant: a defect of ours, please report it

Plain TypeError is raised where an argument has a wrong type. Each message is one sentence that says what was
expected, what was found, and what to do.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from numbers import Integral


class PagedError(Exception):
    """Base of all errors raised by paged and scheduler."""


class LoadError(PagedError, ValueError):
    """A model source cannot be loaded; the message names the file and what was expected in it."""


class MissingTensor(LoadError):
    """A checkpoint lacks a tensor that its configuration calls for, or has it in another shape."""


class UnsupportedShape(PagedError, ValueError):
    """A shape or dtype that the chosen backend does not compute; the message names the limit."""


class InvalidRequest(PagedError, ValueError):
    """A request that is refused at submit; the engine and its other requests are untouched."""


class PromptTooLong(InvalidRequest):
    """The prompt (or prompt and max_tokens) cannot fit; the message holds both numbers."""


class ContextTooLong(PromptTooLong, RuntimeError):
    """The token-level API was asked for more than max_seq_len holds; TinyLoop's callers expect a RuntimeError."""


class DuplicateRequest(InvalidRequest):
    """A request id that is still live was submitted again."""


class QueueFull(PagedError, RuntimeError):
    """The queue holds as much as it may; nothing is wrong with the request, and it may be submitted again later."""


class OutOfPages(PagedError, RuntimeError):
    """The pool cannot supply the pages; nothing was taken."""


class GeometryMismatch(PagedError, RuntimeError):
    """Objects that were built for different models, page sizes or codecs were used together."""


class BadLogits(PagedError, RuntimeError):
    """Rows of logits hold NaN or +inf, or nothing but -inf; `rows` names them, the other rows can still be sampled.

    `reasons` says of a row what is wrong with it, where that is not the message.
    """

    def __init__(self, message: str, rows: tuple[int, ...] = (), reasons: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.rows = rows
        self.reasons = reasons or {}

    def reason(self, row: int) -> str:
        """What is wrong with one of `rows`, as a sentence with the name of the error."""
        return f"{type(self).__name__}: {self.reasons.get(row, self)}"


class ProcessorFailed(BadLogits):
    """A logits processor of a request raised an error, or gave a row that cannot be drawn from."""


class SessionInUse(PagedError, RuntimeError):
    """Pages can be attached only to a session that holds no context yet."""


class StateMismatch(PagedError, RuntimeError):
    """A recurrent state is valid at one position, and was used at another."""


class LoopsMismatch(PagedError, RuntimeError):
    """A handle was built at another loop depth than the call asks for."""


class Closed(PagedError, RuntimeError):
    """The object was closed."""


class Draining(PagedError, RuntimeError):
    """The engine is about to end: it finishes the requests that it has and takes no new ones."""


class RequestFailed(PagedError, RuntimeError):
    """A request of the token-level API ended with an error."""


class NativeMissing(PagedError, ImportError):
    """The compiled part of paged cannot be imported."""


class ExtraMissing(PagedError, ImportError):
    """A package of one of the optional extras is not installed; the message names the extra."""


class CheckFailed(PagedError, AssertionError):
    """An invariant that a class docstring lists does not hold."""


def check(condition: bool, message: str) -> None:
    """Raise CheckFailed(message) unless condition; used by every `check()`, so that `python -O` keeps them."""
    if not condition:
        raise CheckFailed(message)


def require_text(name: str, value: object) -> str:
    """`value`. TypeError for anything but a str, InvalidRequest (a ValueError) for one that UTF-8 has no bytes for."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} must be text that UTF-8 can encode, got {value!r}") from None
    return value


def require_integer(name: str, value: object, expected: str = "an integer") -> int:
    """`value` as an int of Python. TypeError, which says what `name` must be, for all else, truth values included."""
    if type(value) is int:  # the usual case, a tenth of the time of the other question
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be {expected}, got {reprlib.repr(value)}")
    return int(value)
