"""AsyncStream: the events of one request, for a task of an event loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from paged.errors import Closed
from scheduler.mailbox import LoopPort, Mailbox
from scheduler.output import Event, RequestOutput
from scheduler.samples import Samples

if TYPE_CHECKING:
    from scheduler.async_engine import AsyncEngine


class AsyncStream:
    """Iterates over the events of one request; the last one carries the output, which `output` keeps.

    An event holds all that is new of its sample since the last one: several steps' worth where the reader is slower
    than the engine. The request is cancelled, once, where its reader goes away before the end: by `aclose` or the end
    of an `async with` block, by leaving the loop so that the stream is collected, or by a task that is cancelled, or
    runs out of time, while it waits for the next event. One task reads a stream, on the loop that made it.
    """

    def __init__(self, engine: AsyncEngine, samples: Samples, port: LoopPort, keeps_events: bool = True) -> None:
        self._engine = engine
        self._steps = engine.steps
        self._samples = samples
        self._box = Mailbox(port)
        self._done = False
        self.request_id = samples.id
        put = self._box.put if keeps_events else self._box.put_last
        sync = engine.engine

        def sink(event: Event) -> None:
            if not put(event):
                sync.abandon(samples)

        self._steps.start(samples, sink, self._box.fail)

    @property
    def output(self) -> RequestOutput | None:
        """The finished request, or None while it runs."""
        return self._samples.output

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Event:
        if self._done:
            raise StopAsyncIteration
        self._box.require_alone()
        try:
            while (event := self._box.take()) is None:
                await self._box.wait()
        except BaseException:
            self.leave()
            raise
        self._done = event.output is not None
        return event

    async def result(self) -> RequestOutput:
        """The output, when it is there; takes the events up to it. Closed if the stream was closed before."""
        async for _ in self:
            pass
        output = self._samples.output
        if output is None:
            raise Closed("this stream was closed before its end; it has no output")
        return output

    def leave(self) -> None:
        """Cancel the request unless it has ended; does not wait for it."""
        if not self._done:
            self._done = True
            if self._samples.output is None:
                self._steps.cancel(self._samples)

    async def aclose(self) -> None:
        """Cancel the request unless it has ended, and wait until its pages are back."""
        if not self._done:
            self._done = True
            if self._samples.output is None:
                sync, samples = self._engine.engine, self._samples
                with suppress(Closed):
                    await asyncio.wrap_future(self._steps.call(lambda: sync.cancel_call(samples)))

    async def stop(self) -> None:
        """End the request where it stands, unless it has ended, as one that is complete: with finish_reason "stop"."""
        self._samples.ending = "stop"
        await self.aclose()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            self.leave()
