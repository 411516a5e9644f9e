"""Feeds rows to a model over pages in shuffled order, and returns the logits of every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from poison import poison

from paged.kv.storage import PageStorage
from paged.models.base import ForwardBatch, LanguageModel


class Feeder:
    """Sequences of one model by name. Pages are handed out in random order from storage filled with NaN, so that a
    row that is read before it was written, or from another sequence, shows. So are the slots of recurrent state, of a
    model that has it, out of `NUM_SLOTS`.

    `depths` are the iterations of sequences of a looped model, by name; if it is empty, batches give none. Groups
    beyond a sequence's depth have no pages. `windows` are the cache windows of sequences, likewise."""

    NUM_SLOTS = 16

    def __init__(
        self, model: LanguageModel, page_size: int = 16, num_pages: int = 512, seed: int = 0, kv_dtype: str = "auto"
    ) -> None:
        self.model = model
        self.page_size = page_size
        codec = model.default_kv_dtype() if kv_dtype == "auto" else kv_dtype
        self.storage = PageStorage(model.spec, num_pages, page_size, codec, model.device)
        poison(self.storage)
        self.free = np.random.default_rng(seed).permutation(num_pages).astype(np.int32).tolist()
        self.states = model.create_state_pool(self.NUM_SLOTS)
        self.free_slots = np.random.default_rng(seed).permutation(self.NUM_SLOTS).tolist()
        self.slots: dict[str, int] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.lengths: dict[str, int] = {}
        self.depths: dict[str, int] = {}
        self.windows: dict[str, int] = {}

    def batch(self, rows: Mapping[str, Sequence[int]], wanted: str = "all") -> ForwardBatch:
        """These new tokens of each sequence, with pages for them; logits of all rows, or of the "last" of each."""
        groups = self.model.spec.num_groups
        for name, tokens in rows.items():
            table = self.tables.setdefault(name, [[] for _ in range(groups)])
            self.lengths[name] = self.lengths.get(name, 0) + len(tokens)
            if self.states is not None and name not in self.slots:
                self.slots[name] = self.free_slots.pop()
            for row in table[: groups - self.model.max_loops + self._depth(name)]:
                while len(row) * self.page_size < self.lengths[name]:
                    row.append(self.free.pop())
        widest = max(len(self.tables[name][0]) for name in rows)
        tables = np.full((groups, len(rows), widest), -1, np.int32)
        for s, name in enumerate(rows):
            for group, pages in enumerate(self.tables[name]):
                tables[group, s, : len(pages)] = pages
        counts = [len(tokens) for tokens in rows.values()]
        ends = np.cumsum([0, *counts]).astype(np.int32)
        logit_rows = np.arange(ends[-1], dtype=np.int32) if wanted == "all" else ends[1:] - 1
        batch = ForwardBatch(
            tokens=np.concatenate([np.asarray(tokens, np.int32) for tokens in rows.values()]),
            q_indptr=ends,
            kv_lens=np.array([self.lengths[name] for name in rows], np.int32),
            page_tables=tables,
            logit_rows=np.ascontiguousarray(logit_rows, dtype=np.int32),
        )
        if self.states is not None:
            batch.states, batch.state_slots = self.states, np.array([self.slots[name] for name in rows], np.int32)
        if self.depths:
            batch.loops = np.array([self._depth(name) for name in rows], np.int32)
        if self.windows:
            batch.cache_windows = np.array([self.windows.get(name, 0) for name in rows], np.int32)
        return batch

    def step(self, rows: Mapping[str, Sequence[int]], wanted: str = "all") -> dict[str, torch.Tensor]:
        """One forward with these new tokens of each sequence; logits `[rows, vocab]` by name ("last": one row)."""
        logits = self.model.forward(self.batch(rows, wanted), self.storage)
        counts = [len(tokens) if wanted == "all" else 1 for tokens in rows.values()]
        return dict(zip(rows, logits.split(counts), strict=True))

    def _depth(self, name: str) -> int:
        return self.depths.get(name, self.model.default_loops)

    def drop(self, name: str) -> None:
        """Take the pages of a sequence back; NaN again, so that a read of them shows."""
        pages = [page for row in self.tables.pop(name) for page in row]
        del self.lengths[name]
        self.storage.pages.view(torch.uint8)[pages] = 255
        self.free += pages
        if self.states is not None:
            self.free_slots.append(self.slots.pop(name))  # it keeps the state, which the next sequence must not see

    def feed(self, name: str, tokens: Sequence[int], chunk: int = 0) -> torch.Tensor:
        """Logits `[n, vocab]` of tokens fed alone, `chunk` at a time (0: all at once)."""
        step = chunk or len(tokens)
        pieces = [self.step({name: tokens[i : i + step]})[name] for i in range(0, len(tokens), step)]
        return torch.cat(pieces)


def random_tokens(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()
