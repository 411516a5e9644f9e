"""HeldInterrupt: Ctrl-C that comes in the middle of something waits for its end."""

from __future__ import annotations

import importlib
import signal
import threading
from types import FrameType

_MAIN = threading.main_thread()

# What the functions of `signal` are made of: those make enumerators of handlers, which takes ten times as long.
_c = importlib.import_module("_signal")
_SIGINT = int(signal.SIGINT)


class HeldInterrupt:
    """Takes the place of the program's handler of SIGINT from `begin` to `end`, and hands over what came meanwhile.

    Python runs a handler between any two instructions of the main thread, and the one that it sets raises
    KeyboardInterrupt there: half of a step would be accounted for, and half not. A second interrupt is handed over
    where it comes: whoever presses twice wants out of whatever hangs, and gets an engine that is good for nothing more.
    """

    __slots__ = ("_came", "_frame", "_handler")

    def __init__(self) -> None:
        self._came = False
        self._frame: FrameType | None = None
        self._handler = _c.getsignal(_SIGINT)

    @classmethod
    def begin(cls) -> HeldInterrupt | None:
        """Hold off interrupts from now on; None in a thread that has none, or where no handler of Python's is set."""
        if threading.current_thread() is not _MAIN:
            return None
        held = cls()
        if not callable(held._handler):
            return None
        _c.signal(_SIGINT, held._hold)
        return held

    def hand_over(self) -> None:
        """Call the handler of the program for what came; it may raise."""
        if self._came:
            self._came = False
            frame, self._frame = self._frame, None
            assert callable(self._handler)
            self._handler(signal.SIGINT, frame)

    def end(self) -> None:
        """Put the handler back, and hand over what came."""
        _c.signal(_SIGINT, self._handler)
        self.hand_over()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            self.hand_over()
        else:
            self._came, self._frame = True, frame
