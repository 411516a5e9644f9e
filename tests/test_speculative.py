"""Self-speculative decoding: the tokens of plain decoding, whatever is drafted, and the work that it takes for them."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import islice

import pytest
import torch
from feeder import random_tokens
from grammars import tokenizer
from token_api import counting, prompt_of, tiny, with_layers_after

from paged import (
    Grammar,
    GrammarCompiler,
    OutOfPages,
    PrefixCache,
    PrefixHandle,
    PrefixPool,
    PromptTooLong,
    ResumeHandle,
    SamplingParams,
    Session,
    SpeculativeDecoder,
    load_model,
)

MODELS = {"tiny": tiny, "layers after": with_layers_after}
GREEDY = SamplingParams(max_tokens=None)
SEEDED = SamplingParams(max_tokens=None, temperature=1.0, seed=7)
PENALISED = SamplingParams(
    max_tokens=None,
    temperature=0.7,
    top_k=40,
    top_p=0.95,
    seed=2**64 - 1,
    repetition_penalty=1.4,
    presence_penalty=0.6,
    frequency_penalty=0.3,
)
SAMPLING = {"greedy": GREEDY, "seeded": SEEDED, "penalties": PENALISED}


def session_of(model, prompt: list[int], num_pages: int = 600, page_size: int = 16, **options) -> Session:
    session = Session(model, model.create_kv_pool(num_pages, page_size), **options)
    session.eval(prompt)
    return session


def plain(session: Session, params: SamplingParams, count: int, num_prompt: int | None = None) -> list[int]:
    """The same by one row and one draw at a time."""
    session, out = session.fork(), []
    num_prompt = session.n_past if num_prompt is None else num_prompt
    for _ in range(count):
        out.append(session.sample(params, num_prompt))
        session.eval(out[-1:])
    session.release()
    return out


def drafted(session: Session, params: SamplingParams, count: int, draft_loops: int, **options) -> list[int]:
    decoder = SpeculativeDecoder(session, params, params.seed or 0, draft_loops, **options)
    return list(decoder.tokens(count))


# Tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(("loops", "draft_loops"), [(8, 1), (8, 4), (8, 7), (2, 1), (12, 5)])
def test_the_tokens_are_those_of_plain_decoding(kind: str, sampling: str, loops: int, draft_loops: int) -> None:
    model, params = MODELS[kind](), SAMPLING[sampling]
    for length, num_draft in ((1, 4), (16, 1), (37, 3), (47, 9)):
        session = session_of(model, prompt_of(length), loops=loops)
        want = plain(session, params, 25)
        decoder = SpeculativeDecoder(session, params, params.seed or 0, draft_loops, num_draft)
        assert list(decoder.tokens(25)) == want
        session.check()
        assert session.tokens.tolist() == [*prompt_of(length), *want[:24]][: session.n_past]
        assert session.n_past >= length + 24 - num_draft


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("cuts", [(1, 11), (2, 3, 7), (5, 0, 7), (4, 4, 4)])
def test_called_again_it_goes_on_where_it_ended(sampling: str, cuts: tuple[int, ...]) -> None:
    params = SAMPLING[sampling]
    session = session_of(tiny(), prompt_of(30))
    want = plain(session, params, 12)
    decoder = SpeculativeDecoder(session, params, params.seed or 0, 7)
    assert [list(decoder.tokens(count)) for count in cuts] == [
        want[sum(cuts[:i]) : sum(cuts[: i + 1])] for i in range(len(cuts))
    ]
    session.check()


def test_a_reader_that_leaves_in_the_middle_of_a_round_loses_no_token() -> None:
    session = session_of(tiny(), prompt_of(30))
    want = plain(session, GREEDY, 20)
    decoder, got = SpeculativeDecoder(session, GREEDY, 0, 7), []
    while len(got) < 20:
        got.append(next(decoder.tokens(20 - len(got))))
    assert got == want
    assert decoder.stats.accepted > 0


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("window", [1, 7, 16, 30])
def test_a_window_is_kept_to(window: int, sampling: str) -> None:
    params = SAMPLING[sampling]
    session = session_of(tiny(), prompt_of(50), cache_window=window)
    want = plain(session, params, 30)
    assert drafted(session, params, 30, 3) == want
    session.check()
    if sampling == "greedy":
        assert want != plain(session_of(tiny(), prompt_of(50)), params, 30)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_size_of_pages_does_not_matter(page_size: int) -> None:
    session = session_of(tiny(), prompt_of(23), 4000, page_size)
    assert drafted(session, SEEDED, 30, 2) == plain(session_of(tiny(), prompt_of(23)), SEEDED, 30)
    session.check()


@pytest.mark.parametrize("start", ["a cache", "a pool", "a handle", "a resumed handle", "a fork"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_where_the_session_comes_from_does_not_matter(start: str, sampling: str) -> None:
    model, params, prompt = tiny(), SAMPLING[sampling], prompt_of(40)
    want = plain(session_of(model, prompt), params, 20)
    pool = model.create_kv_pool(600)
    session = Session(model, pool)
    if start == "a cache":
        cache, donor = PrefixCache(pool, partial=True), Session(model, pool)
        donor.eval(prompt[:30])
        cache.insert(donor, prompt[:30])
        donor.release()
        matched = cache.attach(session, prompt)
        assert matched == 30
        session.eval(prompt[matched:])
    elif start == "a resumed handle":
        shallow = Session(model, pool, 3)
        session = ResumeHandle.build(shallow, prompt).resume(8)
    else:
        session.eval(prompt)
        handle = PrefixHandle(session)
        if start == "a pool":
            registered = PrefixPool()
            registered.register(handle)
            entry = registered.match(prompt, loops=8)
            assert entry is not None
            handle = entry.handle
        session = session.fork() if start == "a fork" else handle.open()
    assert drafted(session, params, 20, 3) == want
    session.check()


def test_penalties_look_at_the_output_alone_where_that_is_asked() -> None:
    """A session that has generated some of its history already."""
    params = SamplingParams(presence_penalty=3.0, frequency_penalty=1.0)
    session = session_of(tiny(), prompt_of(20))
    begun = plain(session, params, 15)
    session.eval(begun)
    want = plain(session, params, 15, num_prompt=20)
    assert want != plain(session, params, 15)
    assert drafted(session, params, 15, 3, num_prompt=20) == want


def test_an_end_id_comes_out_and_min_tokens_keeps_it_back() -> None:
    session = session_of(tiny(), prompt_of(20))
    free = plain(session, GREEDY, 30)
    end = free[4]
    assert drafted(session.fork(), GREEDY, 30, 3, end_ids=[end])[:5] == free[:5]  # the caller stops there
    params = SamplingParams(min_tokens=9)
    held = drafted(session.fork(), params, 30, 3, end_ids=[end])
    assert end not in held[:9] and held[:4] == free[:4]


def test_a_decoder_may_go_on_where_it_stopped() -> None:
    session = session_of(tiny(), prompt_of(20))
    want = plain(session, SEEDED, 24)
    tokens = SpeculativeDecoder(session, SEEDED, 7, 3).tokens(24)
    assert list(islice(tokens, 5)) == want[:5]
    session.check()
    assert list(tokens) == want[5:]
    session.check()


# Grammars ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def speaking():
    model = load_model("tiny:looped", max_seq_len=256, device="cpu")
    model.tokenizer = tokenizer()  # type: ignore[assignment]
    return model, GrammarCompiler(model.tokenizer, model.vocab_size)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("pattern", ["[ab]{3,6}", "(ab|ba){2}c", "[0-9]+", "a"])
@pytest.mark.parametrize(("draft_loops", "ends"), [(1, [510]), (5, [510]), (7, []), (1, [])])
def test_drafts_keep_to_the_grammar_and_end_with_it(
    speaking, sampling: str, pattern: str, draft_loops: int, ends
) -> None:
    model, compiler = speaking
    grammar = Grammar.regex(pattern)
    params = replace(SAMPLING[sampling], grammar=grammar)
    session = session_of(model, prompt_of(20))
    want, matcher, plainly = [], compiler.matcher(grammar, ends), session.fork()
    while len(want) < 12:
        want.append(plainly.sample(params, 20, matcher))
        if matcher.accept(want[-1]):
            break
        plainly.eval(want[-1:])
    matcher = compiler.matcher(grammar, ends)
    decoder = SpeculativeDecoder(session, params, params.seed or 0, draft_loops, end_ids=ends, matcher=matcher)
    assert list(decoder.tokens(12)) == want
    session.check()


def test_a_grammar_without_its_matcher_is_refused(speaking) -> None:
    session = session_of(speaking[0], prompt_of(5))
    with pytest.raises(ValueError, match="a grammar needs its matcher"):
        SpeculativeDecoder(session, SamplingParams(grammar=Grammar.regex("a")), 0, 2)


# Work -------------------------------------------------------------------------------------------------------------


def with_settled_logits(agree: bool):
    """A looped model whose logits name a token by the position alone: its drafts always hold, or never do."""
    model = load_model("tiny:looped", max_seq_len=256, device="cpu")
    computed = model.run_loops

    def run_loops(batch, storage, residual=None, start=0):
        logits, after = computed(batch, storage, residual, start)
        positions = torch.from_numpy(batch.logit_rows) + int(batch.kv_lens[0]) - len(batch.tokens)
        settled = torch.zeros_like(logits)
        settled[range(len(settled)), (3 * positions + (0 if agree or start else 1)) % 512] = 1.0
        return settled, after

    model.run_loops = run_loops
    return model


@pytest.mark.parametrize("num_draft", [1, 3, 6])
@pytest.mark.parametrize("agree", [True, False])
def test_every_row_is_computed_once_at_each_depth(num_draft: int, agree: bool) -> None:
    """A round drafts row by row at the small depth, and one call runs the missing iterations over all its rows."""
    model = with_settled_logits(agree)
    session = session_of(model, prompt_of(20))
    with counting(model) as work:
        decoder = SpeculativeDecoder(session, GREEDY, 0, 2, num_draft)
        tokens = list(decoder.tokens(1 + 3 * (num_draft + 1)))
    verified = [rows for rows, start, _ in work.calls if start == 2]
    shallow = [(rows, depth) for rows, start, depth in work.calls if start == 0]
    assert len(tokens) == 1 + 3 * (num_draft + 1)
    assert set(shallow) == {(1, 2)} and len(shallow) == sum(verified)
    assert {depth for _, start, depth in work.calls if start} == {8}
    assert work.iterations == sum(verified) * 8  # what plain decoding of as many rows takes
    if agree:
        assert verified == [num_draft + 1] * 3
        assert (decoder.stats.drafted, decoder.stats.accepted) == (3 * num_draft, 3 * num_draft)
    else:
        assert len(verified) == 3 * (num_draft + 1) and decoder.stats.accepted == 0
        assert decoder.stats.drafted == sum(verified) - len(verified)


def test_drafts_that_a_real_model_makes_are_kept_now_and_then_and_more_so_from_a_greater_depth() -> None:
    kept = []
    for draft_loops in (1, 4, 7):
        session = session_of(tiny(), random_tokens(20, 512, 3))
        decoder = SpeculativeDecoder(session, GREEDY, 0, draft_loops)
        list(decoder.tokens(60))
        kept.append(decoder.stats.accepted / decoder.stats.drafted)
    assert 0 <= kept[0] <= kept[1] <= kept[2] < 1 and kept[2] > 0.1


def test_no_more_is_drafted_than_can_be_used() -> None:
    session = session_of(tiny(), prompt_of(20))
    with counting(tiny()) as work:
        decoder = SpeculativeDecoder(session, GREEDY, 0, 7, num_draft=50)
        assert len(list(decoder.tokens(2))) == 2
    assert (decoder.stats.drafted, work.rows) == (0, 2)  # one row drafted at 7 loops and finished at 8
    with counting(tiny()) as work:
        assert len(list(SpeculativeDecoder(session, GREEDY, 0, 7).tokens(1))) == 1
    assert work.forwards == 0


# Pages ------------------------------------------------------------------------------------------------------------


def test_rejected_rows_leave_no_page_behind_and_no_shared_page_is_written() -> None:
    model, prompt = tiny(), prompt_of(37)
    session = session_of(model, prompt)
    handle = PrefixHandle(session)
    session.release()
    pool, storage = handle.pool, handle.pool.storage
    assert storage is not None
    before = storage.pages[handle.page_ids].clone()
    opened = handle.open()
    for token in SpeculativeDecoder(opened, SEEDED, 7, 1, num_draft=7).tokens(40):
        assert token >= 0
        opened.check()
        assert opened.table.num_pages == -(-opened.n_past // 16)
    after = storage.pages[handle.page_ids]
    assert ((after == before) | (after.isnan() & before.isnan())).all()
    opened.release()
    assert pool.num_live == len(handle.page_ids)
    handle.check()
    pool.check()


def test_a_full_pool_ends_it_between_rounds_and_what_was_known_stays() -> None:
    session = session_of(tiny(), prompt_of(30), num_pages=9 * 3)
    want = plain(session_of(tiny(), prompt_of(30)), GREEDY, 30)
    got = []
    with pytest.raises(OutOfPages):
        got.extend(token for token in SpeculativeDecoder(session, GREEDY, 0, 3).tokens(30))
    got = want[: session.n_past - 30]
    assert session.tokens.tolist() == [*prompt_of(30), *got]
    assert session.n_past <= 48
    session.check()
    session.release()
    assert session.pool.num_live == 0


def test_an_error_of_the_model_leaves_the_session_where_it_was(monkeypatch) -> None:
    model = load_model("tiny:looped", max_seq_len=256, device="cpu")
    for fails_at_start in (0, 3):  # while drafting, while verifying
        session = session_of(model, prompt_of(31))
        tokens = SpeculativeDecoder(session, GREEDY, 0, 3).tokens(30)
        next(tokens), next(tokens)
        n_past, run_loops = session.n_past, model.run_loops

        def broken(batch, storage, residual=None, start=0, fails=fails_at_start, run=run_loops):
            if start == fails:
                raise MemoryError("no more of this")
            return run(batch, storage, residual, start)

        with monkeypatch.context() as patch:
            patch.setattr(model, "run_loops", broken)
            with pytest.raises(MemoryError):
                list(tokens)
        assert session.n_past >= n_past
        session.check()


@pytest.mark.parametrize("left", [1, 2, 5, 9])
def test_it_reaches_the_models_length_and_no_further(left: int) -> None:
    model = load_model("tiny:looped", max_seq_len=64, device="cpu")
    session = session_of(model, prompt_of(64 - left))
    want = plain(session_of(tiny(), prompt_of(64 - left)), GREEDY, left + 1)
    assert drafted(session, GREEDY, left + 1, 3) == want  # the last token needs no row
    assert session.n_past <= 64
    session = session_of(model, prompt_of(64 - left))
    with pytest.raises(PromptTooLong):
        drafted(session, GREEDY, left + 2, 3)


def test_the_lock_is_held_while_the_model_runs() -> None:
    model = load_model("tiny:looped", max_seq_len=64, device="cpu")
    session, lock, held = session_of(model, prompt_of(9)), threading.RLock(), []
    run_loops = model.run_loops

    def watched(*args):
        held.append(lock._is_owned())  # type: ignore[attr-defined]
        return run_loops(*args)

    model.run_loops = watched
    for _ in SpeculativeDecoder(session, GREEDY, 0, 3, lock=lock).tokens(10):
        assert not lock._is_owned()  # type: ignore[attr-defined]
    assert held and all(held)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"draft_loops": 0}, "below the 8 loops of the session, got 0"),
        ({"draft_loops": 8}, "got 8"),
        ({"draft_loops": 9}, "got 9"),
        ({"draft_loops": 2, "num_draft": 0}, "num_draft must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_drafted_is_refused(options: dict, match: str) -> None:
    session = session_of(tiny(), prompt_of(5))
    with pytest.raises(ValueError, match=match):
        SpeculativeDecoder(session, GREEDY, 0, **options)


def test_a_model_that_does_not_loop_and_a_fresh_session_are_refused() -> None:
    plain_model = tiny("tiny:llama")
    with pytest.raises(ValueError, match="below the 0 loops"):
        SpeculativeDecoder(session_of(plain_model, prompt_of(5), 60), GREEDY, 0, 1)
    with pytest.raises(RuntimeError, match="eval"):
        SpeculativeDecoder(Session(tiny(), tiny().create_kv_pool(60)), GREEDY, 0, 1)
