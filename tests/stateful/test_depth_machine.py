"""Sessions of every depth and cache window, and prefixes opened at every depth; and the faults that this must find."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from depth_machine import DepthMachine
from fakes import EchoAfter, EchoLooped, EchoModel
from planting import any_order, expect_found, expect_nothing

from paged.kv.page_table import PageTable
from paged.prefix.cache import PrefixCache
from paged.prefix.handles import PrefixHandle
from paged.session import Session
from paged.spec import KVView

Patch = pytest.MonkeyPatch

DepthMachine.TestCase.settings = any_order(50)

TestDepthMachine = DepthMachine.TestCase


class Looped(DepthMachine):
    kinds = (EchoLooped,)
    windows = (0,)


class After(DepthMachine):
    kinds = (EchoAfter,)
    windows = (0,)


class Windows(DepthMachine):
    kinds = (EchoModel,)
    windows = (0, 2, 5)


class OneWindow(Windows):
    windows = (5,)
    keep = open_kept = drop = rewind = None


def narrowing_keeps_the_pages(patch: Patch) -> None:
    def narrow(self: PageTable, groups: np.ndarray) -> None:
        rows = np.full(self._rows.shape, -1, np.int32)
        rows[groups] = self._rows[groups]
        self._rows, self.groups = rows, groups

    patch.setattr(PageTable, "narrow", narrow)


def a_window_is_left_a_token_too_early(patch: Patch) -> None:
    real = PageTable.leave
    patch.setattr(PageTable, "leave", lambda self, position, windows: real(self, position + 1, windows))


def a_shallow_match_serves_a_deep_session(patch: Patch) -> None:
    patch.setattr(PrefixCache, "_has_pages", lambda self, cursor, depth, rows=0: True)


def rows_of_a_shallow_page_are_copied_for_a_deep_session(patch: Patch) -> None:
    patch.setattr(PrefixCache, "_whole", lambda self, node, view: True)


def a_rewind_does_not_look_at_the_window(patch: Patch) -> None:
    def rewind(self: Session, n_past: int) -> None:
        if 0 <= n_past < self.n_past:
            self.table.truncate(-(-n_past // self.pool.page_size))
            self._n_past, self.logits = n_past, None

    patch.setattr(Session, "rewind", rewind)


def a_rewound_session_keeps_its_columns(patch: Patch) -> None:
    def rewind(self: Session, n_past: int) -> None:
        self._n_past, self.logits = min(n_past, self._n_past), None

    patch.setattr(Session, "rewind", rewind)


def a_prefix_serves_other_depths(patch: Patch) -> None:
    patch.setattr(PrefixHandle, "require", lambda self, view: None)


def a_prefix_gives_its_logits_to_other_depths(patch: Patch) -> None:
    real = PrefixHandle.__init__
    patch.setattr(PrefixHandle, "__init__", lambda self, session, shares: real(self, session, shares, own_logits=True))


def a_field_is_missing(patch: Patch, field: str) -> None:
    real = PrefixCache.namespace_key

    def key(self: PrefixCache, namespace: str = "", **fields: object) -> bytes:
        return real(self, namespace, **{name: value for name, value in fields.items() if name != field})

    patch.setattr(PrefixCache, "namespace_key", key)


def the_cache_window_is_missing_from_the_namespace(patch: Patch) -> None:
    a_field_is_missing(patch, "cache_window")


def the_depth_is_missing_from_the_namespace(patch: Patch) -> None:
    a_field_is_missing(patch, "loops")


def a_cache_window_is_heeded_by_the_first_group_alone(patch: Patch) -> None:
    real = KVView.first_columns

    def first_columns(self: KVView, position: int, page_size: int) -> np.ndarray:
        first = real(self, position, page_size)
        first[1:] = position // page_size
        return first

    patch.setattr(KVView, "first_columns", first_columns)


def a_drop_forgets_what_has_a_window(patch: Patch) -> None:
    patch.setattr(PrefixCache, "_keys_of", lambda self, namespace, **fields: [self.namespace_key(namespace, **fields)])


FAULTS: list[tuple[type, Callable[[Patch], None]]] = [
    (Looped, narrowing_keeps_the_pages),
    (Windows, a_window_is_left_a_token_too_early),
    (Looped, a_shallow_match_serves_a_deep_session),
    (Looped, rows_of_a_shallow_page_are_copied_for_a_deep_session),
    (Windows, a_rewind_does_not_look_at_the_window),
    (Windows, a_rewound_session_keeps_its_columns),
    (Looped, a_prefix_serves_other_depths),
    (Looped, a_prefix_gives_its_logits_to_other_depths),
    (Windows, the_cache_window_is_missing_from_the_namespace),
    (After, the_depth_is_missing_from_the_namespace),
    (OneWindow, a_cache_window_is_heeded_by_the_first_group_alone),
    (Windows, a_drop_forgets_what_has_a_window),
]


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "fault"), FAULTS, ids=[fault.__name__ for _, fault in FAULTS])
def test_the_machine_finds(machine: type, fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    expect_found(machine, max_examples=400)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Looped, After, Windows])
def test_the_machine_finds_nothing_without_a_fault(machine: type) -> None:
    expect_nothing(machine, max_examples=100)
