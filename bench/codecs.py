"""What each KV codec costs and loses: bytes, decode time, perplexity and greedy tokens, on real text.

    python bench/codecs.py --json --save

Perplexity is that of windows of text at chunked prefill, every row reading K and V back from the pages; "agree" is the
share of rows whose likeliest token is that of fp32. Greedy runs continue prompts from the same text: the share of runs
with the tokens of fp32, and the mean number of tokens before the first other one. A decode step is one row for each
of a few long sequences, all layers; attend is one layer of it, from the caches. Times are CPU time of all threads (this
machine may be shared), the best of many, the codecs taking turns.

store-h ("-h") is refused where query heads share K and V. Its perplexity is measured on the same weights with the
shared ones repeated for each head, which computes the same function.
"""

from __future__ import annotations

import argparse
import inspect
import math
import pydoc_data.topics as topics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import record
import torch

from paged.kv.codecs import CODECS
from paged.kv.storage import PageStorage
from paged.models.base import ForwardBatch, LanguageModel
from paged.models.llama import LlamaModel
from paged.models.registry import build_model
from paged.ops.dispatch import get_backend
from paged.ops.plan import make_plan
from scheduler import Engine, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
PAGE = 16

Int32 = npt.NDArray[np.int32]


def texts() -> dict[str, str]:
    """Text that every machine has: Python's manual and a module of it, and the pages of this repository."""
    pages = sorted([ROOT / "README.md", ROOT / "csrc" / "README.md", *(ROOT / "docs").rglob("*.md")])
    return {
        "manual": "\n\n".join(topics.topics[name] for name in sorted(topics.topics)),
        "code": inspect.getsource(argparse),
        "docs": "\n\n".join(page.read_text(encoding="utf-8") for page in pages),
    }


def windows(model: LanguageModel, text: str, count: int, length: int) -> list[Int32]:
    """`count` windows of `length` tokens, spread evenly over the text."""
    assert model.tokenizer is not None
    tokens = np.asarray(model.tokenizer.encode(text), np.int32)
    if len(tokens) < length:
        raise SystemExit(f"a text has only {len(tokens)} tokens, and a window needs {length}: pass a smaller --length")
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return [tokens[start : start + length] for start in starts]


def unshared(model: LanguageModel) -> LanguageModel:
    """The same function with K and V of its own for each query head, as store-h needs it: shared ones stand there for
    every head that shares them."""
    assert isinstance(model, LlamaModel)
    config = model.config
    share = config.num_heads // config.num_kv_heads

    def read(name: str) -> torch.Tensor:
        values = model.tensor(name)
        if name.split(".")[-2] in ("k_proj", "v_proj"):
            values = values.unflatten(0, (config.num_kv_heads, -1)).repeat_interleave(share, 0).flatten(0, 1)
        return values

    return build_model(replace(config, num_kv_heads=config.num_heads), read)


def page_storage(model: LanguageModel, num_pages: int, kv_dtype: str) -> PageStorage:
    return PageStorage(model.spec, num_pages, PAGE, kv_dtype, input_size=model.input_size)


def logits_of(model: LanguageModel, tokens: Int32, kv_dtype: str, chunk: int) -> torch.Tensor:
    """Logits of every row of one sequence, `chunk` rows at a time."""
    pages = -(-len(tokens) // PAGE)
    storage = page_storage(model, pages, kv_dtype)
    table = np.arange(pages, dtype=np.int32)[None, None]
    parts = []
    for start in range(0, len(tokens), chunk):
        rows = len(tokens[start : start + chunk])
        batch = ForwardBatch(
            tokens=tokens[start : start + rows],
            q_indptr=np.array([0, rows], np.int32),
            kv_lens=np.array([start + rows], np.int32),
            page_tables=table,
            logit_rows=np.arange(rows, dtype=np.int32),
        )
        parts.append(model.forward(batch, storage))
    return torch.cat(parts)


def quality(model: LanguageModel, names: list[str], load: dict[str, list[Int32]]) -> dict[str, dict[str, Any]]:
    """Perplexity of each text and codec, and how often its likeliest token is that of fp32."""
    figures: dict[str, dict[str, Any]] = {name: {"perplexity": {}, "change": {}, "agree": {}} for name in names}
    for text, parts in load.items():
        nats = dict.fromkeys(names, 0.0)
        agree = dict.fromkeys(names, 0.0)
        for tokens in parts:
            target = torch.from_numpy(tokens[1:]).long()[:, None]
            exact: torch.Tensor | None = None
            for name in names:
                logits = logits_of(model, tokens, name, 512)[:-1]
                nats[name] -= float(torch.log_softmax(logits, -1).gather(1, target).double().mean()) / len(parts)
                chosen = logits.argmax(-1)
                exact = chosen if exact is None else exact
                agree[name] += float((chosen == exact).double().mean()) / len(parts)
        for name in names:
            figures[name]["perplexity"][text] = round(math.exp(nats[name]), 4)
            figures[name]["change"][text] = round(math.exp(nats[name] - nats[names[0]]) - 1, 5)
            figures[name]["agree"][text] = round(agree[name], 4)
    return figures


def same_bits(model: LanguageModel, tokens: Int32, kv_dtype: str) -> bool:
    """Whether chunks of two sizes give the same logits, bit for bit (promise 1)."""
    return torch.equal(logits_of(model, tokens, kv_dtype, 512), logits_of(model, tokens, kv_dtype, 100))


def greedy(model: LanguageModel, names: list[str], prompts: list[Int32], length: int) -> dict[str, dict[str, Any]]:
    """Greedy continuations with each codec against those of the first."""
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    exact: list[list[int]] = []
    figures: dict[str, dict[str, Any]] = {}
    for name in names:
        with Engine(model, kv_dtype=name, max_seq_len=1024) as engine:
            outputs = [output.token_ids for output in engine.generate(prompts, params)]
        exact = exact or outputs
        equal = [
            next((i for i, (a, b) in enumerate(zip(out, want, strict=True)) if a != b), length)
            for out, want in zip(outputs, exact, strict=True)
        ]
        figures[name] = {
            "greedy_same": round(sum(n == length for n in equal) / len(equal), 3),
            "greedy_tokens_before_another": round(sum(equal) / len(equal), 1),
        }
    return figures


def decode_calls(model: LanguageModel, kv_dtype: str, seqs: int, context: int) -> tuple[Callable[[], object], ...]:
    """(a decode step of the model, attend of one layer) over `seqs` sequences of `context` random rows."""
    spec, columns = model.spec, -(-context // PAGE)
    storage = PageStorage(spec, seqs * columns, PAGE, kv_dtype)
    table = np.random.default_rng(0).permutation(seqs * columns).astype(np.int32).reshape(seqs, columns)
    ends = np.arange(seqs + 1, dtype=np.int32)
    lens = np.full(seqs, context, np.int32)
    backend = get_backend("cpu")
    k = torch.randn(seqs * context, spec.num_kv_heads, spec.head_dim)
    whole = make_plan(PAGE, ends * context, lens, table)
    for layer in range(spec.layers):
        backend.append(storage, layer, k, k, whole)
    plan = make_plan(PAGE, ends, lens, table)
    q = torch.randn(seqs, spec.num_kv_heads * 3, spec.head_dim)
    batch = ForwardBatch(np.ones(seqs, np.int32), ends, lens, table[None], np.arange(seqs, dtype=np.int32))
    return lambda: model.forward(batch, storage), lambda: backend.attend(q, storage, 0, plan, scale=0.125)


def cpu_seconds(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The smallest CPU time of each call, in turns for about `seconds`, at least five; the first warms up."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(times))]) < 5:
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append(time.process_time() - start)
    return {name: min(each) for name, each in times.items()}


def main() -> None:
    p = record.parser(__doc__ or "")
    p.add_argument("--model", default="smollm2", help="what load_model takes (default: %(default)s)")
    p.add_argument("--codecs", nargs="*", default=list(CODECS), help="the first is what the others are compared with")
    p.add_argument("--windows", type=int, default=4, help="windows of each text (default: %(default)s)")
    p.add_argument("--length", type=int, default=1024, help="tokens of a window (default: %(default)s)")
    p.add_argument("--greedy", type=int, default=64, help="tokens of a greedy run (default: %(default)s)")
    p.add_argument("--seqs", type=int, default=8, help="sequences of a decode step (default: %(default)s)")
    p.add_argument("--seconds", type=float, default=20.0, help="for the decode times (default: %(default)s)")
    args = p.parse_args()
    from paged import load_model

    model = load_model(args.model)
    names: list[str] = args.codecs
    load = {name: windows(model, text, args.windows, args.length) for name, text in texts().items()}
    figures = quality(model, names, load)
    prompts = [tokens[: min(96, args.length)] for parts in load.values() for tokens in parts]
    for name, more in greedy(model, names, prompts, args.greedy).items():
        figures[name].update(more)
    calls = {name: decode_calls(model, name, args.seqs, args.length) for name in names}
    steps = cpu_seconds({name: both[0] for name, both in calls.items()}, args.seconds)
    attends = cpu_seconds({name: both[1] for name, both in calls.items()}, args.seconds / 4)
    bf16 = PageStorage(model.spec, 1, PAGE, "bf16").page_bytes
    tokens = next(iter(load.values()))[0]
    print(
        f"{'codec':6} {'B/token':>8} {'of bf16':>8} {'step ms':>8} {'attend us':>9}  "
        f"perplexity against {names[0]}, rows that agree"
    )
    for name in names:
        page_bytes = PageStorage(model.spec, 1, PAGE, name).page_bytes
        f = figures[name]
        f["bytes_per_token"] = page_bytes * model.spec.num_groups / PAGE
        f["share_of_bf16"] = round(page_bytes / bf16, 4)
        f["decode_step_cpu_ms"] = round(steps[name] * 1e3, 2)
        f["attend_cpu_us"] = round(attends[name] * 1e6, 1)
        f["same_bits_in_other_chunks"] = same_bits(model, tokens, name)
        texts_line = ", ".join(f"{text} {f['change'][text]:+.2%} {f['agree'][text]:.1%}" for text in load)
        print(
            f"{name:6} {f['bytes_per_token']:8.0f} {f['share_of_bf16']:8.4f} {f['decode_step_cpu_ms']:8.2f} "
            f"{f['attend_cpu_us']:9.1f}  {texts_line}; greedy runs equal {f['greedy_same']:.0%}, "
            f"{f['greedy_tokens_before_another']} of {args.greedy} tokens; "
            f"same bits in other chunks: {f['same_bits_in_other_chunks']}"
        )
    apart, inputs = unshared(model), [f"{name}-h" for name in names]
    kept = quality(apart, [names[0], *inputs], load)
    whole = PageStorage(apart.spec, 1, PAGE, names[0]).page_bytes
    print(
        f"store-h, of the same model with K and V for each query head ({whole * apart.spec.num_groups // PAGE} B/token)"
    )
    for name in inputs:
        f = kept[name]
        f["bytes_per_token"] = page_storage(apart, 1, name).page_bytes * apart.spec.num_groups / PAGE
        f["same_bits_in_other_chunks"] = same_bits(apart, tokens[:300], name)
        texts_line = ", ".join(f"{text} {f['change'][text]:+.2%} {f['agree'][text]:.1%}" for text in load)
        print(f"{name:6} {f['bytes_per_token']:8.0f}  {texts_line}; same bits: {f['same_bits_in_other_chunks']}")
        figures[name] = f
    settings = {name: getattr(args, name) for name in ("windows", "length", "greedy", "seqs")}
    record.report("codecs", {"model": model.name, "settings": settings, "codecs": figures}, args)


if __name__ == "__main__":
    main()
