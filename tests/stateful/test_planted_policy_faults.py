"""What policies, quotas and the limits of the queue promise: each of these faults must make the machine fail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from planting import expect_found, expect_nothing
from scheduler_machine import SchedulerMachine

from scheduler.admission import Admission
from scheduler.bounds import Bounds
from scheduler.policy import LongestPrefix, Priority
from scheduler.queue import WaitingQueue
from scheduler.quota import Quota
from scheduler.quotas import Quotas

Patch = pytest.MonkeyPatch


class Urgent(SchedulerMachine):
    """Priorities."""

    kinds = ("attention",)
    hashes = ("real",)
    policies = ("priority",)


class Prefixes(SchedulerMachine):
    """Longest prefix first."""

    kinds = ("attention",)
    hashes = ("real",)
    policies = ("longest_prefix",)


class Metered(SchedulerMachine):
    """A quota that a few requests outgrow together."""

    kinds = ("attention",)
    hashes = ("real",)
    page_sizes = (1,)

    @staticmethod
    def quotas(num_groups: int) -> list[dict[str, Quota]]:
        return [{"": Quota(max_pages=20 * num_groups)}]


def urgency_does_not_grow(patch: Patch) -> None:
    patch.setattr(Priority, "rank", lambda self, request: request.priority * self.ageing)


def equals_push_each_other_out(patch: Patch) -> None:
    def displaceable(self: Priority, request, slots: np.ndarray) -> np.ndarray:
        slots = slots[self._level[slots] >= request.priority]
        return slots[self._order(slots)[::-1]]

    patch.setattr(Priority, "displaceable", displaceable)


def who_was_pushed_out_pushes_back(patch: Patch) -> None:
    def displaceable(self: Priority, request, slots: np.ndarray) -> np.ndarray:
        if request.num_preemptions:
            return slots[self._order(slots)[::-1]]
        return real(self, request, slots)

    real = Priority.displaceable
    patch.setattr(Priority, "displaceable", displaceable)


def patience_has_no_end(patch: Patch) -> None:
    real = LongestPrefix._in_order

    def in_order(self: LongestPrefix, known):
        patience, self.patience = self.patience, 10**9
        try:
            return real(self, known)
        finally:
            self.patience = patience

    patch.setattr(LongestPrefix, "_in_order", in_order)


def a_bypass_is_not_counted(patch: Patch) -> None:
    real = Admission.admit

    def admit(self: Admission, budget: int):
        before = {request: request.num_bypassed for request in self.waiting}
        done = real(self, budget)
        for request, count in before.items():
            request.num_bypassed = min(request.num_bypassed, count)
        return done

    patch.setattr(Admission, "admit", admit)


def a_quota_of_requests_is_ignored(patch: Patch) -> None:
    patch.setattr(Quotas, "is_full", lambda self, namespace, more=0: False)


def a_quota_of_pages_is_ignored(patch: Patch) -> None:
    patch.setattr(Quotas, "room_for", lambda self, request, before=(): 0)
    patch.setattr(Quotas, "overdrawn", lambda self: None)


def growth_past_a_quota_is_ignored(patch: Patch) -> None:
    patch.setattr(Quotas, "overdrawn", lambda self: None)


def the_limit_of_the_queue_is_ignored(patch: Patch) -> None:
    patch.setattr(Bounds, "require_room", lambda self, waiting, num_requests, num_tokens: None)


def a_lane_is_lost_when_its_first_request_starts(patch: Patch) -> None:
    real = WaitingQueue.remove

    def remove(self: WaitingQueue, request) -> None:
        real(self, request)
        lane = self.lanes.get(request.namespace)
        if lane is not None and self.by_namespace:
            self.fronts.remove(lane)

    patch.setattr(WaitingQueue, "remove", remove)


FAULTS: list[tuple[type, Callable[[Patch], None]]] = [
    (Urgent, urgency_does_not_grow),
    (Urgent, equals_push_each_other_out),
    (Urgent, who_was_pushed_out_pushes_back),
    (Prefixes, patience_has_no_end),
    (SchedulerMachine, a_bypass_is_not_counted),
    (SchedulerMachine, a_quota_of_requests_is_ignored),
    (SchedulerMachine, a_quota_of_pages_is_ignored),
    (Metered, growth_past_a_quota_is_ignored),
    (SchedulerMachine, the_limit_of_the_queue_is_ignored),
    (SchedulerMachine, a_lane_is_lost_when_its_first_request_starts),
]


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "fault"), FAULTS, ids=[fault.__name__ for _, fault in FAULTS])
def test_the_machine_finds(machine: type, fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    expect_found(machine, max_examples=300)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Urgent, Prefixes, Metered])
def test_the_machine_finds_nothing_without_a_fault(machine: type) -> None:
    expect_nothing(machine, max_examples=100)
