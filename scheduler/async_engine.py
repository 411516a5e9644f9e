"""AsyncEngine: an engine for asyncio, with a thread that runs its steps."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from paged.errors import Closed
from paged.prefix.handles import PrefixHandle
from paged.prefix.resume import ResumeHandle
from scheduler.async_stream import AsyncStream
from scheduler.background import StepThread
from scheduler.engine import Engine
from scheduler.forecast import Forecast
from scheduler.intake import Prompt
from scheduler.mailbox import LoopPort
from scheduler.offline import prepare_batch
from scheduler.output import RequestOutput
from scheduler.policy import Policy
from scheduler.request import RequestOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from paged.media import MediaSpan
    from paged.models.base import LanguageModel
    from paged.sampling import SamplingParams

T = TypeVar("T")


class AsyncEngine:
    """An Engine whose verbs are awaited, and whose steps a thread of its own runs while there is work.

    Tasks of several event loops and several threads may use it at once, and the calls of the Engine itself (`engine`)
    go on working beside it, from threads that may wait. A request is submitted by `stream` or `generate`; there is no
    `step` to call. Prompts are checked, and texts tokenised, by the calling task, so that what is wrong with them is
    raised where they are given; where long texts would hold up the loop, give token ids.

    Leave it by `close`, or by `async with`. One that is left open ends with the process, or when it is collected.
    """

    def __init__(self, source: str | LanguageModel | Engine, **settings: Any) -> None:
        """`source` and `settings` are those of Engine; or an Engine, which `close` then leaves open."""
        if isinstance(source, Engine):
            if settings:
                raise TypeError(f"an Engine has its settings already; got {', '.join(sorted(settings))} beside it")
            self.engine = source
        else:
            self.engine = Engine(source, **settings)
        self._owns_engine = self.engine is not source
        self.steps = StepThread(self.engine)
        self._ports = threading.local()
        weakref.finalize(self, self.steps.stop).atexit = False  # at the end of the process StepThread does it

    # Verbs ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Run a batch to its end; returns the outputs in the order of the prompts. See Engine.generate.

        Its requests are queued as those of many clients: unlike those of Engine.generate they heed the queue limits.
        A task that is cancelled meanwhile, or runs out of time, cancels what is live of the batch.
        """
        self.steps.require_open()
        port = self._port()
        calls = [
            AsyncStream(self, samples, port, keeps_events=False)
            for samples in prepare_batch(self.engine, prompts, params, options)
        ]
        try:
            return [await call.result() for call in calls]
        finally:
            for call in calls:
                call.leave()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncStream:
        """Submit one request and iterate over its events with `async for`. See Engine.stream and AsyncStream.

        What the request itself lacks is raised here, an id that is still live (DuplicateRequest) by the first event.
        Draining or Closed if the engine takes no more requests.
        """
        self.steps.require_open()
        return AsyncStream(self, self.engine.prepare(prompt, params, **options), self._port())

    async def cancel(self, request_id: str) -> bool:
        """End a request, with all its samples, with finish_reason "cancelled"; False if it is not live (any more)."""
        return await self._between_steps(lambda: self.engine.cancel(request_id))

    async def prefix_match_len(
        self,
        prompt: Prompt,
        namespace: str = "",
        loops: int | None = None,
        cache_window: int = 0,
        media: Sequence[MediaSpan] = (),
    ) -> int:
        """How many leading tokens of `prompt` a request would attach right now. Takes nothing, touches no entry."""
        tokens = self.engine.tokens_of(prompt)
        return await self._between_steps(
            lambda: self.engine.prefix_match_len(tokens, namespace, loops, cache_window, media)
        )

    async def admit(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Forecast:
        """What `stream` with the same arguments would come to; takes nothing, touches nothing. See Engine.admit."""
        if isinstance(prompt, str):
            prompt = self.engine.tokens_of(prompt)  # here, so that the steps do not wait for it
        return await self._between_steps(lambda: self.engine.admit(prompt, params, **options))

    async def set_policy(self, policy: str | Policy) -> None:
        """Order what waits by another policy from now on. ValueError for a name that there is not."""
        await self._between_steps(lambda: self.engine.set_policy(policy))

    async def build_prefix(self, prompt: Prompt, **settings: Any) -> PrefixHandle:
        """See Engine.build_prefix. Runs in a thread of the loop's pool, between the steps; cannot be cancelled."""
        self.steps.require_open()
        return await asyncio.to_thread(self.engine.build_prefix, prompt, **settings)

    async def build_resume(self, prompt: Prompt, loops: int, **settings: Any) -> ResumeHandle:
        """See Engine.build_resume. Runs in a thread of the loop's pool, between the steps; cannot be cancelled."""
        self.steps.require_open()
        return await asyncio.to_thread(self.engine.build_resume, prompt, loops, **settings)

    async def save_prefix_cache(self, path: str | os.PathLike[str]) -> int:
        """Write what is cached to a file; returns the pages written. No step runs meanwhile."""
        return await self._between_steps(lambda: self.engine.save_prefix_cache(path))

    async def load_prefix_cache(self, path: str | os.PathLike[str]) -> int:
        """Take in what a file of the same model holds; returns the pages taken. No step runs meanwhile."""
        return await self._between_steps(lambda: self.engine.load_prefix_cache(path))

    async def reset_prefix_cache(self) -> None:
        """Forget every cached page at once. See Engine.reset_prefix_cache."""
        await self._between_steps(self.engine.reset_prefix_cache)

    # Reading --------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a request is live."""
        return self.engine.has_work

    async def stats(self) -> dict[str, Any]:
        """Counters and gauges, all plain numbers, as they are between two steps. See Engine.stats."""
        return await self._between_steps(self.engine.stats)

    async def metrics_text(self) -> str:
        """All counters, gauges and latencies as the text that Prometheus reads. Needs the extra `metrics`."""
        return await self._between_steps(self.engine.metrics_text)

    async def explain(self, request_id: str) -> dict[str, Any]:
        """Where a request's tokens and its time went. See Engine.explain."""
        return await self._between_steps(lambda: self.engine.explain(request_id))

    async def check(self) -> None:
        """Assert the invariants of the engine."""
        await self._between_steps(self.engine.check)

    # The end --------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Refuse new requests with Draining from now on, and wait until those that are live have ended.

        That is about what came through this object; the engine's own verbs go on.
        """
        await asyncio.wrap_future(self.steps.drain())

    async def close(self) -> None:
        """Cancel what is live and end the thread, after the step that runs; later calls raise Closed.

        The engine is closed with it, unless it was given. A second close does nothing.
        """
        self.steps.stop()
        await asyncio.wrap_future(self.steps.ended)
        self.steps.join()
        if self._owns_engine:
            with suppress(Closed):  # in a process that was forked during a step
                self.engine.close()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _between_steps(self, function: Callable[[], T]) -> T:
        """Wait for what the thread does between two steps: the loop itself never waits for a step."""
        return await asyncio.wrap_future(self.steps.call(function))

    def _port(self) -> LoopPort:
        """The way into the running loop, of which a thread has one at a time."""
        loop = asyncio.get_running_loop()
        port: LoopPort | None = getattr(self._ports, "port", None)
        if port is None or port.loop is not loop:
            port = self._ports.port = LoopPort(loop)
        return port
