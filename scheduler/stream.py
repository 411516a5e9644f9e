"""Stream: the events of one request, as an iterator that drives the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.live import Live
from scheduler.output import Event, RequestOutput

if TYPE_CHECKING:
    from scheduler.engine import Engine


class Stream:
    """Iterates over the events of one request; the last one carries the output, which `output` keeps.

    Closing it, leaving a `with` block, or letting it be collected before the end cancels the request.
    """

    def __init__(self, engine: Engine, live: Live) -> None:
        self._engine = engine
        self._live = live
        self.request_id = live.request.id

    @property
    def output(self) -> RequestOutput | None:
        """The finished request, or None while it runs."""
        return self._live.output

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        event = self._engine.drive(self._live)
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        if self._live.output is None:
            self._engine.cancel(self.request_id)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
