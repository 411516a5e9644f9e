"""Mailbox: where steps leave the events of a request until a task of some event loop takes them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from scheduler.output import Event


class LoopPort:
    """Wakes tasks of one event loop from other threads: one call into the loop for all that a step has to tell it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ready: deque[Mailbox] = deque()
        self._called = False

    def wake(self, box: Mailbox) -> bool:
        """Let the loop look at `box`; False if the loop was closed. From any thread."""
        self._ready.append(box)
        if not self._called:
            self._called = True
            try:
                self.loop.call_soon_threadsafe(self._run)
            except RuntimeError:
                self._called = False  # so that the next one hears of it too
                return False
        return True

    def _run(self) -> None:
        self._called = False  # first: what comes from now on calls again
        while self._ready:
            self._ready.popleft().ring()


class Mailbox:
    """Holds at most one event a sample: what its reader has not taken grows together into one.

    So what is kept for a reader who is slow, or never reads, is bounded by the tokens of its own request. The request
    itself is not paused for it: a request that waits for its reader would keep its pages from all others meanwhile.

    `put` and `fail` may be called from any thread, the rest belongs to the loop of `port`.
    """

    __slots__ = ("_error", "_events", "_lock", "_waiter", "_wanted", "port")

    def __init__(self, port: LoopPort) -> None:
        self.port = port
        self._lock = threading.Lock()
        self._events: dict[int, Event] = {}  # by sample, in the order of their last change: the very last one is last
        self._error: BaseException | None = None
        self._wanted = False  # its reader found nothing and waits
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> bool:
        """Leave an event; False if the reader's loop is closed, so that nobody will ever take it."""
        with self._lock:
            earlier = self._events.pop(event.index, None)
            if earlier is not None:
                earlier.absorb(event)
                event = earlier
            self._events[event.index] = event
        return self._tell()

    def put_last(self, event: Event) -> bool:
        """`put`, for a reader who wants the last event alone."""
        return event.output is None or self.put(event)

    def fail(self, error: BaseException) -> None:
        """There will be no more events: the reader is to raise `error`."""
        with self._lock:
            self._events.clear()
            self._error = error
        self._tell()

    def _tell(self) -> bool:
        with self._lock:
            wanted, self._wanted = self._wanted, False
        return not wanted or self.port.wake(self)

    def take(self) -> Event | None:
        """The next event; None if there is none yet: then `wait`. Raises what `fail` was given."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._events:
                return self._events.pop(next(iter(self._events)))
            self._wanted = True
            return None

    def require_alone(self) -> None:
        """RuntimeError if a task waits already."""
        if self._waiter is not None:
            raise RuntimeError("another task reads this stream already; one task reads it, and passes on what it got")

    async def wait(self) -> None:
        """Until there is something to take; for one task."""
        self.require_alone()
        self._waiter = self.port.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def ring(self) -> None:
        """There is something to take."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
