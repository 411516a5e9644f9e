"""CheckpointStore: exact page ids, kinds, budgets and pins on tiny pools, with real pages and real states."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from byhand import expect_check_fails, span
from checkpoint_machine import STATE, Lab, expect_state, ids

from paged.errors import GeometryMismatch, OutOfPages
from paged.kv.pages import PagePool
from paged.kv.state import StatePool, StateSnapshot
from paged.ops.dispatch import get_backend
from paged.prefix import checkpoints
from paged.prefix.checkpoints import CheckpointStore
from paged.prefix.stats import PrefixStats
from paged.spec import StatePlane, StateSpec

SNAPSHOT = STATE.num_bytes  # 16
PAGE = 256  # bytes of a page of the lab at page size 4: K and V of one head of 8 fp32 numbers


def found(lab: Lab, prompt, namespace: bytes = b"") -> int:
    """Tokens of the checkpoint that `prompt` would attach."""
    checkpoint = lab.store.find(namespace, ids(*prompt))
    return 0 if checkpoint is None else checkpoint.num_tokens


# Keeping one, and attaching it --------------------------------------------------------------------------------------


def test_six_evaluated_tokens_are_one_checkpoint_on_two_pages_of_which_it_copied_the_partial_one() -> None:
    lab = Lab(10, 4)
    donor = lab.run(span(1, 6))
    assert donor.table.rows.tolist() == [[0, 1]]
    checkpoint = donor.insert(preview="hello")
    assert checkpoint is not None
    assert checkpoint.pages.tolist() == [[0, 2]]
    assert checkpoint.tokens.tolist() == span(1, 6) and checkpoint.num_tokens == 6
    assert (checkpoint.opening, checkpoint.preview, checkpoint.pins, checkpoint.num_hits) == (False, "hello", 0, 0)
    assert lab.pool.refs[:4].tolist() == [2, 1, 1, 0]
    assert lab.pool.held[:4].tolist() == [True, False, True, False]
    assert len(lab.store) == 1 and lab.store.held_pages == 2
    assert lab.store.num_bytes == SNAPSHOT + 2 * PAGE
    lab.check()


def test_the_same_tokens_again_are_touched_and_not_kept_twice() -> None:
    lab = Lab(10, 4)
    donor = lab.run(span(1, 6))
    first = donor.insert()
    lab.leave(span(50, 4))
    refs = lab.pool.refs.copy()
    assert donor.insert() is first
    assert np.array_equal(lab.pool.refs, refs)
    assert lab.kept() == [span(50, 4), span(1, 6)]  # it was used last
    assert lab.store.stats.checkpoint_inserts == 2
    lab.check()


def test_a_prompt_that_goes_on_shares_the_whole_pages_and_gets_a_copy_of_the_partial_one() -> None:
    lab = Lab(10, 4)
    donor = lab.run(span(1, 6))
    donor.insert()
    warm = lab.stream()
    assert warm.attach(span(1, 9)) == 6
    assert warm.table.rows.tolist() == [[0, 3]]
    assert lab.pool.refs[:5].tolist() == [3, 1, 1, 1, 0]
    warm.expect_exact()
    warm.eval(span(7, 3))
    warm.expect_exact()
    assert warm.table.rows.tolist() == [[0, 3, 4]]
    lab.check()


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        (span(1, 9), 6),
        (span(1, 7), 6),
        (span(1, 6), 0),  # equal to the checkpoint: nothing would be left to compute
        (span(1, 5), 0),
        ([*span(1, 5), 99, *span(7, 3)], 0),  # leaves it at index 5
        ([99, *span(2, 8)], 0),
        ([], 0),
        ([1], 0),
    ],
)
def test_a_prompt_attaches_only_what_it_begins_with_whole_and_goes_on_from(prompt: list[int], want: int) -> None:
    lab = Lab(10, 4)
    lab.leave(span(1, 6))
    before = lab.pool.refs.copy()
    assert found(lab, prompt) == want
    assert np.array_equal(lab.pool.refs, before)


def test_a_checkpoint_of_whole_pages_needs_no_copy_of_any() -> None:
    lab = Lab(2, 4)
    donor = lab.run(span(0, 8))
    checkpoint = donor.insert()
    assert checkpoint is not None and checkpoint.pages.tolist() == [[0, 1]]
    warm = lab.stream()
    assert warm.attach(span(0, 9)) == 8
    assert warm.table.rows.tolist() == [[0, 1]]
    assert lab.pool.refs.tolist() == [3, 3]
    warm.expect_exact()
    lab.check()


def test_every_group_has_pages_of_its_own() -> None:
    lab = Lab(12, 4, num_groups=2)
    donor = lab.run(span(0, 6))
    assert donor.table.rows.tolist() == [[0, 2], [1, 3]]
    checkpoint = donor.insert()
    assert checkpoint is not None and checkpoint.pages.tolist() == [[0, 4], [1, 5]]
    assert lab.store.held_pages == 4
    warm = lab.stream()
    assert warm.attach(span(0, 7)) == 6
    assert warm.table.rows.tolist() == [[0, 6], [1, 7]]
    warm.expect_exact()
    lab.check()


def test_a_checkpoint_keeps_what_it_took_while_its_donor_moves_on() -> None:
    lab = Lab(10, 4)
    donor = lab.run(span(1, 6))
    checkpoint = donor.insert()
    assert checkpoint is not None
    content = lab.bytes_of(checkpoint.pages)
    donor.eval(span(70, 8))  # into the rest of its own page 1, in place
    assert donor.table.rows.tolist() == [[0, 1, 3, 4]]
    donor.expect_exact()
    assert lab.bytes_of(checkpoint.pages) == content
    expect_state(checkpoint.snapshot, span(1, 6))
    donor.release()
    assert lab.bytes_of(checkpoint.pages) == content
    warm = lab.stream()
    assert warm.attach(span(1, 9)) == 6
    warm.expect_exact()
    lab.check()


def test_two_sequences_go_on_from_one_checkpoint_without_seeing_each_other() -> None:
    lab = Lab(12, 4)
    lab.leave(span(1, 6))
    one, two = lab.stream(), lab.stream()
    for stream, first in ((one, 40), (two, 60)):
        assert stream.attach([*span(1, 6), *span(first, 5)]) == 6
    for stream, first in ((one, 40), (two, 60), (one, 80)):
        stream.eval(span(first, 3))
    one.expect_exact()
    two.expect_exact()
    lab.check()


def test_what_the_caller_passed_may_change_afterwards() -> None:
    lab = Lab(10, 4)
    donor = lab.run(span(0, 8))
    tokens, pages = ids(*span(0, 8)), donor.table.rows.copy()
    checkpoint = lab.store.insert(b"", tokens, pages, lab.states.snapshot(donor.slot))
    tokens[:], pages[:] = 5, 9
    assert checkpoint is not None
    assert checkpoint.tokens.tolist() == span(0, 8) and checkpoint.pages.tolist() == [[0, 1]]
    assert found(lab, span(0, 9)) == 8
    lab.check()


def test_pages_past_the_tokens_stay_the_donors() -> None:
    lab = Lab(10, 4)
    donor = lab.run(span(0, 4))
    snapshot = lab.states.snapshot(donor.slot)
    donor.eval(span(4, 6))
    checkpoint = lab.store.insert(b"", ids(*span(0, 4)), donor.table.rows, snapshot)
    assert checkpoint is not None and checkpoint.pages.tolist() == [[0]]
    assert lab.pool.refs[:3].tolist() == [2, 1, 1]
    lab.check()


# Nothing kept -------------------------------------------------------------------------------------------------------


def test_a_state_at_another_position_keeps_nothing() -> None:
    lab = Lab(10, 4)
    donor = lab.run(span(0, 7))
    early = lab.states.snapshot(donor.slot)
    donor.eval([7])
    late = lab.states.snapshot(donor.slot)
    before = lab.pool.refs.copy()
    assert lab.store.insert(b"", ids(*donor.tokens), donor.table.rows, early) is None
    assert lab.store.insert(b"", ids(*span(0, 7)), donor.table.rows, late) is None
    assert len(lab.store) == 0 and np.array_equal(lab.pool.refs, before)
    assert lab.store.stats == PrefixStats()
    lab.check()


def test_no_tokens_keep_nothing() -> None:
    lab = Lab(10, 4)
    assert lab.stream().insert() is None
    assert len(lab.store) == 0


@pytest.mark.parametrize("max_states", [0, -1, -16])
def test_no_states_allowed_keep_nothing_and_stop_nowhere(max_states: int) -> None:
    lab = Lab(10, 4, max_states=max_states)
    donor = lab.run(span(0, 8))
    assert donor.insert(opening=True) is None
    assert lab.store.max_states == 0 and lab.store.held_pages == 0 and found(lab, span(0, 9)) == 0
    assert lab.store.stop_at(b"", ids(*span(0, 20)), 0, 12) == 0
    assert lab.pool.refs[:3].tolist() == [1, 1, 0]
    lab.check()


def test_without_a_page_for_the_copy_nothing_is_kept_and_the_refusal_is_counted() -> None:
    lab = Lab(2, 4)
    donor = lab.run(span(0, 6))
    assert donor.insert() is None
    assert lab.store.stats.checkpoints_refused == 1 and lab.store.stats.checkpoint_inserts == 0
    assert lab.pool.refs.tolist() == [1, 1] and len(lab.store) == 0
    lab.check()
    donor.eval(span(6, 2))  # now its pages are whole
    assert donor.insert() is not None
    lab.check()


def test_a_refusal_drops_nothing_of_others() -> None:
    lab = Lab(4, 4)
    lab.leave(span(50, 4))
    lab.stream().attach(span(50, 5))
    donor = lab.run(span(0, 10))
    assert lab.pool.num_free == 0
    assert donor.insert() is None
    assert lab.kept() == [span(50, 4)]
    lab.check()


def test_room_for_the_copy_is_made_from_other_checkpoints() -> None:
    lab = Lab(3, 4)
    lab.leave(span(50, 4))
    donor = lab.run(span(0, 6))
    checkpoint = donor.insert()
    assert checkpoint is not None and checkpoint.pages.tolist() == [[1, 0]]
    assert lab.kept() == [span(0, 6)]
    assert lab.store.stats.checkpoint_evictions == 1
    lab.check()


@pytest.mark.parametrize("verb", ["insert", "attach"])
def test_a_copy_that_fails_midway_changes_nothing(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(10, 4)
    donor, warm = lab.run(span(0, 6)), lab.stream()
    if verb == "attach":
        donor.insert()

    def copy_pages(self, storage, src, dst) -> None:
        raise RuntimeError("the device is gone")

    before = lab.pool.refs.copy()
    with monkeypatch.context() as patch:
        patch.setattr(type(get_backend("cpu")), "copy_pages", copy_pages)
        with pytest.raises(RuntimeError, match="the device is gone"):
            donor.insert() if verb == "insert" else warm.attach(span(0, 9))
    assert np.array_equal(lab.pool.refs, before)
    assert len(lab.store) == (verb == "attach") and lab.store.stats.checkpoint_hits == 0
    lab.check()
    assert donor.insert() is not None


@pytest.mark.parametrize(
    ("pages", "match"),
    [
        (np.zeros((1, 1), np.int32), r"needs 2 pages in each of 1 groups, got an array \(1, 1\)"),
        (np.zeros((2, 2), np.int32), r"in each of 1 groups, got an array \(2, 2\)"),
        (np.zeros(2, np.int32), r"got an array \(2,\)"),
        (np.array([[0, 7]], np.int32), "live pages only"),
    ],
)
def test_pages_that_cannot_be_the_tokens_are_refused(pages: np.ndarray, match: str) -> None:
    lab = Lab(10, 4)
    donor = lab.run(span(0, 6))
    before = lab.pool.refs.copy()
    with pytest.raises(ValueError, match=match):
        lab.store.insert(b"", ids(*span(0, 6)), pages, lab.states.snapshot(donor.slot))
    assert np.array_equal(lab.pool.refs, before) and len(lab.store) == 0
    lab.check()


def test_a_negative_byte_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_state_bytes must be 0 \(no bound\) or more, got -1"):
        CheckpointStore(PagePool(4), 1, max_state_bytes=-1)


# Attaching under pressure -------------------------------------------------------------------------------------------


def test_an_attach_without_a_page_for_the_copy_changes_nothing() -> None:
    lab = Lab(3, 4)
    donor = lab.run(span(0, 6))
    checkpoint = donor.insert()  # page 2 is idle now, and the only page to be had
    assert checkpoint is not None
    lab.store.drop(checkpoint)
    checkpoint = donor.insert()
    assert checkpoint is not None
    other = lab.stream()
    refs, tick = lab.pool.refs.copy(), checkpoint.last_use
    with pytest.raises(OutOfPages):
        other.attach(span(0, 9))
    assert np.array_equal(lab.pool.refs, refs)
    assert (checkpoint.last_use, checkpoint.num_hits, checkpoint.last_hit_at) == (tick, 0, 0.0)
    assert lab.store.stats.checkpoint_hits == 0 and checkpoint in lab.store
    assert lab.kept() == [span(0, 6)]
    lab.check()


def test_room_for_the_copy_never_comes_from_the_checkpoint_that_is_attached() -> None:
    lab = Lab(4, 4)
    oldest = lab.leave(span(0, 6))  # pages 0 and 2, so page 1 is free
    newer = lab.leave(span(50, 8))
    assert oldest is not None and newer is not None and lab.pool.num_free == 0
    warm = lab.stream()
    assert warm.attach(span(0, 9)) == 6
    assert oldest in lab.store and newer not in lab.store
    warm.expect_exact()
    lab.check()


def test_a_dropped_checkpoint_cannot_be_attached_or_dropped_again() -> None:
    lab = Lab(10, 4)
    checkpoint = lab.leave(span(0, 6))
    assert checkpoint is not None and checkpoint in lab.store
    lab.store.drop(checkpoint)
    assert checkpoint not in lab.store
    with pytest.raises(ValueError, match="of 6 tokens was dropped; look it up again"):
        lab.store.attach(checkpoint)
    with pytest.raises(ValueError, match="of 6 tokens was dropped before"):
        lab.store.drop(checkpoint)
    assert lab.pool.num_free == 10
    lab.check()


def test_a_hit_is_counted_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 200.0, 300.0])
    monkeypatch.setattr(checkpoints.time, "time", lambda: next(clock))
    lab = Lab(10, 4)
    checkpoint = lab.leave(span(0, 6))
    assert checkpoint is not None and (checkpoint.born_at, checkpoint.last_hit_at) == (100.0, 0.0)
    for hits, at in ((1, 200.0), (2, 300.0)):
        lab.stream().attach(span(0, 7))
        assert (checkpoint.num_hits, checkpoint.last_hit_at) == (hits, at)
        assert lab.store.stats.checkpoint_hits == hits
    assert checkpoint.born_at == 100.0


def test_a_state_of_another_geometry_is_refused_and_the_slot_untouched() -> None:
    lab = Lab(10, 4)
    checkpoint = lab.leave(span(0, 6))
    assert checkpoint is not None
    other = StatePool(StateSpec((StatePlane("digest", (2,), "int64"), StatePlane("sums", (2,)))), 2)
    other.planes["sums"][1] = 3.0
    other.positions[1] = 5
    with pytest.raises(GeometryMismatch):
        other.restore(1, checkpoint.snapshot)
    assert other.positions.tolist() == [0, 5] and other.planes["sums"][1].tolist() == [3.0, 3.0]
    lab.check()


# Which one ----------------------------------------------------------------------------------------------------------


def test_the_deepest_checkpoint_that_the_prompt_begins_with_is_found() -> None:
    lab = Lab(30, 4)
    for n in (8, 3, 12, 5):
        lab.leave(span(0, n))
    lab.leave([*span(0, 6), 90, 91])
    got = [found(lab, span(0, n)) for n in range(16)]
    assert got == [0, 0, 0, 0, 3, 3, 5, 5, 5, 8, 8, 8, 8, 12, 12, 12]
    assert found(lab, [*span(0, 7), 99]) == 5
    assert found(lab, [*span(0, 6), 90, 91, 0]) == 8
    assert found(lab, [*span(0, 6), 90]) == 5


def test_with_checkpoints_at_32_and_96_a_prompt_equal_for_80_tokens_attaches_at_32() -> None:
    lab = Lab(20, 16)
    donor = lab.run(span(0, 32))
    donor.insert()
    donor.eval(span(32, 64))
    donor.insert()
    assert donor.table.num_pages == 6
    warm = lab.stream()
    assert warm.attach([*span(0, 80), *span(500, 40)]) == 32
    assert warm.table.rows.tolist() == [[0, 1]]
    warm.eval([*span(32, 48), *span(500, 40)])
    warm.expect_exact()
    lab.check()


@pytest.mark.parametrize("n", [47, 48, 49])
def test_a_checkpoint_exactly_where_two_prompts_part_is_used(n: int) -> None:
    lab = Lab(20, 16)
    lab.leave(span(0, n))
    warm = lab.stream()
    assert warm.attach([*span(0, n), 900]) == n
    warm.eval([900])
    warm.expect_exact()
    lab.check()


def test_one_namespace_never_sees_another() -> None:
    lab = Lab(10, 4)
    lab.leave(span(0, 6), b"a")
    lab.leave(span(0, 3), b"b")
    assert [found(lab, span(0, 9), name) for name in (b"a", b"b", b"")] == [6, 3, 0]
    assert [lab.store.common(name, ids(*span(0, 9))) for name in (b"a", b"b", b"")] == [6, 3, 0]
    assert lab.store.stop_at(b"", ids(*span(0, 9)), 0) == 0


def test_any_int32_is_a_token() -> None:
    lab = Lab(20, 4)
    edges = [-(2**31), -1, 0, 1, 255, 256, 2**31 - 1]
    pages = lab.pool.alloc(2)[None]
    for a in edges:
        for b in edges:
            lab.store.insert(b"", ids(a, b, 7, 7), pages, StateSnapshot(4, {}))
    assert len(lab.store) == 16
    lab.store.check()
    kept = {tuple(c.tokens.tolist()) for c in lab.store}
    for a in edges:
        for b in edges:
            got = lab.store.find(b"", ids(a, b, 7, 7, 7))
            assert (got is not None) == ((a, b, 7, 7) in kept)
            assert got is None or got.tokens.tolist() == [a, b, 7, 7]


@pytest.mark.parametrize("vocabulary", [2, 3])
def test_find_and_common_agree_with_a_search_through_all(vocabulary: int) -> None:
    draw = random.Random(vocabulary)
    pool = PagePool(4, 16)
    store, pages = CheckpointStore(pool, 1, 10**6), pool.alloc(1)[None]
    pool.max_pages = 10**6
    kept: set[tuple[int, ...]] = set()
    for _ in range(300):
        tokens = tuple(draw.randrange(vocabulary) for _ in range(draw.randrange(1, 12)))
        kept.add(tokens)
        store.insert(b"", ids(*tokens), pages, StateSnapshot(len(tokens), {}))
        if draw.random() < 0.3:
            gone = draw.choice(list(store))
            kept.remove(tuple(gone.tokens.tolist()))
            store.drop(gone)
        prompt = [draw.randrange(vocabulary) for _ in range(draw.randrange(0, 14))]
        best = max((k for k in kept if len(k) < len(prompt) and k == tuple(prompt[: len(k)])), key=len, default=())
        got = store.find(b"", ids(*prompt))
        assert (() if got is None else tuple(got.tokens.tolist())) == best
        shared = max(
            (n for k in kept for n in range(len(k) + 1) if n < max(1, len(prompt)) and k[:n] == tuple(prompt[:n])),
            default=0,
        )
        assert store.common(b"", ids(*prompt)) == shared
    store.check()


def test_looking_up_touches_nothing() -> None:
    lab = Lab(20, 4)
    for n in (4, 6, 9):
        lab.leave(span(0, n))
    uses = [c.last_use for c in lab.store]
    refs = lab.pool.refs.copy()
    for _ in range(1000):
        found(lab, span(0, 10))
        found(lab, span(0, 5))
        lab.store.common(b"", ids(*span(0, 8)))
        lab.store.stop_at(b"", ids(*span(0, 8)), 0)
        lab.store.idle_pages(next(iter(lab.store)))
    assert np.array_equal(lab.pool.refs, refs)
    assert lab.kept() == [span(0, 4), span(0, 6), span(0, 9)]
    assert [c.last_use for c in lab.store] == uses and not any(c.num_hits for c in lab.store)
    assert lab.store.stats == PrefixStats(checkpoint_inserts=3)


@pytest.mark.parametrize("shape", ["apart", "comb", "nested"])
@pytest.mark.parametrize("n", [4, 400])
def test_a_look_up_compares_tokens_with_two_at_most_however_many_checkpoints_there_are(
    shape: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PagePool(1, 512)
    store, pages = CheckpointStore(pool, 1, 10**6), pool.alloc(1)[None]
    pool.max_pages = 10**6
    for i in range(1, n + 1):
        tokens = {"apart": [i + 5, 5, 5], "comb": [5] * i + [1], "nested": [5] * i}[shape]
        store.insert(b"", ids(*tokens), pages, StateSnapshot(len(tokens), {}))
    store.check()
    calls = {"_common": 0, "_order": 0}
    for name in calls:
        real = getattr(checkpoints, name)

        def counted(*args, real=real, name=name):
            calls[name] += 1
            return real(*args)

        monkeypatch.setattr(checkpoints, name, counted)
    prompt = ids(*[5] * (n // 2), 9, 9)
    got = store.find(b"", prompt)
    assert (0 if got is None else got.num_tokens) == (n // 2 if shape == "nested" else 0)
    # nested: the neighbour of the prompt, and that of what they share, instead of every one between the two
    assert (
        calls
        == {
            "apart": {"_common": 0, "_order": 1},
            "comb": {"_common": 1, "_order": 1},
            "nested": {"_common": 2, "_order": 2},
        }[shape]
    )
    calls["_common"] = calls["_order"] = 0
    assert store.common(b"", prompt) == (0 if shape == "apart" else n // 2)
    assert calls["_common"] <= 2 and calls["_order"] == 1


# Where to stop ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matched", "stable_at", "want"),
    [(0, 12, 12), (8, 12, 12), (9, 12, 0), (0, 20, 0), (0, 25, 0), (0, 4, 4), (0, 3, 0), (0, 19, 19), (0, 0, 0)],
)
def test_a_hint_is_taken_from_a_page_past_the_match_to_the_last_token(matched: int, stable_at: int, want: int) -> None:
    assert Lab(20, 4).store.stop_at(b"", ids(*span(0, 20)), matched, stable_at) == want


@pytest.mark.parametrize(
    ("matched", "stable_at", "want"), [(0, 0, 10), (0, 12, 12), (0, 20, 10), (6, 0, 10), (7, 0, 0), (8, 0, 0)]
)
def test_without_a_hint_the_prefill_stops_where_the_prompt_leaves_an_earlier_one(
    matched: int, stable_at: int, want: int
) -> None:
    lab = Lab(20, 4)
    lab.leave([*span(0, 10), *span(200, 10)])
    lab.leave([*span(0, 7), *span(300, 10)])
    assert lab.store.stop_at(b"", ids(*span(0, 20)), matched, stable_at) == want


def test_an_earlier_one_that_contains_the_whole_prompt_stops_it_one_token_short() -> None:
    lab = Lab(20, 4)
    lab.leave(span(0, 30))
    assert lab.store.common(b"", ids(*span(0, 20))) == 19
    assert lab.store.stop_at(b"", ids(*span(0, 20)), 0) == 19
    assert lab.store.common(b"", ids(*span(0, 30))) == 29
    assert lab.store.common(b"", ids(*span(0, 35))) == 30
    assert lab.store.common(b"", ids(5)) == lab.store.common(b"", ids()) == 0


def test_of_three_prompts_that_branch_the_second_leaves_an_opening_and_the_third_attaches_it() -> None:
    lab = Lab(30, 4)
    common = span(0, 10)
    matches, stops = [], []
    for tail in (span(100, 5), span(200, 5), span(300, 5)):
        stream, prompt = lab.stream(), [*common, *tail]
        matches.append(stream.attach(prompt))
        stops.append(lab.store.stop_at(b"", ids(*prompt), matches[-1]))
        if stops[-1]:
            stream.eval(prompt[matches[-1] : stops[-1]])
            stream.insert(opening=True)
        stream.eval(prompt[len(stream.tokens) :])
        stream.insert()
        stream.expect_exact()
        stream.release()
        lab.check()
    assert matches == [0, 0, 10]
    assert stops == [0, 10, 0]
    assert [c.num_tokens for c in lab.store if c.opening] == [10]


# Kinds and the count ------------------------------------------------------------------------------------------------


def test_with_room_for_two_the_one_used_longest_ago_makes_way() -> None:
    lab = Lab(20, 4, max_states=2)
    lab.leave(span(0, 4))
    lab.leave(span(20, 4))
    user = lab.stream()
    user.attach(span(0, 5))
    lab.leave(span(40, 4))
    assert lab.kept() == [span(0, 4), span(40, 4)]
    assert lab.store.stats.checkpoint_evictions == 1
    lab.check()


def test_a_tail_goes_before_an_opening_however_recent_it_is() -> None:
    lab = Lab(20, 4, max_states=2)
    lab.leave(span(0, 4), opening=True)
    lab.leave(span(20, 4))
    lab.leave(span(40, 4))
    assert lab.kept() == [span(0, 4), span(40, 4)]
    lab.check()


def test_openings_survive_a_stream_of_tails() -> None:
    lab = Lab(40, 4, max_states=4)
    openings = [span(0, 6), span(20, 6)]
    for tokens in openings:
        lab.leave(tokens, opening=True)
    for i in range(30):
        lab.leave(span(100 + 10 * i, 5))
    assert lab.kept() == [*openings, span(380, 5), span(390, 5)]
    assert lab.store.held_pages == 8
    lab.check()


def test_an_opening_goes_when_no_tail_stands_the_one_used_longest_ago_first() -> None:
    lab = Lab(20, 4, max_states=2)
    lab.leave(span(0, 4), opening=True)
    lab.leave(span(20, 4), opening=True)
    lab.stream().attach(span(0, 5))
    lab.leave(span(40, 4), opening=True)
    assert lab.kept() == [span(0, 4), span(40, 4)]
    lab.check()


def test_the_newest_stands_even_as_the_only_tail_among_openings() -> None:
    lab = Lab(20, 4, max_states=2)
    lab.leave(span(0, 4), opening=True)
    lab.leave(span(20, 4), opening=True)
    lab.leave(span(40, 4))
    assert lab.kept() == [span(20, 4), span(40, 4)]
    lab.leave(span(60, 4))
    assert lab.kept() == [span(20, 4), span(60, 4)]
    lab.check()


@pytest.mark.parametrize(
    ("again", "opening"),
    [({"donor": 1}, False), ({"donor": 1, "opening": True}, True), ({"donor": 2}, True), ({"donor": 0}, True)],
)
def test_a_tail_becomes_an_opening_when_it_is_called_one_or_another_stops_at_it(again: dict, opening: bool) -> None:
    lab = Lab(20, 4)
    first = lab.leave(span(0, 6), donor=1)
    assert first is not None and not first.opening
    assert lab.leave(span(0, 6), **again) is first
    assert first.opening == opening and first.donor == 1
    lab.check()


def test_an_opening_stays_one() -> None:
    lab = Lab(20, 4, max_states=2)
    first = lab.leave(span(0, 6), opening=True, donor=1)
    assert lab.leave(span(0, 6), opening=False, donor=1) is first
    lab.leave(span(20, 4))
    lab.leave(span(40, 4))
    assert first in lab.store and first.opening
    lab.check()


def test_a_promoted_tail_is_kept_over_later_tails() -> None:
    lab = Lab(20, 4, max_states=2)
    lab.leave(span(0, 6))
    lab.leave(span(0, 6))  # another sequence stops at it
    for first in (20, 40, 60):
        lab.leave(span(first, 4))
    assert lab.kept() == [span(0, 6), span(60, 4)]
    lab.check()


# Bytes --------------------------------------------------------------------------------------------------------------


def test_a_page_that_several_checkpoints_hold_is_counted_once() -> None:
    lab = Lab(20, 4)
    donor = lab.run(span(0, 4))
    donor.insert()
    assert (lab.store.held_pages, lab.store.num_bytes) == (1, SNAPSHOT + PAGE)
    donor.eval(span(4, 4))
    donor.insert()
    assert (lab.store.held_pages, lab.store.num_bytes) == (2, 2 * SNAPSHOT + 2 * PAGE)
    donor.eval(span(8, 1))
    donor.insert()
    assert (lab.store.held_pages, lab.store.num_bytes) == (3, 3 * SNAPSHOT + 3 * PAGE)
    assert lab.pool.refs[:5].tolist() == [2, 2, 1, 1, 0]  # one reference for the cache, however many hold it
    lab.check()


def test_a_page_goes_with_the_last_checkpoint_that_holds_it() -> None:
    lab = Lab(20, 4)
    donor = lab.run(span(0, 4))
    short = donor.insert()
    donor.eval(span(4, 4))
    long = donor.insert()
    donor.release()
    assert short is not None and long is not None and lab.pool.refs[:2].tolist() == [1, 1]
    lab.store.drop(short)
    assert lab.pool.refs[:2].tolist() == [1, 1] and lab.store.held_pages == 2
    assert found(lab, span(0, 9)) == 8 and found(lab, span(0, 7)) == 0
    lab.check()
    lab.store.drop(long)
    assert lab.pool.num_free == 20 and lab.store.num_bytes == 0
    lab.check()


def test_past_the_byte_budget_tails_go_until_it_holds() -> None:
    lab = Lab(40, 4, max_state_bytes=3 * (SNAPSHOT + PAGE))
    for first in (0, 20, 40):
        lab.leave(span(first, 4))
    assert len(lab.store) == 3 and lab.store.num_bytes == 3 * (SNAPSHOT + PAGE)
    lab.leave(span(60, 8))  # two pages: two must go
    assert lab.kept() == [span(40, 4), span(60, 8)]
    assert lab.store.num_bytes == 2 * SNAPSHOT + 3 * PAGE
    lab.check()


def test_a_byte_over_the_budget_is_over_it() -> None:
    lab = Lab(40, 4, max_state_bytes=2 * (SNAPSHOT + PAGE) - 1)
    lab.leave(span(0, 4))
    lab.leave(span(20, 4))
    assert lab.kept() == [span(20, 4)]
    lab.check()


def test_the_newest_stands_alone_over_the_byte_budget() -> None:
    lab = Lab(40, 4, max_state_bytes=1)
    lab.leave(span(0, 4), opening=True)
    assert lab.kept() == [span(0, 4)]
    lab.leave(span(20, 30))
    assert lab.kept() == [span(20, 30)]
    assert lab.store.num_bytes == SNAPSHOT + 8 * PAGE
    lab.check()


def test_without_storage_only_snapshots_have_bytes() -> None:
    pool = PagePool(10, 4)
    store = CheckpointStore(pool, 1, max_state_bytes=40)
    pages = pool.alloc(2)[None]
    for n in (4, 5, 6):
        assert store.insert(b"", ids(*span(0, n)), pages, StateSnapshot(n, {"x": torch.zeros(5)})) is not None
        store.check()
    assert [c.num_tokens for c in store] == [5, 6] and store.num_bytes == 40
    assert store.held_pages == 3 and pool.refs[:5].tolist() == [2, 1, 1, 1, 0]
    pool.check()


def test_the_hold_counts_follow_a_pool_that_grows() -> None:
    lab = Lab(2, 4, max_pages=16)
    donor = lab.run(span(0, 6))
    checkpoint = donor.insert()
    assert checkpoint is not None and checkpoint.pages.tolist() == [[0, 2]]
    assert lab.pool.num_pages == 4
    lab.check()
    donor.eval(span(6, 20))
    assert lab.pool.num_pages == 8
    lab.check()
    assert donor.insert() is not None
    assert lab.pool.num_pages == 16 and lab.store.held_pages == 8
    lab.check()


# Pins ---------------------------------------------------------------------------------------------------------------


def test_a_pinned_checkpoint_never_makes_way() -> None:
    lab = Lab(6, 4, max_states=2)
    pinned = lab.leave(span(0, 4))
    assert pinned is not None
    pinned.pins += 1
    for first in (20, 40, 60):
        lab.leave(span(first, 4))
        assert lab.kept() == [span(0, 4), span(first, 4)]
    assert lab.store.reclaim(100) == 1
    assert lab.kept() == [span(0, 4)]
    lab.check()
    pinned.pins -= 1
    assert lab.store.reclaim(100) == 1
    assert len(lab.store) == 0


def test_when_only_pinned_ones_could_go_the_count_is_exceeded_until_the_next_insert() -> None:
    lab = Lab(12, 4, max_states=1)
    pinned = lab.leave(span(0, 4))
    assert pinned is not None
    pinned.pins += 2
    lab.leave(span(20, 4))
    assert lab.kept() == [span(0, 4), span(20, 4)]
    lab.check()
    pinned.pins -= 2
    lab.check()  # nothing was inserted since
    lab.leave(span(40, 4))
    assert lab.kept() == [span(40, 4)]
    lab.check()


def test_the_pool_promises_nobody_the_pages_of_a_pinned_checkpoint() -> None:
    lab = Lab(4, 4)
    pinned, other = lab.leave(span(0, 6)), lab.leave(span(20, 4))
    assert pinned is not None and other is not None
    assert lab.pool.num_available == 4
    pinned.pins = 1
    lab.pool.share(pinned.pages.ravel())
    lab.check()
    assert lab.pool.num_available == 2 and lab.store.idle_pages(pinned) == 0
    with pytest.raises(OutOfPages):
        lab.pool.alloc(3)
    assert lab.kept() == [span(0, 6), span(20, 4)]
    warm = lab.stream()
    assert warm.attach(span(0, 9)) == 6
    warm.expect_exact()
    lab.check()


# Making room --------------------------------------------------------------------------------------------------------


def test_room_is_made_from_tails_by_last_use_then_from_openings_by_last_use() -> None:
    lab = Lab(20, 4)
    lab.leave(span(0, 4), opening=True)
    lab.leave(span(20, 4))
    lab.leave(span(40, 4), opening=True)
    lab.leave(span(60, 4))
    for first in (0, 20):
        stream = lab.stream()
        stream.attach(span(first, 5))
        stream.release()
    gone = []
    while len(lab.store):
        before = lab.kept()
        assert lab.store.reclaim(1) == 1
        (first,) = {tokens[0] for tokens in before} - {tokens[0] for tokens in lab.kept()}
        gone.append(first)
        lab.check()
    assert gone == [60, 20, 40, 0]
    assert lab.store.reclaim(1) == 0 and lab.store.stats.checkpoint_evictions == 4


def test_no_more_is_dropped_than_was_asked_for() -> None:
    lab = Lab(20, 4)
    for first in (0, 20, 40):
        lab.leave(span(first, 8))
    assert lab.store.reclaim(0) == lab.store.reclaim(-1) == 0
    assert lab.store.reclaim(1) == 2
    assert lab.kept() == [span(20, 8), span(40, 8)]
    assert lab.store.reclaim(3) == 4
    assert len(lab.store) == 0 and lab.pool.num_free == 20
    lab.check()


def test_a_checkpoint_whose_pages_are_all_in_use_stands() -> None:
    lab = Lab(20, 4)
    lab.leave(span(0, 8))
    lab.leave(span(20, 8))
    user = lab.stream()
    user.attach(span(0, 9))
    assert lab.store.reclaim(100) == 2
    assert lab.kept() == [span(0, 8)]
    user.release()
    assert lab.store.reclaim(100) == 2
    lab.check()


def test_of_a_checkpoint_partly_in_use_only_the_idle_pages_become_free() -> None:
    lab = Lab(20, 4)
    donor = lab.run(span(0, 6))
    donor.insert()
    assert lab.store.reclaim(100) == 1  # the copy; the donor still has page 0
    assert lab.pool.refs[:3].tolist() == [1, 1, 0]
    donor.expect_exact()
    lab.check()


def test_the_pool_makes_room_from_checkpoints_when_its_free_pages_run_out() -> None:
    lab = Lab(4, 4)
    lab.leave(span(0, 8))
    lab.leave(span(20, 4))
    busy = lab.run(span(40, 8))
    assert lab.kept() == [span(20, 4)]
    busy.expect_exact()
    busy.eval(span(60, 8))
    assert len(lab.store) == 0 and lab.pool.num_free == 0
    lab.check()


def test_idle_pages_are_those_that_an_attach_makes_live() -> None:
    lab = Lab(20, 4, num_groups=2)
    donor = lab.run(span(0, 4))
    donor.insert()
    donor.eval(span(4, 6))
    checkpoint = donor.insert()
    assert checkpoint is not None
    assert lab.store.idle_pages(checkpoint) == 0  # the donor has both whole pages of each group
    donor.release()
    assert lab.store.idle_pages(checkpoint) == 4  # the copy of the partial one is not attached, but copied
    before = lab.pool.num_live
    user = lab.stream()
    user.attach(span(0, 11))
    assert lab.store.idle_pages(checkpoint) == 0
    assert lab.pool.num_live == before + 4 + 2
    lab.check()


# Forgetting ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_between_two_others_can_come_and_go() -> None:
    lab = Lab(20, 4)
    lab.leave(span(0, 3))
    lab.leave(span(0, 9))
    middle = lab.leave(span(0, 6))
    assert middle is not None
    assert [found(lab, [*span(0, n), 99]) for n in (3, 5, 6, 8, 9)] == [3, 3, 6, 6, 9]
    lab.store.drop(middle)
    assert middle.above is None  # whoever still has it keeps no other one in memory
    assert [found(lab, [*span(0, n), 99]) for n in (3, 5, 6, 8, 9)] == [3, 3, 3, 3, 9]
    lab.check()


def test_a_namespace_is_forgotten_whole_and_alone() -> None:
    lab = Lab(30, 4)
    for n in (3, 6, 9):
        checkpoint = lab.leave(span(0, n), b"a")
    assert checkpoint is not None
    checkpoint.pins = 1
    lab.leave(span(0, 6), b"b")
    assert lab.store.drop_namespace(b"nobody's") == 0
    assert lab.store.drop_namespace(b"a") == 3
    assert found(lab, span(0, 10), b"a") == 0 and found(lab, span(0, 10), b"b") == 6
    assert lab.store.held_pages == 2
    assert lab.store.stats.checkpoint_evictions == 0
    lab.check()
    assert lab.store.drop_namespace(b"a") == 0


def test_clearing_many_that_open_each_other_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(2, 512)
    pages = lab.pool.alloc(1)[None]
    lab.pool.max_pages = 200
    for n in range(1, 17):
        lab.store.insert(b"", ids(*[5] * n), pages, StateSnapshot(n, {}))
    assert len(lab.store) == 16
    monkeypatch.setattr(checkpoints, "_common", lambda a, b: pytest.fail("tokens were compared"))
    lab.store.clear()
    assert len(lab.store) == 0
    lab.store.check()


def test_the_version_changes_with_what_can_be_found_and_with_nothing_else() -> None:
    lab = Lab(30, 4)
    assert lab.store.version == 0 and lab.store.namespaces() == []
    checkpoint = lab.leave(span(0, 6), b"a")
    lab.leave(span(0, 4), b"b")
    assert checkpoint is not None and lab.store.namespaces() == [b"a", b"b"]
    assert lab.store.version == 2
    lab.leave(span(0, 6), b"a")
    lab.stream(b"a").attach(span(0, 9))
    lab.store.stop_at(b"a", ids(*span(0, 9)), 0)
    assert lab.store.version == 2
    lab.store.drop(checkpoint)
    assert lab.store.version == 3 and lab.store.namespaces() == [b"b"]
    lab.store.clear()
    assert lab.store.version == 4 and lab.store.namespaces() == []


def test_after_clear_no_page_is_held_and_pages_in_use_stay_their_sequences() -> None:
    lab = Lab(20, 4)
    lab.leave(span(0, 6), b"a")
    lab.leave(span(0, 6), b"b", opening=True)
    user = lab.stream(b"a")
    user.attach(span(0, 9))
    lab.store.clear()
    assert len(lab.store) == lab.store.held_pages == lab.store.num_bytes == 0
    assert not lab.pool.held.any() and lab.pool.num_live == 2
    user.eval(span(6, 3))
    user.expect_exact()
    lab.check()
    user.release()
    assert not lab.pool.refs.any() and lab.pool.num_free == 20
    assert lab.leave(span(0, 6), b"a") is not None  # and it goes on


# check() ------------------------------------------------------------------------------------------------------------


def corrupt_order(lab: Lab, a, b) -> None:
    a.tokens[0] = 77


def corrupt_twice(lab: Lab, a, b) -> None:
    b.tokens[:] = a.tokens


def corrupt_namespace(lab: Lab, a, b) -> None:
    a.namespace = b"x"


def corrupt_above(lab: Lab, a, b) -> None:
    b.above = a


def corrupt_kind(lab: Lab, a, b) -> None:
    a.opening = True


def corrupt_membership(lab: Lab, a, b) -> None:
    lab.store._tails.pop(a)


def corrupt_use(lab: Lab, a, b) -> None:
    a.last_use = b.last_use + 1


def corrupt_position(lab: Lab, a, b) -> None:
    a.snapshot = StateSnapshot(5, a.snapshot.tensors)


def corrupt_pages(lab: Lab, a, b) -> None:
    a.pages = a.pages[:, :1]


def corrupt_page_twice(lab: Lab, a, b) -> None:
    a.pages[0, 1] = a.pages[0, 0]


def corrupt_partial_in_use(lab: Lab, a, b) -> None:
    lab.pool.share(a.pages[0, 1:])


def corrupt_partial_shared(lab: Lab, a, b) -> None:
    b.pages[0, 1] = a.pages[0, 1]


def corrupt_holders(lab: Lab, a, b) -> None:
    lab.store._holders[a.pages[0, 0]] += 1


def corrupt_held(lab: Lab, a, b) -> None:
    lab.pool.held[a.pages[0, 0]] = False


def corrupt_num_held(lab: Lab, a, b) -> None:
    lab.store._num_held += 1


def corrupt_bytes(lab: Lab, a, b) -> None:
    lab.store._snapshot_bytes -= 1


def corrupt_count(lab: Lab, a, b) -> None:
    lab.store.max_states = 1


def corrupt_budget(lab: Lab, a, b) -> None:
    lab.store.max_state_bytes = lab.store.num_bytes - 1


def corrupt_empty(lab: Lab, a, b) -> None:
    lab.store._by_tokens[b"y"] = type(lab.store._by_tokens[b""])()


@pytest.mark.parametrize(
    ("corrupt", "match"),
    [
        (corrupt_order, "out of order"),
        (corrupt_twice, "or twice"),
        (corrupt_namespace, "another namespace"),
        (corrupt_above, "another one opens"),
        (corrupt_kind, "among the other kind"),
        (corrupt_membership, "kinds do not add up"),
        (corrupt_use, "order of use"),
        (corrupt_position, "state of another position"),
        (corrupt_pages, "too few pages"),
        (corrupt_page_twice, "stands twice"),
        (corrupt_partial_in_use, "a sequence has the partial page"),
        (corrupt_partial_shared, "one partial page"),
        (corrupt_holders, "miscounted"),
        (corrupt_held, "does not hold a page"),
        (corrupt_num_held, "held_pages is 5"),
        (corrupt_bytes, "num_bytes is"),
        (corrupt_count, "a budget is exceeded"),
        (corrupt_budget, "a budget is exceeded"),
        (corrupt_empty, "an empty namespace"),
    ],
)
def test_check_notices(corrupt, match: str) -> None:
    lab = Lab(20, 4)
    a, b = lab.leave(span(0, 6)), lab.leave(span(20, 6))
    corrupt(lab, a, b)
    expect_check_fails(lab.store, match)
