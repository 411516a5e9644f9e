"""What it costs to look a long prompt up among more and more checkpoints.

python bench/micro/checkpoints.py --json

Three surroundings of `n` checkpoints each: `branches`, of which one opens the prompt and the others share only its
system prompt; `comb`, which leave the prompt at n different places and none of which opens it; `turns`, which open
each other and all but the first of which the prompt leaves. The look-up must not grow with n. Beside it, the price of
one comparison of the whole prompt with itself, which any look-up that verifies its tokens has to pay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
from common import best, by_turns

from paged.kv.pages import Int32, PagePool
from paged.kv.state import StateSnapshot
from paged.prefix.checkpoints import CheckpointStore

SYSTEM = 512  # tokens that all branches share
VOCABULARY = 50_000


def filled(sequences: list[Int32]) -> CheckpointStore:
    """A store of these checkpoints, on pages without storage: a look-up reads none."""
    pool = PagePool(len(sequences) + 1, 1 << 20)
    store, pages = CheckpointStore(pool, 1, len(sequences)), pool.alloc(1)[None]
    for tokens in sequences:
        store.insert(b"", tokens, pages, StateSnapshot(len(tokens), {}))
    return store


def surroundings(prompt: Int32, n: int) -> dict[str, tuple[CheckpointStore, Int32, int]]:
    """By name: a store of n checkpoints, a prompt, and the tokens that it must find."""
    rng = np.random.default_rng(n)
    end = np.array([-1], np.int32)
    others = rng.integers(0, VOCABULARY, (n - 1, 64), dtype=np.int32)
    deep = prompt[: len(prompt) * 7 // 8]
    branches = [deep, *(np.concatenate([prompt[:SYSTEM], tail]) for tail in others)]
    comb = [np.concatenate([prompt[:i], end]) for i in range(1, n + 1)]
    turns = [prompt[:i] for i in range(1, n + 1)]
    left = np.concatenate([prompt[:1], end, prompt[2:]])
    return {
        "branches": (filled(branches), prompt, len(deep)),
        "comb": (filled(comb), prompt, 0),
        "turns": (filled(turns), left, 1),
    }


def main() -> None:
    p = record.parser(__doc__ or "")
    p.add_argument("--tokens", type=int, default=32_768, help="length of the prompt (default: %(default)s)")
    p.add_argument("--counts", type=int, nargs="+", default=[1, 16, 256, 4096], help="checkpoints of each kind")
    p.add_argument("--seconds", type=float, default=2.0, help="time for each count (default: %(default)s)")
    args = p.parse_args()
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, args.tokens, dtype=np.int32)
    rows: dict[str, dict[str, float]] = {}
    for n in args.counts:
        calls: dict[str, Callable[[], object]] = {"compare": lambda: np.array_equal(prompt, prompt)}
        for name, (store, asked, want) in surroundings(prompt, n).items():
            found = store.find(b"", asked)
            if (found.num_tokens if found is not None else 0) != want:
                raise SystemExit(f"{name}, {n} checkpoints: expected one of {want} tokens, found {found}")
            calls[name] = lambda store=store, asked=asked: store.find(b"", asked)
            calls[f"{name}.stop_at"] = lambda store=store, asked=asked: store.stop_at(b"", asked, 0)
        times = by_turns(calls, args.seconds)
        rows[str(n)] = {name: round(best(seconds) * 1e6, 2) for name, seconds in times.items()}
        print(f"{n:5} checkpoints: " + ", ".join(f"{name} {value:.1f} us" for name, value in rows[str(n)].items()))
    record.report("checkpoints", {"tokens": args.tokens, "us": rows}, args)


if __name__ == "__main__":
    main()
