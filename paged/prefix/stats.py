"""Counters and chain records of a prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PrefixStats:
    """What happened to the cache since it was made; each counter counts pages unless it says otherwise."""

    num_queries: int = 0  # prompts that were looked up in order to attach
    query_tokens: int = 0  # their tokens
    hit_tokens: int = 0  # tokens that were attached instead of computed
    hit_pages: int = 0
    partial_hits: int = 0  # prompts that also copied rows of a page that goes on otherwise
    inserted_pages: int = 0
    merged_pages: int = 0  # computed twice; the second copy was given back
    evicted_pages: int = 0
    num_collisions: int = 0  # a key was taken by other tokens: that page stays uncached
    load_refused: int = 0  # of loaded files: no page was free for them, or no budget, or their key was taken
    # Of models with recurrent state; these count checkpoints:
    checkpoint_hits: int = 0
    checkpoint_inserts: int = 0
    checkpoint_evictions: int = 0
    checkpoints_refused: int = 0  # no memory was left for the copy of the state or of the last partial page


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
