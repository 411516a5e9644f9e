"""Stream: the events of one request, as an iterator that drives the engine."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from scheduler.output import Event, RequestOutput
from scheduler.samples import Samples

if TYPE_CHECKING:
    from scheduler.engine import Engine


class Stream:
    """Iterates over the events of one request; the last one carries the output, which `output` keeps.

    Closing it, leaving a `with` block, or letting it be collected before the end cancels the request; `stop` ends it as
    complete, for a reader that knows an end of its own.
    """

    def __init__(self, engine: Engine, samples: Samples) -> None:
        self._engine = engine
        self._samples = samples
        self._events: deque[Event] = deque()
        self._done = False
        self.request_id = samples.id
        engine.start(samples, self._events.append)

    @property
    def output(self) -> RequestOutput | None:
        """The finished request, or None while it runs."""
        return self._samples.output

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        if self._done:
            raise StopIteration
        while not self._events:
            ended = self._samples.output is not None
            self._engine.drive(self._samples, self._events)
            if ended and not self._events:  # looked at behind the step of another thread that ended it
                raise StopIteration
        event = self._events.popleft()
        self._done = event.finished
        return event

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        self._engine.cancel_call(self._samples)

    def stop(self) -> None:
        """End the request where it stands, unless it has ended, as one that is complete: with finish_reason "stop"."""
        self._samples.ending = "stop"
        self.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        samples: Samples | None = getattr(self, "_samples", None)  # none yet, where its making was interrupted
        if samples is not None and samples.output is None:
            self._engine.abandon(samples)
