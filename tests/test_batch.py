"""eval_batch: several sessions in one pass, each as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import EchoHybrid, EchoLooped, EchoModel
from feeder import random_tokens
from token_api import counting, tiny, with_layers_after

from paged import OutOfPages, PrefixHandle, PromptTooLong, Session, eval_batch, load_model

KINDS = {
    "attention": lambda: EchoModel(512),
    "windows": lambda: EchoModel(512, windows=(0, 9)),
    "hybrid": lambda: EchoHybrid(512),
    "looped": lambda: EchoLooped(512),
    "tiny": lambda: tiny("tiny:llama"),
    "tiny hybrid": lambda: load_model("tiny:hybrid", max_seq_len=256, device="cpu"),
    "tiny looped": tiny,
    "layers after": with_layers_after,
}


def sessions_of(model, lengths: list[int], num_pages: int = 900, page_size: int = 8, **options) -> list[Session]:
    pool = model.create_kv_pool(num_pages, page_size)
    sessions = [Session(model, pool, **options) for _ in lengths]
    for i, (session, length) in enumerate(zip(sessions, lengths, strict=True)):
        session.eval(random_tokens(length, model.vocab_size, i))
    return sessions


@pytest.mark.parametrize("kind", KINDS)
def test_each_session_gets_the_bits_that_eval_gives_it_alone(kind: str) -> None:
    model, lengths = KINDS[kind](), [1, 40, 7, 8, 9, 33]
    alone, together = sessions_of(model, lengths), sessions_of(model, lengths)
    for step in range(12):
        new = random_tokens(len(lengths), 512, 100 + step)
        want = torch.stack([s.eval([t]) for s, t in zip(alone, new, strict=True)])  # type: ignore[misc]
        got = eval_batch(together, new)
        assert got.shape == (6, 512) and got.dtype == torch.float32
        assert torch.equal(got, want)
        for mine, other in zip(together, alone, strict=True):
            assert mine.tokens.tolist() == other.tokens.tolist()
            assert torch.equal(mine.logits, other.logits)
            mine.check()


@pytest.mark.parametrize("kind", ["looped", "tiny looped", "layers after"])
def test_sessions_may_differ_in_depth_and_window(kind: str) -> None:
    model = KINDS[kind]()
    views = [(1, 0), (3, 0), (2, 12), (4, 9), (1, 5), (3, 100)]

    def make() -> list[Session]:
        pool = model.create_kv_pool(900, 8)
        sessions = [Session(model, pool, loops, window) for loops, window in views]
        for i, session in enumerate(sessions):
            session.eval(random_tokens(20 + i, 512, i))
        return sessions

    alone, together = make(), make()
    for step in range(12):
        new = random_tokens(6, 512, 100 + step)
        want = torch.stack([s.eval([t]) for s, t in zip(alone, new, strict=True)])  # type: ignore[misc]
        assert torch.equal(eval_batch(together, new), want)
        for session in together:
            session.check()


def test_it_is_one_forward_whoever_is_in_it() -> None:
    sessions = sessions_of(tiny(), [5, 20, 3], 3000)
    with counting(tiny()) as work:
        eval_batch(sessions, [1, 2, 3])
    assert work.calls == [(3, 0, 8)]


def test_one_session_is_a_batch_too() -> None:
    model = EchoModel(97)
    [session] = sessions_of(model, [9])
    tokens = session.tokens.tolist()
    logits = eval_batch([session], np.array([3], np.int64))
    assert np.array_equal(logits[0].numpy(), model.oracle([*tokens, 3]))


def test_forks_of_one_session_go_their_own_ways() -> None:
    model, prompt = EchoModel(97), random_tokens(13, 97)
    first = Session(model, model.create_kv_pool(50, 8))
    first.eval(prompt)
    handle = PrefixHandle(first)
    sessions = [first, first.fork(), handle.open()]
    for step in range(5):
        eval_batch(sessions, [step, step + 20, step + 40])
    for i, session in enumerate(sessions):
        history = [*prompt, *(step + 20 * i for step in range(5))]
        assert session.tokens.tolist() == history
        assert np.array_equal(session.logits.numpy(), model.oracle(history))
        session.check()
    assert len({int(s.table.rows[0, 0]) for s in sessions}) == 1  # the full page is shared
    assert len({int(s.table.rows[0, 1]) for s in sessions}) == 3  # the partial one was copied for two of them


@pytest.mark.parametrize("kind", ["attention", "windows", "looped"])
def test_where_one_finds_no_page_none_has_moved(kind: str) -> None:
    model = KINDS[kind]()
    groups = len(model.view().groups)
    sessions = sessions_of(model, [7, 8, 5], num_pages=3 * groups)  # the second needs a page
    before = [(s.n_past, s.table.num_pages) for s in sessions]
    with pytest.raises(OutOfPages):
        eval_batch(sessions, [1, 2, 3])
    assert [(s.n_past, s.table.num_pages) for s in sessions] == before
    for session in sessions:
        session.check()
    sessions[0].release()
    eval_batch(sessions[1:], [2, 3])
    assert [s.n_past for s in sessions[1:]] == [9, 6]


def test_an_error_of_the_model_leaves_all_where_they_were(monkeypatch) -> None:
    model = EchoModel(97)
    sessions = sessions_of(model, [8, 8])

    def broken(batch, storage):
        raise MemoryError("no more of this")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", broken)
        with pytest.raises(MemoryError):
            eval_batch(sessions, [1, 2])
    for session in sessions:
        assert session.n_past == 8
        session.check()
    eval_batch(sessions, [1, 2])


def test_what_is_no_batch_is_refused_and_nothing_moves() -> None:
    sessions = sessions_of(EchoModel(97, max_seq_len=9), [9, 5])
    with pytest.raises(ValueError, match="2 sessions need one token each, got 3"):
        eval_batch(sessions, [1, 2, 3])
    with pytest.raises(PromptTooLong, match="10 tokens, and the model holds 9"):
        eval_batch(sessions, [1, 2])
    with pytest.raises(ValueError, match="between 0 and 96, got 97"):
        eval_batch(sessions[1:], [97])
    with pytest.raises(ValueError, match="share one model and one pool"):
        eval_batch([sessions[1], *sessions_of(EchoModel(97), [5])], [1, 2])
    other = Session(sessions[0].model, sessions[0].model.create_kv_pool(9, 8))
    with pytest.raises(ValueError, match="share one model and one pool"):
        eval_batch([sessions[1], other], [1, 2])
    with pytest.raises(ValueError, match="at least one session"):
        eval_batch([], [])
    assert [s.n_past for s in sessions] == [9, 5]


def test_a_session_twice_in_one_batch_is_refused() -> None:
    [session] = sessions_of(EchoModel(97), [5])
    with pytest.raises(ValueError, match="each session once"):
        eval_batch([session, session], [1, 2])
    assert session.n_past == 5
    session.check()
