"""Looped models: a run of layers that is iterated, each iteration with K and V of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from paged.kv.pages import PagePool
from paged.kv.storage import PageStorage
from paged.models.base import ForwardBatch, LanguageModel
from paged.models.config import ModelConfig
from paged.models.llama import LlamaModel
from paged.models.step import Place, Step
from paged.spec import KVSpec, LoopGroups


class Loops(LanguageModel):
    """What every looped model is: layers 0 .. a - 1 run once, layers a .. b - 1, the loop block, run `loops` times in
    a row, layers b .. n - 1 run once, then the head.

    loop_layers    (a, b)
    default_loops  iterations where a batch gives none
    max_loops      iterations that a batch may ask for, `batch.loops`; each sequence of a batch has a depth of its own
    before_group   page group of the layers before the block; None if a = 0
    after_group    page group of the layers after the block; None if b = n
    first_group    page group of iteration 0; iteration i has first_group + i, and spec.num_groups is
                   first_group + max_loops
    residual_size  values a row of what one iteration hands to the next (`run_loops`)

    A sequence of depth L uses the groups below `first_group + L`; the rows of its page table beyond may be -1 and are
    neither read nor written. Iteration i depends on the iterations before it alone, so rows computed at one depth
    serve every smaller one, and a greater one needs the missing groups only (`run_loops`). The rows of `after_group`
    are the exception: they depend on the depth, and serve that depth alone. All rows that a sequence sees must have
    been computed at its depth or, in the groups that both have, at a greater one.

    A group whose layers have different windows keeps the rows that the widest of them sees.
    """

    config: ModelConfig
    loop_layers: tuple[int, int]
    before_group: int | None
    after_group: int | None
    first_group: int
    residual_size: int
    _layers: Sequence[Any]
    _places: list[Place]

    # What the kinds of looped models differ in ----------------------------------------------------------------

    if TYPE_CHECKING:  # a class beside this one in the bases has them

        def _embedded(self, batch: ForwardBatch) -> torch.Tensor:
            """What enters the first layer, fp32 `[T, hidden_size]`, new memory."""
            ...

        def _run(self, layer: Any, place: Place, x: torch.Tensor, step: Any) -> None:
            """Run one layer in x; its K and V rows are appended."""

        def _logits(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
            """Head of the wanted rows; x stays as it is."""
            ...

        def _step(self, batch: ForwardBatch, storage: PageStorage, seqs: npt.NDArray[np.bool_] | None = None) -> Step:
            """What the layers share, of all rows or of those of the sequences `seqs`."""
            ...

    def _carried(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What iterations hand on, from what enters the block: x, and beside it what they only read."""
        return [x]

    def _enter(self, carried: list[torch.Tensor]) -> None:
        """What happens to x, the first of these, before each iteration."""

    # Computing ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, storage: PageStorage) -> torch.Tensor:
        """Append K and V of the batch's rows to their pages and return fp32 logits `[R, vocab_size]`, new memory.

        ValueError for a depth outside 1 .. max_loops; then nothing was written.
        """
        depths, step = self._depths(batch, 0), self._step(batch, storage)
        carried = self._before(batch, step)
        self._iterate(carried, batch, step, depths, 0)
        return self._after(carried[0], batch, step)

    @torch.inference_mode()
    def run_loops(
        self, batch: ForwardBatch, storage: PageStorage, residual: torch.Tensor | None = None, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, from `residual` after `start` iterations on; returns the logits and the residual after the last.

        The residual is fp32 `[T, residual_size]` on the model's device: what the loop block gave for each row of the
        batch. None (with `start` = 0) begins with the tokens. Given one, only the iterations from `start` on and the
        layers after the block run: they write the groups from `first_group + start` on and `after_group`, and read no
        other, so that rows computed at depth 4 become those of depth 8, bit for bit, at the cost of four iterations.
        A row's residual is that after as many iterations as its sequence has; the one given is not changed.

        ValueError for a depth outside 1 .. max_loops or below `start`, and for a residual of another shape; then
        nothing was written.
        """
        depths = self._depths(batch, start)
        shape = (len(batch.tokens), self.residual_size)
        if residual is None and start:
            raise ValueError(f"the residual after {start} iterations is needed to go on from there, got none")
        if residual is not None and tuple(residual.shape) != shape:
            raise ValueError(f"the residual of this batch must have shape {shape}, got {tuple(residual.shape)}")
        step = self._step(batch, storage)
        if residual is None:
            carried = self._before(batch, step)
        else:
            parts = residual.split(self.config.hidden_size, 1)
            carried = [part.to(self.device, torch.float32).clone() for part in parts]
        self._iterate(carried, batch, step, depths, start)
        after = torch.cat(carried, 1)  # a copy: the layers after the block change x
        return self._after(carried[0], batch, step), after

    def _depths(self, batch: ForwardBatch, start: int) -> npt.NDArray[np.int32]:
        """Iterations of each sequence, [S]; ValueError if one of them cannot be, going on after `start`."""
        count = len(batch.kv_lens)
        depths = np.full(count, self.default_loops, np.int32) if batch.loops is None else batch.loops
        if depths.shape != (count,):
            raise ValueError(f"batch.loops must have a depth for each of {count} sequences, got shape {depths.shape}")
        least, most = int(depths.min(initial=self.max_loops)), int(depths.max(initial=1))
        if least < 1 or most > self.max_loops:
            bad = least if least < 1 else most
            raise ValueError(f"loops must be between 1 and this model's {self.max_loops}, got {bad}")
        if not 0 <= start <= least:
            raise ValueError(f"a batch can go on after 0 to {least} loops, the least of its sequences, got {start}")
        return depths

    def _before(self, batch: ForwardBatch, step: Step) -> list[torch.Tensor]:
        """What is carried into the first iteration."""
        x, (start, _) = self._embedded(batch), self.loop_layers
        for layer, place in zip(self._layers[:start], self._places[:start], strict=True):
            self._run(layer, place, x, step)
        return self._carried(x)

    def _iterate(
        self, carried: list[torch.Tensor], batch: ForwardBatch, step: Step, depths: npt.NDArray[np.int32], done: int
    ) -> None:
        """Iterations from `done` on, in the first of `carried`, each of the rows whose sequences are deep enough."""
        first, last = self.loop_layers
        for depth in np.unique(depths).tolist():  # a stretch of iterations that the same sequences run
            deep, part, rows, here = depths >= depth, step, None, carried
            if not deep.all():
                part = self._step(batch, step.storage, deep)
                rows = torch.from_numpy(np.flatnonzero(np.repeat(deep, np.diff(batch.q_indptr)))).to(self.device)
                here = [values.index_select(0, rows) for values in carried]
            for iteration in range(done, depth):
                self._enter(here)
                for layer, place in zip(self._layers[first:last], self._places[first:last], strict=True):
                    self._run(layer, Place(place.group + iteration, place.index, place.window), here[0], part)
            if rows is not None:
                carried[0].index_copy_(0, rows, here[0])
            done = depth

    def _after(self, x: torch.Tensor, batch: ForwardBatch, step: Step) -> torch.Tensor:
        """The layers after the loop block, added to x, and the logits."""
        _, end = self.loop_layers
        for layer, place in zip(self._layers[end:], self._places[end:], strict=True):
            self._run(layer, place, x, step)
        return self._logits(x, batch)

    # Pages ----------------------------------------------------------------------------------------------------

    def _page_groups(self, config: ModelConfig) -> tuple[list[Place], KVSpec]:
        """Groups: before, after, then one an iteration; the places of the block are those of iteration 0."""
        loop = config.loop
        if loop is None:
            raise ValueError(f"a looped model needs a config with loop layers, got one of the family {config.family}")
        self.residual_size = config.hidden_size
        self.loop_layers, self.default_loops, self.max_loops = loop.layers, loop.num_loops, loop.max_loops
        start, end = loop.layers
        before, block, after = range(start), range(start, end), range(end, config.num_layers)
        slices = [layers for layers in (before, after, block) if layers]
        self.before_group = slices.index(before) if before else None
        self.after_group = slices.index(after) if after else None
        self.first_group = len(slices) - 1
        windows, widest, places = config.layer_windows, [], {}
        for group, layers in enumerate(slices):
            seen = [windows[layer] for layer in layers]
            widest.append(0 if 0 in seen else max(seen))
            places |= {layer: Place(group, index, windows[layer]) for index, layer in enumerate(layers)}
        spec = KVSpec(
            max(len(layers) for layers in slices),
            config.num_kv_heads,
            config.head_dim,
            self.first_group + loop.max_loops,
            (*widest[:-1], *widest[-1:] * loop.max_loops),
            LoopGroups(self.first_group, loop.max_loops, loop.num_loops, self.after_group),
        )
        return [places[layer] for layer in range(config.num_layers)], spec

    def create_kv_pool(
        self,
        num_pages: int | None = None,
        page_size: int = 16,
        kv_dtype: str = "auto",
        num_bytes: int | None = None,
    ) -> PagePool:
        """See LanguageModel; where neither size is given, four sequences of `max_seq_len` at the default depth."""
        if num_pages is None and num_bytes is None and page_size > 0:
            num_pages = 4 * (self.first_group + self.default_loops) * -(-self.max_seq_len // page_size)
        return super().create_kv_pool(num_pages, page_size, kv_dtype, num_bytes)


class LoopedModel(Loops, LlamaModel):
    """A LlamaModel with a run of layers that loops. With one loop it is the plain model, bit for bit.

    The loop block begins with what the layers before it gave, and goes on with what it gave itself.
    """

    def _step(self, batch: ForwardBatch, storage: PageStorage, seqs: npt.NDArray[np.bool_] | None = None) -> Step:
        return Step(self, batch, storage, seqs)

    def extra_info(self) -> dict[str, Any]:
        """What a LlamaModel says, and which layers loop, and how often."""
        loops = {"loop_layers": self.loop_layers, "default_loops": self.default_loops, "max_loops": self.max_loops}
        return super().extra_info() | loops
