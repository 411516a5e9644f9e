"""Session: one sequence, driven by hand."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from paged.errors import GeometryMismatch, InvalidRequest, LoopsMismatch, PromptTooLong, check, require_integer
from paged.kv.page_table import PageTable
from paged.kv.pages import Int32, PagePool
from paged.kv.state import UNKNOWN
from paged.matcher import GrammarMatcher
from paged.models.base import ForwardBatch, LanguageModel
from paged.prefix.hashing import as_tokens, require_namespace
from paged.sampler import sample_one
from paged.sampling import SamplingParams, draw_seed
from paged.spec import KVView

CHUNK = 512  # rows evaluated at once; results do not depend on it, memory does

_ids = itertools.count(1)


class Session:
    """The KV pages, the recurrent state (of a model that has one), the tokens and the last logits of one sequence.

    `eval` runs tokens at position `n_past` and advances it; `sample` draws from the last logits and runs nothing.
    A fork shares every page and copies the state. Pages go back to the pool with `release`, or when the session is
    collected; those that a sliding window has left behind go back as soon as it has.

    Invariants (`check()`): the table is sound and covers exactly the pages of `n_past` positions, of a group with a
    window only those that it can still see; the state is at `n_past`, or not valid since a forward failed.
    """

    def __init__(
        self,
        model: LanguageModel,
        pool: PagePool,
        loops: int | None = None,
        cache_window: int = 0,
        namespace: str = "",
    ) -> None:
        """`loops` is the depth in a looped model (None: its default). With a `cache_window` W > 0 every token sees the
        last W positions alone, itself included, in every layer.

        GeometryMismatch unless `pool` was made by `model.create_kv_pool`, ValueError for a depth or window that the
        model does not take, or a namespace that is no valid text.
        """
        storage = pool.storage
        same = storage is not None and (storage.model_spec is model.spec or storage.model_spec == model.spec)
        if storage is None or not same or pool.fingerprint != model.fingerprint:
            raise GeometryMismatch("this pool was made for another model; make one with model.create_kv_pool()")
        self.model = model
        self.pool = pool
        self.storage = storage
        self.view = model.view(loops, cache_window)
        self.namespace = require_namespace(namespace)
        self.id = next(_ids)
        self.table = PageTable(pool, model.spec.num_groups, self.view.groups)
        self.states = model.create_state_pool(1)
        self.logits: torch.Tensor | None = None
        self._tokens = np.zeros(64, np.int32)
        self._n_past = 0
        self._fingerprint = pool.fingerprint  # of the weights that its first rows are of
        self._seed: int | None = None

    @property
    def n_past(self) -> int:
        """Positions whose rows are in the pages."""
        return self._n_past

    @property
    def tokens(self) -> Int32:
        """The evaluated history, int32 [n_past]; a view."""
        return self._tokens[: self._n_past]

    @property
    def outdated(self) -> bool:
        """Whether its first rows are of weights that the model, and with it the pool, does not have any more."""
        return self._n_past > 0 and self._fingerprint != self.pool.fingerprint

    def eval(self, tokens: object) -> torch.Tensor | None:
        """Run `tokens` after the present history; returns fp32 logits [vocab_size] of the last of them.

        No tokens: nothing happens, and the last logits (None in a fresh session) come back. PromptTooLong past the
        model's length, InvalidRequest for an id outside the vocabulary, OutOfPages if the pool is full; then, and
        after any error of the model, the session is as it was before the chunk (of 512 tokens) that failed. Only a
        recurrent state that an error of the model left half moved is lost: StateMismatch until `release`.
        """
        new = as_tokens(tokens)
        if not len(new):
            return self.logits
        self.admit(new)
        for start in range(0, len(new), CHUNK):
            self._eval_chunk(new[start : start + CHUNK])
        return self.logits

    def admit(self, new: Int32) -> None:
        """PromptTooLong or InvalidRequest for tokens that this session cannot take."""
        if self._n_past + len(new) > self.model.max_seq_len:
            raise PromptTooLong(
                f"the session would hold {self._n_past + len(new)} tokens, and the model holds {self.model.max_seq_len}"
            )
        if int(new.min()) < 0 or int(new.max()) >= self.model.vocab_size:
            bad = int(new.max()) if int(new.max()) >= self.model.vocab_size else int(new.min())
            raise InvalidRequest(f"token ids must be between 0 and {self.model.vocab_size - 1}, got {bad}")

    def _eval_chunk(self, new: Int32) -> None:
        before = self.table.num_pages
        self.table.ensure(self._n_past, self._n_past + len(new))
        try:
            self.logits = self.model.forward(self.batch(new), self.storage)[0]
        except BaseException:
            self.table.truncate(before)  # a fork would share pages that both then write
            raise
        self.advance(new)

    def batch(self, new: Int32, num_logits: int = 1, ahead: int = 0, loops: int | None = None) -> ForwardBatch:
        """The rows of `new` behind the history and `ahead` more tokens, in pages that the table has; logits of the last
        `num_logits` of them. `loops`: a smaller depth than the session's own.
        """
        view = self.view if loops is None else self.model.view(loops, self.view.cache_window)
        return ForwardBatch(
            tokens=new,
            q_indptr=np.array([0, len(new)], np.int32),
            kv_lens=np.array([self._n_past + ahead + len(new)], np.int32),
            page_tables=self.table.rows[:, None, :],
            logit_rows=np.arange(len(new) - num_logits, len(new), dtype=np.int32),
            state_slots=None if self.states is None else np.zeros(1, np.int32),
            states=self.states,
            loops=np.array([view.loops], np.int32) if view.loops else None,
            cache_windows=np.array([view.cache_window], np.int32) if view.cache_window else None,
        )

    def use(self, view: KVView) -> None:
        """Go on at a smaller depth: rows of deeper iterations are given back. The last logits are of no more use."""
        self.table.narrow(view.groups)
        self.view, self.logits = view, None

    def eval_residual(self, tokens: object) -> torch.Tensor:
        """`eval` of at most 512 tokens in a looped model that also returns the residual after its last iteration,
        fp32 [tokens, residual_size] (see `Loops.run_loops`); `logits` are then those of the last token."""
        new = as_tokens(tokens)
        if not len(new):
            raise ValueError("no tokens were given, so there is no residual: at least one is needed")
        self.admit(new)
        before = self.table.num_pages
        self.table.ensure(self._n_past, self._n_past + len(new))
        try:
            logits, residual = self.model.run_loops(self.batch(new), self.storage)
        except BaseException:
            self.table.truncate(before)
            raise
        self.logits = logits[-1]
        self.advance(new)
        return residual

    def deepen(self, loops: int, residual: torch.Tensor) -> None:
        """Go on at a greater depth, from `residual` [n_past, residual_size], what the last iteration gave for each
        token of the history (see `eval_residual`).

        Runs iterations [view.loops, loops) over the history and nothing else; the rows that are there stay, shared
        with whoever shares them. OutOfPages if the pool cannot supply the pages of the new iterations; then, and
        after an error of the model, nothing changed.
        """
        start, loop = self.view.loops, self.model.spec.loop
        view = self.model.view(loops, self.view.cache_window)
        if view.loops < start:
            raise LoopsMismatch(f"loops mismatch: a session at {start} loops can only go deeper, got {loops}")
        if loop is None or view.loops == start:
            return
        table = self.table.fork()
        try:
            if loop.after_group is not None:  # the rows behind the block belong to one depth
                table.narrow(np.setdiff1d(table.groups, loop.after_group))
            table.widen(view.groups)
            logits = self._run_deeper(view, table, residual)
        except BaseException:
            table.release()
            raise
        table.leave(self._n_past, view.windows.tolist())
        old, self.table, self.view, self.logits = self.table, table, view, logits
        old.release()

    def _run_deeper(self, view: KVView, table: PageTable, residual: torch.Tensor) -> torch.Tensor | None:
        """Iterations [self.view.loops, view.loops) over the history; the logits of its last token."""
        n, logits = self._n_past, self.logits
        for first in range(0, n, CHUNK):
            rows = slice(first, min(n, first + CHUNK))
            batch = ForwardBatch(
                tokens=self.tokens[rows],
                q_indptr=np.array([0, rows.stop - first], np.int32),
                kv_lens=np.array([rows.stop], np.int32),
                page_tables=table.rows[:, None, :],
                logit_rows=np.array([rows.stop - first - 1], np.int32),
                loops=np.array([view.loops], np.int32),
                cache_windows=np.array([view.cache_window], np.int32) if view.cache_window else None,
            )
            logits = self.model.run_loops(batch, self.storage, residual[rows], self.view.loops)[0][0]
        return logits

    def advance(self, new: Int32) -> None:
        """The rows of `new` were computed: they are history now."""
        self._remember(new)
        self.table.leave(self._n_past, self.view.windows.tolist())

    def rewinds_to(self, n_past: int) -> bool:
        """Whether a session of attention alone still has the pages that position `n_past` sees."""
        columns = -(-n_past // self.pool.page_size)
        return all(
            (self.table.rows[group, self._first_column(group, n_past) : columns] >= 0).all()
            for group in self.view.groups.tolist()
        )

    def rewind(self, n_past: int) -> None:
        """Forget the history from position `n_past` on; the next tokens go there. The last logits go with it.

        ValueError beyond the history; RuntimeError for a recurrent state, which only moves forward, and where a
        window has left pages that position `n_past` sees.
        """
        n_past = require_integer("n_past", n_past)
        if not 0 <= n_past <= self._n_past:
            raise ValueError(f"a session of {self._n_past} tokens can rewind to 0 to {self._n_past}, got {n_past}")
        if n_past == self._n_past:
            return
        if self.states is not None:
            raise RuntimeError("a recurrent state only moves forward: this session cannot rewind; fork it beforehand")
        if not self.rewinds_to(n_past):
            raise RuntimeError(f"position {n_past} sees pages that the window of this session has left")
        self.table.truncate(-(-n_past // self.pool.page_size))
        self._n_past = n_past
        self.logits = None

    def _first_column(self, group: int, position: int) -> int:
        """The first page that a query at `position` sees."""
        window = int(self.view.windows[group])
        return max(0, position - window + 1) // self.pool.page_size if window else 0

    def _remember(self, new: Int32) -> None:
        if not self._n_past:
            self._fingerprint = self.pool.fingerprint
        end = self._n_past + len(new)
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, max(end, 2 * len(self._tokens)))
        self._tokens[self._n_past : end] = new
        self._n_past = end

    def adopt(self, tokens: Int32, pages: Int32) -> None:
        """Start from pages `[num_groups, n]`, already referenced for this session, that hold exactly `tokens`."""
        self.table.append(pages)
        self._remember(tokens)

    def sample(
        self, params: SamplingParams | None = None, num_prompt: int = 0, matcher: GrammarMatcher | None = None
    ) -> int:
        """The next token by the last logits. Depends on (seed, position) only; evaluates nothing.

        `num_prompt` says how many tokens of the history are prompt, for the penalties that look at output alone.
        With `params.grammar` comes the `matcher` that has accepted the output so far (see GrammarCompiler); it is only
        asked: `accept` the token that you go on with.
        """
        if self.logits is None:
            raise RuntimeError("there are no logits to sample from: eval() at least one token first")
        params = params or SamplingParams()
        if params.seed is None and self._seed is None:
            self._seed = draw_seed()
        seed = params.seed if params.seed is not None else self._seed
        history = self.tokens
        prompt, output = history[:num_prompt], history[num_prompt:]
        return sample_one(self.logits, params, seed or 0, self._n_past, prompt, output, matcher=matcher)

    def fork(self) -> Session:
        """Another session with the same history over the same pages; the first write into a shared page copies it."""
        other = Session(self.model, self.pool, self.view.loops or None, self.view.cache_window, self.namespace)
        if self.states is not None and other.states is not None:
            other.states.restore(0, self.states.snapshot(0))
        other.table = self.table.fork()
        other._remember(self.tokens)
        other._fingerprint = self._fingerprint
        other.logits = self.logits
        other._seed = self._seed
        return other

    def release(self) -> None:
        """Give every page back and be fresh; a second call does nothing."""
        self.table.release()
        if self.states is not None:
            self.states.reset(0)
        self._n_past = 0
        self.logits = None

    def __del__(self) -> None:
        table = getattr(self, "table", None)
        if table is not None and table.num_pages:
            self.pool.drop(table.ids)

    def check(self) -> None:
        """Assert the invariants of the class docstring."""
        self.table.check()
        size = self.pool.page_size
        want = -(-self._n_past // size)
        check(self.table.num_pages == want, f"{self.table.num_pages} columns for {self._n_past} tokens")
        check(np.array_equal(self.table.groups, self.view.groups), "the table uses other groups than the session")
        for group in self.view.groups.tolist():
            first = self._first_column(group, self._n_past)
            left = self.table.rows[group] < 0
            check(bool(left[:first].all()) and not left[first:].any(), f"group {group}: not the pages of its window")
        if self.states is not None:
            check(int(self.states.positions[0]) in (self._n_past, UNKNOWN), "the state is not that of n_past tokens")
