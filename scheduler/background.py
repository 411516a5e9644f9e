"""StepThread: a thread that runs an engine's steps while there is work, and sleeps while there is none."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from paged.errors import Closed, Draining
from scheduler.samples import Samples, Sink

if TYPE_CHECKING:
    from scheduler.engine import Engine
    from scheduler.output import Event

T = TypeVar("T")
Fail = Callable[[BaseException], object]

_EXIT_WAIT_S = 10.0  # for the step that runs while the interpreter exits


@dataclass(frozen=True, slots=True)
class Job:
    """Something to do between two steps; `fail` is called instead where nothing is done any more."""

    run: Callable[[], object]
    fail: Fail


class StepThread:
    """Starts calls on an engine, runs steps until they have ended, and does other jobs between two steps.

    It is told what to do through one queue: each job is done in its turn, by this thread, so that nobody waits for a
    step who must not, an event loop above all, and nothing that comes behind a start overtakes it. With no call live it
    waits for the queue, without any polling: `num_wakeups` counts how often it woke from that. Steps that other threads
    run on the same engine serve its calls as well.

    Where a step raises what was not for one request (an interrupt, no memory), the thread ends: every call fails with
    an error that says so, and so does whatever is asked of it later.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_wakeups = 0
        self.ended: Future[None] = _future()
        self._inbox: SimpleQueue[Job] = SimpleQueue()  # its put may be called by the garbage collector, whatever runs
        self._open: dict[Samples, Fail] = {}
        self._over: deque[Samples] = deque()  # calls that have ended, by steps of any thread
        self._waits_for_all: list[Future[None]] = []
        self._draining = False  # nothing new is let in
        self._drained = False  # and nothing that is let in is queued any more
        self._stopping = False
        self._end: str | None = None  # why no job is done any more
        self._cause: BaseException | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="paged-steps", daemon=True)
        self._thread.start()
        _running.add(self)

    # From any thread ------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Closed or Draining, if nothing new can be started."""
        if self._end is not None:
            raise self._closed()
        self.engine.require_open()
        if self._draining:
            raise _draining()

    def start(self, samples: Samples, sink: Sink, fail: Fail) -> None:
        """Queue a call. Its events go to `sink`, in whichever thread steps; `fail` hears why there will be none."""
        self._post(Job(lambda: self._start(samples, sink, fail), fail))

    def cancel(self, samples: Samples) -> None:
        """Cancel a call before the next step. May be called by the garbage collector."""
        self._post(Job(lambda: self.engine.cancel_call(samples), _nothing))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` between two steps; what it returns or raises comes through the future."""
        future: Future[T] = _future()

        def run() -> None:
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            else:
                future.set_result(result)

        self._post(Job(run, future.set_exception))
        return future

    def drain(self) -> Future[None]:
        """Refuse new calls from now on; the future is done when those that were started before have ended."""
        self._draining = True
        future: Future[None] = _future()
        self._post(Job(lambda: self._drain(future), lambda _: future.set_result(None)))
        return future

    def stop(self) -> None:
        """Cancel what is live and end the thread, after the step that runs; `ended` is done then."""
        self._post(Job(self._stop, _nothing))

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the thread, unless this is it."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # In the thread --------------------------------------------------------------------------------------------

    def _post(self, job: Job) -> None:
        self._inbox.put(job)
        if self._process != os.getpid() and self._end is None:
            self._end = "this process was forked, and the thread of the engine was not; make a new engine"
            self.ended = _future()
            self.ended.set_result(None)
        if self._end is not None:
            self._refuse()

    def _refuse(self) -> None:
        """Nothing takes jobs any more: fail those that are there."""
        while True:
            try:
                self._inbox.get_nowait().fail(self._closed())
            except Empty:
                return

    def _closed(self) -> Closed:
        """Why there is nothing more; a new one for everybody, since each raise adds its frames."""
        error = Closed(self._end)
        error.__cause__ = self._cause
        return error

    def _run(self) -> None:
        end = "this engine was closed; make a new one"
        try:
            while not self._stopping:
                self._do_jobs()
                if self._open:
                    self.engine.drive(next(iter(self._open)))
                self._forget_ended()
        except BaseException as error:
            end = f"a step of this engine raised {type(error).__name__}: {error}; make a new engine"
            self._cause = error
        self._finish(end)

    def _do_jobs(self) -> None:
        """What waits in the queue; with nothing live, wait for something to come."""
        if not self._open:
            job = self._inbox.get()
            self.num_wakeups += 1
            job.run()
        for _ in range(self._inbox.qsize()):  # what comes meanwhile is done after the next step
            if not self._stopping:
                self._inbox.get().run()

    def _start(self, samples: Samples, sink: Sink, fail: Fail) -> None:
        if self._drained:  # it was let in a moment before that, and queued behind it
            fail(_draining())
            return

        def hand_on(event: Event) -> None:
            sink(event)
            if event.output is not None:
                self._over.append(samples)

        self._open[samples] = fail
        try:
            self.engine.start(samples, hand_on)
        except Exception as error:
            del self._open[samples]
            fail(error)

    def _drain(self, future: Future[None]) -> None:
        self._drained = True
        self._waits_for_all.append(future)

    def _forget_ended(self) -> None:
        while self._over:
            self._open.pop(self._over.popleft(), None)
        if not self._open:
            while self._waits_for_all:
                self._waits_for_all.pop().set_result(None)

    def _stop(self) -> None:
        self._stopping = True
        for samples in list(self._open):
            self.engine.cancel_call(samples)

    def _finish(self, end: str) -> None:
        """The thread ends: say so to all who wait."""
        self._end = end
        self._forget_ended()
        for samples, fail in self._open.items():
            fail(self._closed())
            try:
                self.engine.cancel_call(samples)
            except Exception:  # after a failure that broke the engine itself; the callers have heard of that one
                continue
        self._open.clear()
        self._forget_ended()
        self._refuse()
        self.ended.set_result(None)


def _draining() -> Draining:
    return Draining("this engine is draining: it finishes what it has and takes no new requests")


def _nothing(_: BaseException) -> None:
    """Nobody waits for this job."""


def _future() -> Future[Any]:
    """A future that is done in any case: whoever stops waiting for it does not call it off."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


_running: weakref.WeakSet[StepThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that is in native code while the interpreter goes away would crash."""
    threads = list(_running)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(_EXIT_WAIT_S)
