"""Sessions of one depth and one cache window: their pages, going back, going shallower, and going deeper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from byhand import Hand, span
from fakes import EchoAfter, EchoHybrid, EchoLooped
from looping import config_of, looped

from paged import load_model
from paged.errors import LoopsMismatch, OutOfPages
from paged.session import Session


@pytest.mark.parametrize("kind", [EchoLooped, EchoAfter])
@pytest.mark.parametrize("loops", [None, 1, 4])
@pytest.mark.parametrize("cache_window", [0, 1, 6])
def test_logits_are_those_of_the_depth_and_the_window(kind, loops: int | None, cache_window: int) -> None:
    hand = Hand(60, kind=kind)
    session = hand.session(loops=loops, cache_window=cache_window)
    for start in range(0, 20, 5):
        hand.expect_exact(session, span(0, start + 5), session.eval(span(start, 5)))
        session.check()
    assert session.view.loops == (loops or 2)


def test_only_the_groups_of_its_depth_take_pages() -> None:
    hand = Hand(20, kind=EchoLooped)
    session = hand.session(loops=1)
    session.eval(span(0, 6))
    assert session.table.rows.tolist() == [[0, 2], [1, 3], [-1, -1], [-1, -1], [-1, -1]]
    assert hand.pool.num_free == 16


def test_what_the_cache_window_leaves_goes_back_in_every_group() -> None:
    hand = Hand(20, num_groups=2)
    session = hand.session(cache_window=3)
    session.eval(span(0, 9))
    assert session.table.rows.tolist() == [[-1, 2, 4], [-1, 3, 5]]
    session.eval([9])
    assert session.table.rows.tolist() == [[-1, -1, 4], [-1, -1, 5]]
    assert hand.pool.num_free == 18


@pytest.mark.parametrize(
    ("arguments", "match"),
    [((2,), "does not loop"), ((None, -1), "cache_window must be 0")],
)
def test_what_the_model_does_not_take_is_refused(arguments: tuple, match: str) -> None:
    hand = Hand()
    with pytest.raises(ValueError, match=match):
        Session(hand.model, hand.pool, *arguments)
    hand.model.windows_cache = False
    with pytest.raises(ValueError, match="echo does not take a cache_window, got 4"):
        Session(hand.model, hand.pool, None, 4)


def test_a_fork_has_the_depth_and_the_window_of_its_parent() -> None:
    hand = Hand(40, kind=EchoLooped)
    session = hand.session(loops=3, cache_window=5)
    session.eval(span(0, 6))
    fork = session.fork()
    assert fork.view is session.view
    hand.expect_exact(fork, [*span(0, 6), 50], fork.eval([50]))


# Going back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [0, 1, 3, 4, 5, 9])
def test_a_session_goes_on_from_where_it_was_rewound_to(to: int) -> None:
    hand = Hand(20)
    session = hand.session()
    session.eval(span(0, 9))
    session.rewind(to)
    assert session.n_past == to and session.table.rows.tolist() == [list(range(-(-to // 4)))]
    assert (session.logits is None) == (to < 9)
    session.check()
    hand.expect_exact(session, [*span(0, to), 500], session.eval([500]))


def test_rewinding_into_a_shared_page_copies_it_before_it_is_written() -> None:
    hand = Hand(20)
    session = hand.session()
    session.eval(span(0, 8))
    hand.cache.insert(session, span(0, 8))
    session.rewind(6)
    session.eval([500])
    assert session.table.rows.tolist() == [[0, 2]]
    assert hand.pages_of(span(0, 8)) == [0, 1]
    hand.ask([*span(0, 8), 7])  # its logits are those of the rows that were there


@pytest.mark.parametrize("to", [-1, 10])
def test_a_session_rewinds_within_its_history(to: int) -> None:
    session = Hand(20).session()
    session.eval(span(0, 9))
    with pytest.raises(ValueError, match=f"a session of 9 tokens can rewind to 0 to 9, got {to}"):
        session.rewind(to)


def test_a_recurrent_state_cannot_be_rewound() -> None:
    session = Hand(20, kind=EchoHybrid).session()
    session.eval(span(0, 9))
    session.rewind(9)
    with pytest.raises(RuntimeError, match="only moves forward"):
        session.rewind(8)


def test_pages_that_a_window_left_are_not_seen_again() -> None:
    session = Hand(20).session(cache_window=4)
    session.eval(span(0, 11))  # positions 8 to 10 are seen; the second page, of 4 to 7, was left
    assert session.table.rows.tolist() == [[-1, -1, 2]]
    with pytest.raises(RuntimeError, match="position 10 sees pages that the window of this session has left"):
        session.rewind(10)
    assert session.n_past == 11 and session.logits is not None
    session.check()


# Going shallower and deeper ---------------------------------------------------------------------------------------


def test_going_shallower_gives_the_pages_of_the_other_iterations_back() -> None:
    hand = Hand(20, kind=EchoLooped)
    session = hand.session(loops=4)
    session.eval(span(0, 5))
    assert hand.pool.num_free == 10
    session.use(hand.model.view(1))
    assert hand.pool.num_free == 16 and session.logits is None
    session.check()
    hand.expect_exact(session, span(0, 6), session.eval([5]))


TOKENS = (np.arange(45) * 7 % 90).astype(np.int32)
MODELS = {
    "all layers loop": lambda: load_model("tiny:looped"),
    "layers after": lambda: looped(config_of("layers after")),
}
MODELS |= {"both": lambda: looped(config_of("layers before and after"))}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache_window", [0, 9])
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_deeper_session_has_the_bits_of_one_that_began_at_that_depth(name, cache_window: int, page_size: int) -> None:
    model = MODELS[name]()
    pool = model.create_kv_pool(400, page_size)
    fresh, grown = Session(model, pool, 8, cache_window), Session(model, pool, 4, cache_window)
    parts = [grown.eval_residual(TOKENS[:20]), grown.eval_residual(TOKENS[20:])]
    assert torch.equal(grown.logits, Session(model, pool, 4, cache_window).eval(TOKENS))
    shared = grown.table.rows[grown.view.groups].copy()
    kept = np.setdiff1d(grown.view.groups, model.after_group if model.after_group is not None else [])
    grown.deepen(8, torch.cat(parts))
    assert torch.equal(grown.logits, fresh.eval(TOKENS))
    assert grown.view is fresh.view and shared.shape[1] == grown.table.num_pages
    assert np.array_equal(grown.table.rows[kept] >= 0, fresh.table.rows[kept] >= 0)
    for session in (grown, fresh):
        session.check()
    for token in (3, 4, 5, 6):
        assert torch.equal(grown.eval([token]), fresh.eval([token]))
    pool.check()


def test_rows_that_are_there_stay_and_only_new_iterations_take_pages() -> None:
    model = load_model("tiny:looped")
    pool = model.create_kv_pool(60, 16)
    session = Session(model, pool, 2)
    residual = session.eval_residual(TOKENS)
    before, free = session.table.rows.copy(), pool.num_free
    old = session.view.groups
    session.deepen(5, residual)
    assert np.array_equal(session.table.rows[old], before[old])
    assert free - pool.num_free == 3 * 3
    pool.check()


def test_a_session_that_cannot_go_deeper_stays_as_it_was() -> None:
    model = load_model("tiny:looped")
    pool = model.create_kv_pool(18, 16)  # 15 for five groups, and 3 for one more
    session = Session(model, pool, 4)
    residual = session.eval_residual(TOKENS)
    rows, logits, free = session.table.rows.copy(), session.logits, pool.num_free
    with pytest.raises(OutOfPages):
        session.deepen(8, residual)
    with pytest.raises(ValueError, match="residual of this batch must have shape"):
        session.deepen(5, residual[:, :3])
    with pytest.raises(LoopsMismatch, match="a session at 4 loops can only go deeper, got 3"):
        session.deepen(3, residual)
    session.deepen(4, residual)  # nothing to do
    assert np.array_equal(session.table.rows, rows) and session.logits is logits and pool.num_free == free
    session.check()


def test_a_position_that_is_no_integer_and_a_residual_of_nothing_are_refused() -> None:
    session = Hand(40, 4, kind=EchoLooped).session()
    session.eval(span(0, 8))
    with pytest.raises(TypeError, match="n_past must be an integer"):
        session.rewind(1.5)
    with pytest.raises(ValueError, match="at least one is needed"):
        session.eval_residual([])
    assert session.n_past == 8
    session.check()
