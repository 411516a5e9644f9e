"""Any order of calls: the cache by hand against a set of prefixes, the scheduler against the model's own tokens."""

from __future__ import annotations

from cache_machine import CacheMachine
from hypothesis import HealthCheck, settings
from scheduler_machine import SchedulerMachine

SETTINGS = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)

CacheMachine.TestCase.settings = SETTINGS
SchedulerMachine.TestCase.settings = SETTINGS

TestCacheMachine = CacheMachine.TestCase
TestSchedulerMachine = SchedulerMachine.TestCase
