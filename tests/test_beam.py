"""Beam search: against every continuation there is, a plain search without pages, and transformers."""

from __future__ import annotations

import gc
import itertools
import threading

import numpy as np
import pytest
import torch
from fakes import EchoHybrid, EchoLooped, EchoModel
from feeder import random_tokens
from token_api import counting, tiny

from paged import Beam, BeamSearch, PrefixCache, PrefixHandle, PrefixPool, Session

KINDS = {
    "attention": lambda vocab: EchoModel(vocab),
    "windows": lambda vocab: EchoModel(vocab, windows=(0, 5)),
    "hybrid": lambda vocab: EchoHybrid(vocab),
    "looped": lambda vocab: EchoLooped(vocab),
}


def session_of(model, prompt: list[int], num_pages: int = 400, page_size: int = 4, **options) -> Session:
    session = Session(model, model.create_kv_pool(num_pages, page_size), **options)
    session.eval(prompt)
    return session


def log_probs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def every_continuation(model, prompt: list[int], length: int, ends: set[int], penalty: float) -> list[Beam]:
    """All of them with their scores, best first: those that an end id ends, and those of full length."""
    out: list[Beam] = []

    def walk(tokens: tuple[int, ...], total: float) -> None:
        scores = total + log_probs(model.oracle([*prompt, *tokens]))
        for token, score in enumerate(scores.tolist()):
            n = len(tokens) + 1
            if token in ends:
                out.append(Beam(tokens, score / n**penalty, "stop"))
            elif n == length:
                out.append(Beam((*tokens, token), score / n**penalty, "length"))
            else:
                walk((*tokens, token), score)

    walk((), 0.0)
    return sorted(out, key=lambda beam: -beam.score)


def plain_search(model, prompt, width: int, length: int, ends: set[int], penalty: float) -> list[Beam]:
    """Beam search over the oracle's logits, one sequence at a time, with nothing kept between two tokens."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    done: list[Beam] = []
    for n in range(1, length + 1):
        found = []
        for tokens, total in live:
            scores = total + log_probs(model.oracle([*prompt, *tokens]))
            found += [((*tokens, token), score) for token, score in enumerate(scores.tolist())]
        found.sort(key=lambda one: -one[1])
        for tokens, score in found[:width]:
            if tokens[-1] in ends:
                done.append(Beam(tokens[:-1], score / n**penalty, "stop"))
        live = [one for one in found if one[0][-1] not in ends][:width]
        done.sort(key=lambda beam: -beam.score)
        if not live or (len(done) >= width and done[width - 1].score >= live[0][1] / n**penalty):
            return done[:width]
    done += [Beam(tokens, score / length**penalty, "length") for tokens, score in live]
    return sorted(done, key=lambda beam: -beam.score)[:width]


def expect_same(got: list[Beam], want: list[Beam]) -> None:
    assert [(b.token_ids, b.finish_reason) for b in got] == [(b.token_ids, b.finish_reason) for b in want]
    assert np.allclose([b.score for b in got], [b.score for b in want], rtol=1e-12, atol=1e-12)


# Against oracles --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("ends", [set(), {2}, {0, 4}], ids=str)
def test_with_a_beam_for_each_continuation_it_finds_the_best_of_all(kind: str, penalty: float, ends: set[int]) -> None:
    model, prompt = KINDS[kind](5), [3, 1, 4, 1, 0]
    want = every_continuation(model, prompt, 4, ends, penalty)
    search = BeamSearch(session_of(model, prompt, 4000), 5**4 + 50, ends, penalty)
    got = search.run(4)
    assert len(got) == len(want) == len({(b.token_ids, b.finish_reason, b.score) for b in got})
    expect_same(got, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 2, 3, 7, 20])
def test_with_few_beams_it_is_the_search_that_keeps_nothing(kind: str, width: int) -> None:
    """Over prompts of many lengths, with ends that come early and late."""
    model = KINDS[kind](11)
    for seed in range(6):
        prompt = random_tokens(3 + 5 * seed, 11, seed)
        for ends, penalty in ((set(), 1.0), ({3}, 1.0), ({3, 7}, 0.5), ({1}, 2.0)):
            session = session_of(model, prompt, 1500)
            got = BeamSearch(session, width, ends, penalty).run(9)
            expect_same(got, plain_search(model, prompt, width, 9, ends, penalty))
            assert session.tokens.tolist() == prompt
            session.check()


def test_ends_do_end_searches_early() -> None:
    """So that the test above is about something."""
    seen = set()
    for seed in range(6):
        model, prompt = EchoModel(11), random_tokens(3 + 5 * seed, 11, seed)
        [best, *_] = BeamSearch(session_of(model, prompt), 3, {3, 7}, 0.5).run(9)
        seen.add((best.finish_reason, len(best.token_ids)))
    assert {reason for reason, _ in seen} == {"stop", "length"} or len(seen) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_one_beam_is_greedy_decoding(kind: str) -> None:
    model = KINDS[kind](97)
    for seed in range(5):
        prompt = random_tokens(7 + seed, 97, seed)
        [beam] = BeamSearch(session_of(model, prompt), 1).run(20)
        assert list(beam.token_ids) == model.greedy(prompt, 20)
        end = beam.token_ids[9]
        cut = beam.token_ids.index(end)
        [beam] = BeamSearch(session_of(model, prompt), 1, [end]).run(20)
        assert (list(beam.token_ids), beam.finish_reason) == (model.greedy(prompt, cut), "stop")


@pytest.mark.parametrize("width", [2, 4, 5])
def test_it_agrees_with_transformers(width: int) -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny("tiny:llama")
    config = model.config
    oracle = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    from paged.models.tiny import random_tensors

    oracle.load_state_dict(random_tensors(config))
    early = 0
    for seed in range(6):
        prompt = random_tokens(9 + seed, 512, seed)
        session = session_of(model, prompt, page_size=16)
        [greedy] = BeamSearch(session, 1).run(12)
        end = greedy.token_ids[5]
        with torch.inference_mode():
            theirs = oracle.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                length_penalty=1.0,
                early_stopping=False,
                max_new_tokens=12,
                eos_token_id=end,
                pad_token_id=end,
                return_dict_in_generate=True,
                output_scores=True,
            )
        rows = theirs.sequences[:, len(prompt) :].tolist()
        want = [row[: row.index(end)] if end in row else row for row in rows]
        ours = BeamSearch(session, width, [end]).run(12)
        assert [list(beam.token_ids) for beam in ours] == want
        assert np.allclose([beam.score for beam in ours], theirs.sequences_scores.numpy(), atol=1e-4)
        early += any(beam.finish_reason == "stop" for beam in ours)
    assert early


# What it costs, and what it leaves --------------------------------------------------------------------------------


def test_a_step_is_one_forward_over_the_live_beams() -> None:
    model = tiny()
    session = session_of(model, random_tokens(20, 512), 1200, 16, loops=4)
    with counting(model) as work:
        beams = BeamSearch(session, 3).run(6)
    assert [rows for rows, _, _ in work.calls] == [3] * 5 and len(beams) == 3


def test_beams_share_the_pages_of_what_they_have_in_common_and_all_go_back() -> None:
    model = EchoModel(97)
    session = session_of(model, random_tokens(40, 97), num_pages=64)
    before = session.table.rows.copy()
    peak, pool = 0, session.pool
    search = BeamSearch(session, 4)
    assert pool.num_live == 10  # the first beam is a fork and has taken nothing
    forward = model.forward

    def watched(batch, storage):
        nonlocal peak
        peak = max(peak, pool.num_live)
        return forward(batch, storage)

    model.forward = watched  # type: ignore[method-assign]
    assert len(search.run(8)) == 4
    assert 10 < peak <= 10 + 4 * 2  # eight tokens of four beams, in pages of four
    assert pool.num_live == 10 and np.array_equal(session.table.rows, before)
    pool.check()
    session.release()
    assert pool.num_live == 0


def test_beams_that_are_given_up_are_released_under_the_lock_and_not_left_to_the_collector(monkeypatch) -> None:
    gc.collect()  # sessions of other tests
    left, session = [], session_of(EchoModel(97), random_tokens(9, 97))
    pool, real = session.pool, Session.__del__

    def watched(other: Session) -> None:
        if getattr(other, "pool", None) is pool:
            left.append(other.table.num_pages)
        real(other)

    monkeypatch.setattr(Session, "__del__", watched)
    BeamSearch(session, 4).run(8)
    gc.collect()
    assert len(left) > 4 and set(left) == {0}
    session.release()


def test_without_room_for_the_beams_it_says_so_and_gives_back_what_it_took() -> None:
    session = session_of(EchoModel(97), random_tokens(8, 97), num_pages=4)
    with pytest.raises(RuntimeError, match="pages were asked for"):
        BeamSearch(session, 4).run(8)
    assert session.pool.num_live == 2
    session.check()
    session.pool.check()
    assert len(BeamSearch(session, 2).run(4)) == 2


def test_equal_scores_are_kept_in_order_of_beam_and_token_id() -> None:
    class Flat(EchoModel):
        def forward(self, batch, storage):
            return torch.zeros_like(super().forward(batch, storage))

    for vocab, width in ((5, 6), (300, 200)):
        beams = BeamSearch(session_of(Flat(vocab), [1, 2], 900), width).run(3)
        assert [b.token_ids for b in beams] == list(itertools.islice(itertools.product(range(vocab), repeat=3), width))


def test_ties_among_many_tokens_are_in_order_of_their_ids_too() -> None:
    class TwoLevels(EchoModel):
        def forward(self, batch, storage):
            logits = torch.zeros_like(super().forward(batch, storage))
            logits[:, torch.arange(self.vocab_size) * 7 % 5 < 2] = 1.0
            return logits

    high = [t for t in range(997) if t * 7 % 5 < 2]
    beams = BeamSearch(session_of(TwoLevels(997), [1, 2], 1300), 600).run(1)
    assert [b.token_ids[0] for b in beams] == [*high, *(t for t in range(997) if t not in high)][:600]


def test_logits_of_minus_infinity_are_never_chosen() -> None:
    class Masked(EchoModel):
        def forward(self, batch, storage):
            logits = super().forward(batch, storage)
            logits[:, 2:] = -torch.inf
            return logits

    beams = BeamSearch(session_of(Masked(5), [1, 2]), 6).run(2)
    assert len(beams) == 4 and {t for b in beams for t in b.token_ids} == {0, 1}
    ended = BeamSearch(session_of(Masked(5), [1, 2]), 6, [0, 1]).run(2)  # nothing but ends
    assert [b.token_ids for b in ended] == [(), ()]


# Where it starts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", ["a cache", "a handle", "a pool", "a fork", "chunks"])
def test_where_the_session_comes_from_does_not_matter(kind: str, start: str) -> None:
    model, prompt = KINDS[kind](97), random_tokens(23, 97)
    want = BeamSearch(session_of(model, prompt, 600), 4, [5]).run(8)
    pool = model.create_kv_pool(600, 4)
    session = Session(model, pool)
    if start == "a cache":
        cache, donor = PrefixCache(pool), Session(model, pool)
        donor.eval(prompt[:-1])
        cache.insert(donor, prompt[:-1])
        donor.release()
        matched = cache.attach(session, prompt)
        assert matched >= 20
        session.eval(prompt[matched:])
    elif start == "chunks":
        for token in prompt:
            session.eval([token])
    else:
        session.eval(prompt)
        if start == "a fork":
            session = session.fork()
        else:
            handle = PrefixHandle(session)
            if start == "a pool":
                registered = PrefixPool()
                registered.register(handle)
                entry = registered.match([*prompt, 1], loops=session.view.loops)
                assert entry is not None
                handle = entry.handle
            session = handle.open()
    expect_same(BeamSearch(session, 4, [5]).run(8), want)
    session.check()


def test_the_lock_is_held_whenever_pages_or_the_model_are_touched() -> None:
    model = EchoModel(97)
    session, lock, held = session_of(model, random_tokens(9, 97)), threading.RLock(), []
    forward, release = model.forward, session.pool.release

    def owned() -> bool:
        return lock._is_owned()  # type: ignore[attr-defined]

    model.forward = lambda *args: held.append(owned()) or forward(*args)  # type: ignore[method-assign]
    session.pool.release = lambda *args: held.append(owned()) or release(*args)  # type: ignore[method-assign]
    BeamSearch(session, 3, lock=lock).run(5)
    assert len(held) > 4 and all(held) and not owned()


def test_what_cannot_be_searched_is_refused() -> None:
    session = session_of(EchoModel(97), [1, 2])
    with pytest.raises(ValueError, match="num_beams must be at least 1, got 0"):
        BeamSearch(session, 0)
    with pytest.raises(RuntimeError, match="eval"):
        BeamSearch(Session(session.model, session.pool), 2)
