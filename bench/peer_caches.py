"""The prefix caches of vLLM and SGLang on the same prompts, where they can be imported; never a dependency.

Both get the tokens that our cache gets. vLLM: `vllm.v1.core.block_pool.BlockPool`; `match` is the chained hash of each
block and its look-up. SGLang: `RadixCache.create_simulated` with the trace's block as its page. Written for vLLM 0.33
and SGLang 0.5.23; another version that answers otherwise is named with its error and left out.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from paged.kv.pages import Int32

Request = Callable[[Int32], tuple[int, tuple[float, ...]]]  # prompt -> blocks found, times of the four calls
Evict = Callable[[int], int]  # blocks -> blocks that went

NAMES = ("match_us", "allocate_us", "donate_us", "free_us")
clock = time.perf_counter


def vllm(capacity: int, block: int) -> tuple[Request, Evict]:
    """vLLM's block pool with `capacity` blocks of `block` tokens."""
    from vllm.utils.hashing import xxhash_cbor  # type: ignore[import-not-found]
    from vllm.v1.core.block_pool import BlockPool  # type: ignore[import-not-found]
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash  # type: ignore[import-not-found]

    pool = BlockPool(capacity + 1, True, block)  # one is its null block
    init_none_hash(xxhash_cbor)  # the fastest hash that it offers

    def request(prompt: Int32) -> tuple[int, tuple[float, ...]]:
        tokens = prompt.tolist()  # it keeps prompts as lists
        t0 = clock()
        hashes, parent = [], None
        for start in range(0, len(tokens), block):
            parent = hash_block_tokens(xxhash_cbor, parent, tokens[start : start + block])
            hashes.append(parent)
        blocks: list[Any] = []
        for key in hashes:
            found = pool.get_cached_block(key, [0])
            if found is None:
                break
            blocks.append(found[0])
        hits, t1 = len(blocks), clock()
        pool.touch(blocks)
        blocks += pool.get_new_blocks(len(hashes) - hits)
        t2 = clock()
        pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), blocks, hits, len(hashes), block, 0)
        t3 = clock()
        pool.free_blocks(reversed(blocks))
        return hits, (t1 - t0, t2 - t1, t3 - t2, clock() - t3)

    def evict(num_blocks: int) -> int:
        return len(pool.get_new_blocks(min(num_blocks, pool.get_num_free_blocks())))

    return request, evict


def sglang(capacity: int, block: int) -> tuple[Request, Evict]:
    """SGLang's radix cache, which may hold `capacity` pages of `block` tokens."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import (  # type: ignore[import-not-found]
        EvictParams,
        InsertParams,
        MatchPrefixParams,
    )
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # type: ignore[import-not-found]

    allocator = SimpleNamespace(device="cpu", free_segment=lambda value, start_pos: None)
    cache = RadixCache.create_simulated(mock_allocator=allocator, page_size=block)

    def request(prompt: Int32) -> tuple[int, tuple[float, ...]]:
        key = RadixKey(array("q", prompt.astype("<i8").tobytes()))
        t0 = clock()
        match = cache.match_prefix(MatchPrefixParams(key=key))
        hits, t1 = match.device_prefix_len, clock()
        cache.inc_lock_ref(match.last_device_node)
        missing = cache.total_size() + len(prompt) - hits - capacity * block
        if missing > 0:
            cache.evict(EvictParams(num_tokens=missing))
        t2 = clock()
        value = torch.from_numpy(prompt.astype(np.int64))
        cache.insert(InsertParams(key=key, value=value))
        t3 = clock()
        cache.dec_lock_ref(match.last_device_node)
        return hits // block, (t1 - t0, t2 - t1, t3 - t2, clock() - t3)

    def evict(num_blocks: int) -> int:
        return cache.evict(EvictParams(num_tokens=num_blocks * block)).num_tokens_evicted // block

    return request, evict


def measure(trace: Any, num_requests: int, share: float = 0.10) -> dict[str, dict[str, Any]]:
    """For each peer the hit rate on the whole trace, in percent, and the median microseconds of its calls."""
    capacity, out = int(share * trace.unique), dict[str, dict[str, Any]]()
    for name, make in (("vllm", vllm), ("sglang", sglang)):
        try:
            request, evict = make(capacity, trace.block)
            times: list[tuple[float, ...]] = []
            hit_tokens = 0
            for chain in trace.chains:
                hits, row = request(np.repeat(chain, trace.block))
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
