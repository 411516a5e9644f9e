"""What policies promise, checked from outside after a step: nothing here asks the policy itself."""

from __future__ import annotations

from driver import Driver

from scheduler.request import Request
from scheduler.step import StepPlan


def expect_promises(driver: Driver, plan: StepPlan) -> None:
    """Nobody was passed by too often, or by one who had to come later; nobody was pushed out by an equal."""
    scheduler = driver.scheduler
    waiting = list(scheduler.waiting)
    for request in waiting:
        assert request.num_bypassed <= scheduler.config.max_bypass, f"{request.id} was passed by too often"
    for later in plan.admitted:
        for earlier in waiting:
            if scheduler.config.plan_ahead and came_after_the_decision(driver, earlier):
                continue
            if comes_before(driver, earlier, later) and not limited(driver, earlier):
                assert earlier.num_bypassed, f"{later.id} started before {earlier.id}, which was not even looked at"
    if scheduler.policy.name == "priority" and plan.admitted:  # on a shortage of pages nobody is admitted
        for pushed in plan.preempted:
            assert any(other.priority < pushed.priority for other in plan.admitted + waiting), f"{pushed.id} was pushed"


def came_after_the_decision(driver: Driver, request: Request) -> bool:
    """Whether a waiting request may have been queued after the step was decided, while the one before it ran."""
    return request.arrival_step >= driver.scheduler.stats.num_steps - 1 or bool(request.num_preemptions)


def comes_before(driver: Driver, earlier: Request, later: Request) -> bool:
    """Whether the policy says so, in so many words."""
    policy, now = driver.scheduler.policy, driver.scheduler.stats.num_steps - 1
    if policy.name == "fcfs":
        return earlier.arrival < later.arrival
    if policy.name == "priority":
        levels, behind = earlier.priority - later.priority, later.arrival_step - earlier.arrival_step
        return behind > levels * policy.ageing or (behind == levels * policy.ageing and earlier.arrival < later.arrival)
    if policy.name == "longest_prefix":
        late = now - earlier.arrival_step >= policy.patience
        return late and earlier.arrival < later.arrival
    return False


def limited(driver: Driver, request: Request) -> bool:
    """Whether a quota may keep it waiting."""
    quota = driver.scheduler.config.quota_of(request.namespace)
    return bool(quota.max_pages or quota.max_running)
