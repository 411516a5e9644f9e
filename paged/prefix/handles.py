"""PrefixHandle: one computed prefix that any number of sequences may start from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paged.errors import GeometryMismatch, LoopsMismatch, check
from paged.kv.pages import Int32

if TYPE_CHECKING:
    import torch

    from paged.kv.pages import PagePool
    from paged.kv.state import StateSnapshot
    from paged.session import Session
    from paged.spec import KVView


class PrefixHandle:
    """A prefix as it was computed: its tokens, its pages (the last, partial one too), its state, and its last logits.

    It never changes. `open` starts a sequence from it and copies nothing but a recurrent state: the pages are shared,
    and the first write into a partial page copies that page. So a prompt that equals the prefix needs no forward, and
    any other one needs a forward over its remaining tokens alone. The pages go back when the handle and everything
    that was opened from it are gone.

    In a looped model it serves its own depth; with `share_depths` also every smaller one, since an iteration depends
    on those before it alone. There its last token is evaluated once more, for the logits of that depth.
    """

    def __init__(self, session: Session, share_depths: bool = False, own_logits: bool = False) -> None:
        """Keep what `session` has evaluated; the session goes on for itself.

        With `own_logits` a sequence of less depth begins with the logits of the prefix's own depth too.

        ValueError if it evaluated nothing, and for `share_depths` where layers follow the loop block: their rows
        belong to one depth. GeometryMismatch if the weights have changed since it began.
        """
        if session.logits is None:
            raise ValueError("a prefix handle needs a session that evaluated at least one token")
        loop = session.model.spec.loop
        if share_depths and (loop is None or loop.after_group is not None):
            raise ValueError(
                "share_depths needs a looped model whose last layer is in the loop block, and "
                + ("this model does not loop" if loop is None else "layers follow the block in this one")
            )
        if session.outdated:
            raise GeometryMismatch(
                "the weights of the model have changed while this prefix was computed; build it again"
            )
        self._session = session.fork()
        self.share_depths = share_depths
        self.own_logits = own_logits
        self.tokens: Int32 = np.array(session.tokens, np.int32)
        self.tokens.flags.writeable = False

    @property
    def pool(self) -> PagePool:
        """The pool whose pages it holds."""
        return self._session.pool

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def namespace(self) -> str:
        return self._session.namespace

    @property
    def view(self) -> KVView:
        """The depth and the cache window that it was computed with."""
        return self._session.view

    @property
    def loops(self) -> int:
        """Its depth in a looped model; 0 = not looped."""
        return self.view.loops

    @property
    def cache_window(self) -> int:
        return self.view.cache_window

    @property
    def logits(self) -> torch.Tensor:
        """fp32 [vocab_size]: the logits after the last token, at its own depth."""
        logits = self._session.logits
        assert logits is not None
        return logits

    @property
    def page_ids(self) -> Int32:
        """The pages it holds, int32 [n]; a copy."""
        return self._session.table.ids

    @property
    def page_table(self) -> Int32:
        """Its pages in order, int32 [num_groups, columns]; -1 where it has none. Not to be written to."""
        return self._session.table.rows

    @property
    def num_bytes(self) -> int:
        """Bytes of its pages (some may be shared with others) and of its recurrent state."""
        states = self._session.states
        return len(self.page_ids) * self._session.storage.page_bytes + (0 if states is None else states.num_bytes)

    @property
    def snapshot_at(self) -> int | None:
        """The one position that its recurrent state is valid at; None for a model without one."""
        return None if self._session.states is None else self.num_tokens

    def snapshot(self) -> StateSnapshot | None:
        """Its recurrent state, of a model that has one; a copy."""
        states = self._session.states
        return None if states is None else states.snapshot(0)

    def rows_of_pages(self) -> dict[int, int]:
        """Rows that it has in each of its pages, by page id."""
        size, table = self._session.pool.page_size, self._session.table.rows
        rows: dict[int, int] = {}
        for column in range(table.shape[1]):
            for page in table[:, column].tolist():
                if page >= 0:
                    rows[page] = min(size, self.num_tokens - column * size)
        return rows

    @property
    def outdated(self) -> bool:
        """Whether the weights of its model have changed since it was built, so that it serves nobody any more."""
        return self._session.outdated

    def require(self, view: KVView) -> None:
        """LoopsMismatch unless it serves sequences of this view, GeometryMismatch where its model's weights have
        changed since it was built."""
        own = self.view
        if self.outdated:
            raise GeometryMismatch("the weights of the model have changed since this prefix was built; build it again")
        if view.cache_window != own.cache_window:
            raise LoopsMismatch(
                f"cache_window mismatch: the prefix was built with {own.cache_window}, the call asks for "
                f"{view.cache_window}; use the same value for both"
            )
        if view.loops != own.loops and not (self.share_depths and view.loops < own.loops):
            raise LoopsMismatch(
                f"loops mismatch: the prefix was built at {own.loops} loops, the call asks for {view.loops}; "
                "use the same value for both, or build a prefix at that depth"
            )

    def begins(self, view: KVView) -> bool:
        """Whether its logits are those that a sequence of this view begins with."""
        return view is self.view or self.own_logits

    def opens(self, loops: int | None = None) -> bool:
        """Whether `open` at that depth finds all pages: at a smaller one, a cache window may have left what the last
        token, which is evaluated again, sees."""
        return loops in (None, self.loops) or self.own_logits or self._session.rewinds_to(self.num_tokens - 1)

    def open(self, loops: int | None = None) -> Session:
        """A session that stands behind the prefix, with its logits. O(pages), and one copy of a recurrent state.

        `loops` below its own depth (see `share_depths`) evaluates the last token; RuntimeError unless it `opens` there.
        Errors as those of `require`.
        It takes references in the pool: of a handle that an engine built, hold `engine.lock` meanwhile.
        """
        view = self._session.model.view(self.loops if loops is None else loops, self.cache_window)
        self.require(view)
        session = self._session.fork()
        if view.loops == self.loops:
            return session
        try:
            if self.own_logits:
                session.use(view)
                session.logits = self.logits
            else:
                session.rewind(self.num_tokens - 1)
                session.use(view)
                session.eval(self.tokens[-1:])
        except BaseException:
            session.release()
            raise
        return session

    def check(self) -> None:
        """Assert that the session behind it is sound and still where it was."""
        self._session.check()
        check(np.array_equal(self._session.tokens, self.tokens), "the session behind a prefix handle has moved")
