"""Reserve: the pages that an admission leaves for what requests will still generate."""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

from paged.kv.pages import Int64
from scheduler.config import SchedulerConfig
from scheduler.request import Int32, Request
from scheduler.slots import Slots

SAMPLES = 64  # finished outputs that an expectation is made of
FEWEST = 8  # below so many, those of all namespaces are asked, then max_tokens
QUANTILE = 0.9
NAMESPACES = 1024


class OutputLengths:
    """How long outputs were, by namespace and in all: the latest `SAMPLES` of each, of the latest namespaces."""

    def __init__(self) -> None:
        self._all: deque[int] = deque(maxlen=SAMPLES)
        self._of: OrderedDict[str, deque[int]] = OrderedDict()

    def add(self, namespace: str, length: int) -> None:
        """One more finished output."""
        of = self._of.setdefault(namespace, deque(maxlen=SAMPLES))
        self._of.move_to_end(namespace)
        if len(self._of) > NAMESPACES:
            self._of.popitem(last=False)
        of.append(length)
        self._all.append(length)

    def expected(self, namespace: str) -> int | None:
        """The length that nine of ten outputs of the namespace do not exceed; None where too few are known."""
        for lengths in (self._of.get(namespace, ()), self._all):
            if len(lengths) >= FEWEST:
                return sorted(lengths)[int(QUANTILE * (len(lengths) - 1) + 0.5)]
        return None


class Reserve:
    """How many tokens a request is taken to come to hold, and the pages that are kept for that.

    `config.reserve` says what is counted at admission beside the pages of the tokens that are known:

    - "prompt": nothing. The most run at once; where outputs are long, some are preempted.
    - "max_tokens": everything up to the limit of each request. Nobody is ever preempted for pages.
    - "expected": the output length that nine of ten recent outputs of its namespace stayed below, at most the limit.

    What the running requests may still take counts as much as what the new one may. `begin` adds it up, at
    O(running) vectorised; with "prompt" there is nothing to add.
    """

    def __init__(self, config: SchedulerConfig, state: Slots) -> None:
        self.mode = config.reserve
        self.state = state
        self.lengths = OutputLengths()
        self.outstanding = 0  # pages that the running requests may still take
        self._reach = np.zeros(len(state.known), np.int32)  # by slot: tokens that it is taken to come to hold

    def reach(self, request: Request) -> int:
        """Tokens that a request is taken to come to hold."""
        least = len(request.known)
        if self.mode == "prompt":
            return least
        expected = self.lengths.expected(request.namespace) if self.mode == "expected" else None
        return request.limit if expected is None else min(request.limit, max(least, request.num_prompt + expected))

    def growth(self, request: Request) -> int:
        """Pages that a waiting request is taken to need beyond those of its known tokens."""
        if self.mode == "prompt":
            return 0
        size, view = self.state.pool.page_size, request.view
        held = request.columns(size)
        more = -(-self.reach(request) // size) - held
        windows = view.windows[view.groups]
        return int(np.where(windows > 0, np.clip(-(-windows // size) + 1 - held, 0, more), more).sum())

    def begin(self) -> None:
        """Add up what the running requests may still take."""
        if self.mode != "prompt":
            self.outstanding = self.of_slots(self.state.running)

    def of_slots(self, slots: Int32) -> int:
        """Pages that running requests may still take. A group with a window gives back what it takes beyond that."""
        return int(self.of_each(slots).sum())

    def of_each(self, slots: Int32) -> Int64:
        """The same for each of `slots`, int64 [len(slots)]."""
        if self.mode == "prompt" or not len(slots):
            return np.zeros(len(slots), np.int64)
        state, size = self.state, self.state.pool.page_size
        more = np.maximum(-(-self._reach[slots] // size) - state.num_pages[slots], 0) * state.uses[:, slots]
        windows = state.windows[:, slots]
        if windows.any():
            room = -(-windows // size) + 1 - (state.num_pages[slots] - state.left[:, slots])
            more = np.where(windows > 0, np.clip(room, 0, more), more)
        return more.sum(axis=0).astype(np.int64)

    def started(self, request: Request) -> None:
        """The request was placed in its slot."""
        if self.mode != "prompt":
            self._reach[request.slot] = self.reach(request)
            self.outstanding += self.of_slots(np.array([request.slot], np.int32))

    def finished(self, request: Request, length: int) -> None:
        """The request came to an end of its own, with `length` tokens of output."""
        if self.mode == "expected":
            self.lengths.add(request.namespace, length)
