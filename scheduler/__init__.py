"""Continuous batching over one pool of KV pages: requests in, tokens out.

Importing this package loads no torch: each public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged.grammar import Grammar
    from paged.media import MediaSpan
    from paged.sampling import SamplingParams
    from scheduler.async_engine import AsyncEngine
    from scheduler.config import SchedulerConfig
    from scheduler.engine import Engine
    from scheduler.forecast import Forecast
    from scheduler.model import Model
    from scheduler.output import Event, RequestOutput
    from scheduler.policy import Policy
    from scheduler.quota import Quota
    from scheduler.request import PrefillStops, Request
    from scheduler.scheduler import Scheduler
    from scheduler.step import StepPlan

_HOME = {
    "AsyncEngine": "scheduler.async_engine",
    "Engine": "scheduler.engine",
    "Event": "scheduler.output",
    "Forecast": "scheduler.forecast",
    "Model": "scheduler.model",
    "Grammar": "paged.grammar",
    "MediaSpan": "paged.media",
    "Policy": "scheduler.policy",
    "PrefillStops": "scheduler.request",
    "Quota": "scheduler.quota",
    "Request": "scheduler.request",
    "RequestOutput": "scheduler.output",
    "SamplingParams": "paged.sampling",
    "Scheduler": "scheduler.scheduler",
    "SchedulerConfig": "scheduler.config",
    "StepPlan": "scheduler.step",
}

__all__ = [
    "AsyncEngine",
    "Engine",
    "Event",
    "Forecast",
    "Grammar",
    "MediaSpan",
    "Model",
    "Policy",
    "PrefillStops",
    "Quota",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "StepPlan",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'scheduler' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
