"""Quotas: what each namespace may run and hold at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged.errors import check
from paged.kv.pages import Int64
from scheduler.config import SchedulerConfig
from scheduler.quota import Quota
from scheduler.request import Int32, Request
from scheduler.reserve import Reserve
from scheduler.slots import Slots


class Quotas:
    """Keeps every namespace within its Quota: who would exceed it waits, and is passed by at no cost for others.

    A page counts for each request that has it, shared or not, so that a namespace's share does not depend on the
    others. What running requests are reserved counts too; where they grow past the quota nevertheless, one of the
    namespace is preempted, as on a shortage of the whole pool, and never its oldest one.

    Invariants (`check()`): no namespace runs more requests, or holds more pages, than its quota.
    """

    def __init__(self, config: SchedulerConfig, state: Slots, reserve: Reserve) -> None:
        self.state = state
        self.reserve = reserve
        self.active = bool(config.quotas) or config.quota != Quota()
        self.pages_matter = any(quota.max_pages for quota in (config.quota, *config.quotas.values()))
        self.of = config.quota_of
        num_slots = len(state.known)
        self._index: dict[str, int] = {}  # of each namespace that runs something
        self._free = list(range(num_slots))
        self._running = np.zeros(num_slots, np.int32)  # requests, by index
        self._max_pages: Int64 = np.zeros(num_slots, np.int64)  # by index; 0: none
        self._of_slot = np.zeros(num_slots, np.int32)

    def started(self, request: Request) -> None:
        """The request was placed in its slot."""
        if not self.active:
            return
        i = self._index.get(request.namespace)
        if i is None:
            i = self._index[request.namespace] = self._free.pop()
            self._max_pages[i] = self.of(request.namespace).max_pages
        self._running[i] += 1
        self._of_slot[request.slot] = i

    def stopped(self, request: Request) -> None:
        """The request is about to lose its slot."""
        if not self.active:
            return
        i = self._index[request.namespace]
        self._running[i] -= 1
        if not self._running[i]:
            del self._index[request.namespace]
            self._free.append(i)

    def full(self) -> set[str]:
        """The namespaces that run as many requests as they may. O(namespaces that run something)."""
        return {name for name in self._index if self.is_full(name)} if self.active else set()

    def is_full(self, namespace: str, more: int = 0) -> bool:
        """Whether a namespace, once `more` requests of it have started, runs as many as it may."""
        most, i = self.of(namespace).max_running, self._index.get(namespace)
        return bool(most) and (0 if i is None else int(self._running[i])) + more >= most

    def room_for(self, request: Request, before: Sequence[Request] = ()) -> int:
        """Pages that the namespace may take beyond those that `request` needs, once those `before` it have started;
        negative: it has to wait. A namespace that runs nothing has room for each request that `fit` accepts.
        O(running) vectorised."""
        most, i = self.of(request.namespace).max_pages, self._index.get(request.namespace)
        if not most or (i is None and not before):
            return 0
        slots = self.state.running[self._of_slot[self.state.running] == i] if i is not None else self.state.running[:0]
        taken = int(self._held(slots).sum()) + self.reserve.of_slots(slots)
        return most - taken - sum(map(self._needs, before)) - self._needs(request)

    def _needs(self, request: Request) -> int:
        """Pages that a waiting request will have when it starts, with what is reserved for it."""
        columns = request.columns(self.state.pool.page_size)
        return columns * request.view.num_groups + self.reserve.growth(request)

    def may_take(self, slot: int, num_pages: int) -> bool:
        """Whether a running slot may have so many pages more. O(running) vectorised."""
        i = int(self._of_slot[slot])
        if not self.pages_matter or not self._max_pages[i]:
            return True
        slots = self.state.running[self._of_slot[self.state.running] == i]
        return int(self._held(slots).sum()) + num_pages <= int(self._max_pages[i])

    def overdrawn(self) -> Int32 | None:
        """The running slots of a namespace that would exceed its pages if each of them took its next one."""
        if not self.pages_matter:
            return None
        state, slots = self.state, self.state.running
        known = state.known[slots] + state.tokens_ahead[slots]
        grows = (known > state.num_pages[slots] * state.pool.page_size) & (known < state.limit[slots])
        pages = self._held(slots) + np.where(grows, state.uses[:, slots].sum(axis=0), 0)
        of = self._of_slot[slots]
        totals = np.bincount(of, pages, minlength=len(self._max_pages))
        over = np.flatnonzero((self._max_pages > 0) & (totals > self._max_pages))
        return slots[of == over[0]] if len(over) else None

    def _held(self, slots: Int32) -> Int64:
        """Pages that each slot has."""
        state = self.state
        return (state.uses[:, slots] * (state.num_pages[slots] - state.left[:, slots])).sum(axis=0).astype(np.int64)

    def check(self) -> None:
        """Assert the invariants of the class docstring."""
        if not self.active:
            return
        slots = self.state.running
        for name, i in self._index.items():
            quota, mine = self.of(name), slots[self._of_slot[slots] == i]
            check(len(mine) == int(self._running[i]), f"namespace {name!r} runs another number than was counted")
            check(not quota.max_running or len(mine) <= quota.max_running, f"namespace {name!r} runs too many")
            pages = int(self._held(mine).sum())
            check(not quota.max_pages or pages <= quota.max_pages, f"namespace {name!r} holds {pages} pages")
