"""Counters and chain records of a prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from paged.counters import counter


@dataclass(slots=True)
class PrefixStats:
    """What happened to the cache since it was made; each counter says what it counts."""

    num_queries: int = counter("Prompts that were looked up in order to attach.")
    query_tokens: int = counter("Tokens of the prompts that were looked up.")
    hit_tokens: int = counter("Tokens that were attached instead of computed.")
    hit_pages: int = counter("Pages that were attached.")
    partial_hits: int = counter("Prompts that also copied rows of a page that goes on otherwise.")
    inserted_pages: int = counter("Pages that entered the cache.")
    merged_pages: int = counter("Pages that were computed twice; the second copy was given back.")
    evicted_pages: int = counter("Pages that went for room.")
    num_collisions: int = counter("Pages that stay uncached since their key was taken by other tokens.")
    load_refused: int = counter("Pages of loaded files with no free page or budget for them, or whose key was taken.")
    policy_errors: int = counter("Calls of the eviction policy that failed.")
    # Of models with recurrent state:
    checkpoint_hits: int = counter("Prompts that attached a checkpoint.")
    checkpoint_inserts: int = counter("Checkpoints that were kept.")
    checkpoint_evictions: int = counter("Checkpoints that went for room.")
    checkpoints_refused: int = counter("Checkpoints that no memory was left for.")


@dataclass(slots=True)
class PrefixChain:
    """One donation: the pages that it was the first to bring."""

    id: int
    preview: str
    born_at: float  # seconds since the epoch
    num_tokens: int = 0  # tokens of the pages that this donation brought
    num_pages: int = 0  # of these pages, the ones still cached
    num_hits: int = 0  # prompts whose deepest attached page is of this chain
    last_hit_at: float = 0.0  # 0 until the first hit
