"""How many rows of one prompt a step computes at most."""

from __future__ import annotations

from scheduler.config import SchedulerConfig

NO_CAP = 2**31 - 1


def chunk_cap(config: SchedulerConfig, num_running: int, num_prefills: int, num_waiting: int, num_free: int) -> int:
    """Rows of one prefill in this step, of `num_prefills` among `num_running` requests, while others wait for
    `num_free` slots. One that is alone has the whole step: there is nobody whom a long chunk would keep waiting."""
    if not config.max_chunk_tokens or num_running + num_waiting == 1:
        return NO_CAP
    if not config.adaptive_chunks:
        return config.max_chunk_tokens
    eligible = max(1, num_prefills + min(num_waiting, num_free))
    return max(config.max_chunk_tokens, config.max_num_batched_tokens // eligible)
