"""Milliseconds of one forward of a model, and where they go: matrix products, attention, and the rest.

    python bench/micro/forward.py [--model smollm2] [--threads 2] [--context 256] [--json]

Every product and every append or attend of a forward is timed where it happens, and so is each stretch between them.
A figure is the sum of the smallest times that each stretch took over all repetitions: a busy machine disturbs single
stretches, and seldom the same one every time. More threads than idle cores spoil it all the same.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paged.kv.storage import PageStorage
from paged.models import llama
from paged.models.base import ForwardBatch
from paged.models.linear import PackedLinear
from paged.models.llama import LlamaModel
from paged.models.registry import load_model
from paged.ops.dispatch import get_backend

PAGE = 16


def make_batch(model: LlamaModel, seqs: int, rows: int, context: int) -> tuple[ForwardBatch, PageStorage]:
    """`seqs` sequences with `context` stored positions each, and `rows` new rows of each; logits of the last rows."""
    length = context + rows
    columns = -(-length // PAGE)
    groups = model.spec.num_groups
    tables = np.random.default_rng(0).permutation(groups * seqs * columns).astype(np.int32)
    storage = PageStorage(model.spec, len(tables), PAGE)
    storage.pages.normal_()
    ends = np.arange(seqs + 1, dtype=np.int32) * rows
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, seqs * rows).astype(np.int32)
    lens = np.full(seqs, length, np.int32)
    return ForwardBatch(tokens, ends, lens, tables.reshape(groups, seqs, columns), ends[1:] - 1), storage


class Stretches:
    """Times of the products and of the attention of one forward, in order, taken by standing in their way."""

    def __init__(self) -> None:
        self.times: list[tuple[str, int, int]] = []  # kind, start and end in ns

    def timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            result = function(*args, **kwargs)
            self.times.append((kind, start, time.perf_counter_ns()))
            return result

        return call

    def of(self, forward: Callable[[], object]) -> list[tuple[str, int]]:
        """Kind and nanoseconds of every stretch of one forward."""
        self.times.clear()
        last, found = time.perf_counter_ns(), []
        forward()
        end = time.perf_counter_ns()
        for kind, start, stop in self.times:
            found += [("rest", start - last), (kind, stop - start)]
            last = stop
        return [*found, ("rest", end - last)]


class TimedBackend:
    """The backend of a model with its two operations timed."""

    def __init__(self, backend: Any, stretches: Stretches) -> None:
        self.append = stretches.timed("attention", backend.append)
        self.attend = stretches.timed("attention", backend.attend)


def measure(model: LlamaModel, batch: ForwardBatch, storage: PageStorage, repeats: int) -> dict[str, float]:
    """Milliseconds of a forward by part, and their sum."""
    stretches = Stretches()
    backend, product = get_backend(model.device), PackedLinear.__call__
    timed = TimedBackend(backend, stretches)
    llama.get_backend = lambda device: timed  # pyright: ignore[reportAttributeAccessIssue]
    PackedLinear.__call__ = stretches.timed("products", product)
    try:
        runs = [stretches.of(lambda: model.forward(batch, storage)) for _ in range(repeats)]
    finally:
        llama.get_backend, PackedLinear.__call__ = get_backend, product
    best = dict.fromkeys(("products", "attention", "rest"), 0.0)
    for same in zip(*runs, strict=True):
        best[same[0][0]] += min(ns for _, ns in same) / 1e6
    return {"forward": sum(best.values()), **best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=256, help="stored positions of each decoding sequence")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_model(args.model, device="cpu")
    if not isinstance(model, LlamaModel):
        parser.error(f"expected a Llama-like model, got {type(model).__name__}")
    cases = {f"decode {n}": (n, 1, args.context, args.repeats) for n in (1, 4, 16)}
    cases["prefill 512"] = (1, 512, 0, max(1, args.repeats // 4))
    results = {}
    print(f"{'':12} {'forward':>9} {'products':>9} {'attention':>9} {'rest':>9}  ms, {args.threads} threads")
    for name, (seqs, rows, context, repeats) in cases.items():
        best = measure(model, *make_batch(model, seqs, rows, context), repeats)
        print(f"{name:12} " + " ".join(f"{best[part]:9.2f}" for part in ("forward", "products", "attention", "rest")))
        results[name] = {part: round(value, 3) for part, value in best.items()}
    if args.json:
        print(json.dumps({"model": args.model, "threads": args.threads, "context": args.context, "ms": results}))


if __name__ == "__main__":
    main()
