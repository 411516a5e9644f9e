"""PrefixHandle: one computed prefix that any number of sequences may start from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paged.errors import check
from paged.kv.pages import Int32

if TYPE_CHECKING:
    import torch

    from paged.session import Session


class PrefixHandle:
    """A prefix as it was computed: its tokens, its pages (the last, partial one too), its state, and its last logits.

    It never changes. `open` starts a sequence from it and copies nothing but a recurrent state: the pages are shared,
    and the first write into a partial page copies that page. So a prompt that equals the prefix needs no forward, and
    any other one needs a forward over its remaining tokens alone. The pages go back when the handle and everything
    that was opened from it are gone.
    """

    def __init__(self, session: Session) -> None:
        """Keep what `session` has evaluated; the session goes on for itself. ValueError if it evaluated nothing."""
        if session.logits is None:
            raise ValueError("a prefix handle needs a session that evaluated at least one token")
        self._session = session.fork()
        self.tokens: Int32 = np.array(session.tokens, np.int32)
        self.tokens.flags.writeable = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def namespace(self) -> str:
        return self._session.namespace

    @property
    def logits(self) -> torch.Tensor:
        """fp32 [vocab_size]: the logits after the last token."""
        logits = self._session.logits
        assert logits is not None
        return logits

    @property
    def page_ids(self) -> Int32:
        """The pages it holds, int32 [n]; a copy."""
        return self._session.table.ids

    @property
    def num_bytes(self) -> int:
        """Bytes of its pages (some may be shared with others) and of its recurrent state."""
        states = self._session.states
        return len(self.page_ids) * self._session.storage.page_bytes + (0 if states is None else states.num_bytes)

    def rows_of_pages(self) -> dict[int, int]:
        """Rows that it has in each of its pages, by page id."""
        size, table = self._session.pool.page_size, self._session.table.rows
        rows: dict[int, int] = {}
        for column in range(table.shape[1]):
            for page in table[:, column].tolist():
                if page >= 0:
                    rows[page] = min(size, self.num_tokens - column * size)
        return rows

    def open(self) -> Session:
        """A session that stands behind the prefix, with its logits. O(pages), and one copy of a recurrent state."""
        return self._session.fork()

    def check(self) -> None:
        """Assert that the session behind it is sound and still where it was."""
        self._session.check()
        check(np.array_equal(self._session.tokens, self.tokens), "the session behind a prefix handle has moved")
