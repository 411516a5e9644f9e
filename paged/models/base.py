"""What a model must offer to be driven by a session or by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paged.errors import UnsupportedShape, require_integer
from paged.kv.pages import PagePool
from paged.kv.state import StatePool
from paged.kv.storage import PageStorage
from paged.media import Float32
from paged.ops.plan import AttendPlan, Int32, make_plan
from paged.spec import KVSpec, KVView, StateSpec

if TYPE_CHECKING:
    from paged.loaders.chat import ChatTemplate
    from paged.loaders.tokenizer import Tokenizer


@dataclass(slots=True)
class ForwardBatch:
    """The rows of one step. S sequences, T rows, G page groups, R rows whose logits are wanted.

    tokens       int32 [T]
    q_indptr     int32 [S + 1]             rows of sequence s: q_indptr[s] .. q_indptr[s + 1]
    kv_lens      int32 [S]                 positions of the sequence once these rows are appended
    page_tables  int32 [G, S, max_pages]   C-contiguous
    logit_rows   int32 [R]                 rows, each once; not in order where rows are scored beside those sampled
    state_slots  int32 [S]                 slot of each sequence in `states`
    states       the pool of recurrent state, which forward moves; both None for a model without state
    loops          int32 [S]               iterations of each sequence in a looped model; None = its default_loops
    cache_windows  int32 [S]               positions that queries of each sequence see at most, in every layer; 0 =
                                           all. None = all see all
    media                                  (row, fp32 [n, media_size]): embeddings of n rows from that one on, in place
                                           of those of their tokens, which are below 0 there
    """

    tokens: Int32
    q_indptr: Int32
    kv_lens: Int32
    page_tables: Int32
    logit_rows: Int32
    state_slots: Int32 | None = None
    states: StatePool | None = None
    loops: Int32 | None = None
    cache_windows: Int32 | None = None
    media: list[tuple[int, Float32]] = field(default_factory=list[tuple[int, Float32]])

    def plans(self, page_size: int) -> list[AttendPlan]:
        """One AttendPlan a group, of all rows."""
        return [make_plan(page_size, self.q_indptr, self.kv_lens, table) for table in self.page_tables]

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of `x [T, ...]` whose logits are wanted, `[R, ...]`; x itself where that is all of it."""
        rows = self.logit_rows
        if len(rows) == len(x) and np.array_equal(rows, np.arange(len(x))):
            return x
        return x.index_select(0, torch.from_numpy(rows).to(x.device))


class LanguageModel:
    """Base class of the models; a user's own object needs only these attributes and `forward`.

    spec           geometry of its pages
    vocab_size     number of rows of its head
    max_seq_len    positions it can hold
    eos_token_ids  ids that end a generation
    fingerprint    a string that differs between models, and between weights: the root of every prefix chain
    tokenizer      None if prompts are always token ids
    chat           the chat template, or None
    state_spec     geometry of the recurrent state of one sequence, or None; then pages alone continue nothing
    default_loops  iterations of a looped model where a batch gives none; 0 = not looped
    max_loops      iterations that a batch may ask for; 0 = not looped
    input_size     values of the input of an attention block, where pages may keep it instead of K and V (a kv_dtype
                   with "-h"); 0 = they may not
    media_size     values of an embedding, where `forward` heeds `batch.media`; 0 = requests with media are refused
    windows_cache  whether `forward` heeds `batch.cache_windows`; else such sequences are refused
    """

    spec: KVSpec
    vocab_size: int
    max_seq_len: int
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    name: str = ""
    device: torch.device = torch.device("cpu")
    tokenizer: Tokenizer | None = None
    chat: ChatTemplate | None = None
    state_spec: StateSpec | None = None
    default_loops: int = 0
    max_loops: int = 0
    windows_cache: bool = False
    input_size: int = 0
    media_size: int = 0

    def forward(self, batch: ForwardBatch, storage: PageStorage) -> torch.Tensor:
        """Append K and V of the batch's rows to their pages and return fp32 logits `[R, vocab_size]`.

        A model with `state_spec` also moves `batch.states` at `batch.state_slots`, inside `states.advance`.
        """
        raise NotImplementedError

    def run_loops(
        self, batch: ForwardBatch, storage: PageStorage, residual: torch.Tensor | None = None, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A part of a looped model's forward: see Loops.run_loops. ValueError for any other model."""
        raise ValueError(f"{self.name or 'this model'} does not loop")

    def view(self, loops: int | None = None, cache_window: int = 0) -> KVView:
        """What a sequence of this depth and cache window uses of the page groups; ValueError where that cannot be,
        TypeError for what is no integer."""
        view = self.spec.view(loops, cache_window)
        if view.cache_window and not self.windows_cache:
            raise ValueError(f"{self.name or 'this model'} does not take a cache_window, got {cache_window}")
        return view

    def default_kv_dtype(self) -> str:
        """What kv_dtype="auto" means for this model: fp32 on the CPU, bf16 on a GPU."""
        return "bf16" if self.device.type == "cuda" else "fp32"

    def create_kv_pool(
        self,
        num_pages: int | None = None,
        page_size: int = 16,
        kv_dtype: str = "auto",
        num_bytes: int | None = None,
    ) -> PagePool:
        """A page pool with storage for this model.

        Its size is `num_pages`, else as many pages as fit in `num_bytes`, else four sequences of `max_seq_len`
        tokens. On the CPU a page that is never written costs address space, not memory.
        """
        page_size = require_integer("page_size", page_size)
        if page_size < 1:
            raise UnsupportedShape(f"page_size must be at least 1 token, got {page_size}")
        codec = self.default_kv_dtype() if kv_dtype == "auto" else kv_dtype
        if num_pages is None and num_bytes is not None:
            one = PageStorage(self.spec, 1, page_size, codec, self.device, self.input_size).page_bytes
            num_pages = require_integer("num_bytes", num_bytes) // one
            if num_pages < 1:
                raise ValueError(f"num_bytes must hold at least one page of {one} bytes, got {num_bytes}")
        if num_pages is None:
            num_pages = 4 * self.spec.num_groups * -(-self.max_seq_len // page_size)
        pool = PagePool(
            num_pages, page_size, PageStorage(self.spec, num_pages, page_size, codec, self.device, self.input_size)
        )
        pool.fingerprint = self.fingerprint
        pool.state_spec = self.state_spec
        return pool

    def create_state_pool(self, num_slots: int = 1) -> StatePool | None:
        """Recurrent state for `num_slots` sequences of this model; None if it has none."""
        return None if self.state_spec is None else StatePool(self.state_spec, num_slots, self.device)

    def extra_info(self) -> dict[str, Any]:
        """What `paged info` prints about this model beyond the attributes above."""
        return {}
