"""Session: one sequence by hand; evaluation in chunks, forks, failures, sampling."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from byhand import Hand, expect_check_fails, growing_pool, span
from fakes import EchoModel

import paged.session
from paged.errors import GeometryMismatch, InvalidRequest, OutOfPages, PromptTooLong
from paged.sampling import SamplingParams
from paged.session import Session

# Evaluating -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_logits_are_those_of_the_tokens_alone(page_size: int, num_groups: int) -> None:
    hand = Hand(150, page_size, num_groups)
    session, tokens = hand.session(), span(0, 33)
    hand.expect_exact(session, tokens, session.eval(tokens))
    assert session.n_past == 33
    session.check()


@pytest.mark.parametrize("sizes", [[33], [1] * 33, [16, 17], [15, 1, 1, 16], [7, 26]])
def test_how_the_tokens_are_cut_does_not_matter(sizes: list[int]) -> None:
    hand = Hand(10, 16)
    session, tokens, done = hand.session(), span(5, 33), 0
    for size in sizes:
        logits = session.eval(tokens[done : done + size])
        done += size
        hand.expect_exact(session, tokens[:done], logits)
        session.check()


def test_the_history_grows_with_the_session() -> None:
    hand = Hand(60, 4)
    session = hand.session()
    for length in (50, 70, 71, 200):
        logits = session.eval(span(session.n_past, length - session.n_past))
        hand.expect_exact(session, span(0, length), logits)


def test_long_input_is_evaluated_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged.session, "CHUNK", 10)
    hand = Hand(20, 4)
    session, tokens = hand.session(), span(0, 35)
    hand.expect_exact(session, tokens, session.eval(tokens))
    assert (hand.model.num_forwards, hand.model.num_rows) == (4, 35)


def test_evaluating_nothing_returns_the_last_logits() -> None:
    hand = Hand()
    session = hand.session()
    assert session.eval([]) is None
    logits = session.eval([3])
    assert session.eval([]) is logits
    assert hand.model.num_forwards == 1


def test_pages_are_taken_as_they_are_needed_and_come_back() -> None:
    hand = Hand(10, 4)
    session = hand.session()
    for tokens, pages in ((1, 1), (3, 1), (1, 2), (4, 3)):
        session.eval([7] * tokens)
        assert (session.table.num_pages, hand.pool.num_live) == (pages, pages)
    for _ in range(2):
        session.release()
        assert (session.n_past, session.logits, hand.pool.num_free) == (0, None, 10)
    hand.expect_exact(session, [4, 5], session.eval([4, 5]))


def test_an_array_of_the_callers_may_change_afterwards() -> None:
    hand = Hand()
    session, tokens = hand.session(), np.array(span(0, 6), np.int32)
    session.eval(tokens)
    tokens[:] = 99
    hand.expect_exact(session, [*span(0, 6), 8], session.eval([8]))


def test_a_pool_may_grow_under_a_session() -> None:
    model = EchoModel(997)
    pool = growing_pool(model, 2, 32)
    session = Session(model, pool)
    for n in range(1, 60):
        logits = session.eval([n])
        assert logits is not None
        assert np.array_equal(logits.numpy(), model.oracle(span(1, n)))
    assert pool.num_pages == 16
    session.check()
    pool.check()


# Failures ---------------------------------------------------------------------------------------------------------


def test_a_full_pool_leaves_the_session_as_it_was() -> None:
    hand = Hand(2, 4)
    session = hand.session()
    before = session.eval(span(0, 6))
    with pytest.raises(OutOfPages):
        session.eval(span(6, 3))
    session.check()
    assert session.logits is before
    hand.expect_exact(session, span(0, 8), session.eval(span(6, 2)))


def test_chunks_before_the_one_that_failed_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged.session, "CHUNK", 4)
    hand = Hand(2, 4)
    session = hand.session()
    with pytest.raises(OutOfPages):
        session.eval(span(0, 12))
    assert session.tokens.tolist() == span(0, 8)
    hand.expect_exact(session, span(0, 8), session.eval([]))


@pytest.mark.parametrize("history", [0, 3, 4, 6])
def test_an_error_of_the_model_leaves_the_session_as_it_was(history: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(10, 4)
    session = hand.session()
    session.eval(span(0, history))
    live = hand.pool.num_live

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(hand.model, "forward", broken)
        with pytest.raises(RuntimeError, match="the device is gone"):
            session.eval(span(50, 9))
    session.check()
    assert (session.n_past, hand.pool.num_live) == (history, live)
    fork = session.fork()  # both go on: neither may write into the other's pages
    session.eval([*span(70, 5)])
    fork.eval([*span(80, 5)])
    hand.expect_exact(session, [*span(0, history), *span(70, 5), 1], session.eval([1]))
    hand.expect_exact(fork, [*span(0, history), *span(80, 5), 2], fork.eval([2]))


def test_a_fresh_session_whose_first_eval_failed_can_still_attach() -> None:
    hand = Hand(4, 4)
    hand.donate(span(0, 8))
    session = hand.session()
    with pytest.raises(OutOfPages):
        session.eval(span(100, 17))
    assert hand.cache.attach(session, span(0, 9)) == 8


@pytest.mark.parametrize("bad", [[-1], [3, 997], [3, 2000], [1, -5]])
def test_ids_outside_the_vocabulary_are_refused(bad: list[int]) -> None:
    session = Hand().session()
    with pytest.raises(InvalidRequest, match=rf"between 0 and 996, got {next(b for b in bad if not 0 <= b < 997)}"):
        session.eval(bad)
    assert session.n_past == 0
    session.check()


def test_the_models_length_is_the_last_that_fits() -> None:
    model = EchoModel(max_seq_len=10)
    session = Session(model, model.create_kv_pool(8, 4))
    session.eval(span(0, 7))
    with pytest.raises(PromptTooLong, match="would hold 11 tokens, and the model holds 10"):
        session.eval(span(0, 4))
    assert session.eval(span(0, 3)) is not None
    assert session.n_past == 10


@pytest.mark.parametrize("other", [EchoModel(vocab_size=50), EchoModel(num_groups=2)])
def test_a_pool_of_another_model_is_refused(other: EchoModel) -> None:
    with pytest.raises(GeometryMismatch, match="made for another model"):
        Session(other, Hand().pool)


# Forks ------------------------------------------------------------------------------------------------------------


def test_a_fork_shares_pages_until_one_of_them_writes_into_one() -> None:
    hand = Hand(10, 16)
    session = hand.session()
    session.eval(span(0, 20))
    forks = [session.fork() for _ in range(2)]
    assert hand.pool.refs[:3].tolist() == [3, 3, 0]
    for i, fork in enumerate(forks):
        fork.eval([100 + i])
    assert [f.table.rows.tolist() for f in (session, *forks)] == [[[0, 1]], [[0, 2]], [[0, 3]]]
    for i, fork in enumerate(forks):
        hand.expect_exact(fork, [*span(0, 20), 100 + i, 7], fork.eval([7]))
    hand.expect_exact(session, [*span(0, 20), 9], session.eval([9]))
    for one in (session, *forks):
        one.check()
        one.release()
    assert hand.pool.num_free == 10


def test_a_fork_at_a_page_border_copies_nothing() -> None:
    hand = Hand(10, 16)
    session = hand.session()
    session.eval(span(0, 32))
    fork = session.fork()
    session.eval([1])
    fork.eval([2])
    assert hand.pool.num_live == 4
    hand.expect_exact(fork, [*span(0, 32), 2, 3], fork.eval([3]))


def test_a_fork_outlives_its_parent() -> None:
    hand = Hand()
    session = hand.session()
    session.eval(span(0, 6))
    fork = session.fork()
    session.release()
    hand.expect_exact(fork, span(0, 7), fork.eval([6]))
    assert fork.namespace == session.namespace


def test_a_fork_starts_with_the_logits_of_its_parent() -> None:
    hand = Hand()
    session = hand.session()
    session.eval(span(0, 6))
    fork = session.fork()
    assert fork.eval([]) is session.eval([])
    assert fork.sample() == session.sample() == int(hand.model.oracle(span(0, 6)).argmax())


def test_a_fork_of_a_donated_history_writes_into_no_cached_page() -> None:
    hand = Hand(20, 4)
    session = hand.ask(span(0, 10))
    hand.cache.insert(session, span(0, 10))
    fork = session.fork()
    fork.eval(span(50, 6))
    session.eval(span(60, 6))
    assert hand.ask([*span(0, 8), 90]).n_past == 9  # compared with the model's own logits
    hand.check()


# Letting go -------------------------------------------------------------------------------------------------------


def test_pages_come_back_when_a_session_is_collected() -> None:
    hand = Hand()
    session = hand.session()
    session.eval(span(0, 9))
    assert hand.pool.num_live == 3
    del session
    gc.collect()
    assert hand.pool.num_live == 0
    hand.pool.check()


def test_a_session_in_a_cycle_gives_its_pages_back_too() -> None:
    hand = Hand()
    session = hand.session()
    session.eval(span(0, 9))
    session.me = session  # type: ignore[attr-defined]
    del session
    gc.collect()
    assert hand.pool.num_free == 10
    hand.pool.check()


def test_a_session_that_was_never_made_needs_no_release() -> None:
    hand = Hand()
    with pytest.raises(GeometryMismatch):
        Session(EchoModel(50), hand.pool)
    gc.collect()
    hand.pool.check()


# Sampling ---------------------------------------------------------------------------------------------------------


def test_sampling_before_any_logits_is_refused() -> None:
    hand = Hand()
    hand.donate(span(0, 8))
    fresh, attached = hand.session(), hand.session()
    assert hand.cache.attach(attached, span(0, 9)) == 8
    for session in (fresh, attached):
        with pytest.raises(RuntimeError, match=r"eval\(\) at least one token"):
            session.sample()


def test_greedy_tokens_are_the_models_own() -> None:
    hand = Hand(20, 4)
    session, out = hand.session(), []
    session.eval(span(0, 9))
    for _ in range(12):
        out.append(session.sample())
        session.eval(out[-1:])
    assert out == hand.model.greedy(span(0, 9), 12)


def test_a_draw_depends_on_seed_and_position_and_runs_nothing() -> None:
    hand = Hand(20, 4)
    session = hand.session()
    session.eval(span(0, 9))
    forwards = hand.model.num_forwards
    draws = {seed: session.sample(SamplingParams(temperature=1.0, seed=seed)) for seed in range(30)}
    assert len(set(draws.values())) > 5
    warm = hand.session()
    hand.cache.insert(session, span(0, 8))
    hand.cache.attach(warm, span(0, 9))
    warm.eval([8])
    for seed, token in draws.items():
        assert warm.sample(SamplingParams(temperature=1.0, seed=seed)) == token
    assert hand.model.num_forwards == forwards + 1


def test_without_a_seed_one_is_drawn_once_a_session() -> None:
    hand = Hand()
    session = hand.session()
    session.eval(span(0, 5))
    params = SamplingParams(temperature=1.0)
    assert len({session.sample(params) for _ in range(5)}) == 1
    assert session.fork().sample(params) == session.sample(params)


def test_penalties_on_output_leave_the_prompt_alone() -> None:
    hand = Hand()
    session = hand.session()
    session.eval(span(0, 5))
    token = session.sample()
    session.eval([token])
    best = session.sample()
    heavy = SamplingParams(presence_penalty=100.0)
    session.eval([best])
    third = session.sample()
    session.eval([third])
    assert session.sample(heavy, num_prompt=session.n_past) == session.sample()
    assert session.sample(heavy, num_prompt=5) not in (token, best, third)


# check() ----------------------------------------------------------------------------------------------------------


def test_check_notices_a_column_too_many() -> None:
    session = Hand().ask(span(0, 4))
    session.table.ensure(4, 5)
    expect_check_fails(session, "2 columns for 4 tokens")


def test_check_notices_a_column_too_few() -> None:
    session = Hand().ask(span(0, 5))
    session.table.truncate(1)
    expect_check_fails(session, "1 columns for 5 tokens")


def test_check_notices_an_unsound_table() -> None:
    hand = Hand()
    session = hand.ask(span(0, 5))
    hand.pool.release(session.table.rows[0, :1])
    expect_check_fails(session, "freed page")
    hand.pool.alloc(1)  # so that the session can let go of it
