"""ResumeHandle: a prefix computed at one depth of a looped model, that goes on at any greater one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from paged.errors import LoopsMismatch, check, require_integer
from paged.prefix.handles import PrefixHandle
from paged.prefix.hashing import as_tokens

if TYPE_CHECKING:
    from paged.session import Session

CHUNK = 512  # tokens evaluated at once while it is built
MOST_LOOPS = 64  # TinyLoop's bound


class ResumeHandle(PrefixHandle):
    """A PrefixHandle that also keeps the residual of its last iteration, fp32 [num_tokens, residual_size].

    `resume(L)` gives a sequence at depth L: iterations [loops, L) run over the stored residual, nothing else does.
    The pages of the iterations that are there are shared, those of the new ones are taken then and not before; the
    handle stays as it is. After TinyLoop's handle of that name, which allocates every layer up to `max_loops` at once.
    """

    def __init__(self, session: Session, residual: Sequence[torch.Tensor], max_loops: int = 32) -> None:
        """`session` has evaluated the prefix, and `residual` is what its last iteration gave for its tokens, in parts.

        ValueError where `max_loops` is above 64 or below the depth of the session.
        """
        max_loops = require_integer("max_loops", max_loops)
        if max_loops > MOST_LOOPS:
            raise ValueError(f"max_loops must be at most {MOST_LOOPS}, got {max_loops}")
        if not 1 <= session.view.loops <= max_loops:
            raise ValueError(
                f"a resume handle needs 1 <= loops <= max_loops, got {session.view.loops} loops and "
                f"max_loops {max_loops}"
            )
        count = sum(len(part) for part in residual)
        if count != session.n_past:
            raise ValueError(f"the residual of {session.n_past} tokens is needed, got one of {count}")
        super().__init__(session)
        self.max_loops = max_loops
        self.residual = residual[0] if len(residual) == 1 else torch.cat(tuple(residual))

    @classmethod
    def build(cls, session: Session, tokens: object, max_loops: int = 32) -> ResumeHandle:
        """Evaluate `tokens` in a fresh session and keep what a deeper run needs. Errors as those of `Session.eval`."""
        ids = as_tokens(tokens)
        parts = [session.eval_residual(ids[start : start + CHUNK]) for start in range(0, len(ids), CHUNK)]
        return cls(session, parts, max_loops)

    @property
    def num_bytes(self) -> int:
        """Bytes of its pages (some may be shared with others) and of the residual."""
        return super().num_bytes + self.residual.numel() * self.residual.element_size()

    def resume(self, loops: int) -> Session:
        """A session that stands behind the prefix at depth `loops`, with the logits of that depth.

        LoopsMismatch unless self.loops <= loops <= max_loops, OutOfPages where the new iterations find no room.
        """
        self.require(self.view)
        if not self.loops <= loops <= self.max_loops:
            raise LoopsMismatch(
                f"loops mismatch: this handle was built at {self.loops} loops with max_loops {self.max_loops}, and can "
                f"be resumed at {self.loops} to {self.max_loops}, got {loops}"
            )
        session = self._session.fork()
        try:
            session.deepen(loops, self.residual)
        except BaseException:
            session.release()
            raise
        return session

    def check(self) -> None:
        """Assert what a PrefixHandle asserts, and that there is a residual for every token."""
        super().check()
        check(len(self.residual) == self.num_tokens, "the residual is not that of the prefix")
        check(bool(np.isfinite(self.residual.detach().cpu().numpy()).all()), "the residual is not finite")
