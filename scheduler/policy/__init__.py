"""In which order waiting requests are admitted, and which running one yields: one file a policy."""

from __future__ import annotations

from scheduler.policy.base import Policy
from scheduler.policy.deadline import Deadline
from scheduler.policy.fair_share import FairShare
from scheduler.policy.fcfs import FCFS
from scheduler.policy.longest_prefix import LongestPrefix
from scheduler.policy.priority import Priority
from scheduler.policy.shortest_remaining import ShortestRemaining

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (FCFS, Priority, LongestPrefix, ShortestRemaining, FairShare, Deadline)
}


def get_policy(policy: str | Policy) -> Policy:
    """A policy by its name, or the object itself. ValueError lists the names there are; TypeError for what is none."""
    if not isinstance(policy, str):
        if not isinstance(policy, Policy):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"policy must be a name or a scheduler.Policy, got {policy!r}")
        return policy
    try:
        return POLICIES[policy]()
    except KeyError:
        raise ValueError(f"the policy must be one of {', '.join(sorted(POLICIES))}, got {policy!r}") from None


__all__ = [
    "FCFS",
    "POLICIES",
    "Deadline",
    "FairShare",
    "LongestPrefix",
    "Policy",
    "Priority",
    "ShortestRemaining",
    "get_policy",
]
