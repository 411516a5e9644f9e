"""Any order of calls on a checkpoint store, against a list of token tuples; and the faults that this must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from checkpoint_machine import CheckpointMachine
from planting import any_order, expect_found, expect_nothing

from paged.errors import OutOfPages
from paged.ops.dispatch import get_backend
from paged.prefix import checkpoints
from paged.prefix.checkpoints import Checkpoint, CheckpointStore

Patch = pytest.MonkeyPatch

CheckpointMachine.TestCase.settings = any_order(60)

TestCheckpointMachine = CheckpointMachine.TestCase

# Pages ------------------------------------------------------------------------------------------------------------


def a_hold_is_not_counted(patch: Patch) -> None:
    def hold(self: CheckpointStore, ids: np.ndarray) -> None:
        if self.pool.num_pages > len(self._holders):
            self._holders = np.resize(self._holders, self.pool.num_pages)
        new = ids[self._holders[ids] == 0]
        self.pool.hold(new)
        self._num_held += len(new)
        self._holders[ids] = 1

    patch.setattr(CheckpointStore, "_hold", hold)


def a_partial_page_is_not_copied(patch: Patch) -> None:
    def copied(self: CheckpointStore, source: np.ndarray) -> np.ndarray:
        self.pool.share(source)
        return source

    patch.setattr(CheckpointStore, "_copied", copied)


def a_copied_page_lacks_its_rows(patch: Patch) -> None:
    patch.setattr(type(get_backend("cpu")), "copy_pages", lambda self, storage, src, dst: None)


def a_copy_keeps_its_first_reference(patch: Patch) -> None:
    real = CheckpointStore._enter

    def enter(self: CheckpointStore, checkpoint: Checkpoint) -> None:
        if checkpoint.num_tokens % self.pool.page_size:
            self.pool.share(checkpoint.pages[:, -1])
        real(self, checkpoint)

    patch.setattr(CheckpointStore, "_enter", enter)


def the_source_is_not_protected(patch: Patch) -> None:
    def attach(self: CheckpointStore, checkpoint: Checkpoint) -> np.ndarray:
        pages, whole = checkpoint.pages.copy(), checkpoint.num_tokens // self.pool.page_size
        if whole < pages.shape[1]:
            pages[:, -1] = self._copied(pages[:, -1].copy())
        self.pool.share(pages[:, :whole].ravel())
        self._touch(checkpoint)
        checkpoint.num_hits += 1
        self.stats.checkpoint_hits += 1
        return pages

    patch.setattr(CheckpointStore, "attach", attach)


def an_attach_that_fails_keeps_its_pages(patch: Patch) -> None:
    real = CheckpointStore.attach

    def attach(self: CheckpointStore, checkpoint: Checkpoint) -> np.ndarray:
        try:
            return real(self, checkpoint)
        except OutOfPages:
            self.pool.share(checkpoint.pages.ravel())
            raise

    patch.setattr(CheckpointStore, "attach", attach)


def a_page_goes_with_its_first_holder(patch: Patch) -> None:
    real = CheckpointStore.drop

    def drop(self: CheckpointStore, checkpoint: Checkpoint) -> None:
        self._holders[checkpoint.pages.ravel()] = 1
        real(self, checkpoint)

    patch.setattr(CheckpointStore, "drop", drop)


# Looking up -------------------------------------------------------------------------------------------------------


def tokens_are_compared_on_the_first_page_only(patch: Patch) -> None:
    real = checkpoints._common

    def common(a: np.ndarray, b: np.ndarray) -> int:
        first = real(a[:4], b[:4])
        return first if first < 4 else min(len(a), len(b))

    patch.setattr(checkpoints, "_common", common)


def only_the_neighbour_is_looked_at(patch: Patch) -> None:
    real = CheckpointStore.find

    def find(self: CheckpointStore, namespace: bytes, tokens: np.ndarray) -> Checkpoint | None:
        entries = self._by_tokens.get(namespace, ())
        found = real(self, namespace, tokens)
        before = [c for c in entries if checkpoints._order_of(c) <= checkpoints._order(tokens[:-1])]
        return found if before and found is before[-1] else None

    patch.setattr(CheckpointStore, "find", find)


def a_prompt_may_be_its_checkpoint(patch: Patch) -> None:
    real = CheckpointStore.find

    def find(self: CheckpointStore, namespace: bytes, tokens: np.ndarray) -> Checkpoint | None:
        return real(self, namespace, np.append(tokens, np.int32(0)).astype(np.int32))

    patch.setattr(CheckpointStore, "find", find)


def a_dropped_one_stays_above_others(patch: Patch) -> None:
    real = checkpoints._opened_by

    def opened_by(checkpoint: Checkpoint, entries) -> Iterator[Checkpoint]:
        return iter(()) if checkpoint not in entries else real(checkpoint, entries)

    patch.setattr(checkpoints, "_opened_by", opened_by)


def namespaces_are_one(patch: Patch) -> None:
    real = CheckpointStore.find
    patch.setattr(CheckpointStore, "find", lambda self, namespace, tokens: real(self, b"", tokens))


def a_hint_need_not_pay(patch: Patch) -> None:
    real = CheckpointStore.stop_at
    patch.setattr(
        CheckpointStore,
        "stop_at",
        lambda self, namespace, tokens, matched, stable_at=0: (
            stable_at if matched < stable_at < len(tokens) else real(self, namespace, tokens, matched)
        ),
    )


# Budgets ----------------------------------------------------------------------------------------------------------


def openings_go_like_tails(patch: Patch) -> None:
    patch.setattr(CheckpointStore, "_victims", lambda self: (c for c in list(self) if not c.pins))


def pins_hold_nothing(patch: Patch) -> None:
    patch.setattr(CheckpointStore, "_victims", lambda self: iter([*self._tails, *self._openings]))


def the_newest_goes(patch: Patch) -> None:
    def trim(self: CheckpointStore, newest: Checkpoint) -> None:
        for checkpoint in self._victims():
            if self._over_budget():
                self._evict(checkpoint)

    patch.setattr(CheckpointStore, "_trim", trim)


def bytes_are_not_bounded(patch: Patch) -> None:
    patch.setattr(CheckpointStore, "_over_budget", lambda self: len(self) > self.max_states)


def a_use_does_not_count(patch: Patch) -> None:
    def touch(self: CheckpointStore, checkpoint: Checkpoint, promote: bool = False) -> None:
        if promote and not checkpoint.opening:
            del self._tails[checkpoint]
            checkpoint.opening = True
            self._openings[checkpoint] = None

    patch.setattr(CheckpointStore, "_touch", touch)


def another_donor_promotes_nothing(patch: Patch) -> None:
    real = CheckpointStore.insert

    def insert(self: CheckpointStore, namespace, tokens, pages, snapshot, opening=False, donor=0, preview=""):
        same = self._same(namespace, tokens)
        donor = donor if same is None else same.donor
        return real(self, namespace, tokens, pages, snapshot, opening, donor, preview)

    patch.setattr(CheckpointStore, "insert", insert)


def checkpoints_in_use_go_too(patch: Patch) -> None:
    def reclaim(self: CheckpointStore, num_pages: int) -> int:
        freed = 0
        for checkpoint in self._victims():
            if freed < num_pages:
                freed += self._evict(checkpoint)
        return freed

    patch.setattr(CheckpointStore, "reclaim", reclaim)


def a_state_of_elsewhere_is_kept(patch: Patch) -> None:
    real = CheckpointStore.insert

    def insert(self: CheckpointStore, namespace, tokens, pages, snapshot, *args, **how):
        there = checkpoints.StateSnapshot(len(tokens), snapshot.tensors)
        return real(self, namespace, tokens, pages, there, *args, **how)

    patch.setattr(CheckpointStore, "insert", insert)


FAULTS = [
    a_hold_is_not_counted,
    a_partial_page_is_not_copied,
    a_copied_page_lacks_its_rows,
    a_copy_keeps_its_first_reference,
    the_source_is_not_protected,
    an_attach_that_fails_keeps_its_pages,
    a_page_goes_with_its_first_holder,
    tokens_are_compared_on_the_first_page_only,
    only_the_neighbour_is_looked_at,
    a_prompt_may_be_its_checkpoint,
    a_dropped_one_stays_above_others,
    namespaces_are_one,
    a_hint_need_not_pay,
    openings_go_like_tails,
    pins_hold_nothing,
    the_newest_goes,
    bytes_are_not_bounded,
    a_use_does_not_count,
    another_donor_promotes_nothing,
    checkpoints_in_use_go_too,
    a_state_of_elsewhere_is_kept,
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])
def test_the_oracle_alone_finds(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    monkeypatch.setattr(CheckpointStore, "check", lambda self: None)
    expect_found(CheckpointMachine, max_examples=600)


@pytest.mark.slow
def test_the_machine_finds_nothing_without_a_fault() -> None:
    expect_nothing(CheckpointMachine, max_examples=100)
