"""In which order waiting requests are admitted, and which running one yields: one file a policy."""

from __future__ import annotations

from scheduler.policy.base import Policy
from scheduler.policy.fcfs import FCFS

POLICIES: dict[str, type[Policy]] = {"fcfs": FCFS}


def get_policy(policy: str | Policy) -> Policy:
    """A policy by its name, or the object itself. ValueError lists the names there are."""
    if not isinstance(policy, str):
        return policy
    try:
        return POLICIES[policy]()
    except KeyError:
        raise ValueError(f"the policy must be one of {', '.join(sorted(POLICIES))}, got {policy!r}") from None


__all__ = ["FCFS", "Policy", "get_policy"]
