"""SchedulerStats: what a scheduler has counted since it was made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler was made."""

    num_steps: int = 0
    num_admitted: int = 0  # first admissions; a resume is not one
    num_finished: int = 0
    num_cancelled: int = 0  # of those, the ones that were cancelled, each sample by itself
    num_preemptions: int = 0
    preempted_tokens: int = 0  # computed tokens that preempted requests gave up
    reattached_tokens: int = 0  # of those, the ones that a resume found in the cache again
    prompt_tokens: int = 0  # of admitted requests
    cached_tokens: int = 0  # of those, attached instead of computed
    computed_tokens: int = 0  # rows of all steps
    generated_tokens: int = 0
    drafted_tokens: int = 0  # rows computed for tokens that a proposer guessed
    accepted_tokens: int = 0  # of those, the ones that were right
    proposer_errors: int = 0  # calls of the proposer that failed
    cache_errors: int = 0  # times that what was computed could not be entered in the cache
    peak_running: int = 0
