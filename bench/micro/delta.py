"""Milliseconds of one gated delta layer, and of the matrix products around it.

    python bench/micro/delta.py [--threads 2] [--torch] [--json]

The sizes are those of a small model of the Qwen3.5 family: hidden size 1024, MLP 3584, 16 states of 128 x 128.
A decode step reads and writes the whole state of each sequence: its rate is set beside that of copying as many bytes.
The parts are taken in turns; each figure is the minimum of its repetitions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from paged.kv.state import StatePool
from paged.models.config import DeltaConfig
from paged.models.delta import DELTA, DeltaStep, GatedDelta, delta_state_spec
from paged.models.linear import PackedLinear

HIDDEN, INNER = 1024, 3584
SHAPE = DeltaConfig(num_key_heads=16, num_value_heads=16, key_head_dim=128, value_head_dim=128, conv_kernel=4)
WIDTH = SHAPE.num_channels + SHAPE.value_size + 2 * SHAPE.num_value_heads


def make_layer() -> GatedDelta:
    return GatedDelta(
        SHAPE,
        0,
        conv=0.5 * torch.randn(SHAPE.num_channels, 1, SHAPE.conv_kernel),
        a_log=torch.randn(SHAPE.num_value_heads) - 3,
        dt_bias=torch.randn(SHAPE.num_value_heads),
        norm=torch.ones(SHAPE.value_head_dim),
        norm_eps=1e-6,
    )


def make_products() -> list[PackedLinear]:
    """Input and output projections of the layer, and its MLP."""
    sizes = ((WIDTH, HIDDEN), (HIDDEN, SHAPE.value_size), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    return [PackedLinear(torch.randn(n, k) / k**0.5) for n, k in sizes]


def parts(layer: GatedDelta, products: list[PackedLinear], seqs: int, rows: int, in_torch: bool) -> dict:
    """What is timed, by name."""
    pool = StatePool(delta_state_spec(SHAPE, 1), seqs)
    step = DeltaStep(np.arange(seqs, dtype=np.int32), np.arange(seqs + 1, dtype=np.int32) * rows, pool)
    projected = torch.randn(seqs * rows, WIDTH)
    inputs = [torch.randn(seqs * rows, product.in_features) for product in products]
    source, target = (torch.zeros_like(pool.planes[DELTA]) for _ in range(2))
    named: dict[str, Callable[[], object]] = {
        "delta": lambda: layer(projected, step),
        "products": lambda: [product(x) for product, x in zip(products, inputs, strict=True)],
        "copy": lambda: target.copy_(source),
    }
    if in_torch:
        named["torch"] = lambda: layer.in_torch(projected, step)
    return named


def measure(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
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
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of the products; see PAGED_THREADS"
    )
    parser.add_argument("--torch", action="store_true", help="time the version in plain torch as well")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    layer, products = make_layer(), make_products()
    results = {}
    for name, seqs, rows in (("decode 1", 1, 1), ("decode 32", 32, 1), ("chunk 64", 1, 64), ("prefill 512", 1, 512)):
        best = measure(parts(layer, products, seqs, rows, args.torch), args.repeats)
        print(f"{name:12} " + "  ".join(f"{part} {ms:8.2f} ms" for part, ms in best.items()))
        results[name] = {part: round(ms, 3) for part, ms in best.items()}
    if args.json:
        print(json.dumps({"threads": args.threads, "ms": results}))


if __name__ == "__main__":
    main()
