"""An EchoModel whose steps wait for a permit, so that a test decides what happens while a step runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from fakes import EchoModel

T = TypeVar("T")
PATIENCE_S = 120.0  # what hangs fails; no test depends on how long anything takes


class GatedModel(EchoModel):
    """Each forward says that it began, and waits for `allow` or `free`."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.began = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)
        self.is_free = False

    def forward(self, batch, storage):
        self.began.release()
        if not self.is_free:
            assert self.permits.acquire(timeout=PATIENCE_S), "nobody let this step go on"
        return super().forward(batch, storage)

    def allow(self, steps: int = 1) -> None:
        self.permits.release(steps)

    def free(self) -> None:
        """No step waits any more."""
        self.is_free = True
        self.permits.release()

    def wait_for_step(self) -> None:
        """Until the next step is in the model."""
        assert self.began.acquire(timeout=PATIENCE_S), "no step began"

    async def step_began(self) -> None:
        await asyncio.to_thread(self.wait_for_step)


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine in a loop of its own."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, PATIENCE_S)

    return asyncio.run(bounded())


def join(threads: list[threading.Thread]) -> None:
    """Start threads and wait for them."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a thread hangs"
