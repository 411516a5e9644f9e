"""What happens to requests, as events, and the hub that tells them and the page events to whoever subscribed."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from paged.prefix.events import CacheEvent
from paged.prefix.tree import PageTree
from scheduler.request import Request
from scheduler.stats import SchedulerStats

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request got a slot. `num_cached_tokens` were attached instead of computed; after a preemption it `resumed`."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request gave its pages up and waits again; `num_tokens` is what it knows, prompt and output."""

    request_id: str
    num_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended. See RequestOutput for the reasons and the counts."""

    request_id: str
    reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    error: str


RequestEvent = Admitted | Preempted | Finished
Told = TypeVar("Told", RequestEvent, CacheEvent)


class Subscribers:
    """Tells request events when the step that they come from is over, and page events as they happen.

    A callback runs in the thread that took the engine's lock. One that fails misses that event, is counted
    (`num_callback_errors`; the log has its first failure) and is called again with the next; no request notices. With
    nobody there, a step pays for one comparison.
    """

    def __init__(self, stats: SchedulerStats, cache: PageTree | None) -> None:
        self.stats = stats
        self.cache = cache
        self.requests: list[Callable[[RequestEvent], object]] = []
        self.pages: list[Callable[[CacheEvent], object]] = []
        self._waiting: deque[RequestEvent] = deque()
        self._telling = False
        self._failed: set[int] = set()  # ids of callbacks whose failure the log has
        self._lock = threading.RLock()  # of the lists: who ends a subscription does not wait for a step

    def add(self, callback: Callable[[RequestEvent], object]) -> Callable[[], None]:
        """Tell `callback` of requests; returns what ends that, from any thread."""
        with self._lock:
            self.requests = [*self.requests, callback]  # a new list: the old one may be gone through right now

        def remove() -> None:
            with self._lock:
                self.requests = self._without(self.requests, callback)

        return _once(remove)

    def add_pages(self, callback: Callable[[CacheEvent], object]) -> Callable[[], None]:
        """Tell `callback` of cached pages; returns what ends that. RuntimeError if there is no cache of pages."""
        if self.cache is None:
            raise RuntimeError("this engine was made with prefix_cache=False: no page event will ever come")
        with self._lock:
            self.pages = [*self.pages, callback]
            self.cache.listen = self._tell_pages

        def remove() -> None:
            with self._lock:
                self.pages = self._without(self.pages, callback)  # the cache goes on telling until the step is over

        return _once(remove)

    def _without(
        self, callbacks: list[Callable[[Told], object]], one: Callable[[Told], object]
    ) -> list[Callable[[Told], object]]:
        """The list without the first of its entries that is `one`: it may have been subscribed several times."""
        at = next(i for i, other in enumerate(callbacks) if other is one)
        self._failed.discard(id(one))
        return [*callbacks[:at], *callbacks[at + 1 :]]

    def admitted(self, request: Request, matched: int, resumed: bool) -> None:
        """Note that `request` got a slot with `matched` tokens attached, not for the first time if it `resumed`."""
        self._waiting.append(Admitted(request.id, request.num_prompt, matched, resumed))

    def preempted(self, request: Request) -> None:
        """Note that `request` waits again."""
        self._waiting.append(Preempted(request.id, len(request.known), request.num_preemptions))

    def finished(self, request: Request, reason: str, num_generated: int) -> None:
        """Note that `request` has ended."""
        self._waiting.append(
            Finished(
                request.id,
                reason,
                request.num_prompt,
                request.num_cached_tokens,
                request.num_computed_tokens,
                num_generated,
                request.num_preemptions,
                request.error,
            )
        )

    def tell(self) -> None:
        """Call back with what was noted. A callback may call the engine: no step runs now."""
        if self.cache is not None and self.cache.listen == self._tell_pages and not self.pages:
            with self._lock:
                if not self.pages:
                    self.cache.listen = None  # the cache has a shorter way where nobody listens
        if self._telling:  # a callback called the engine: what comes of that is told behind this event
            return
        self._telling = True
        try:
            while self._waiting:
                event = self._waiting.popleft()
                for callback in self.requests:
                    self._call(callback, event)
        finally:
            self._telling = False

    def _tell_pages(self, event: CacheEvent) -> None:
        for callback in self.pages:
            self._call(callback, event)

    def _call(self, callback: Callable[[Told], object], event: Told) -> None:
        try:
            callback(event)
        except Exception:
            self.stats.num_callback_errors += 1
            if id(callback) not in self._failed:
                self._failed.add(id(callback))
                log.exception("a subscriber failed with %s; it is called again with the next event", event)


def _once(function: Callable[[], None]) -> Callable[[], None]:
    """Calls `function` the first time; further calls, of any thread, do nothing."""
    left = [function]

    def call() -> None:
        with suppress(IndexError):
            left.pop()()

    return call
