"""Seed 003, "The Prefix Cache by Hand": a test for each of its sentences that promises something.

The seed's names, and ours: create_kv_pool is model.create_kv_pool; create_prefix_cache is PrefixCache; prefix_insert,
prefix_match_len, prefix_attach, prefix_checkpoint_at, prefix_chain_list and prefix_release are the methods insert,
match_len, attach, checkpoint_at, chains and release; prefix_held_groups is held_pages; render_turn_marked is
ChatRenderer.render_marked. Where it speaks of real figures, the model is SmolLM2 itself.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
from feeder import random_tokens

from paged import ChatRenderer, GeometryMismatch, LoadError, PrefixCache, Session, SessionInUse, load_model
from paged.loaders.open import open_checkpoint
from paged.models.base import LanguageModel
from paged.models.hybrid import HybridModel
from paged.models.tiny import TINY_HYBRID, random_tensors
from scheduler import Engine, SamplingParams
from scheduler.request import PrefillStops

GIB = 1024 * 1048576
Prompt = list[int] | npt.NDArray[np.int32]
GREEDY = SamplingParams(max_tokens=6)

SYSTEM = (  # 60 tokens of SmolLM2
    "You keep the lighthouse on Gull Rock: the lamp, the log and the tea. You answer visitors politely, in one short "
    "sentence, and you never invent facts about the sea. If you do not know something, say so, and offer the visitor "
    "a cup of hot black tea instead.\n"
)
FIRST, SECOND = "How high is the lamp?\n", "Is there any tea left?\n"


@pytest.fixture(scope="module")
def llama() -> LanguageModel:
    return load_model("tiny:llama", device="cpu")


@pytest.fixture(scope="module")
def hybrid() -> LanguageModel:
    return load_model("tiny:hybrid", device="cpu")


class Hand:
    """A pool of a model and its cache; sessions are cold or attach, and `check` looks at all of it."""

    def __init__(self, model: LanguageModel, num_pages: int = 64, page_size: int = 16, **cache) -> None:
        self.model = model
        self.pool = model.create_kv_pool(num_pages, page_size)
        self.cache = PrefixCache(self.pool, **cache)

    def ask(self, prompt: Prompt) -> tuple[Session, int]:
        """A fresh session that attached what is cached of `prompt` and evaluated the rest; and what it attached."""
        session = Session(self.model, self.pool)
        matched = self.cache.attach(session, prompt)
        session.eval(prompt[matched:])
        self.check(session)
        return session, matched

    def donate(self, prompt: Prompt, preview: str = "", opening: bool = False) -> None:
        """One stream from its prompt to its end."""
        session, _ = self.ask(prompt)
        self.cache.insert(session, prompt, preview, opening)
        session.release()
        self.check(session)

    def check(self, session: Session | None = None) -> None:
        self.pool.check()
        self.cache.check()
        if session is not None:
            session.check()

    def checkpoints(self) -> list[tuple[int, bool]]:
        """(tokens, whether it is an opening) of each checkpoint, shortest first."""
        assert self.cache.checkpoints is not None
        return sorted((c.num_tokens, c.opening) for c in self.cache.checkpoints)


def answer(session: Session, num_tokens: int = 6) -> list[tuple[int, bytes]]:
    """The session's next tokens by greedy choice, and the bytes of the logits behind each."""
    steps: list[tuple[int, bytes]] = []
    for _ in range(num_tokens):
        assert session.logits is not None
        steps.append((session.sample(), session.logits.numpy().tobytes()))
        session.eval([steps[-1][0]])
    return steps


def cold_answer(model: LanguageModel, prompt: Prompt, num_tokens: int = 6) -> list[tuple[int, bytes]]:
    session = Session(model, model.create_kv_pool(32))
    session.eval(prompt)
    return answer(session, num_tokens)


def run(engine: Engine, prompt: Prompt, stops: PrefillStops | None = None) -> SimpleNamespace:
    """One request from submit to its end; its output, and what it was told it attached."""
    wanted = engine.submit(prompt, GREEDY, stops=stops)
    while engine.has_work:
        for event in engine.step():
            if event.output is not None and event.request_id == wanted:
                output = event.output
        engine.check()
    return SimpleNamespace(tokens=output.token_ids, cached=output.num_cached_tokens, prompt=output.num_prompt_tokens)


system = random_tokens(60, 512, seed=1)
prompts = [system + random_tokens(7, 512, seed=seed) for seed in (2, 3, 4)]


# The idea ---------------------------------------------------------------------------------------------------------


def test_two_requests_on_one_system_prompt_compute_the_same_rows_for_it(llama: LanguageModel) -> None:
    rows = []
    for prompt in prompts[:2]:
        pool = llama.create_kv_pool(70, 1)  # pages of one token: a page is a row
        session = Session(llama, pool)
        session.eval(prompt)
        assert pool.storage is not None
        rows.append(pool.storage.pages[session.table.rows[0]].numpy())
    assert rows[0][:60].tobytes() == rows[1][:60].tobytes()
    assert rows[0][60:].tobytes() != rows[1][60:].tobytes()


def test_the_cache_that_the_scheduler_runs_can_be_driven_by_hand_too(llama: LanguageModel) -> None:
    engine = Engine(llama, num_pages=64)
    run(engine, prompts[0])
    assert engine.cache is not None
    session = Session(engine.model, engine.pool)
    assert engine.cache.attach(session, prompts[1]) == 60
    session.eval(prompts[1][60:])
    assert answer(session) == cold_answer(llama, prompts[1])
    engine.cache.insert(session, session.tokens)
    session.release()
    engine.check()
    assert run(engine, prompts[1]).cached == 66


@pytest.mark.parametrize("page_size", [1, 4, 7, 16, 60, 61, 64])
def test_the_match_is_granular_to_the_pages_of_the_pool(llama: LanguageModel, page_size: int) -> None:
    hand = Hand(llama, 80, page_size)
    hand.donate(prompts[0])
    assert hand.ask(prompts[1])[1] == 60 // page_size * page_size


@pytest.mark.parametrize("page_size", [1, 4, 7, 16, 60, 61, 64])
def test_asked_for_partial_pages_too_the_match_is_the_common_prefix(llama: LanguageModel, page_size: int) -> None:
    hand = Hand(llama, 80, page_size, partial=True)
    hand.donate(prompts[0])
    session, matched = hand.ask(prompts[1])
    assert matched == 60
    assert answer(session) == cold_answer(llama, prompts[1])


# Donate, then attach ----------------------------------------------------------------------------------------------


def test_a_cache_serves_the_sessions_of_one_pool(llama: LanguageModel) -> None:
    hand, other = Hand(llama), Hand(llama)
    session, _ = other.ask(prompts[0])
    with pytest.raises(GeometryMismatch, match="not paged out of this cache's pool"):
        hand.cache.insert(session, prompts[0])
    with pytest.raises(GeometryMismatch, match="not paged out of this cache's pool"):
        hand.cache.attach(Session(llama, other.pool), prompts[0])
    assert hand.cache.held_pages == 0


@pytest.mark.parametrize(
    ("evaluated", "given", "kept"), [(67, 67, 4), (64, 64, 4), (67, 63, 3), (47, 67, 2), (15, 15, 0)]
)
def test_a_donation_keeps_every_full_page_of_what_was_evaluated(
    llama: LanguageModel, evaluated: int, given: int, kept: int
) -> None:
    hand = Hand(llama)
    session = Session(llama, hand.pool)
    session.eval(prompts[0][:evaluated])
    assert hand.cache.insert(session, prompts[0][:given]) == kept == hand.cache.held_pages
    hand.check(session)


def test_a_donation_of_the_full_history_keeps_the_pages_of_the_answer_too(llama: LanguageModel) -> None:
    hand = Hand(llama)
    session, _ = hand.ask(prompts[0])
    answer(session, 20)
    history = session.tokens.tolist()
    hand.cache.insert(session, history)
    session.release()
    assert hand.cache.match_len([*history, 1]) == 80  # of 87: prompt 67, answer 20
    assert hand.ask([*history, 1])[1] == 80


def test_the_donated_rows_outlive_their_donor(llama: LanguageModel) -> None:
    hand = Hand(llama)
    session, _ = hand.ask(prompts[0])
    hand.cache.insert(session, prompts[0], "system prompt")
    session.release()
    assert (hand.pool.num_live, hand.pool.num_cached_only) == (0, 4)
    warm, matched = hand.ask(prompts[1])
    assert matched == 48
    assert answer(warm) == cold_answer(llama, prompts[1])


def test_the_preview_is_only_a_label(llama: LanguageModel) -> None:
    hand = Hand(llama)
    hand.donate(prompts[0], "one label")
    hand.donate(prompts[0], "another label")
    assert [chain.preview for chain in hand.cache.chains()] == ["one label"]
    assert hand.cache.match_len(prompts[0]) == 64


@pytest.mark.parametrize("partial", [False, True])
def test_the_cache_says_how_many_tokens_an_attach_would_bring_right_now(llama: LanguageModel, partial: bool) -> None:
    hand = Hand(llama, partial=partial)
    asked = [*prompts, system, prompts[0][:33], prompts[0] + prompts[1], [1], random_tokens(40, 512, seed=9)]
    for prompt in asked:
        want = hand.cache.match_len(prompt)
        session, matched = hand.ask(prompt)
        assert matched == want
        hand.cache.insert(session, prompt)
        session.release()
    assert [hand.cache.match_len(p) for p in asked[:3]] == ([66] * 3 if partial else [64] * 3)


def test_asking_attaches_nothing_and_touches_no_entry(llama: LanguageModel) -> None:
    hand = Hand(llama, 12, partial=True)
    hand.donate(random_tokens(64, 512, seed=5))
    hand.donate(random_tokens(64, 512, seed=6))
    index = hand.cache.index
    seen = (hand.pool.refs, index.last_use, index.tick, hand.cache.stats, hand.cache.chains())
    before = repr(seen)
    for _ in range(100):
        assert hand.cache.match_len([*random_tokens(64, 512, seed=5), 1]) == 64
    assert repr(seen) == before
    hand.pool.alloc(5)  # one more than are free: the older donation goes first, however often it was asked for
    assert hand.cache.match_len([*random_tokens(64, 512, seed=5), 1]) == 48
    assert hand.cache.match_len([*random_tokens(64, 512, seed=6), 1]) == 64


def test_a_server_learns_what_a_request_must_still_bring(llama: LanguageModel) -> None:
    engine = Engine(llama, num_pages=64)
    for prompt in [*prompts, prompts[0]]:
        held = engine.prefix_match_len(prompt)
        output = run(engine, prompt)
        assert output.cached == held
        assert output.tokens == [token for token, _ in cold_answer(llama, prompt)]
    assert held == len(prompts[0]) - 1


def test_matched_pages_join_the_page_table_and_the_position_jumps_past_them(llama: LanguageModel) -> None:
    hand = Hand(llama)
    first, _ = hand.ask(prompts[0])
    hand.cache.insert(first, prompts[0])
    second = Session(llama, hand.pool)
    assert hand.cache.attach(second, prompts[1]) == 48 == second.n_past
    assert second.tokens.tolist() == prompts[1][:48]
    assert second.table.rows.tolist() == first.table.rows[:, :3].tolist()
    assert hand.pool.refs[second.table.ids].tolist() == [3, 3, 3]  # both streams, and the cache
    hand.check(second)


def test_only_the_tail_is_evaluated(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    hand, rows, forward = Hand(llama), [], llama.forward
    monkeypatch.setattr(llama, "forward", lambda batch, kv: rows.append(len(batch.tokens)) or forward(batch, kv))
    hand.donate(prompts[0])
    hand.ask(prompts[1])
    assert rows == [67, 19]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("partial", [False, True])
def test_the_match_is_capped_one_token_short_of_the_prompt(llama: LanguageModel, page_size: int, partial: bool) -> None:
    hand = Hand(llama, 80, page_size, partial=partial)
    hand.donate(prompts[0])
    for length in (1, 2, 16, 17, 32, 64, 65, 67):
        session, matched = hand.ask(prompts[0][:length])
        assert matched == (length - 1 if partial else (length - 1) // page_size * page_size)
        assert session.logits is not None  # the model had a token to make them of
        session.release()


def test_pages_are_attached_to_a_fresh_session_only(llama: LanguageModel) -> None:
    hand = Hand(llama)
    session, _ = hand.ask(prompts[0])
    with pytest.raises(SessionInUse, match="holds 67 tokens and 5 pages"):
        hand.cache.attach(session, prompts[0])


@pytest.mark.parametrize("partial", [False, True])
def test_what_follows_an_attach_is_what_follows_a_cold_prompt(llama: LanguageModel, partial: bool) -> None:
    hand = Hand(llama, partial=partial)
    hand.donate(prompts[0])
    for prompt in prompts:
        session, matched = hand.ask(prompt)
        assert matched > 0
        assert answer(session) == cold_answer(llama, prompt)


# The real figures: SmolLM2, a system prompt of 60 tokens, pages of 16 ---------------------------------------------


@pytest.fixture(scope="module", params=[False, True], ids=["whole pages", "partial pages"])
def walk(request: pytest.FixtureRequest, smollm2) -> SimpleNamespace:
    """The seed's walk from the first prefill to the release: stream A donates; B asks, attaches, answers."""
    partial: bool = request.param
    first, second = (smollm2.tokenizer.encode(SYSTEM + text).tolist() for text in (FIRST, SECOND))
    pool = smollm2.create_kv_pool(64, 16)
    cache = PrefixCache(pool, 0, 16, GIB, partial=partial)
    a = Session(smollm2, pool)
    a.eval(first)
    cache.insert(a, first, "system prompt")
    a.release()
    told = cache.match_len(second)
    b = Session(smollm2, pool)
    attached = cache.attach(b, second)
    b.eval(second[attached:])
    steps = answer(b)
    [chain] = cache.chains()
    b.release()
    held, not_free = cache.held_pages, pool.num_pages - pool.num_free
    cache.release()
    pool.check()
    return SimpleNamespace(
        partial=partial,
        first=first,
        second=second,
        told=told,
        attached=attached,
        steps=steps,
        chain=chain,
        held=held,
        not_free=not_free,
        missing=pool.num_pages - pool.num_free,
    )


@pytest.mark.slow
def test_of_60_shared_tokens_the_second_stream_attaches_three_whole_pages_or_all(walk, smollm2) -> None:
    assert walk.first[:60] == walk.second[:60] == smollm2.tokenizer.encode(SYSTEM).tolist()
    assert walk.first[60] != walk.second[60]
    assert walk.told == walk.attached == (60 if walk.partial else 48)


@pytest.mark.slow
def test_the_second_stream_evaluates_a_handful_and_answers_what_a_cold_one_answers(walk, smollm2) -> None:
    assert len(walk.second) == 67
    assert walk.second[walk.attached :] == walk.second[-7 if walk.partial else -19 :]
    assert walk.steps == cold_answer(smollm2, walk.second)


@pytest.mark.slow
def test_the_chain_tells_of_the_second_stream_and_everything_comes_back(walk) -> None:
    assert (walk.chain.num_tokens, walk.chain.num_pages) == ((67, 5) if walk.partial else (64, 4))
    assert (walk.chain.num_hits, walk.chain.preview) == (1, "system prompt")
    assert walk.held == walk.not_free == walk.chain.num_pages
    assert walk.missing == 0


@pytest.mark.slow
def test_the_scheduler_tells_as_many_cached_tokens_as_the_walk_by_hand(smollm2) -> None:
    engine = Engine(smollm2, num_pages=64)
    first, second = (smollm2.tokenizer.encode(SYSTEM + text) for text in (FIRST, SECOND))
    run(engine, first)
    output = run(engine, second)
    assert (output.cached, output.prompt) == (60, 67)


# Models that carry state between tokens ---------------------------------------------------------------------------


def test_pages_alone_continue_nothing(hybrid: LanguageModel) -> None:
    hand = Hand(hybrid)
    hand.donate(prompts[0])
    assert hand.cache.held_pages == 5
    assert hand.cache.match_len(prompts[1]) == 0  # 60 tokens are the same, and no state was kept after any of them
    assert hand.cache.match_len(prompts[0][:64]) == 0


def test_a_checkpoint_is_the_tokens_their_pages_and_the_state_at_one_position(hybrid: LanguageModel) -> None:
    hand = Hand(hybrid)
    hand.donate(prompts[0])
    assert hand.cache.checkpoints is not None
    [checkpoint] = hand.cache.checkpoints
    assert checkpoint.tokens.tolist() == prompts[0]
    assert checkpoint.pages.shape == (1, 5)
    assert checkpoint.snapshot.position == 67


@pytest.mark.parametrize(
    ("prompt", "attached"),
    [
        (prompts[0] + [5], 67),
        (prompts[0] + prompts[1], 67),
        (prompts[0], 0),
        (prompts[0][:66], 0),
        ([*prompts[0][:66], 511, 5], 0),
        ([511, *prompts[0][1:], 5], 0),
    ],
    ids=["one more", "many more", "the same", "one less", "another last token", "another first token"],
)
def test_a_prompt_attaches_a_checkpoint_only_if_it_starts_with_all_of_it(
    hybrid: LanguageModel, prompt: Prompt, attached: int
) -> None:
    assert prompts[0][66] != 511 != prompts[0][0]
    hand = Hand(hybrid)
    hand.donate(prompts[0])
    assert hand.cache.match_len(prompt) == attached
    session, matched = hand.ask(prompt)
    assert matched == attached
    assert answer(session) == cold_answer(hybrid, prompt)


def test_a_checkpoint_after_the_prompt_helps_the_next_turn_and_no_other_conversation(hybrid: LanguageModel) -> None:
    hand = Hand(hybrid)
    session, _ = hand.ask(prompts[0])
    hand.cache.insert(session, prompts[0])
    reply = [token for token, _ in answer(session)]
    next_turn = prompts[0] + reply + random_tokens(9, 512, seed=7)
    assert hand.cache.match_len(next_turn) == 67
    assert hand.cache.match_len(prompts[1]) == 0
    warm, _ = hand.ask(next_turn)
    assert answer(warm) == cold_answer(hybrid, next_turn)


def test_a_checkpoint_right_after_the_system_prompt_serves_every_conversation_on_it(hybrid: LanguageModel) -> None:
    hand = Hand(hybrid)
    session = Session(hybrid, hand.pool)
    stop = hand.cache.checkpoint_at(session, prompts[0], 0, len(system))
    session.eval(prompts[0][:stop])
    hand.cache.insert(session, prompts[0], "", opening=True)
    session.eval(prompts[0][stop:])
    assert answer(session) == cold_answer(hybrid, prompts[0])  # the stop changed nothing
    for prompt in prompts[1:]:
        other, matched = hand.ask(prompt)
        assert matched == 60 == stop
        assert answer(other) == cold_answer(hybrid, prompt)


@pytest.fixture(scope="module")
def chatty() -> LanguageModel:
    """A recurrent model with random weights that speaks with SmolLM2's tokenizer and template."""
    try:
        checkpoint = open_checkpoint("smollm2")
    except LoadError as error:
        pytest.skip(str(error))
    config = replace(TINY_HYBRID, vocab_size=checkpoint.config.vocab_size)
    model = HybridModel(config, random_tensors(config).__getitem__)
    model.tokenizer, model.chat = checkpoint.tokenizer, checkpoint.chat
    return model


def turn_of(model: LanguageModel, text: str):
    chat = ChatRenderer(model, SYSTEM)
    chat.add_user(text)
    return chat.render_marked()


def test_the_opening_counts_the_leading_tokens_that_are_the_same_for_any_user_text(chatty: LanguageModel) -> None:
    assert chatty.tokenizer is not None
    texts = (FIRST, SECOND, "", " ", "\n", "x", "assistant", "<|im_end|>", "日本", "\u0301", SYSTEM)
    turns = [turn_of(chatty, text) for text in texts]
    [opening] = {turn.opening for turn in turns}
    assert len({tuple(turn.tokens[:opening].tolist()) for turn in turns}) == 1
    assert opening > len(chatty.tokenizer.encode(SYSTEM))  # all of the system prompt is in it
    assert len({int(turn.tokens[opening]) for turn in turns}) > 1  # and not one more


def test_the_walk_of_a_chat_on_a_recurrent_model(chatty: LanguageModel) -> None:
    hand = Hand(chatty, max_states=16, max_state_bytes=GIB)
    attached = []
    for text in (FIRST, SECOND):
        turn = turn_of(chatty, text)
        session = Session(chatty, hand.pool)
        matched = hand.cache.attach(session, turn.tokens)
        stop = hand.cache.checkpoint_at(session, turn.tokens, matched, turn.opening)
        if stop > 0:
            session.eval(turn.tokens[matched:stop])
            hand.cache.insert(session, turn.tokens, "", opening=True)
        session.eval(turn.tokens[session.n_past :])
        attached.append((matched, stop))
        assert answer(session) == cold_answer(chatty, turn.tokens)
        hand.check(session)
    assert attached == [(0, turn.opening), (turn.opening, 0)]
    assert hand.checkpoints() == [(turn.opening, True)]


@pytest.mark.parametrize(
    ("matched", "stable_at", "stop"),
    [
        (0, 60, 60),
        (0, 16, 16),
        (44, 60, 60),
        (45, 60, 0),  # less than a page past what is attached
        (60, 60, 0),
        (0, 15, 0),
        (0, 66, 66),
        (0, 67, 0),  # not inside the prompt
        (0, 0, 0),
    ],
)
def test_checkpoint_at_is_where_to_stop_or_0_where_a_stop_buys_nothing(
    hybrid: LanguageModel, matched: int, stable_at: int, stop: int
) -> None:
    hand = Hand(hybrid)
    session = Session(hybrid, hand.pool)
    assert hand.cache.checkpoint_at(session, prompts[0], matched, stable_at) == stop
    assert hand.checkpoints() == []


def test_without_a_hint_the_prefill_stops_where_it_leaves_an_earlier_conversation(hybrid: LanguageModel) -> None:
    hand = Hand(hybrid)
    hand.donate(prompts[0])
    session = Session(hybrid, hand.pool)
    assert hand.cache.attach(session, prompts[1]) == 0
    assert hand.cache.checkpoint_at(session, prompts[1], 0) == 60
    session.eval(prompts[1][:60])
    hand.cache.insert(session, prompts[1])
    assert hand.ask(prompts[2])[1] == 60


def test_on_a_model_without_state_checkpoint_at_is_always_0(llama: LanguageModel) -> None:
    hand = Hand(llama)
    session = Session(llama, hand.pool)
    for matched in (0, 16, 48):
        for stable_at in (0, 16, 60, 66, 67):
            assert hand.cache.checkpoint_at(session, prompts[0], matched, stable_at) == 0
    hand.donate(prompts[0])
    assert hand.cache.match_len(prompts[1]) == 48  # the pages are the cache already


def test_an_insert_records_where_the_session_stands(hybrid: LanguageModel) -> None:
    hand = Hand(hybrid)
    session = Session(hybrid, hand.pool)
    for end in (16, 30, 60, 67):
        session.eval(prompts[0][session.n_past : end])
        hand.cache.insert(session, prompts[0], opening=end == 60)  # the whole turn is given each time
        hand.check(session)
    assert hand.checkpoints() == [(16, False), (30, False), (60, True), (67, False)]
    for prompt, matched in ((prompts[0] + [5], 67), (prompts[1], 60), (prompts[0][:59], 30), (prompts[0][:30], 16)):
        other, got = hand.ask(prompt)
        assert got == matched
        assert answer(other) == cold_answer(hybrid, prompt)
        other.release()


def test_a_cache_keeps_sixteen_checkpoints_unless_told_otherwise(hybrid: LanguageModel) -> None:
    for cache, kept in (({}, 16), ({"max_states": 3}, 3), ({"max_states": 0}, 0)):
        hand = Hand(hybrid, 128, **cache)
        for seed in range(20):
            hand.donate(random_tokens(20, 512, seed))
        assert len(hand.checkpoints()) == kept
        assert hand.pool.num_free == 128 - hand.cache.held_pages


@pytest.mark.parametrize("budget", ["states", "bytes"])
def test_the_budget_drops_an_opening_after_any_conversations_own(hybrid: LanguageModel, budget: str) -> None:
    storage = hybrid.create_kv_pool(1, 16).storage
    assert hybrid.state_spec is not None and storage is not None
    one = hybrid.state_spec.num_bytes + 2 * storage.page_bytes  # 20 tokens, on two pages
    limit = {"max_states": 3} if budget == "states" else {"max_state_bytes": 3 * one}
    hand = Hand(hybrid, 128, **limit)
    openings = [random_tokens(20, 512, seed) for seed in (100, 101)]
    for prompt in openings:
        hand.donate(prompt, opening=True)
    for seed in range(9):  # each a conversation of its own, used later than both openings
        hand.donate(random_tokens(20, 512, seed))
        assert hand.checkpoints() == [(20, False), (20, True), (20, True)]
        assert hand.cache.match_len([*random_tokens(20, 512, seed), 1]) == 20
    assert [hand.cache.match_len([*prompt, 1]) for prompt in openings] == [20, 20]
    for seed in (102, 103):  # openings alone: now the one that was used longest ago goes
        hand.donate(random_tokens(20, 512, seed), opening=True)
    assert [hand.cache.match_len([*prompt, 1]) for prompt in openings] == [0, 20]
    hand.check()


# The four places of the scheduler ---------------------------------------------------------------------------------

HEAD, OPENING, STABLE, END = PLACES = 32, 64, 120, 180
turn = random_tokens(200, 512, seed=20)
stops = PrefillStops(head=HEAD, opening=OPENING, stable=STABLE, messages_end=END)


def engine_of(model: LanguageModel, **limits) -> Engine:
    return Engine(model, num_pages=256, **limits)


def kept(engine: Engine) -> list[tuple[int, bool]]:
    assert engine.cache is not None and engine.cache.checkpoints is not None
    return sorted((c.num_tokens, c.opening) for c in engine.cache.checkpoints)


def test_the_scheduler_stops_at_the_four_places_that_a_request_names(hybrid: LanguageModel) -> None:
    engine = engine_of(hybrid)
    output = run(engine, turn, stops)
    assert kept(engine) == [(HEAD, True), (OPENING, True), (STABLE, False), (END, False), (205, False)]
    assert output.tokens == [token for token, _ in cold_answer(hybrid, turn)]  # the stops changed nothing


@pytest.mark.parametrize(
    ("place", "other"),
    [
        (HEAD, turn[:HEAD] + random_tokens(90, 512, seed=21)),
        (OPENING, turn[:OPENING] + random_tokens(90, 512, seed=22)),
        (STABLE, turn[:STABLE] + random_tokens(40, 512, seed=23)),
        (END, turn[:END] + random_tokens(30, 512, seed=24)),
    ],
    ids=["another system text", "another conversation", "another last message", "the next turn"],
)
def test_each_place_serves_the_prompts_that_it_is_for(hybrid: LanguageModel, place: int, other: Prompt) -> None:
    engine = engine_of(hybrid)
    run(engine, turn, stops)
    assert engine.prefix_match_len(other) == place
    output = run(engine, other)
    assert output.cached == place
    assert output.tokens == [token for token, _ in cold_answer(hybrid, other)]


@pytest.mark.parametrize("place", ["head", "opening", "stable", "messages_end"])
def test_each_place_may_be_named_alone(hybrid: LanguageModel, place: str) -> None:
    engine = engine_of(hybrid)
    run(engine, turn, PrefillStops(**{place: 100}))
    assert (100, place in ("head", "opening")) in kept(engine)


def test_the_marks_of_a_rendered_turn_are_places_to_stop_at(chatty: LanguageModel) -> None:
    engine = engine_of(chatty)
    marked = turn_of(chatty, "Tell me about the lamp, and about the log, and about the tea, in this order please.")
    run(engine, marked.tokens, PrefillStops(marked.head, marked.opening, marked.stable, marked.messages_end))
    assert (marked.opening, True) in kept(engine)
    assert (marked.messages_end, False) in kept(engine)
    assert run(engine, turn_of(chatty, SECOND).tokens).cached == marked.opening


def test_the_schedulers_byte_budget_is_a_quarter_of_the_memory_unless_told_otherwise(hybrid: LanguageModel) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for given, want in ((None, memory // 4), (123_456, 123_456)):
        engine = engine_of(hybrid, max_state_bytes=given)
        assert engine.cache is not None and engine.cache.checkpoints is not None
        assert engine.cache.checkpoints.max_state_bytes == want


def test_within_its_budget_the_scheduler_drops_tails_before_openings(hybrid: LanguageModel) -> None:
    engine = engine_of(hybrid, max_state_bytes=300_000)
    assert engine.cache is not None and engine.cache.checkpoints is not None
    for seed in range(8):
        own = random_tokens(136, 512, seed=30 + seed)
        run(engine, turn[:OPENING] + own, stops)
        assert engine.cache.checkpoints.num_bytes <= 300_000
    assert engine.stats()["checkpoint_evictions"] > 0
    assert [place for place, opening in kept(engine) if opening] == [HEAD, OPENING]
    assert engine.prefix_match_len(prompts[0]) == 0
    assert engine.prefix_match_len(turn) == OPENING


# What the cache holds, and giving it back -------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [False, True])
def test_the_chain_list_tells_of_every_donation(llama: LanguageModel, partial: bool) -> None:
    hand = Hand(llama, partial=partial)
    hand.donate(prompts[0], "system prompt")
    hand.donate(random_tokens(40, 512, seed=8), "something else")
    for prompt in prompts[1:]:
        hand.ask(prompt)[0].release()
    shown = [(c.num_tokens, c.num_pages, c.num_hits, c.preview) for c in hand.cache.chains()]
    sizes = ((67, 5), (40, 3)) if partial else ((64, 4), (32, 2))
    assert shown == [(*sizes[0], 2, "system prompt"), (*sizes[1], 0, "something else")]
    assert len({c.id for c in hand.cache.chains()}) == 2


def test_the_chain_list_counts_the_pages_that_are_still_alive(llama: LanguageModel) -> None:
    hand = Hand(llama, 6)
    hand.donate(prompts[0], "old")
    hand.pool.release(hand.pool.alloc(3))  # one more than are free
    hand.check()
    [chain] = hand.cache.chains()
    assert (chain.num_tokens, chain.num_pages) == (64, 3)
    hand.pool.release(hand.pool.alloc(6))
    assert hand.cache.chains() == []


def test_the_chain_list_is_a_snapshot(llama: LanguageModel) -> None:
    hand = Hand(llama)
    hand.donate(prompts[0])
    [before] = hand.cache.chains()
    hand.ask(prompts[1])
    [after] = hand.cache.chains()
    assert (before.num_hits, after.num_hits) == (0, 1)
    assert before.last_hit_at == 0 < after.last_hit_at


def test_held_pages_are_those_that_a_plain_release_would_have_returned(llama: LanguageModel) -> None:
    hand = Hand(llama)
    plain, donor = Session(llama, hand.pool), Session(llama, hand.pool)
    for session in (plain, donor):
        session.eval(prompts[0])
    plain.release()
    assert hand.pool.num_free == 64 - 5  # the donor's
    hand.cache.insert(donor, prompts[0])
    donor.release()
    assert hand.cache.held_pages == 4
    assert hand.pool.num_free == 64 - 4


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_release_hands_every_cached_page_back(kind: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    hand = Hand(model, partial=True)
    for prompt in [*prompts, prompts[0] + prompts[1]]:
        hand.donate(prompt, "some label")
    assert hand.cache.held_pages == 64 - hand.pool.num_free > 0
    hand.cache.release()
    hand.check()
    assert (hand.cache.held_pages, hand.cache.chains()) == (0, [])
    assert hand.pool.num_free == 64
    assert all(hand.cache.match_len(prompt) == 0 for prompt in prompts)
    hand.cache.release()  # a second time finds nothing to do
    assert PrefixCache(hand.pool).held_pages == 0  # nobody has a claim on the pool any more


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_pages_that_a_stream_still_uses_are_its_own_until_it_ends(kind: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    hand = Hand(model, partial=True)
    hand.donate(prompts[0])
    session, matched = hand.ask(prompts[0] + prompts[1])
    assert matched == 67
    hand.cache.release()
    assert hand.pool.num_free == 64 - session.table.num_pages
    assert answer(session) == cold_answer(model, prompts[0] + prompts[1])
    session.release()
    hand.check(session)
    assert hand.pool.num_free == 64
