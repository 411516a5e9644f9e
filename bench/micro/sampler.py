"""What it costs to draw the tokens of a step, by the parameters of its rows.

python bench/micro/sampler.py --json

Logits with a few likely tokens over a wide rest, as a language model gives them; every row has the same parameters.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
from common import best, by_turns

from paged.sampler import Sampler, TokenHistory
from paged.sampling import SamplingParams

VOCABULARY = 49_152  # of SmolLM2
KINDS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(temperature=0.8, top_k=50),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "min_p": SamplingParams(temperature=0.8, min_p=0.05),
    "top_k and top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "repetition_penalty": SamplingParams(repetition_penalty=1.1),
    "logprobs": SamplingParams(logprobs=5),
}


def likely(num_rows: int) -> torch.Tensor:
    """fp32 [num_rows, VOCABULARY]."""
    rng = np.random.default_rng(num_rows)
    logits = rng.normal(0, 2, (num_rows, VOCABULARY))
    for row in logits:
        row[rng.integers(0, VOCABULARY, 30)] += rng.uniform(8, 16, 30)
    return torch.from_numpy(logits.astype(np.float32))


def step(kind: str, num_rows: int, length: int = 500) -> partial[object]:
    """A call that draws one step of `num_rows` requests with `length` known tokens."""
    sampler = Sampler(num_rows, VOCABULARY)
    for slot in range(num_rows):
        sampler.assign(slot, KINDS[kind], slot)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (num_rows, length), dtype=np.int32)
    known = np.full(num_rows, length, np.int32)
    history = TokenHistory(tokens, known // 2, known)
    return partial(sampler.sample, likely(num_rows), np.arange(num_rows, dtype=np.int32), known, history)


def main() -> None:
    p = record.parser(__doc__ or "")
    p.add_argument("--rows", type=int, nargs="+", default=[64, 256], help="rows of a step")
    p.add_argument("--seconds", type=float, default=10.0, help="time for each number of rows (default: %(default)s)")
    args = p.parse_args()
    us: dict[str, dict[str, float]] = {}
    for num_rows in args.rows:
        times = by_turns({kind: step(kind, num_rows) for kind in KINDS}, args.seconds)
        us[str(num_rows)] = {kind: round(best(taken) / num_rows * 1e6, 2) for kind, taken in times.items()}
        shown = ", ".join(f"{kind} {each}" for kind, each in us[str(num_rows)].items())
        print(f"{num_rows} rows, us a row: {shown}")
    record.report("sampler", {"vocabulary": VOCABULARY, "us_per_row": us}, args)


if __name__ == "__main__":
    main()
