"""Milliseconds of one forward of a model, and where they go: matrix products, attention, and the rest.

    python bench/micro/forward.py [--model smollm2] [--threads 2] [--context 256] [--json]

Products and attention are timed by themselves with the shapes of that forward, interleaved with whole forwards; the
rest is the difference. Each figure is the minimum of its repetitions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from paged.kv.storage import PageStorage
from paged.models.base import ForwardBatch
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


def parts(model: LlamaModel, batch: ForwardBatch, storage: PageStorage) -> dict[str, Callable[[], object]]:
    """The whole forward, and its products and its attention alone."""
    config, rows = model.config, len(batch.tokens)
    x = {n: torch.randn(rows, n) for n in (config.hidden_size, config.num_heads * config.head_dim)}
    x[config.intermediate_size] = torch.randn(rows, config.intermediate_size)
    last = torch.randn(len(batch.logit_rows), config.hidden_size)
    q = torch.randn(rows, config.num_heads, config.head_dim)
    k = torch.randn(rows, config.num_kv_heads, config.head_dim)
    backend = get_backend(model.device)

    def products() -> None:
        for layer in model._layers:
            for product in (layer.qkv, layer.output, layer.gate_up, layer.down):
                product(x[product.in_features])
        model._head(last)

    def attention() -> None:
        plans = batch.plans(PAGE)
        for place in model._places:
            backend.append(storage, place.index, k, k, plans[place.group])
            backend.attend(q, storage, place.index, plans[place.group], scale=0.125, window=place.window)

    return {"forward": lambda: model.forward(batch, storage), "products": products, "attention": attention}


def measure(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Smallest milliseconds of each, taken in turns so that a busy machine disturbs all alike."""
    best = dict.fromkeys(functions, float("inf"))
    with torch.inference_mode():
        for _ in range(repeats):
            for name, function in functions.items():
                start = time.perf_counter()
                function()
                best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


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
        best = measure(parts(model, *make_batch(model, seqs, rows, context)), repeats)
        best["rest"] = best["forward"] - best["products"] - best["attention"]
        print(f"{name:12} " + " ".join(f"{best[part]:9.2f}" for part in ("forward", "products", "attention", "rest")))
        results[name] = {part: round(value, 3) for part, value in best.items()}
    if args.json:
        print(json.dumps({"model": args.model, "threads": args.threads, "context": args.context, "ms": results}))


if __name__ == "__main__":
    main()
