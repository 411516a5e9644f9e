"""KVView: which page groups a sequence of a depth and a cache window uses, how far it sees in each, what may lack."""

from __future__ import annotations

import numpy as np
import pytest

from paged.spec import KVSpec, LoopGroups

PLAIN = KVSpec(2, 1, 8)
WINDOWS = KVSpec(2, 1, 8, 3, (5, 0, 9))
LOOPED = KVSpec(2, 1, 8, 5, (0,) * 5, LoopGroups(1, 4, 2))
AFTER = KVSpec(2, 1, 8, 6, (0,) * 6, LoopGroups(2, 4, 2, after_group=1))


def test_a_plain_sequence_uses_every_group_and_may_lack_nothing() -> None:
    view = PLAIN.view()
    assert (view.loops, view.cache_window, view.num_groups) == (0, 0, 1)
    assert view.groups.tolist() == [0] and view.uses.tolist() == [True]
    assert view.loose.tolist() == view.wanted.tolist() == []
    assert view.fields == {"cache_window": None, "loops": None}


def test_equal_views_are_one_object() -> None:
    assert PLAIN.view() is KVSpec(2, 1, 8).view(None, 0) is PLAIN.view(0)
    assert LOOPED.view() is LOOPED.view(2)
    assert LOOPED.view() is not LOOPED.view(3)
    assert PLAIN.view(cache_window=4) is PLAIN.view(None, 4)


@pytest.mark.parametrize(
    ("cache_window", "windows", "loose"),
    [(0, [5, 0, 9], [0, 2]), (1, [1, 1, 1], [0, 1, 2]), (7, [5, 7, 7], [0, 1, 2]), (20, [5, 20, 9], [0, 1, 2])],
)
def test_a_cache_window_narrows_every_group(cache_window: int, windows: list[int], loose: list[int]) -> None:
    view = WINDOWS.view(cache_window=cache_window)
    assert view.windows.tolist() == windows and view.windows.dtype == np.int32
    assert view.loose.tolist() == view.wanted.tolist() == loose
    assert view.fields["cache_window"] == (cache_window or None)


@pytest.mark.parametrize(
    ("loops", "groups", "wanted"), [(1, [0, 1], []), (2, [0, 1, 2], [2]), (4, [0, 1, 2, 3, 4], [2, 3, 4])]
)
def test_a_depth_uses_the_groups_of_its_iterations(loops: int, groups: list[int], wanted: list[int]) -> None:
    view = LOOPED.view(loops)
    assert view.groups.tolist() == groups and np.flatnonzero(view.uses).tolist() == groups
    assert view.num_groups == len(groups)
    assert view.loose.tolist() == [2, 3, 4], "prefixes of all depths have the first iteration alone in common"
    assert view.wanted.tolist() == wanted


def test_without_a_depth_the_models_own_is_meant() -> None:
    assert LOOPED.view().loops == AFTER.view().loops == 2


def test_rows_belong_to_a_depth_only_where_layers_follow_the_block() -> None:
    assert LOOPED.view(3).fields["loops"] is None
    assert AFTER.view(3).fields == {"cache_window": None, "loops": 3}
    assert AFTER.view(3).groups.tolist() == [0, 1, 2, 3, 4]
    assert AFTER.view(3).loose.tolist() == [3, 4, 5]


def test_depth_and_cache_window_go_together() -> None:
    view = LOOPED.view(2, 6)
    assert view.windows.tolist() == [6] * 5
    assert view.loose.tolist() == [0, 1, 2, 3, 4] and view.wanted.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("position", "first"),
    [(0, [0, 0, 0]), (4, [0, 0, 0]), (8, [1, 0, 0]), (11, [1, 0, 0]), (12, [2, 0, 1]), (40, [9, 0, 8])],
)
def test_the_first_page_that_a_query_sees(position: int, first: list[int]) -> None:
    assert WINDOWS.view().first_columns(position, 4).tolist() == first


@pytest.mark.parametrize(
    ("spec", "arguments", "message"),
    [
        (PLAIN, (None, -1), "cache_window must be 0 .* or more positions, got -1"),
        (PLAIN, (2,), "this model does not loop: loops must be None or 0, got 2"),
        (LOOPED, (0,), "loops must be between 1 and this model's 4, got 0"),
        (LOOPED, (5,), "loops must be between 1 and this model's 4, got 5"),
    ],
)
def test_what_cannot_be_is_refused_with_both_numbers(spec: KVSpec, arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec.view(*arguments)


@pytest.mark.parametrize("value", [True, 2.0, float("nan"), float("inf"), "2", [2], np.float32(2)])
def test_depth_and_window_are_integers(value) -> None:
    with pytest.raises(TypeError, match="loops must be an integer, got "):
        LOOPED.view(value)
    with pytest.raises(TypeError, match="cache_window must be an integer, got "):
        PLAIN.view(None, value)
    with pytest.raises(ValueError, match="cache_window must be at most 2147483647 positions, got 2147483648"):
        PLAIN.view(None, 2**31)


def test_an_integer_of_numpy_does_not_stand_in_for_an_equal_one() -> None:
    """Views are remembered: the first of two equal numbers must not lend its type to every later sequence."""
    view = AFTER.view(np.int64(4), np.int64(41))
    assert view is AFTER.view(4, 41)
    assert [type(value) for value in view.fields.values()] == [int, int]
