"""Hit rates on request traces by eviction policy and capacity, and what each call of the cache costs there.

    python bench/trace.py --json --save --plot hit-rates.svg

The prompts of a trace go one after the other through a PrefixCache over a pool without storage; full blocks are pages,
the last token is recomputed, outputs are left out. Rates are shares of prompt tokens. A capacity is a share of the
trace's unique blocks. `+hints`: each request says whether a later prompt goes on from its last block ("turn") or none
does ("none"). `optimum` is what a cache that knew the future would reach. The times are medians of single requests at
the trace's true page size, `storm` is one page evicted while everything cached is pushed out. Where vLLM's or SGLang's
prefix cache can be imported, it is driven by the same prompts.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import peer_caches
import record
import replay
from replay import END, FOLDER

from paged.kv.pages import PagePool
from paged.prefix.cache import PrefixCache
from paged.prefix.eviction import POLICIES

CAPACITIES = (0.02, 0.05, 0.10, 0.25)
HINTED = ("lru", "gdsf")


def hit_rates(trace: Any, capacities: list[float], policies: list[str]) -> dict[str, list[float]]:
    """For each policy the share of prompt tokens that were attached, in percent, one for each capacity."""
    runs = [(policy, False) for policy in policies]
    runs += [(policy, True) for policy in policies if policy in HINTED] + [("optimum", False)]
    rates: dict[str, list[float]] = {}
    for policy, hinted in runs:
        name = policy + "+hints" * hinted
        rates[name] = []
        for share in capacities:
            run = replay.replay(trace, int(share * trace.unique), policy, hinted)
            run.cache.check()
            rates[name].append(round(100 * run.hit_rate, 2))
        print(f"  {name:14}" + "".join(f"{rate:8.1f} %" for rate in rates[name]), flush=True)
    return rates


def costs(trace: Any, policy: str, num_requests: int, share: float = 0.10) -> dict[str, float]:
    """Median microseconds of each call of a request, and of evicting one page."""
    pool = PagePool(int(share * trace.unique), trace.block)
    cache = PrefixCache(pool, policy=policy)
    clock = time.perf_counter
    times: list[tuple[float, ...]] = []
    for chain in trace.chains[:num_requests]:
        prompt = np.append(np.repeat(chain, trace.block), END)
        t0 = clock()
        cursor = cache.cursor()
        hits = cache.seek(cursor, prompt) // trace.block
        t1 = clock()
        pages = cache.take(cursor)
        pages = np.concatenate([pages, pool.alloc(len(chain) - hits)[None]], axis=1)
        t2 = clock()
        cache.publish(cursor, prompt, pages)
        t3 = clock()
        pool.release(pages[0])
        times.append((t1 - t0, t2 - t1, t3 - t2, clock() - t3))
    held, start = cache.held_pages, clock()
    while cache.held_pages:
        cache.evict(64)
    storm = (clock() - start) / held
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    names = ("match_us", "allocate_us", "donate_us", "free_us", "storm_page_us")
    return {name: round(seconds * 1e6, 2) for name, seconds in zip(names, [*medians, storm], strict=True)}


def plot(results: dict[str, dict[str, Any]], capacities: list[float], path: Path) -> None:
    """Hit rate against capacity, one panel a trace. Needs the extra `plots`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install '.[plots]'") from error
    figure = Figure(figsize=(6 * len(results), 4.5), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for panel, (name, found) in zip(panels, results.items(), strict=True):
        for policy, rates in found["hit_rates"].items():
            style = "k--" if policy == "optimum" else "o:" if "+" in policy else "o-"
            panel.plot([100 * c for c in capacities], rates, style, label=policy)
        panel.set(title=name, xscale="log", xlabel="capacity, % of unique blocks", ylabel="hit rate, % of tokens")
        panel.legend(fontsize="small")
    figure.savefig(path)
    print(f"drawn in {path}")


def main() -> None:
    p = record.parser(__doc__ or "")
    p.add_argument("--traces", nargs="+", default=["mooncake_conversation", "mooncake_synthetic"], metavar="NAME")
    p.add_argument("--folder", type=Path, default=FOLDER, help="where the traces lie (default: %(default)s)")
    p.add_argument("--capacities", type=float, nargs="+", default=list(CAPACITIES), help="shares of unique blocks")
    p.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    p.add_argument("--requests", type=int, default=2000, help="requests that are timed (default: %(default)s)")
    p.add_argument("--plot", type=Path, default=None, help="draw the hit rates into this file")
    args = p.parse_args()
    if not (args.folder / "traces.py").exists():
        print(f"There are no traces in {args.folder}, so there is nothing to replay; --folder names another place.")
        return
    results: dict[str, dict[str, Any]] = {}
    for name in args.traces:
        trace = replay.load(name, args.folder)
        print(f"{name}: {len(trace.chains)} requests, {trace.unique} unique blocks of {trace.block} tokens")
        print(" " * 16 + "".join(f"{share:10.0%}" for share in args.capacities))
        rates = hit_rates(trace, args.capacities, args.policies)
        timed = {policy: costs(trace, policy, args.requests) for policy in args.policies}
        for policy, row in timed.items():
            print(f"  {policy:10}" + "".join(f"  {call} {us}" for call, us in row.items()))
        peers = peer_caches.measure(trace, args.requests)
        for peer, row in peers.items():
            print(f"  {peer:10}  {row}")
        facts = {"requests": len(trace.chains), "unique": trace.unique, "block": trace.block}
        results[name] = {**facts, "hit_rates": rates, "us": timed, "peers": peers}
    if args.plot is not None:
        plot(results, args.capacities, args.plot)
    record.report("trace", {"capacities": args.capacities, "traces": results}, args)


if __name__ == "__main__":
    main()
