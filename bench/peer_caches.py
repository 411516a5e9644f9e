"""The prefix caches of vLLM and SGLang on the same prompts, where they can be imported; never a dependency.

vLLM: `vllm.v1.core.block_pool.BlockPool`, with the trace's block ids as block hashes, so that it hashes nothing.
SGLang: `RadixCache.create_simulated`, a token for each block. Written for vLLM 0.11 and SGLang 0.5; another version
that answers otherwise is named with its error and left out.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

Request = Callable[[list[int]], tuple[int, tuple[float, ...]]]  # block ids -> hits, times of the four calls
Evict = Callable[[int], int]  # pages -> pages that went

NAMES = ("match_us", "allocate_us", "donate_us", "free_us")
clock = time.perf_counter


def vllm(capacity: int) -> tuple[Request, Evict]:
    """vLLM's block pool with `capacity` blocks."""
    from vllm.v1.core.block_pool import BlockPool  # type: ignore[import-not-found]

    pool = BlockPool(capacity + 1, True)  # one is its null block

    def request(chain: list[int]) -> tuple[int, tuple[float, ...]]:
        hashes = [block.to_bytes(8, "little") for block in chain]
        t0 = clock()
        blocks: list[Any] = []
        for key in hashes:
            found = pool.get_cached_block(key, [0])
            if found is None:
                break
            blocks.append(found[0])
        hits, t1 = len(blocks), clock()
        pool.touch((blocks,))
        blocks += pool.get_new_blocks(len(hashes) - hits)
        t2 = clock()
        pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), blocks, hits, len(hashes), 1, 0)
        t3 = clock()
        pool.free_blocks(reversed(blocks))
        return hits, (t1 - t0, t2 - t1, t3 - t2, clock() - t3)

    def evict(num_blocks: int) -> int:
        return len(pool.get_new_blocks(min(num_blocks, pool.get_num_free_blocks())))

    return request, evict


def sglang(capacity: int) -> tuple[Request, Evict]:
    """SGLang's radix cache, which may hold `capacity` tokens."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import (  # type: ignore[import-not-found]
        EvictParams,
        InsertParams,
        MatchPrefixParams,
    )
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # type: ignore[import-not-found]

    allocator = SimpleNamespace(device="cpu", free_segment=lambda value, start_pos: None)
    cache = RadixCache.create_simulated(mock_allocator=allocator)

    def request(chain: list[int]) -> tuple[int, tuple[float, ...]]:
        key = RadixKey(array("q", chain))
        t0 = clock()
        match = cache.match_prefix(MatchPrefixParams(key=key))
        hits, t1 = match.device_prefix_len, clock()
        cache.inc_lock_ref(match.last_device_node)
        missing = cache.total_size() + len(chain) - hits - capacity
        if missing > 0:
            cache.evict(EvictParams(num_tokens=missing))
        t2 = clock()
        value = torch.tensor(chain, dtype=torch.int64)
        cache.insert(InsertParams(key=key, value=value))
        t3 = clock()
        cache.dec_lock_ref(match.last_device_node)
        return hits, (t1 - t0, t2 - t1, t3 - t2, clock() - t3)

    def evict(num_tokens: int) -> int:
        return cache.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted

    return request, evict


def measure(trace: Any, num_requests: int, share: float = 0.10) -> dict[str, dict[str, Any]]:
    """For each peer the hit rate on the whole trace, in percent, and the median microseconds of its calls."""
    capacity, out = int(share * trace.unique), dict[str, dict[str, Any]]()
    for name, make in (("vllm", vllm), ("sglang", sglang)):
        try:
            request, evict = make(capacity)
            times: list[tuple[float, ...]] = []
            hit_tokens = 0
            for chain in trace.chains:
                hits, row = request(chain.tolist())
                hit_tokens += hits * trace.block
                times.append(row)
            held, start = 0, clock()
            while gone := evict(64):
                held += gone
            storm = (clock() - start) / max(1, held)
        except Exception as error:  # not installed, or another version: a peer is never needed
            out[name] = {"left_out": f"{type(error).__name__}: {error}"}
            continue
        medians = [statistics.median(column) for column in zip(*times[:num_requests], strict=True)]
        row = {key: round(s * 1e6, 2) for key, s in zip((*NAMES, "storm_page_us"), (*medians, storm), strict=True)}
        out[name] = {"hit_rate": round(100 * hit_tokens / int(trace.in_len.sum()), 2), **row}
    return out
