"""SchedulerStats: what a scheduler has counted since it was made."""

from __future__ import annotations

from dataclasses import dataclass

from paged.counters import counter, gauge


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler was made; each says what it counts."""

    num_steps: int = counter("Steps that were planned.")
    num_admitted: int = counter("Requests that got a slot for the first time; a resume is not one.")
    num_finished: int = counter("Requests that ended, in whichever way, each sample by itself.")
    num_cancelled: int = counter("Requests that were cancelled, each sample by itself.")
    num_preemptions: int = counter("Times that a running request gave up its pages.")
    preempted_tokens: int = counter("Computed tokens that preempted requests gave up.")
    reattached_tokens: int = counter("Of the preempted tokens, those that a resume found in the cache again.")
    prompt_tokens: int = counter("Prompt tokens of requests that were admitted, or that a prefix answered whole.")
    cached_tokens: int = counter("Prompt tokens that were attached instead of computed.")
    computed_tokens: int = counter("Rows of all steps.")
    generated_tokens: int = counter("Tokens that were drawn.")
    drafted_tokens: int = counter("Rows computed for tokens that a proposer guessed.")
    accepted_tokens: int = counter("Of the drafted tokens, those that were right.")
    proposer_errors: int = counter("Calls of the proposer that failed.")
    cache_errors: int = counter("Times that what was computed could not be entered in the cache.")
    num_callback_errors: int = counter("Calls of subscribers that failed.")
    peak_running: int = gauge("The most requests that ran at once.")
