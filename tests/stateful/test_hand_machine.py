"""Any order of calls by hand over pages or checkpoints, and the faults that this must find."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fakes import EchoHybrid, EchoModel
from hand_machine import HandMachine
from planting import any_order, expect_found, expect_nothing

from paged.kv.page_table import PageTable
from paged.kv.pages import PagePool
from paged.kv.state import StatePool, StateSnapshot
from paged.prefix import saved
from paged.prefix.cache import PrefixCache
from paged.prefix.checkpoint_intake import CheckpointIntake
from paged.prefix.checkpoints import CheckpointStore
from paged.prefix.eviction_run import take_out
from paged.prefix.index import Cursor, PrefixIndex
from paged.prefix.pins import Pins
from paged.prefix.saved_checkpoints import SavedCheckpoints
from paged.prefix.saved_tree import SavedTree
from paged.prefix.siblings import Siblings
from paged.prefix.tree_intake import TreeIntake

Patch = pytest.MonkeyPatch

HandMachine.TestCase.settings = any_order(80)

TestHandMachine = HandMachine.TestCase


class Pages(HandMachine):
    kinds = (EchoModel,)
    window_sizes = (0,)


class Exact(Pages):
    exact = (True,)


class Windows(HandMachine):
    kinds = (EchoModel,)
    window_sizes = (3, 5)
    bounds = (0,)


class Checkpoints(HandMachine):
    kinds = (EchoHybrid,)


class FewCheckpoints(Checkpoints):
    states = (2,)
    fork = branch = begin = publish = save_and_load = load_elsewhere = drop = release_cache = press = None


class Pinning(Pages):
    """Little else than pins: a fault in them shows only after several calls."""

    budgets = (2, 4, None)
    fork = branch = begin = publish = save_and_load = load_elsewhere = drop = release_cache = None


class Rivals(Pinning):
    """Pins without end that compete for few pages."""

    budgets = (2,)
    times = (None,)
    priorities = (1, 1, 0)
    open = extend = insert = let_go = evict = press = ask = unpin = wait = None


class ShortPins(Pinning):
    """Pins that end soon, and room that is needed then."""

    budgets = (None,)
    times = (1, 2)
    open = run = extend = insert = let_go = ask = unpin = None


class Cursors(Pages):
    """Little else than cursors that are held on to."""

    pin = wait = fork = branch = save_and_load = load_elsewhere = evict = press = None


# Pages ------------------------------------------------------------------------------------------------------------


def a_reference_is_dropped_on_attach(patch: Patch) -> None:
    real = PrefixCache.take

    def take(self: PrefixCache, cursor: Cursor) -> np.ndarray:
        pages = real(self, cursor)
        if pages.shape[1] > 1:
            self.pool.release(pages[pages[:, -1] >= 0, -1])
        return pages

    patch.setattr(PrefixCache, "take", take)


def a_parent_is_evicted_before_its_child(patch: Patch) -> None:
    def on_idle(self: PrefixCache, ids: np.ndarray) -> None:
        for node in np.unique(self.index.node_of_page[ids]).tolist():
            self.queue.push(node)

    def give_up(self: PrefixCache, node: int, most: int = 1) -> np.ndarray:
        self.index.children[node] = 0
        return take_out(self, [node]) if self.idle(node) else np.zeros(0, np.int32)

    patch.setattr(PrefixCache, "_on_idle", on_idle)
    patch.setattr(PrefixCache, "_give_up", give_up)


def the_rows_of_a_partial_match_are_not_compared(patch: Patch) -> None:
    patch.setattr(Siblings, "_shared", lambda self, node, tokens: min(int(self._index.rows[node]), len(tokens)))


def a_tail_is_entered_with_a_row_too_many(patch: Patch) -> None:
    real = PrefixCache.publish_tail

    def publish_tail(
        self: PrefixCache, cursor: Cursor, tokens: np.ndarray, pages: np.ndarray, preview: str = ""
    ) -> None:
        if len(tokens) % self.pool.page_size < self.pool.page_size - 1:
            tokens = np.append(tokens, np.int32(0))
        real(self, cursor, tokens, pages, preview)

    patch.setattr(PrefixCache, "publish_tail", publish_tail)


def a_published_twin_is_not_taken_over(patch: Patch) -> None:
    patch.setattr(PagePool, "exchange", lambda self, column, old, new: None)


def a_drop_ends_no_epoch(patch: Patch) -> None:
    real = PrefixIndex.drop

    def drop(self: PrefixIndex, namespace: bytes) -> np.ndarray:
        epoch = self._epochs.get(namespace)
        pages = real(self, namespace)
        if epoch is not None:
            epoch.over = False
        return pages

    patch.setattr(PrefixIndex, "drop", drop)


def a_drop_forgets_the_pins(patch: Patch) -> None:
    patch.setattr(Pins, "__iter__", lambda self: iter(()))


# Pins -------------------------------------------------------------------------------------------------------------


def a_pinned_page_is_evicted(patch: Patch) -> None:
    def idle(self: PrefixCache, node: int) -> bool:
        pages = self.index.pages[node]
        pages = pages[pages >= 0]
        return bool((self.pool.refs[pages] - self.pins.refs()[pages] <= 1).all())

    def reclaim(self: PrefixCache, num_pages: int) -> int:
        for pin in self.pins:  # what it pins is looked at as well
            for node in self.index.node_of_page[pin.pages].tolist():
                self.queue.push(node)
        return real(self, num_pages)

    real = PrefixCache._reclaim
    patch.setattr(PrefixCache, "idle", idle)
    patch.setattr(PrefixCache, "_reclaim", reclaim)


def a_pinned_checkpoint_is_evicted(patch: Patch) -> None:
    patch.setattr(CheckpointStore, "_victims", lambda self: iter([*self._tails, *self._openings]))


def a_pin_never_expires(patch: Patch) -> None:
    patch.setattr(Pins, "expire", lambda self: 0)


def a_pin_displaces_its_equals(patch: Patch) -> None:
    real = Pins._displaced_by
    patch.setattr(Pins, "_displaced_by", lambda self, pages, priority: real(self, pages, priority + 1))


# Windows --------------------------------------------------------------------------------------------------------------


def a_window_gives_a_page_back_too_early(patch: Patch) -> None:
    real = PageTable.leave

    def leave(self: PageTable, position: int, windows: tuple[int, ...]) -> None:
        real(self, position + self.pool.page_size, windows)

    patch.setattr(PageTable, "leave", leave)


def a_match_ignores_what_the_window_needs(patch: Patch) -> None:
    patch.setattr(PrefixCache, "_has_pages", lambda self, cursor, depth, rows=0: True)


def places_without_pages_are_left(patch: Patch) -> None:
    patch.setattr(PrefixCache, "drop_places", lambda self, cursor: None)


# Checkpoints ------------------------------------------------------------------------------------------------------


def a_checkpoint_is_restored_at_the_wrong_position(patch: Patch) -> None:
    real = StatePool.restore

    def restore(self: StatePool, slot: int, snapshot: StateSnapshot) -> None:
        real(self, slot, StateSnapshot(snapshot.position - 1, snapshot.tensors))

    patch.setattr(StatePool, "restore", restore)


def a_checkpoint_is_restored_without_its_state(patch: Patch) -> None:
    def restore(self: StatePool, slot: int, snapshot: StateSnapshot) -> None:
        self.positions[slot] = snapshot.position

    patch.setattr(StatePool, "restore", restore)


# Files ------------------------------------------------------------------------------------------------------------


def a_load_swaps_two_pages(patch: Patch) -> None:
    real = saved._copy_in

    def copy_in(file, storage, wanted: np.ndarray, ids: np.ndarray) -> None:
        real(file, storage, wanted, np.concatenate([ids[1::-1], ids[2:]]))

    patch.setattr(saved, "_copy_in", copy_in)


def a_load_copies_nothing(patch: Patch) -> None:
    patch.setattr(saved, "_copy_in", lambda *args: None)


def what_was_loaded_never_falls_idle(patch: Patch) -> None:
    for kind in (TreeIntake, CheckpointIntake):
        real = kind.enter

        def enter(self, ids: np.ndarray, real=real) -> None:
            real(self, ids)
            if len(ids) > 1:
                (self.cache if isinstance(self, TreeIntake) else self.store).pool.share(ids[:1])

        patch.setattr(kind, "enter", enter)


def a_load_takes_more_than_there_is_room_for(patch: Patch) -> None:
    real = TreeIntake._choose
    patch.setattr(TreeIntake, "_choose", lambda self, room: real(self, room + 2))


def a_load_enters_a_child_without_its_parent(patch: Patch) -> None:
    real = TreeIntake._choose

    def choose(self: TreeIntake, room: int) -> None:
        self.saved.last_use = self.saved.last_use.copy()
        real(self, room)
        if self.new.sum() > 1:
            first = int(np.flatnonzero(self.new)[0])
            self.new[first] = False
            self.wanted[first] = False

    patch.setattr(TreeIntake, "_choose", choose)


def a_save_blanks_a_row_too_many(patch: Patch) -> None:
    real = SavedTree.rows_of_page.fget
    assert real is not None
    patch.setattr(SavedTree, "rows_of_page", property(lambda self: real(self) - 1))


def states_are_saved_in_another_order(patch: Patch) -> None:
    patch.setattr(SavedCheckpoints, "_pieces", lambda self, name: (tensors[name] for tensors in reversed(self.states)))


FAULTS: list[tuple[type, Callable[[Patch], None]]] = [
    (Pages, a_reference_is_dropped_on_attach),
    (Pages, a_parent_is_evicted_before_its_child),
    (Pages, a_published_twin_is_not_taken_over),
    (Exact, the_rows_of_a_partial_match_are_not_compared),
    (Exact, a_tail_is_entered_with_a_row_too_many),
    (Cursors, a_drop_ends_no_epoch),
    (HandMachine, a_drop_forgets_the_pins),
    (Pinning, a_pinned_page_is_evicted),
    (FewCheckpoints, a_pinned_checkpoint_is_evicted),
    (ShortPins, a_pin_never_expires),
    (Rivals, a_pin_displaces_its_equals),
    (Windows, a_window_gives_a_page_back_too_early),
    (Windows, a_match_ignores_what_the_window_needs),
    (Windows, places_without_pages_are_left),
    (Checkpoints, a_checkpoint_is_restored_at_the_wrong_position),
    (Checkpoints, a_checkpoint_is_restored_without_its_state),
    (HandMachine, a_load_swaps_two_pages),
    (HandMachine, a_load_copies_nothing),
    (HandMachine, what_was_loaded_never_falls_idle),
    (Pages, a_load_takes_more_than_there_is_room_for),
    (Pages, a_load_enters_a_child_without_its_parent),
    (Exact, a_save_blanks_a_row_too_many),
    (Checkpoints, states_are_saved_in_another_order),
]


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "fault"), FAULTS, ids=[fault.__name__ for _, fault in FAULTS])
def test_the_machine_finds(machine: type, fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    expect_found(machine, max_examples=600)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Pages, Exact, Windows, FewCheckpoints, Pinning, Rivals, ShortPins])
def test_the_machine_finds_nothing_without_a_fault(machine: type) -> None:
    expect_nothing(machine, max_examples=120)
