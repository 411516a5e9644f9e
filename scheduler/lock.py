"""FairLock: a reentrant lock that no thread can keep for itself by taking it again at once."""

from __future__ import annotations

import threading
from types import TracebackType


class FairLock:
    """A reentrant lock whose holder, once it lets go, comes behind those who wait already.

    With an RLock a thread that runs one step after the other takes it again before a waiting thread has woken up, and
    a `submit` beside it waits for the end of everything. Here who waits holds the turnstile, and the thread that wants
    the lock again has to pass it. Costs two locks of the standard library instead of one; under contention the lock
    changes hands with every step.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._turnstile = threading.RLock()
        self._owner = 0
        self._depth = 0

    @property
    def owned(self) -> bool:
        """Whether this thread holds it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> bool:
        if self.owned:
            self._lock.acquire()
        else:
            with self._turnstile:
                self._lock.acquire()
            self._owner = threading.get_ident()
        self._depth += 1
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._lock.release()

    def try_alone(self) -> bool:
        """Take it if that needs no waiting and nobody holds it, this thread included; `__exit__` gives it back.

        For what the garbage collector calls, which may be in the middle of anything that this thread does.
        """
        if self.owned or not self._lock.acquire(blocking=False):
            return False
        self._owner = threading.get_ident()
        self._depth = 1
        return True
