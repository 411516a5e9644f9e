"""A lock that goes to those who wait."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from paged.errors import Closed
from scheduler.lock import FairLock


def test_it_is_reentrant_and_knows_its_holder() -> None:
    lock = FairLock()
    assert not lock.owned
    with lock:
        assert lock.owned
        with lock:
            assert lock.owned
        assert lock.owned
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(lock.owned))
        thread.start()
        thread.join()
        assert seen == [False]
    assert not lock.owned
    with pytest.raises(KeyError), lock:
        raise KeyError
    assert not lock.owned


class Watched:
    """A lock that says when a thread is about to wait for it."""

    def __init__(self, lock: threading.RLock) -> None:  # type: ignore[valid-type]
        self.lock = lock
        self.waits = threading.Event()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.lock.acquire(blocking=False):
            return True
        self.waits.set()
        return self.lock.acquire(timeout=timeout) if blocking else False

    def release(self) -> None:
        self.lock.release()


def test_a_holder_that_wants_it_again_at_once_comes_behind_who_waits() -> None:
    """With a lock that is not fair the first thread has it again before the other one wakes up."""
    for _ in range(50):
        lock, order = FairLock(), []
        watched = lock._lock = Watched(lock._lock)  # type: ignore[assignment]

        def other(lock=lock, order=order) -> None:
            with lock:
                order.append("other")

        thread = threading.Thread(target=other)
        with lock:
            thread.start()
            watched.waits.wait()
        with lock:
            order.append("first")
        thread.join()
        assert order == ["other", "first"]


def test_it_excludes_under_contention() -> None:
    lock, count = FairLock(), [0]

    def work() -> None:
        for _ in range(500):
            with lock, lock:
                before = count[0]
                count[0] = before + 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count[0] == 3000


def test_alone_it_is_taken_only_where_nobody_holds_it_this_thread_included() -> None:
    lock = FairLock()
    assert lock.try_alone() and lock.owned
    assert not lock.try_alone()
    lock.__exit__()
    assert not lock.owned
    with lock:
        assert not lock.try_alone()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert not lock.try_alone()
    done.set()
    thread.join()
    assert lock.try_alone()
    lock.__exit__()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("held", [True, False])
def test_in_the_child_of_a_fork_a_lock_that_another_thread_held_is_refused_at_once(held: bool) -> None:
    lock, taken, over = FairLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    if held:
        thread.start()
        assert taken.wait(60)
    child = os.fork()
    if not child:  # nothing of the test may run on here
        try:
            signal.alarm(20)  # a child that waits for ever ends with that
            assert lock.try_alone() is not held
            if not held:
                lock.__exit__()
            with lock:
                os._exit(1 if held else 0)
        except Closed as error:
            os._exit(0 if held and "forked" in str(error) else 2)
        finally:
            os._exit(3)
    over.set()
    if held:
        thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with lock:  # in this process nothing has happened
        assert lock.owned
