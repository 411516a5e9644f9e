"""What it costs to look a long prompt up, and to attach it, among more and more other chains.

python bench/micro/prefix.py --json

A `cached` prompt, all of whose pages are in the cache, and a `new` one, of which none is; with and without partial
matches. The other chains are all siblings of the prompt's first page. Nothing may grow with their number. Beside it
what a look-up has to pay that verifies its tokens: hashing the prompt's pages, and comparing it once with itself. The
pages have no storage: neither verb reads one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
from common import best, by_turns

from paged.kv.page_table import PageTable
from paged.kv.pages import Int32, PagePool
from paged.prefix.cache import PrefixCache
from paged.prefix.hashing import extend_keys, page_hash, root_hash

VOCABULARY = 50_000


class Attacher:
    """Stands for a session of a model: what `PrefixCache.attach` asks of one, without state or storage."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.namespace = ""
        self.table = PageTable(pool, 1)
        self.n_past = 0

    def adopt(self, tokens: Int32, pages: Int32) -> None:
        self.table.append(pages)
        self.n_past = len(tokens)


def filled(prompt: Int32, num_chains: int, page_size: int, partial: bool) -> PrefixCache:
    """A cache that holds the whole prompt, and `num_chains` other chains of two pages each."""
    whole = len(prompt) // page_size
    pool = PagePool(whole + 2 * num_chains + 8, page_size)
    cache = PrefixCache(pool, partial=partial)
    rng = np.random.default_rng(num_chains)
    others = rng.integers(0, VOCABULARY, (num_chains, 2 * page_size), dtype=np.int32)
    for tokens in [prompt, *others]:
        pages = pool.alloc(len(tokens) // page_size)
        cache.publish(cache.cursor(), tokens, pages[None])
        pool.release(pages)
    if cache.held_pages != whole + 2 * num_chains:
        raise SystemExit(f"{cache.held_pages} pages are cached, expected {whole + 2 * num_chains}")
    return cache


def attach(cache: PrefixCache, prompt: Int32) -> int:
    """One attach by a fresh session, and its release."""
    session = Attacher(cache.pool)
    matched = cache.attach(session, prompt)  # type: ignore[arg-type]
    session.table.release()
    return matched


def calls_of(cache: PrefixCache, prompt: Int32, new: Int32) -> dict[str, Callable[[], object]]:
    """The calls to time, after it was seen that they match what they should."""
    longest = len(prompt) - 1 if cache.exact else (len(prompt) - 1) // cache.pool.page_size * cache.pool.page_size
    for name, asked, want in (("cached", prompt, longest), ("new", new, 0)):
        got = {cache.match_len(asked), attach(cache, asked)}
        if got != {want}:
            raise SystemExit(f"the {name} prompt of {len(asked)} tokens should match {want} of them, got {got}")
    return {
        "match_len.cached": lambda: cache.match_len(prompt),
        "match_len.new": lambda: cache.match_len(new),
        "attach.cached": lambda: attach(cache, prompt),
        "attach.new": lambda: attach(cache, new),
    }


def main() -> None:
    p = record.parser(__doc__ or "")
    p.add_argument("--tokens", type=int, default=32_768, help="length of the prompt (default: %(default)s)")
    p.add_argument("--page-size", type=int, default=16, help="tokens a page (default: %(default)s)")
    p.add_argument("--counts", type=int, nargs="+", default=[0, 100, 10_000], help="other chains in the cache")
    p.add_argument("--seconds", type=float, default=6.0, help="time for all of it (default: %(default)s)")
    args = p.parse_args()
    rng = np.random.default_rng(1 << 20)
    prompt, new = rng.integers(0, VOCABULARY, (2, args.tokens), dtype=np.int32)
    new[0] = VOCABULARY  # no chain begins with it, so a partial match finds nothing either
    size = args.page_size
    calls: dict[str, Callable[[], object]] = {
        "hash": lambda: extend_keys([], root_hash(b""), prompt, size, page_hash),  # type: ignore[arg-type]
        "compare": lambda: np.array_equal(prompt, prompt),
    }
    for partial in (False, True):
        for n in args.counts:
            for name, call in calls_of(filled(prompt, n, size, partial), prompt, new).items():
                calls[f"{'partial' if partial else 'whole'}.{name}.{n}"] = call
    times = {name: round(best(seconds) * 1e6, 1) for name, seconds in by_turns(calls, args.seconds).items()}
    print(f"{args.tokens} tokens, pages of {size}: hash {times['hash']} us, compare {times['compare']} us")
    growth: dict[str, float] = {}
    for kind in ("whole", "partial"):
        for name in ("match_len.cached", "match_len.new", "attach.cached", "attach.new"):
            row = [times[f"{kind}.{name}.{n}"] for n in args.counts]
            growth[f"{kind}.{name}"] = round(row[-1] / row[0], 2)
            shown = ", ".join(f"{us} us with {n}" for n, us in zip(args.counts, row, strict=True))
            print(f"{kind:7} {name:16} {shown} other chains: x{growth[f'{kind}.{name}']}")
    figures = {"tokens": args.tokens, "page_size": size, "counts": args.counts, "us": times, "growth": growth}
    record.report("prefix", figures, args)


if __name__ == "__main__":
    main()
