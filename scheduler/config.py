"""SchedulerConfig: the limits of one step and of the queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paged.errors import require_integer
from scheduler.quota import Quota

if TYPE_CHECKING:
    from scheduler.policy import Policy

RESERVES = ("prompt", "max_tokens", "expected")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step.

    max_num_seqs            requests that run at once; lowered to max_num_batched_tokens, so that each can decode
    max_num_batched_tokens  rows of one step, prefill chunks and decodes together
    max_chunk_tokens        rows of one request in one step, while others run or wait; 0: only the step's budget bounds
                            them
    adaptive_chunks         never below an equal share of the budget among the requests that prefill or may start
    max_bypass              passes in which later requests may start before one that does not fit; then all wait for it
    lookahead               waiting requests looked at behind one that does not fit
    watermark               share of the pool that an admission leaves free, unless nothing runs
    reserve                 what an admission counts beside the known tokens: "prompt" nothing, "max_tokens" all that it
                            and the running ones may still generate, "expected" what such outputs came to
    quota                   what each namespace may run and hold, unless `quotas` names it
    quotas                  the quotas of namespaces, by name
    max_queue_requests      requests that may wait; 0: no limit. One more is refused with QueueFull
    max_queue_tokens        known tokens of the waiting requests, the same; an empty queue takes any request
    policy                  order of the waiting requests: "fcfs", "priority", "longest_prefix", "shortest_remaining",
                            "fair_share" or "deadline", or a Policy
    plan_ahead              decide step k + 1 while the device computes step k, and start it before the texts of step
                            k are made. The output is the same; a request that step k ends keeps its slot for one step
                            more, so that it pays on a GPU alone; an Engine turns it on there
    num_drafts              guesses of a proposer that one step verifies for each request, see Engine(proposer=...)
    eviction                which cached page goes first: "lru", "lfu_da", "gdsf" or "shortest"
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    max_chunk_tokens: int = 0
    adaptive_chunks: bool = False
    max_bypass: int = 64
    lookahead: int = 16
    watermark: float = 0.01
    reserve: str = "prompt"
    quota: Quota = field(default_factory=Quota)
    quotas: Mapping[str, Quota] = field(default_factory=dict[str, Quota])
    max_queue_requests: int = 0
    max_queue_tokens: int = 0
    policy: str | Policy = "fcfs"
    eviction: str = "lru"
    plan_ahead: bool = False
    num_drafts: int = 4

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "num_drafts"):
            if require_integer(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_chunk_tokens", "max_bypass", "lookahead", "max_queue_requests", "max_queue_tokens"):
            if require_integer(name, getattr(self, name)) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for quota in (self.quota, *self.quotas.values()):
            if not isinstance(quota, Quota):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"quota must be a Quota, and quotas a mapping of them by namespace, got {quota!r}")
        if self.reserve not in RESERVES:
            raise ValueError(f"reserve must be one of {', '.join(RESERVES)}, got {self.reserve!r}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be a share from 0.0 to below 1.0, got {self.watermark}")
        object.__setattr__(self, "max_num_seqs", min(self.max_num_seqs, self.max_num_batched_tokens))

    def quota_of(self, namespace: str) -> Quota:
        """What a namespace may run and hold."""
        return self.quotas.get(namespace, self.quota)
