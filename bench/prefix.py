"""TinyLoop's table of shared prefixes, on our side: N requests over one prefix, each computing it, and all sharing it.

    python bench/prefix.py --json --save

For each model, prefix length and N: the wall seconds of N calls of `generate` without any cache, of one
`build_prefix_cache` and N calls of `generate_from_prefix_cache`, their ratio, and the asymptote that TinyLoop names,
(prefill + decode) / (prefill / N + decode), from the medians of the same run. The two sides take turns, call by call.

The same with N threads at once, whose calls decode as one batch: there decode is what a request takes of the run
without a cache beyond one prefill. Then what attaching a handle costs, matching a pool of 64 tenants, and resuming 4
loops at 8. The looped model is SmolLM2 with its last ten layers iterated 8 times. All tokens are compared with those of
plain `generate`. `--only at_once resume` and the like run a part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import record

from paged import PrefixPool, load_model
from paged.session import Session
from scheduler.model import Model

MAX_TOKENS = 32  # TinyLoop's default
LOOP_LAYERS = (20, 30)
LOOPS = 8
PARTS = ("table", "at_once", "attach", "resume")


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    out = call()
    return time.perf_counter() - start, out


def median_us(call: Callable[[], Any], repeat: int = 200) -> float:
    return round(statistics.median(timed(call)[0] for _ in range(repeat)) * 1e6, 1)


def prompt_of(model: Any, num_tokens: int, salt: int = 0) -> np.ndarray:
    """Real text, cut to `num_tokens`; each salt gives another one."""
    import pydoc_data.topics

    text = "\n".join(pydoc_data.topics.topics.values())
    tokens = model.tokenizer.encode(text[: 8 * (num_tokens + 64) * (salt + 1)])
    return np.array(tokens[salt * 7 : salt * 7 + num_tokens], np.int32)


def shared(model: Any, num_tokens: int, n: int, loops: int | None) -> dict[str, Any]:
    """One row of the table."""
    prompt = prompt_of(model, num_tokens)
    options = {"max_tokens": MAX_TOKENS, "loops": loops, "ignore_eos": True}
    with (
        Model(model, max_seq_len=2048, prefix_cache=False, max_num_seqs=4) as alone,
        Model(model, max_seq_len=2048, max_num_seqs=4) as sharing,
    ):
        alone.generate(prompt[:64], **options)  # both are warm
        sharing.generate(prompt[1:65], **options)
        build_s, prefix = timed(lambda: sharing.build_prefix_cache(prompt, loops=loops))
        plain, first, reused, same = [], [], [], True
        for _ in range(n):
            start = time.perf_counter()
            stream = alone.generate_stream(prompt, **options)
            tokens = [next(stream)]
            first.append(time.perf_counter() - start)
            tokens += stream
            plain.append(time.perf_counter() - start)
            seconds, out = timed(lambda: sharing.generate_from_prefix_cache(prefix, **options))
            reused.append(seconds)
            same = same and out[num_tokens:] == tokens
        prefill = statistics.median(first)
        decode = statistics.median(plain) - prefill
        no_cache, with_cache = sum(plain), build_s + sum(reused)
    speedup = no_cache / with_cache
    asymptote = (prefill + decode) / (prefill / n + decode)
    row = {
        "prefix_tokens": num_tokens,
        "n": n,
        "no_cache_s": round(no_cache, 3),
        "shared_s": round(with_cache, 3),
        "speedup": round(speedup, 3),
        "prefill_s": round(prefill, 4),
        "decode_s": round(decode, 4),
        "asymptote": round(asymptote, 3),
        "share_of_asymptote": round(speedup / asymptote, 4),
        "same_tokens": same,
    }
    print(
        f"  {num_tokens:5d} {n:4d} {no_cache:10.2f} {with_cache:9.2f} {speedup:8.2f}x {asymptote:9.2f}x "
        f"{speedup / asymptote:7.1%}  {same}",
        flush=True,
    )
    return row


def at_once(model: Any, num_tokens: int, n: int, loops: int | None) -> dict[str, Any]:
    """The same, with the N calls made by N threads at once, so that they decode as one batch."""
    prompt = prompt_of(model, num_tokens)
    options = {"max_tokens": MAX_TOKENS, "loops": loops, "ignore_eos": True}
    with (
        Model(model, max_seq_len=2048, prefix_cache=False, max_num_seqs=64) as alone,
        Model(model, max_seq_len=2048, max_num_seqs=64) as sharing,
        ThreadPoolExecutor(n) as threads,
    ):
        alone.generate(prompt[:64], **options)
        sharing.generate(prompt[1:65], **options)
        stream = alone.generate_stream(prompt, **options)
        prefill, _ = timed(lambda: next(stream))
        want = [_, *stream]
        no_cache, plain = timed(lambda: list(threads.map(lambda _: alone.generate(prompt, **options), range(n))))
        build_s, prefix = timed(lambda: sharing.build_prefix_cache(prompt, loops=loops))
        reused_s, reused = timed(
            lambda: list(threads.map(lambda _: sharing.generate_from_prefix_cache(prefix, **options), range(n)))
        )
    decode = max(0.0, no_cache / n - prefill)
    speedup, asymptote = no_cache / (build_s + reused_s), (prefill + decode) / (prefill / n + decode)
    row = {
        "prefix_tokens": num_tokens,
        "n": n,
        "no_cache_s": round(no_cache, 3),
        "shared_s": round(build_s + reused_s, 3),
        "speedup": round(speedup, 3),
        "prefill_s": round(prefill, 4),
        "decode_s": round(decode, 4),
        "asymptote": round(asymptote, 3),
        "share_of_asymptote": round(speedup / asymptote, 4),
        "same_tokens": all(out[num_tokens:] == want for out in [*plain, *reused]),
    }
    print(
        f"  {num_tokens:5d} {n:4d} {no_cache:10.2f} {row['shared_s']:9.2f} {speedup:8.2f}x {asymptote:9.2f}x "
        f"{speedup / asymptote:7.1%}  {row['same_tokens']}",
        flush=True,
    )
    return row


def attach(model: Any, num_tokens: int) -> dict[str, float]:
    """Microseconds to start a sequence from a handle, and to attach the same tokens from the page cache."""
    with Model(model, max_seq_len=2048, max_num_seqs=4) as m:
        prompt = prompt_of(model, num_tokens)
        prefix = m.build_prefix_cache(prompt)
        cache, pool = m.engine.cache, m.engine.pool
        assert cache is not None

        def from_cache() -> None:
            cache.attach(Session(model, pool), prompt)

        return {
            "open_handle_us": median_us(prefix.open),
            "attach_from_cache_us": median_us(from_cache),
            "tokens": num_tokens,
        }


def tenants(model: Any, count: int = 64, num_tokens: int = 4096) -> dict[str, Any]:
    """Microseconds to find the longest of `count` registered prefixes that a long prompt starts with."""
    pool = PrefixPool(capacity=count)
    with Model(model, max_seq_len=8192, max_num_seqs=4) as m:
        tails = [prompt_of(model, 48, salt) for salt in range(count)]
        start = prompt_of(model, 16)
        for tail in tails:  # system prompts that open alike and then differ
            m.register_prefix(pool, np.concatenate([start, tail]))
        prompts = [np.resize(np.concatenate([start, tails[i % count], tails[0]]), num_tokens) for i in range(200)]
        each = iter(prompts)
        found = [pool.match_len(prompt) for prompt in prompts]
        match = median_us(lambda: pool.match(next(each)), len(prompts))
        other = prompt_of(model, num_tokens, 100)
        miss = median_us(lambda: pool.match(other))
    assert min(found) == 64
    return {"tenants": pool.size(), "prompt_tokens": num_tokens, "match_us": match, "miss_us": miss}


def resume(model: Any, num_tokens: int, repeat: int) -> dict[str, Any]:
    """Share of the wall time that resuming at 8 loops saves against generating with 8 from nothing."""
    prompt = prompt_of(model, num_tokens)
    options = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    with Model(model, max_seq_len=2048, prefix_cache=False, max_num_seqs=4) as m:
        build_s, handle = timed(lambda: m.build_resume_handle(prompt, 4, max_loops=8))
        plain, resumed, same = [], [], True
        for _ in range(repeat):
            seconds, whole = timed(lambda: m.generate(prompt, loops=8, **options))
            plain.append(seconds)
            seconds, out = timed(lambda: m.resume_generate(handle, 8, **options))
            resumed.append(seconds)
            same = same and out == whole
    saved = 1 - statistics.median(resumed) / statistics.median(plain)
    print(f"  resume 4 -> 8 over {num_tokens} tokens saves {saved:.1%} of the wall time, tokens identical: {same}")
    return {
        "prefix_tokens": num_tokens,
        "generate_s": round(statistics.median(plain), 3),
        "resume_s": round(statistics.median(resumed), 3),
        "build_s": round(build_s, 3),
        "saved": round(saved, 4),
        "same_tokens": same,
    }


def main() -> None:
    p = record.parser(__doc__ or "")
    p.add_argument("--model", default="smollm2", help="what load_model takes (default: %(default)s)")
    p.add_argument("--prefixes", type=int, nargs="*", default=[500, 1024], help="prefix lengths (default: 500 1024)")
    p.add_argument("--n", type=int, nargs="*", default=[10, 50], help="requests over one prefix (default: 10 50)")
    p.add_argument("--looped-n", type=int, nargs="*", default=[10], help="the same for the looped model (default: 10)")
    p.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="parts to run (default: all)")
    p.add_argument("--repeat", type=int, default=5, help="repetitions of the resume figure (default: %(default)s)")
    args = p.parse_args()
    plain = load_model(args.model)
    looped = load_model(args.model, loop_layers=LOOP_LAYERS, loops=LOOPS)
    longest = max(args.prefixes)
    figures: dict[str, Any] = {"model": plain.name, "max_tokens": MAX_TOKENS, "loop_layers": LOOP_LAYERS}
    head = "tokens    N no cache s  shared s  speedup asymptote   share  same tokens"
    if "table" in args.only:
        figures["table"] = {}
        for name, model, loops, counts in (("plain", plain, None, args.n), ("looped", looped, LOOPS, args.looped_n)):
            print(f"{name}: {head}")
            figures["table"][name] = [shared(model, tokens, n, loops) for tokens in args.prefixes for n in counts]
    if "at_once" in args.only:
        print(f"at once: {head}")
        figures["at_once"] = [at_once(plain, tokens, n, None) for tokens in args.prefixes for n in args.n]
    if "attach" in args.only:
        figures["attach"], figures["match"] = attach(plain, longest), tenants(plain)
        print(f"  attach {figures['attach']}\n  match {figures['match']}")
    if "resume" in args.only:
        figures["resume"] = resume(looped, longest, args.repeat)
    record.report("prefix", figures, args)


if __name__ == "__main__":
    main()
