"""store-h: pages keep the input of each attention block instead of K and V, which are projected again when read.

After TinyLoop's mode of that name (TINYLOOP_KV_H_MODE). It saves memory where a model has more K and V values than its
hidden size, that is, where its query heads do not share K and V; and it costs a projection of the whole context in
every step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from paged.kv.storage import PageStorage
from paged.models.base import ForwardBatch
from paged.models.rotary import Rotation
from paged.models.step import Place, Step

if TYPE_CHECKING:
    from paged.models.llama import Layer, LlamaModel


class Projection:
    """K and V of the pages that one step sees in one page group, for one layer at a time.

    Each page is projected once, however many sequences share it: its place in a sequence is the same in all of them.
    Rows that nobody has written yet are projected too; no query sees them.
    """

    def __init__(self, model: LlamaModel, step: Step, group: int) -> None:
        table, size = step.table(group), step.storage.page_size
        columns = np.arange(table.shape[1])
        used = (columns < -(-step.kv_lens // size)[:, None]) & (table >= 0)
        ids, inverse = np.unique(table[used], return_inverse=True)
        local = np.full(table.shape, -1, np.int32)
        local[used] = inverse
        first = np.zeros(len(ids), np.int64)
        first[inverse] = np.broadcast_to(columns * size, table.shape)[used]
        positions = (first[:, None] + np.arange(size)).ravel().clip(max=model.max_seq_len - 1)
        spec = replace(model.spec, layers=1, num_groups=1, windows=(0,), loop=None)
        self._model = model
        self._inputs = step.storage
        self._ids = torch.from_numpy(ids.astype(np.int64)).to(model.device)
        self._pages = PageStorage(spec, max(1, len(ids)), size, model.default_kv_dtype(), model.device)
        self._rotate = Rotation(model.rotary, positions.astype(np.int32), model.config.num_kv_heads)
        batch = ForwardBatch(
            tokens=np.zeros(int(step.q_indptr[-1]), np.int32),  # only where rows lie is read of it
            q_indptr=step.q_indptr,
            kv_lens=step.kv_lens,
            page_tables=local[None],
            logit_rows=np.zeros(0, np.int32),
            cache_windows=step.cache_windows,
        )
        self._step = Step(model, batch, self._pages)

    def attend(self, layer: Layer, place: Place, q: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of `q [T, heads, head_dim]` over one layer, whose inputs are in the pages already."""
        config, size = self._model.config, self._inputs.page_size
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        halves = self._inputs.gather(place.index, self._ids)
        x = torch.cat([half.transpose(1, 2).reshape(len(self._ids) * size, -1) for half in halves], 1)
        qkv = layer.qkv(x.to(self._model.dtype)).view(len(x), heads + 2 * kv_heads, dim)
        k, v = qkv[:, heads : heads + kv_heads].float(), qkv[:, heads + kv_heads :]
        if layer.qk_norm is not None:
            k = layer.qk_norm(qkv[:, : heads + kv_heads].float(), torch.empty_like(qkv[:, : heads + kv_heads]).float())
            k = k[:, heads:]
        pages = self._pages.pages[: len(self._ids), 0]
        for plane, rows in enumerate((self._rotate(k.contiguous()), v)):
            pages[:, plane] = rows.view(-1, size, kv_heads, dim).transpose(1, 2)
        return self._step.attend(q, Place(0, 0, place.window), scale)


def keep(step: Step, place: Place, x: torch.Tensor) -> None:
    """Store the rows `x [T, hidden_size]` of one layer's input: the first half of each as K, the second as V."""
    spec = step.storage.spec
    k, v = x.float().view(len(x), 2, spec.num_kv_heads, spec.head_dim).unbind(1)
    step.backend.append(step.storage, place.index, k.contiguous(), v.contiguous(), step.plan(place.group))
