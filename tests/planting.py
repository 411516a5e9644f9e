"""Faults planted on purpose: a hypothesis machine must find each of them, and nothing where there is none."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test


def any_order(max_examples: int) -> settings:
    """For the machine's own test: new examples each time, made small and printed where they fail."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


def _settings(max_examples: int) -> settings:
    """The same examples each time, and none kept or made smaller: that something is found is all that counts."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def expect_found(machine: type, max_examples: int) -> None:
    """The machine fails, by a check, a wrong output, or an error that the fault leads to."""
    with pytest.raises(Exception) as found:
        run_state_machine_as_test(machine, settings=_settings(max_examples))
    kinds = (AssertionError, ValueError, LookupError, AttributeError, RuntimeError)
    assert isinstance(found.value, kinds), found.value


def expect_nothing(machine: type, max_examples: int) -> None:
    """The machine passes."""
    run_state_machine_as_test(machine, settings=_settings(max_examples))
