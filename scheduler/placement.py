"""Placement: the pages a request starts with: what it can attach, and fresh ones for the rest of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from paged.errors import OutOfPages
from paged.kv.pages import PagePool
from paged.kv.state import StateSnapshot
from paged.ops.dispatch import get_backend
from paged.prefix.cache import PrefixCache
from paged.prefix.cursor import Cursor
from paged.prefix.handles import PrefixHandle
from scheduler.checkpointer import Checkpointer
from scheduler.config import SchedulerConfig
from scheduler.request import Int32, Request
from scheduler.reserve import Reserve
from scheduler.sharing import StepSharing


@dataclass(slots=True)
class Placement:
    """Pages taken for a request, int32 [num_groups, columns]: its first `matched` tokens are computed in them.

    `snapshot` is the recurrent state after them.
    """

    pages: Int32
    matched: int
    snapshot: StateSnapshot | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """What a waiting request would take now: `num_pages` of those to be had, behind `matched` tokens that are attached.

    `attached` are the ids of the cached pages among them, int32 [n].
    """

    matched: int
    num_pages: int
    attached: Int32


class Placer:
    """Takes pages for one request: those that are cached, or computed in this very step, and fresh ones for the rest.

    It takes all or nothing, and leaves `watermark` of the pool, and what is reserved, free unless nothing runs.
    """

    def __init__(
        self,
        pool: PagePool,
        config: SchedulerConfig,
        cache: PrefixCache | None,
        num_groups: int,
        sharing: StepSharing,
        checkpointer: Checkpointer | None,
        reserve: Reserve,
    ) -> None:
        self.pool = pool
        self.config = config
        self.cache = cache
        self.num_groups = num_groups
        self.sharing = sharing
        self.checkpointer = checkpointer
        self.reserve = reserve

    def place(self, request: Request, alone: bool) -> Placement | None:
        """Pages for all known tokens of `request`, or None: it must wait. `alone`: nothing runs."""
        spare = 0 if alone else self.spare + self.reserve.growth(request)
        if self.cache is None or not request.cache:
            if request.prefix is not None and _reaches(request.prefix, request):
                return self._from_prefix(request.prefix, request, spare)
            return self._fill(request, Placement(np.zeros((self.num_groups, 0), np.int32), 0), spare)
        self._cursor(self.cache, request)
        if self.checkpointer is not None:
            return self._from_checkpoint(self.checkpointer, request, spare)
        return self._from_pages(self.cache, request, spare)

    @property
    def spare(self) -> int:
        """Pages that an admission leaves free: the watermark, and what running requests may still take."""
        return int(self.config.watermark * self.pool.num_pages) + self.reserve.outstanding

    def demand(self, request: Request) -> Demand:
        """What a waiting request would attach now, and what the rest of it would take.

        Takes nothing, touches no entry; what others compute in this very step does not count.
        """
        matched, attached = 0, np.zeros(0, np.int32)
        size, cache = self.pool.page_size, self.cache if request.cache else None
        if self.checkpointer is not None and cache is not None:
            self._cursor(cache, request)
            found = self.checkpointer.find(request)
            if found is not None:
                matched, attached = found.num_tokens, self.checkpointer.store.attachable(found)
        elif cache is not None:
            cursor = self._cursor(cache, request)
            matched = cache.seek(cursor, request.readable)
            attached = cache.attachable(cursor) if cursor.depth else attached
        prefix = request.prefix
        if prefix is not None and matched < _position(prefix, request) and _reaches(prefix, request):
            matched, attached = _position(prefix, request), np.zeros(0, np.int32)
        fresh = (request.columns(size) - matched // size) * request.view.num_groups
        return Demand(matched, fresh + self._idle(attached), attached)

    def next_page(self, request: Request) -> tuple[int, Hashable]:
        """Tokens that a waiting request would attach, and the key of the page behind them, if it is full."""
        if self.cache is None or not request.cache:
            return 0, None
        cursor, known = self._cursor(self.cache, request), request.readable
        if self.checkpointer is not None:
            found = self.checkpointer.find(request)
            matched = 0 if found is None else found.num_tokens
        else:
            matched = self.cache.seek(cursor, known)
        page = matched // self.pool.page_size
        if (page + 1) * self.pool.page_size >= len(known):
            return matched, None
        return matched, cursor.keys_to(known, page + 1)[page]

    def awaits(self, request: Request) -> bool:
        """Whether a waiting request would wait for what a running one is about to compute."""
        if self.cache is None or not request.cache:
            return False
        cursor = self._cursor(self.cache, request)
        if self.checkpointer is not None:
            return self.checkpointer.awaits(request)
        return self.sharing.awaits(request, self.cache.seek(cursor, request.readable) // self.pool.page_size)

    def _cursor(self, cache: PrefixCache, request: Request) -> Cursor:
        """Where a waiting request stands in the cache, from one pass to the next."""
        if request.cursor is None or request.cursor.epoch.over:
            request.cursor = cache.cursor(request.namespace, request.view)
        return request.cursor

    def _from_pages(self, cache: PrefixCache, request: Request, spare: int) -> Placement | None:
        cursor, pool, size, groups = request.cursor, self.pool, self.pool.page_size, request.view.num_groups
        assert cursor is not None
        matched = cache.seek(cursor, request.readable)
        prefix = request.prefix
        if prefix is not None and matched < _position(prefix, request) and _reaches(prefix, request):
            return self._from_prefix(prefix, request, spare)
        offered = self.sharing.follow(request)
        if offered is not None and cursor.rows:  # the next page comes whole, if the match does not need its rows
            depth = cursor.depth
            cache.seek(cursor, request.readable, exact=False)
            offered = offered if cursor.depth == depth else None
        if self.sharing.awaits(request, cursor.depth + (0 if offered is None else offered.shape[1])):
            return None
        room = self._room_for(cache, request, offered, spare)
        if 0 <= room < groups and cursor.rows:  # the page to copy from may have to go to make room
            cache.seek(cursor, request.readable, exact=False)
            room = self._room_for(cache, request, offered, spare)
        if room < 0:
            return None
        rows = cursor.rows
        pages = cache.take(cursor)
        if offered is not None:
            pool.share(offered[offered >= 0])
            pages = np.concatenate([pages, offered], axis=1)
        columns = pages.shape[1]
        fresh = (request.columns(size) - columns) * groups
        try:
            if rows:  # the first column is the copy
                own = cache.take_rows(cursor, fresh - groups).reshape(-1, groups).T
            else:
                own = pool.alloc(fresh).reshape(groups, -1)
            own = self._columns(request, own)
        except BaseException as error:
            pool.release(pages[pages >= 0])
            if not isinstance(error, OutOfPages):
                raise
            return None  # idle pages whose children are in use cannot be evicted
        return Placement(np.concatenate([pages, own], axis=1), columns * size + rows)

    def _room_for(self, cache: PrefixCache, request: Request, offered: Int32 | None, spare: int) -> int:
        """Pages that would be left of those to be had, once `request` had all of its own and what it attaches."""
        cursor = request.cursor
        assert cursor is not None
        columns = cursor.depth + (0 if offered is None else offered.shape[1])
        fresh = (request.columns(self.pool.page_size) - columns) * request.view.num_groups
        return self.pool.num_available - fresh - spare - (self._idle(cache.attachable(cursor)) if cursor.depth else 0)

    def _idle(self, pages: Int32) -> int:
        """How many of these only the cache holds: attaching them makes them live."""
        return int(np.count_nonzero(self.pool.refs[pages] == 1))

    def _from_checkpoint(self, checkpointer: Checkpointer, request: Request, spare: int) -> Placement | None:
        store, pool, groups = checkpointer.store, self.pool, self.num_groups
        if checkpointer.awaits(request):
            return None
        found = checkpointer.find(request)
        prefix = request.prefix
        if prefix is not None and _reaches(prefix, request) and (not found or found.num_tokens < prefix.num_tokens):
            return self._from_prefix(prefix, request, spare)
        if found is None:
            return self._fill(request, Placement(np.zeros((groups, 0), np.int32), 0), spare)
        whole = found.num_tokens // pool.page_size
        fresh = (request.columns(pool.page_size) - whole) * request.view.num_groups
        if fresh + spare + store.idle_pages(found) > pool.num_available:
            return None
        try:
            pages = store.attach(found)
        except OutOfPages:
            return None
        placement = None
        try:
            placement = self._fill(request, Placement(pages, found.num_tokens, snapshot=found.snapshot), 0)
        finally:
            if placement is None:
                pool.release(pages[pages >= 0])
        return placement

    def _from_prefix(self, prefix: PrefixHandle, request: Request, spare: int) -> Placement | None:
        """Start behind a prefix that a handle keeps, or one token short of the prompt: whole pages are shared, a
        partial one is copied."""
        pool, view, matched = self.pool, request.view, _position(prefix, request)
        whole, rows = divmod(matched, pool.page_size)
        table = np.full((self.num_groups, prefix.page_table.shape[1]), -1, np.int32)
        table[view.groups] = prefix.page_table[view.groups]
        shared = table[:, :whole]
        placement = Placement(shared, matched, prefix.snapshot())
        if self._fill(request, placement, spare) is None:
            return None
        pool.share(shared[shared >= 0])
        try:
            if rows and pool.storage is not None:
                backend = get_backend(pool.storage.device)
                backend.copy_pages(pool.storage, table[view.groups, whole], placement.pages[view.groups, whole])
        except BaseException:
            pool.release(placement.pages[placement.pages >= 0])
            raise
        if request.cursor is not None:  # it stands on none of the cached pages: what it publishes merges with them
            request.cursor.restart()
        return placement

    def _fill(self, request: Request, placement: Placement, spare: int) -> Placement | None:
        """Add fresh columns up to the last known token."""
        groups = request.view.num_groups
        fresh = (request.columns(self.pool.page_size) - placement.pages.shape[1]) * groups
        if fresh + spare > self.pool.num_available:
            return None
        try:
            own = self._columns(request, self.pool.alloc(fresh).reshape(groups, -1))
        except OutOfPages:
            return None
        placement.pages = np.concatenate([placement.pages, own], axis=1)
        return placement

    def _columns(self, request: Request, own: Int32) -> Int32:
        """Pages of the groups that a request uses as columns of its page table."""
        if len(own) == self.num_groups:
            return own
        columns = np.full((self.num_groups, own.shape[1]), -1, np.int32)
        columns[request.view.groups] = own
        return columns


def _position(prefix: PrefixHandle, request: Request) -> int:
    """Where a request that starts from a prefix computes its first row."""
    return min(prefix.num_tokens, len(request.known) - 1)


def _reaches(prefix: PrefixHandle, request: Request) -> bool:
    """Whether a request can start from a prefix: not where rows of it are to be scored, nor where the weights changed
    while it waited. Behind its last token it can; one short of it, a recurrent state is not there any more, and a
    window may have left pages that are seen from there.
    """
    at, size, view = _position(prefix, request), prefix.pool.page_size, request.view
    if at >= len(request.readable) or prefix.outdated:
        return False
    if at == prefix.num_tokens:
        return True
    if prefix.snapshot_at is not None:
        return False
    seen = np.arange(-(-at // size)) >= view.first_columns(at, size)[view.groups, None]
    return bool((prefix.page_table[view.groups, : seen.shape[1]] >= 0)[seen].all())
