"""Session: one sequence, driven by hand."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from paged.errors import GeometryMismatch, InvalidRequest, PromptTooLong, check
from paged.kv.page_table import PageTable
from paged.kv.pages import Int32, PagePool
from paged.kv.state import UNKNOWN
from paged.models.base import ForwardBatch, LanguageModel
from paged.prefix.hashing import as_tokens
from paged.sampler import sample_one
from paged.sampling import SamplingParams, draw_seed

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

    def __init__(self, model: LanguageModel, pool: PagePool, namespace: str = "") -> None:
        """GeometryMismatch unless `pool` was made by `model.create_kv_pool`."""
        storage = pool.storage
        if storage is None or storage.spec != model.spec or pool.fingerprint != model.fingerprint:
            raise GeometryMismatch("this pool was made for another model; make one with model.create_kv_pool()")
        self.model = model
        self.pool = pool
        self.storage = storage
        self.namespace = namespace
        self.id = next(_ids)
        self.table = PageTable(pool, model.spec.num_groups)
        self.states = model.create_state_pool(1)
        self.logits: torch.Tensor | None = None
        self._tokens = np.zeros(64, np.int32)
        self._n_past = 0
        self._seed: int | None = None

    @property
    def n_past(self) -> int:
        """Positions whose rows are in the pages."""
        return self._n_past

    @property
    def tokens(self) -> Int32:
        """The evaluated history, int32 [n_past]; a view."""
        return self._tokens[: self._n_past]

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
        if self._n_past + len(new) > self.model.max_seq_len:
            raise PromptTooLong(
                f"the session would hold {self._n_past + len(new)} tokens, and the model holds {self.model.max_seq_len}"
            )
        if int(new.min()) < 0 or int(new.max()) >= self.model.vocab_size:
            bad = int(new.max()) if int(new.max()) >= self.model.vocab_size else int(new.min())
            raise InvalidRequest(f"token ids must be between 0 and {self.model.vocab_size - 1}, got {bad}")
        for start in range(0, len(new), CHUNK):
            self._eval_chunk(new[start : start + CHUNK])
        return self.logits

    def _eval_chunk(self, new: Int32) -> None:
        end, before = self._n_past + len(new), self.table.num_pages
        self.table.ensure(self._n_past, end)
        batch = ForwardBatch(
            tokens=new,
            q_indptr=np.array([0, len(new)], np.int32),
            kv_lens=np.array([end], np.int32),
            page_tables=self.table.rows[:, None, :],
            logit_rows=np.array([len(new) - 1], np.int32),
            state_slots=None if self.states is None else np.zeros(1, np.int32),
            states=self.states,
        )
        try:
            self.logits = self.model.forward(batch, self.storage)[0]
        except BaseException:
            self.table.truncate(before)  # a fork would share pages that both then write
            raise
        self._remember(new)
        self.table.leave(self._n_past, self.model.spec.windows)

    def _remember(self, new: Int32) -> None:
        end = self._n_past + len(new)
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, max(end, 2 * len(self._tokens)))
        self._tokens[self._n_past : end] = new
        self._n_past = end

    def adopt(self, tokens: Int32, pages: Int32) -> None:
        """Start from pages `[num_groups, n]`, already referenced for this session, that hold exactly `tokens`."""
        self.table.append(pages)
        self._remember(tokens)

    def sample(self, params: SamplingParams | None = None, num_prompt: int = 0) -> int:
        """The next token by the last logits. Depends on (seed, position) only; evaluates nothing.

        `num_prompt` says how many tokens of the history are prompt, for the penalties that look at output alone.
        """
        if self.logits is None:
            raise RuntimeError("there are no logits to sample from: eval() at least one token first")
        params = params or SamplingParams()
        if params.seed is None and self._seed is None:
            self._seed = draw_seed()
        seed = params.seed if params.seed is not None else self._seed
        history = self.tokens
        return sample_one(self.logits, params, seed or 0, self._n_past, history[:num_prompt], history[num_prompt:])

    def fork(self) -> Session:
        """Another session with the same history over the same pages; the first write into a shared page copies it."""
        other = Session(self.model, self.pool, self.namespace)
        if self.states is not None and other.states is not None:
            other.states.restore(0, self.states.snapshot(0))
        other.table = self.table.fork()
        other._remember(self.tokens)
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
        for group, window in enumerate(self.model.spec.windows):
            first = max(0, self._n_past - window + 1) // size if window else 0
            left = self.table.rows[group] < 0
            check(bool(left[:first].all()) and not left[first:].any(), f"group {group}: not the pages of its window")
        if self.states is not None:
            check(int(self.states.positions[0]) in (self._n_past, UNKNOWN), "the state is not that of n_past tokens")
