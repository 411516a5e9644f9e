"""One step over several sessions that are driven by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paged.models.base import ForwardBatch
from paged.prefix.hashing import Int32, as_tokens
from paged.session import Session


def eval_batch(sessions: Sequence[Session], tokens: object) -> torch.Tensor:
    """Evaluate one more token in each session, in one pass over the weights; returns fp32 logits [sessions, vocab].

    What each session gets is what `eval` gives it alone, bit for bit. Errors as those of `eval`; then none has moved.
    Sessions of a model with recurrent state run one after another, each with its own state; there those before the one
    that failed have moved. ValueError unless the sessions share one model and one pool, each being there once.
    """
    new = as_tokens(tokens)
    if len(new) != len(sessions):
        raise ValueError(f"{len(sessions)} sessions need one token each, got {len(new)}")
    if not sessions:
        raise ValueError("a batch needs at least one session")
    if len(set(map(id, sessions))) < len(sessions):
        raise ValueError("a batch must hold each session once: it would have two next tokens")
    model, storage = sessions[0].model, sessions[0].storage
    if any(session.model is not model or session.pool is not sessions[0].pool for session in sessions):
        raise ValueError("the sessions of a batch must share one model and one pool")
    if model.state_spec is not None:
        rows = [session.eval(new[i : i + 1]) for i, session in enumerate(sessions)]
        return torch.stack([row for row in rows if row is not None])
    for i, session in enumerate(sessions):
        session.admit(new[i : i + 1])
    before = [session.table.num_pages for session in sessions]
    try:
        for session in sessions:
            session.table.ensure(session.n_past, session.n_past + 1)
        logits = model.forward(_batch(sessions, new), storage)
    except BaseException:
        for session, columns in zip(sessions, before, strict=True):
            session.table.truncate(columns)
        raise
    for i, session in enumerate(sessions):
        session.logits = logits[i]
        session.advance(new[i : i + 1])
    return logits


def _batch(sessions: Sequence[Session], new: Int32) -> ForwardBatch:
    count = len(sessions)
    columns = max(session.table.num_pages for session in sessions)
    tables = np.full((sessions[0].table.num_groups, count, columns), -1, np.int32)
    for i, session in enumerate(sessions):
        tables[:, i, : session.table.num_pages] = session.table.rows
    loops = np.array([session.view.loops for session in sessions], np.int32)
    windows = np.array([session.view.cache_window for session in sessions], np.int32)
    return ForwardBatch(
        tokens=new,
        q_indptr=np.arange(count + 1, dtype=np.int32),
        kv_lens=np.array([session.n_past + 1 for session in sessions], np.int32),
        page_tables=tables,
        logit_rows=np.arange(count, dtype=np.int32),
        loops=loops if loops.any() else None,
        cache_windows=windows if windows.any() else None,
    )
