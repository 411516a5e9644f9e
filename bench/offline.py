"""Offline throughput on the four workloads, with the prefix cache on and off.

    python bench/offline.py --json --save

Each line: wall and CPU seconds, generated tokens a second, rows computed, and the share of prompt tokens that the
prefix cache saved. W3 and W4 run with reuse off and on; the outputs of both must be the same tokens.
"""

from __future__ import annotations

import time
from typing import Any

import record
import workloads

from scheduler import Engine, SamplingParams


def run(model: Any, load: workloads.Workload, reuse: bool) -> tuple[dict[str, Any], list[list[int]]]:
    """One workload on a fresh engine."""
    with Engine(model, prefix_cache=reuse) as engine:
        params = SamplingParams(max_tokens=load.max_tokens, ignore_eos=True)
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = engine.generate(load.prompts, params)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        stats = engine.stats()
    generated = sum(len(o.token_ids) for o in outputs)
    assert generated == len(load.prompts) * load.max_tokens
    figures = {
        "reuse": reuse,
        "wall_s": round(wall, 3),
        "cpu_s": round(cpu, 3),
        "generated_tokens": generated,
        "tokens_per_s": round(generated / wall, 2),
        "prompt_tokens": load.num_prompt_tokens,
        "computed_tokens": stats["computed_tokens"],
        "cached_share": round(stats["cached_tokens"] / load.num_prompt_tokens, 4),
        "num_steps": stats["num_steps"],
    }
    return figures, [o.token_ids for o in outputs]


def main() -> None:
    p = record.parser(__doc__ or "")
    p.add_argument("--model", default="smollm2", help="what load_model takes (default: %(default)s)")
    p.add_argument("--only", nargs="*", help="names of workloads, e.g. W1 W3-10")
    args = p.parse_args()
    from paged import load_model

    model = load_model(args.model)
    results: dict[str, Any] = {}
    print(f"{'load':7} {'reuse':5} {'wall s':>8} {'tok/s':>8} {'rows':>8} {'cached':>7}")
    for load, settings in workloads.all_workloads(model.vocab_size):
        if args.only and load.name not in args.only:
            continue
        tokens: list[list[list[int]]] = []
        for reuse in settings:
            figures, out = run(model, load, reuse)
            tokens.append(out)
            results.setdefault(load.name, {})["on" if reuse else "off"] = figures
            print(
                f"{load.name:7} {'on' if reuse else 'off':5} {figures['wall_s']:8.2f} {figures['tokens_per_s']:8.1f} "
                f"{figures['computed_tokens']:8d} {figures['cached_share']:7.1%}",
                flush=True,
            )
        if len(tokens) == 2:
            same = tokens[0] == tokens[1]
            speedup = results[load.name]["off"]["wall_s"] / results[load.name]["on"]["wall_s"]
            results[load.name].update(same_tokens=same, speedup=round(speedup, 3))
            print(f"{load.name:7} speedup {speedup:.2f}x, tokens identical: {same}")
    record.report("offline", {"model": model.name, "workloads": results}, args)


if __name__ == "__main__":
    main()
