"""Any order of calls: the cache by hand against a set of prefixes, the scheduler against the model's own tokens."""

from __future__ import annotations

from cache_machine import CacheMachine
from planting import any_order
from scheduler_machine import SchedulerMachine

CacheMachine.TestCase.settings = any_order(40)
SchedulerMachine.TestCase.settings = any_order(40)

TestCacheMachine = CacheMachine.TestCase
TestSchedulerMachine = SchedulerMachine.TestCase
