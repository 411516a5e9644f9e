"""Logits processors: a request's own functions that change the logits of its next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paged.errors import ProcessorFailed
from paged.sampling import LogitsProcessor

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]


def process(processors: Sequence[LogitsProcessor], tokens: Int32, logits: Float64) -> Float64:
    """What `processors`, one after the other, make of the `logits [vocab_size]` of the token that follows `tokens`.

    Each gets copies: the tokens as int32, the logits as fp32. It writes into the row and returns None, or returns
    another row. ProcessorFailed, with the processor's name, if it raises, or if the row is not one of `vocab_size`
    numbers that are finite or -inf with a token left to draw. O(vocab_size + tokens) each, and their own time.
    """
    row = logits.astype(np.float32)
    for processor in processors:
        try:
            result: Any = processor(np.array(tokens, np.int32), row)
            row = _checked(row if result is None else result, len(logits))
        except Exception as error:
            raise ProcessorFailed(f"the logits processor {_name(processor)} failed: {_reason(error)}") from error
    return row.astype(np.float64)


class _BadRow(ValueError):
    pass


def _checked(result: Any, size: int) -> npt.NDArray[np.float32]:
    row: npt.NDArray[Any] = np.asarray(result)
    if row.shape != (size,) or row.dtype.kind not in "fiu":
        raise _BadRow(f"it must give {size} numbers, got shape {row.shape} of {row.dtype}")
    if not np.isfinite(row.max()):
        raise _BadRow("its row must be finite or -inf and leave a token to draw, but holds NaN or +inf or only -inf")
    return np.array(row, np.float32)


def _name(processor: LogitsProcessor) -> str:
    return getattr(processor, "__qualname__", type(processor).__qualname__)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, _BadRow) else f"{type(error).__name__}: {error}"
