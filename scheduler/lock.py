"""FairLock: a reentrant lock that no thread can keep for itself by taking it again at once."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType

from paged.errors import Closed
from scheduler.interrupt import HeldInterrupt

_LOOK_S = 0.1  # who waits looks so often for an interrupt


class FairLock:
    """A reentrant lock whose holder, once it lets go, comes behind those who wait already.

    With an RLock a thread that runs one step after the other takes it again before a waiting thread has woken up, and
    a `submit` beside it waits for the end of everything. Here who waits holds the turnstile, and the thread that wants
    the lock again has to pass it. Costs two locks of the standard library instead of one; under contention the lock
    changes hands with every step.

    Ctrl-C takes effect where the lock is not held: see HeldInterrupt. In a process that was forked while another thread
    held it nobody will ever let it go, nor finish what that thread had begun: Closed, there, for whoever wants it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._turnstile = threading.RLock()
        self._owner = 0
        self._depth = 0
        self._interrupt: HeldInterrupt | None = None  # of the main thread, if it holds the lock
        self._orphaned = False
        _locks.add(self)

    @property
    def owned(self) -> bool:
        """Whether this thread holds it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> bool:
        if self.owned:
            self._lock.acquire()
            self._depth += 1
            return True
        if self._orphaned:
            raise Closed(
                "this process was forked while another thread was in a step of this engine; fork before there is an "
                "engine, and make one in each process"
            )
        interrupt = HeldInterrupt.begin()
        try:
            _acquire(self._turnstile, interrupt)
            try:
                _acquire(self._lock, interrupt)
            finally:
                self._turnstile.release()
        except BaseException:
            if interrupt is not None:
                interrupt.end()
            raise
        self._owner, self._depth, self._interrupt = threading.get_ident(), 1, interrupt
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._depth -= 1
        if self._depth:
            self._lock.release()
            return
        interrupt, self._interrupt = self._interrupt, None
        self._owner = 0
        self._lock.release()
        if interrupt is not None:
            interrupt.end()

    def forked(self) -> None:
        """This process is the child of a fork."""
        self._turnstile = threading.RLock()  # of those that waited nobody is left
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._orphaned = True

    def try_alone(self) -> bool:
        """Take it if that needs no waiting and nobody holds it, this thread included; `__exit__` gives it back.

        For what the garbage collector calls, which may be in the middle of anything that this thread does.
        """
        if self.owned or self._orphaned:
            return False
        interrupt = HeldInterrupt.begin()
        if not self._lock.acquire(blocking=False):
            if interrupt is not None:
                interrupt.end()
            return False
        self._owner, self._depth, self._interrupt = threading.get_ident(), 1, interrupt
        return True


_locks: weakref.WeakSet[FairLock] = weakref.WeakSet()


def _after_fork() -> None:
    """In the child: of all threads only the one that forked is there."""
    for lock in list(_locks):
        lock.forked()


if hasattr(os, "register_at_fork"):  # where processes fork
    os.register_at_fork(after_in_child=_after_fork)


def _acquire(lock: threading.RLock, interrupt: HeldInterrupt | None) -> None:
    if interrupt is None:
        lock.acquire()
        return
    while not lock.acquire(timeout=_LOOK_S):
        interrupt.hand_over()
