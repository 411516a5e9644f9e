"""The machines are worth what they find: each of these faults, planted on purpose, must make one of them fail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cache_machine import CacheMachine
from hypothesis.stateful import precondition, rule
from planting import expect_found, expect_nothing
from scheduler_machine import SchedulerMachine

from paged.errors import OutOfPages
from paged.kv.page_table import PageTable
from paged.kv.pages import PagePool
from paged.ops.dispatch import get_backend
from paged.prefix.cache import PrefixCache
from paged.prefix.handles import PrefixHandle
from paged.prefix.index import Cursor, PrefixIndex
from paged.prefix.lookup import PlainLookup
from scheduler import placement
from scheduler import scheduler as scheduling
from scheduler.drafts import Drafter
from scheduler.placement import Placer
from scheduler.publishing import publish_step
from scheduler.scheduler import Scheduler
from scheduler.sharing import StepSharing
from scheduler.slots import Slots
from scheduler.step import Decision

Patch = pytest.MonkeyPatch


class RealHash(CacheMachine):
    hashes = ("real",)


class OneHash(CacheMachine):
    hashes = ("one for all",)


class SlowPrefill(SchedulerMachine):
    """Long prefills, in the middle of which the weights change."""

    hashes = ("real",)
    page_sizes = (8,)
    budgets = (3,)
    kinds = ("attention", "looped")
    aheads = ("no",)

    @precondition(lambda self: self.driver.running())
    @rule()
    def reload_often(self) -> None:
        self.reload(0)


class Looped(SchedulerMachine):
    """Depths in one tree."""

    kinds = ("looped",)
    hashes = ("real",)


class LayersAfter(SchedulerMachine):
    """A namespace for each depth."""

    kinds = ("layers after",)
    hashes = ("real",)
    cache_windows = ((0,),)


class Windowed(SchedulerMachine):
    """Cache windows of requests."""

    kinds = ("attention",)
    hashes = ("real",)
    cache_windows = ((0, 2, 5),)


class Drafting(SchedulerMachine):
    """Steps verify guesses."""

    kinds = ("attention", "looped")
    aheads = ("draft",)


class Planning(SchedulerMachine):
    """Each step is decided while the one before it runs."""

    kinds = ("attention", "looped")
    aheads = ("plan",)


def a_reference_is_dropped_on_share(patch: Patch) -> None:
    real = PagePool.share
    patch.setattr(PagePool, "share", lambda self, ids: real(self, ids[:-1]))


def a_reference_is_kept_on_release(patch: Patch) -> None:
    real = PageTable.truncate

    def truncate(self: PageTable, num_pages: int) -> None:
        if self.num_pages:
            self.pool.share(self._rows[:1, -1])
        real(self, num_pages)

    patch.setattr(PageTable, "truncate", truncate)


def a_parent_is_evicted_before_its_child(patch: Patch) -> None:
    def on_idle(self: PrefixCache, ids: np.ndarray) -> None:
        for node in np.unique(self.index.node_of_page[ids]).tolist():
            self.queue.push(node)

    def reclaim(self: PrefixCache, num_pages: int) -> int:
        freed = 0
        while freed < num_pages and (node := self.queue.pop()) is not None:
            if self.idle(node):
                freed += self._evict(node)
        return freed

    patch.setattr(PrefixCache, "_on_idle", on_idle)
    patch.setattr(PrefixCache, "_reclaim", reclaim)
    real = PrefixIndex.remove
    patch.setattr(PrefixIndex, "remove", lambda self, node: (self.children.__setitem__(node, 0), real(self, node))[1])


def a_page_in_use_is_evicted(patch: Patch) -> None:
    patch.setattr(PrefixCache, "idle", lambda self, node: True)


def an_idle_leaf_is_forgotten(patch: Patch) -> None:
    patch.setattr(PrefixCache, "_on_idle", lambda self, ids: None)


def the_tokens_are_not_compared(patch: Patch) -> None:
    class AnyChild(PlainLookup):
        def match(self, parent, tokens, num_pages, node_tokens, node_parent):
            found: list[int] = []
            for _ in range(num_pages):
                child = next((node for (above, _), node in self._nodes.items() if above == parent), None)
                if child is None:
                    break
                found.append(child)
                parent = child
            return np.array(found, np.int32)

    patch.setattr("paged.prefix.index.make_lookup", AnyChild)
    patch.setattr(PrefixIndex, "check", lambda self: None)  # it would see at once that a page is not found


def the_parent_is_not_compared(patch: Patch) -> None:
    class AnyParent(PlainLookup):
        def match(self, parent, tokens, num_pages, node_tokens, node_parent):
            pages = {data: node for (_, data), node in self._nodes.items()}
            found: list[int] = []
            for column in range(num_pages):
                node = pages.get(tokens[column * self.page_size : (column + 1) * self.page_size].tobytes())
                if node is None:
                    break
                found.append(node)
            return np.array(found, np.int32)

    patch.setattr("paged.prefix.index.make_lookup", AnyParent)
    patch.setattr(PrefixIndex, "check", lambda self: None)


def a_shared_page_is_written_into(patch: Patch) -> None:
    real = PageTable.ensure

    def ensure(self: PageTable, start: int, end: int) -> None:
        refs, self.pool.refs = self.pool.refs, np.minimum(self.pool.refs, 1)
        try:  # it sees no shared page; what it takes is written back
            real(self, start, end)
        finally:
            refs = np.concatenate([refs, np.zeros(len(self.pool.refs) - len(refs), np.int32)])
            self.pool.refs = np.where(refs > 1, refs, self.pool.refs)

    patch.setattr(PageTable, "ensure", ensure)


def a_copied_page_lacks_its_rows(patch: Patch) -> None:
    patch.setattr(type(get_backend("cpu")), "copy_pages", lambda self, storage, src, dst: None)


def a_match_goes_to_the_prompts_end(patch: Patch) -> None:
    def seek(self: PrefixCache, cursor: Cursor, prompt: np.ndarray, exact: bool = True, lazy: bool = False) -> int:
        return self.index.seek(cursor, prompt, len(prompt) // self.pool.page_size) * self.pool.page_size

    patch.setattr(PrefixCache, "seek", seek)


def namespaces_are_ignored(patch: Patch) -> None:
    real = PrefixCache.namespace_key
    patch.setattr(PrefixCache, "namespace_key", lambda self, namespace="", **fields: real(self, "", **fields))


def the_bound_is_ignored(patch: Patch) -> None:
    patch.setattr(PrefixCache, "_trim", lambda self, cursor, first: None)


def a_merged_page_stays_in_the_table(patch: Patch) -> None:
    def exchange(self: PageTable, column: int, groups: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        return (self._rows[groups, column] == old).astype(np.int64) if column < self.num_pages else 0 * groups

    patch.setattr(PageTable, "exchange", exchange)


def taking_too_many_takes_some(patch: Patch) -> None:
    real = PagePool.alloc

    def alloc(self: PagePool, n: int) -> np.ndarray:
        try:
            return real(self, n)
        except OutOfPages:
            real(self, self.num_free)
            raise

    patch.setattr(PagePool, "alloc", alloc)


# The scheduler ----------------------------------------------------------------------------------------------------


def pages_are_published_before_the_commit(patch: Patch) -> None:
    real = Scheduler.schedule

    def schedule(self: Scheduler):
        plan = real(self)
        if plan is not None:
            ends = plan.batch.kv_lens
            publish_step(self.cache, self.state, plan.slots, ends - plan.num_tokens, ends)
        return plan

    patch.setattr(Scheduler, "schedule", schedule)


def nothing_is_released_on_finish(patch: Patch) -> None:
    def vacate(self: Slots, slot: int) -> np.ndarray:
        self.requests[slot] = None
        self.running = self.running[self.running != slot]
        self._free.append(slot)
        return self.tokens[slot, : self.known[slot]].copy()

    patch.setattr(Slots, "vacate", vacate)


def a_resumed_request_forgets_its_output(patch: Patch) -> None:
    real = Scheduler.preempt

    def preempt(self: Scheduler, request) -> None:
        real(self, request)
        self.waiting.remove(request)
        request.known = request.known[: max(1, len(request.known) - 1)]
        self.waiting.add(request)

    patch.setattr(Scheduler, "preempt", preempt)


def offers_ignore_what_comes_before(patch: Patch) -> None:
    class Loose(dict):
        def get(self, key, default=None):
            return super().get(key[1], default)

        def __setitem__(self, key, value):
            super().__setitem__(key[1], value)

    real = StepSharing.__init__

    def init(self: StepSharing, page_size: int) -> None:
        real(self, page_size)
        self._offered = Loose()

    patch.setattr(StepSharing, "__init__", init)


def offers_outlive_their_step(patch: Patch) -> None:
    patch.setattr(StepSharing, "begin", lambda self: None)


def a_waiter_is_never_told(patch: Patch) -> None:
    patch.setattr(StepSharing, "settle", lambda self, requests: None)


def a_release_ends_no_epoch(patch: Patch) -> None:
    patch.setattr(Cursor, "open", property(lambda self: not self.closed))


def the_last_page_of_a_table_is_not_extended(patch: Patch) -> None:
    real = Scheduler._extend_tables

    def extend(self: Scheduler, preempted: list) -> bool:
        done = real(self, preempted)
        state = self.state
        late = state.running[state.known[state.running] % self.pool.page_size == 1]
        if len(late) and self.pool.page_size > 1:
            slot = int(late[0])
            state.page_table[:, slot, state.num_pages[slot] - 1] = state.page_table[:, slot, 0]
        return done

    patch.setattr(Scheduler, "_extend_tables", extend)


# Depths and cache windows ------------------------------------------------------------------------------------------


def a_shallow_match_serves_a_deep_request(patch: Patch) -> None:
    patch.setattr(PrefixCache, "_has_pages", lambda self, cursor, depth, rows=0: True)


def pages_are_taken_in_every_group(patch: Patch) -> None:
    def extend(self: Slots, slots: np.ndarray) -> None:
        pages = self.pool.alloc(self.uses.shape[0] * len(slots)).reshape(-1, len(slots))
        self.page_table[:, slots, self.num_pages[slots]] = pages
        self.num_pages[slots] += 1

    patch.setattr(Slots, "extend", extend)


def the_deepest_pages_leak(patch: Patch) -> None:
    real = Slots.vacate

    def vacate(self: Slots, slot: int) -> np.ndarray:
        deepest = self.pages(slot)[int(np.flatnonzero(self.uses[:, slot])[-1])]
        self.pool.share(deepest[deepest >= 0])
        return real(self, slot)

    patch.setattr(Slots, "vacate", vacate)


def a_window_is_left_a_token_too_early(patch: Patch) -> None:
    real = Slots.leave

    def leave(self: Slots, slots: np.ndarray) -> None:
        self.computed[slots] += 1
        real(self, slots)
        self.computed[slots] -= 1

    patch.setattr(Slots, "leave", leave)


def offers_ignore_the_depth(patch: Patch) -> None:
    class Shallow(dict):
        def get(self, key, default=None):
            return super().get((key[0], key[2]), default)

        def __setitem__(self, key, value):
            super().__setitem__((key[0], key[2]), value)

    real = StepSharing.__init__

    def init(self: StepSharing, page_size: int) -> None:
        real(self, page_size)
        self._offered = Shallow()

    patch.setattr(StepSharing, "__init__", init)


def a_field_is_missing_from_the_namespace(patch: Patch, field: str) -> None:
    real = PrefixCache.namespace_key

    def key(self: PrefixCache, namespace: str = "", **fields: object) -> bytes:
        return real(self, namespace, **{name: value for name, value in fields.items() if name != field})

    patch.setattr(PrefixCache, "namespace_key", key)


def the_cache_window_is_missing_from_the_namespace(patch: Patch) -> None:
    a_field_is_missing_from_the_namespace(patch, "cache_window")


def the_depth_is_missing_from_the_namespace(patch: Patch) -> None:
    a_field_is_missing_from_the_namespace(patch, "loops")


def a_prefix_is_entered_where_its_window_has_left(patch: Patch) -> None:
    patch.setattr(placement, "_reaches", lambda prefix, request: True)


def the_last_page_of_a_prefix_is_not_copied(patch: Patch) -> None:
    real = Placer._from_prefix

    def from_prefix(self: Placer, prefix: PrefixHandle, request, spare: int):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(type(get_backend("cpu")), "copy_pages", lambda self, storage, src, dst: None)
            return real(self, prefix, request, spare)

    patch.setattr(Placer, "_from_prefix", from_prefix)


def wrong_guesses_are_kept(patch: Patch) -> None:
    patch.setattr(scheduling, "kept_rows", lambda plan, tokens, state: np.arange(len(tokens), dtype=np.int32))


def pages_of_wrong_guesses_stay(patch: Patch) -> None:
    patch.setattr(Slots, "shrink", lambda self, slots: None)


def guesses_pass_the_limit(patch: Patch) -> None:
    real = Drafter.draft

    def draft(self: Drafter, slots, num_tokens, budget):
        self.state.limit[slots] += 3
        try:
            return real(self, slots, num_tokens, budget)
        finally:
            self.state.limit[slots] -= 3

    patch.setattr(Drafter, "draft", draft)


def who_ended_stays_in_the_decision(patch: Patch) -> None:
    patch.setattr(Decision, "still_running", lambda self, state, preempt: self)


def the_row_in_flight_is_not_counted(patch: Patch) -> None:
    real = Scheduler._need

    def need(self: Scheduler, slots):
        rows = self.state.rows_ahead.copy()
        self.state.rows_ahead[:] = 0
        try:
            return real(self, slots)
        finally:
            self.state.rows_ahead[:] = rows

    patch.setattr(Scheduler, "_need", need)


FAULTS: list[tuple[type, Callable[[Patch], None]]] = [
    (RealHash, a_reference_is_dropped_on_share),
    (RealHash, a_reference_is_kept_on_release),
    (RealHash, a_parent_is_evicted_before_its_child),
    (RealHash, a_page_in_use_is_evicted),
    (RealHash, an_idle_leaf_is_forgotten),
    (OneHash, the_tokens_are_not_compared),
    (OneHash, the_parent_is_not_compared),
    (RealHash, a_shared_page_is_written_into),
    (RealHash, a_copied_page_lacks_its_rows),
    (RealHash, a_match_goes_to_the_prompts_end),
    (RealHash, namespaces_are_ignored),
    (RealHash, the_bound_is_ignored),
    (RealHash, a_merged_page_stays_in_the_table),
    (RealHash, taking_too_many_takes_some),
    (SchedulerMachine, pages_are_published_before_the_commit),
    (SchedulerMachine, nothing_is_released_on_finish),
    (SchedulerMachine, a_resumed_request_forgets_its_output),
    (SchedulerMachine, offers_ignore_what_comes_before),
    (SchedulerMachine, offers_outlive_their_step),
    (SchedulerMachine, a_waiter_is_never_told),
    (SlowPrefill, a_release_ends_no_epoch),
    (SchedulerMachine, the_last_page_of_a_table_is_not_extended),
    (Looped, a_shallow_match_serves_a_deep_request),
    (Looped, pages_are_taken_in_every_group),
    (Looped, the_deepest_pages_leak),
    (Windowed, a_window_is_left_a_token_too_early),
    (Looped, offers_ignore_the_depth),
    (Windowed, the_cache_window_is_missing_from_the_namespace),
    (LayersAfter, the_depth_is_missing_from_the_namespace),
    (Windowed, a_prefix_is_entered_where_its_window_has_left),
    (SchedulerMachine, the_last_page_of_a_prefix_is_not_copied),
    (Drafting, wrong_guesses_are_kept),
    (Drafting, pages_of_wrong_guesses_stay),
    (Drafting, guesses_pass_the_limit),
    (Planning, who_ended_stays_in_the_decision),
    (Planning, the_row_in_flight_is_not_counted),
]


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "fault"), FAULTS, ids=[fault.__name__ for _, fault in FAULTS])
def test_the_machine_finds(machine: type, fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    expect_found(machine, max_examples=300)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [RealHash, OneHash, SlowPrefill, Looped, LayersAfter, Windowed, Drafting, Planning])
def test_the_machine_finds_nothing_without_a_fault(machine: type) -> None:
    expect_nothing(machine, max_examples=60)
