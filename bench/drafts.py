"""Decoding with and without a proposer (prompt lookup), where the output repeats its prompt and where it does not.

    python bench/drafts.py --json --save

For each text and batch size: tokens a second without and with drafts, in turns (A B A B), medians; rows drafted and
accepted; whether the tokens are the same. `copy` asks for a list that the prompt has twice; `free` for prose, `drawn`
for prose at temperature 1, which repeats itself least.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import record

from scheduler import Engine, SamplingParams

NAMES = "Ann Lee, Bob Roe, Cid Poe, Dan Fox, Eve Hay, Flo Day, Gus May, Hal Orr, Ivy Ash, Jon Elm, Kay Oak, Lou Yew"
COPY = "".join(f"{i}. {name} lives at {3 * i} Mill Road.\n" for i, name in enumerate(NAMES.split(", "), 1))
TEXTS = {
    "copy": (f"List:\n{COPY}\nThe same list:\n{COPY}\nThe same list:\n", 0.0),
    "free": ("A day at the sea begins", 0.0),
    "drawn": ("A day at the sea begins", 1.0),
}


def measure(engine: Engine, prompts: list[Any], params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Tokens a second of one batch on an empty cache, and its tokens."""
    engine.reset_prefix_cache()
    start = time.perf_counter()
    outputs = engine.generate(prompts, params)
    seconds = time.perf_counter() - start
    return sum(len(o.token_ids) for o in outputs) / seconds, [o.token_ids for o in outputs]


def main() -> None:
    p = record.parser(__doc__ or "")
    p.add_argument("--model", default="smollm2", help="what load_model takes (default: %(default)s)")
    p.add_argument("--batches", nargs="*", type=int, default=[1, 4, 16], help="requests at once")
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--repeat", type=int, default=3, help="turns (default: %(default)s)")
    args = p.parse_args()
    from paged import load_model

    model = load_model(args.model)
    results: dict[str, Any] = {}
    print(f"{'text':5} {'batch':>5} {'plain tok/s':>12} {'drafts tok/s':>13} {'ratio':>6} {'accepted':>9}  same")
    for name, (text, temperature) in TEXTS.items():
        params = SamplingParams(max_tokens=args.max_tokens, temperature=temperature, seed=1, ignore_eos=True)
        for batch in args.batches:
            prompts = [f"Note {i}.\n{text}" for i in range(batch)]
            with Engine(model) as plain, Engine(model, proposer="prompt_lookup") as drafted:
                runs = [
                    (measure(plain, prompts, params), measure(drafted, prompts, params)) for _ in range(args.repeat)
                ]
                stats = drafted.stats()
            a, b = (statistics.median(run[i][0] for run in runs) for i in (0, 1))
            same = all(run[0][1] == run[1][1] for run in runs)
            share = stats["accepted_tokens"] / max(1, stats["drafted_tokens"])
            results[f"{name}-{batch}"] = {
                "plain_tokens_per_s": round(a, 1),
                "drafts_tokens_per_s": round(b, 1),
                "ratio": round(b / a, 3),
                "drafted": stats["drafted_tokens"],
                "accepted_share": round(share, 3),
                "same_tokens": same,
            }
            print(f"{name:5} {batch:5} {a:12.1f} {b:13.1f} {b / a:6.2f} {share:9.1%}  {same}", flush=True)
    record.report("drafts", {"model": model.name, "max_tokens": args.max_tokens, "texts": results}, args)


if __name__ == "__main__":
    main()
