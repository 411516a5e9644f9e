"""Checkpointer: where the prefill of a recurrent model stops, and the checkpoints that it leaves there."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash
from sortedcontainers import SortedKeyList

from paged.errors import check
from paged.kv.state import StatePool
from paged.media import is_inside
from paged.prefix.cache import PrefixCache
from paged.prefix.checkpoints import Checkpoint, CheckpointStore
from scheduler.request import Request
from scheduler.slots import NO_STOP, Slots

Stop = tuple[int, bool]  # position, whether it is an opening


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What a waiting request would attach, and the places where it would stop, as things stood at `version`."""

    version: tuple[int, int]
    found: Checkpoint | None
    places: list[Stop]


class Checkpointer:
    """Decides at which positions a request's prefill pauses, and keeps a checkpoint of the state there.

    Up to four stops a request, each at least a page past what was attached and a page below the next: the head and
    the opening of its conversation, its own stable part (where the caller names none: the place where it leaves a
    cached checkpoint, or another running request), and the end of its last message (where the caller names none: one
    token short of the prompt, so that the same prompt again attaches all of it; this one yields to the others). A
    request that is preempted leaves one more at its last computed token, and one that ends where that lies a page past
    the last.

    A request whose stop a running one is about to reach waits for it instead of computing the same tokens; that ends,
    since a running prefill advances in every step. No checkpoint is left inside a media span.

    Invariants (`check()`): every running slot with a stop pending has not passed it; its state is at its computed
    tokens.
    """

    def __init__(self, cache: PrefixCache, store: CheckpointStore, states: StatePool, slots: Slots) -> None:
        self.cache = cache
        self.store = store
        self.states = states
        self.slots = slots
        self._pending: dict[bytes, Request] = {}  # digest of the tokens up to a stop -> who will reach it
        self._running: SortedKeyList = SortedKeyList(key=_order)  # the requests with a slot
        self._num_begun = 0
        self._stops: dict[int, list[Stop]] = {}  # of each running slot, the next one last
        self._kept: dict[int, int] = {}  # of each running slot, the position of its latest checkpoint
        self._outlooks: dict[Request, _Outlook] = {}  # of waiting requests

    # Before admission -----------------------------------------------------------------------------------------

    def find(self, request: Request) -> Checkpoint | None:
        """The deepest checkpoint that opens the request's known tokens."""
        return self._outlook(request).found

    def _outlook(self, request: Request) -> _Outlook:
        """Looked up once, until the store changes or another request starts. O(log requests + tokens)."""
        version = (self.store.version, self._num_begun)
        outlook = self._outlooks.get(request)
        if outlook is None or outlook.version != version:
            found = self.store.find(self._key(request), request.readable)
            matched = 0 if found is None else found.num_tokens
            outlook = self._outlooks[request] = _Outlook(version, found, self._places(request, matched))
        return outlook

    def awaits(self, request: Request) -> bool:
        """Whether a running request is about to leave a checkpoint that is deeper than what is there now."""
        if not self._pending or not self.store.max_states:
            return False
        outlook = self._outlook(request)
        least = self.slots.pool.page_size + (0 if outlook.found is None else outlook.found.num_tokens)
        places = [position for position, _ in outlook.places] + [request.num_prompt - 1]
        end = len(request.readable)
        return any(least <= at < end and self._digest(request, at) in self._pending for at in places)

    # While it runs --------------------------------------------------------------------------------------------

    def begin(self, request: Request, matched: int) -> None:
        """The request was placed in its slot with `matched` tokens attached: settle where its prefill stops."""
        slot, size = request.slot, self.slots.pool.page_size
        if request.cursor is None:  # it leaves no checkpoint
            self.slots.stop[slot] = NO_STOP
            return
        stops: list[Stop] = []
        if self.store.max_states:
            for position, opening in sorted(self._outlook(request).places, reverse=True):
                below = stops[-1][0] - size if stops else len(request.known) - 1
                if matched + size <= position <= below:
                    stops.append((position, opening))
            end = request.num_prompt - 1
            if not request.stops.messages_end and end >= size + (stops[0][0] if stops else matched):
                stops.insert(0, (end, False))
        self._stops[slot], self._kept[slot] = stops, matched
        self.slots.stop[slot] = stops[-1][0] if stops else NO_STOP
        for position, _ in stops:
            self._pending.setdefault(self._digest(request, position), request)
        self.forget(request)
        self._running.add(request)
        self._num_begun += 1

    def reached(self, request: Request) -> None:
        """The step that has just committed took the request to its next stop."""
        slot = request.slot
        position, opening = self._stops[slot].pop()
        self._kept[slot] = position
        self._keep(request, opening)
        self._settle(request, position)
        self.slots.stop[slot] = self._stops[slot][-1][0] if self._stops[slot] else NO_STOP

    def abandon(self, request: Request) -> None:
        """The request leaves no more checkpoints on its way: keeping one has failed."""
        for position, _ in self._stops.get(request.slot, ()):
            self._settle(request, position)
        self._stops[request.slot] = []
        self.slots.stop[request.slot] = NO_STOP

    def leave(self, request: Request, preempted: bool) -> None:
        """The request is about to lose its slot: its last state becomes a tail.

        Unless it comes back, only where that is at least a page past what it left before.
        """
        slot = request.slot
        if request.cursor is None:
            return
        self._running.discard(request)
        for position, _ in self._stops.pop(slot, ()):
            self._settle(request, position)
        self.slots.stop[slot] = NO_STOP
        if preempted or self.slots.computed[slot] >= self._kept.pop(slot, 0) + self.slots.pool.page_size:
            self._keep(request, False)

    def forget(self, request: Request) -> None:
        """The request has left the queue."""
        self._outlooks.pop(request, None)

    def _keep(self, request: Request, opening: bool) -> None:
        slot, cursor = request.slot, request.cursor
        position = int(self.slots.computed[slot])
        if cursor is None or not cursor.open or int(self.states.positions[slot]) != position:
            return  # rows of other weights, rows that hold NaN, or a step that failed
        if is_inside(self.slots.tokens[slot, position]):
            return
        tokens = self.slots.tokens[slot, :position]
        pages, donor = self.slots.pages(slot), request.arrival + 1
        try:
            self.store.insert(self._key(request), tokens, pages, self.states.snapshot(slot), opening, donor)
        except (MemoryError, RuntimeError):  # no memory for the copies (torch raises RuntimeError): the run goes on
            self.store.stats.checkpoints_refused += 1

    def _places(self, request: Request, matched: int) -> list[Stop]:
        """The marks of the request; where nobody named its stable part, the place where it leaves another one's way."""
        stops = request.stops
        marks = [(stops.head, True), (stops.opening, True), (stops.stable, False), (stops.messages_end, False)]
        if not stops.stable:
            branch = max(self.store.stop_at(self._key(request), request.known, matched), self._branch(request))
            marks.append((branch, True))
        return [mark for mark in marks if mark[0]]

    def _branch(self, request: Request) -> int:
        """The longest common prefix with a request that runs, short of the last token: a neighbour in their order."""
        at = self._running.bisect_key_left(_order(request))
        shared = 0
        for other in self._running[max(0, at - 1) : at + 1]:
            if self._key(other) == self._key(request):
                n = min(len(other.known), len(request.known) - 1)
                differs = other.known[:n] != request.known[:n]
                shared = max(shared, int(differs.argmax()) if differs.any() else n)
        return shared

    def _settle(self, request: Request, position: int) -> None:
        digest = self._digest(request, position)
        if self._pending.get(digest) is request:
            del self._pending[digest]

    def _digest(self, request: Request, position: int) -> bytes:
        """Stands for a request's first tokens in its namespace; a wrong wait costs time and never changes a token."""
        digests = request.stop_digests
        if position not in digests:
            digests[position] = xxhash.xxh3_128_digest(self._key(request) + request.known[:position].tobytes())
        return digests[position]

    def _key(self, request: Request) -> bytes:
        assert request.cursor is not None
        return request.cursor.namespace

    def check(self) -> None:
        """Assert the invariants of the class docstring."""
        for slot in self.slots.running.tolist():
            computed, stop = int(self.slots.computed[slot]), int(self.slots.stop[slot])
            check(computed < stop, f"slot {slot} has passed its stop at {stop}: {computed} tokens are computed")
            there = int(self.states.positions[slot])
            check(computed in (0, there), f"slot {slot}: {computed} tokens are computed, its state is at {there}")


def _order(request: Request) -> tuple[bytes, bytes]:
    """Namespace, then token ids big-endian, so that bytes compare as the ids do."""
    assert request.cursor is not None
    return request.cursor.namespace, request.known.astype(">i4").tobytes()
