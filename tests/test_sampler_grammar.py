"""Rows with a grammar in the sampler: the mask among the other parameters, neighbours, slots, refusals, sessions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from grammars import EOS, VOCAB, compiler, feed, model, text_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_oracle import history_of, int32

from paged import Session
from paged.errors import BadLogits, CheckFailed
from paged.grammar import Grammar
from paged.matcher import GrammarMatcher, allowed_tokens
from paged.sampler import Sampler, sample_one
from paged.sampling import SamplingParams

COMPILER = compiler()
GRAMMARS = [
    (Grammar.regex("[a-e]{2,4}"), b"a"),
    (Grammar.regex("[a-e]{2,4}"), b"ab"),
    (Grammar.json(), b'{"'),
    (Grammar.regex("(?s:.)*"), b""),
    (Grammar.regex("xy|x[a-z]+"), b"x"),
]


def row_of(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32))


def at(grammar: Grammar, output: bytes = b"") -> GrammarMatcher:
    matcher = COMPILER.matcher(grammar, [EOS])
    assert True not in feed(matcher, output)
    return matcher


params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 3.0]),
        "top_k": st.sampled_from([0, 1, 3, 50]),
        "top_p": st.sampled_from([1.0, 0.4, 0.0]),
        "min_p": st.sampled_from([0.0, 0.3]),
        "repetition_penalty": st.sampled_from([1.0, 1.7]),
        "presence_penalty": st.sampled_from([0.0, 2.0]),
        "min_tokens": st.sampled_from([0, 3]),
        "logit_bias": st.sampled_from([None, {ord("a"): 4.0, EOS: 9.0, 0: 50.0}]),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@settings(deadline=None, max_examples=200)
@given(params, st.sampled_from(GRAMMARS), st.integers(0, 50))
def test_a_grammar_draws_as_if_the_model_had_given_minus_infinity_elsewhere(
    given_params: dict[str, Any], case: tuple[Grammar, bytes], seed: int
) -> None:
    (grammar, output), row = case, row_of(seed)
    matcher = at(grammar, output)
    [allowed] = allowed_tokens([matcher])
    masked = torch.where(torch.from_numpy(allowed), row, -torch.inf)
    guided = SamplingParams(**given_params, grammar=grammar)
    plain = SamplingParams(**given_params)
    context = (given_params["seed"], 2 + len(output), [1, 2], list(output), [EOS])
    token = sample_one(row, guided, *context, matcher=matcher)
    assert token == sample_one(masked, plain, *context)
    assert allowed[token]


def test_each_row_is_the_same_alone_and_beside_others_with_and_without_a_grammar() -> None:
    rng = np.random.default_rng(3)
    sampler, num = Sampler(20, VOCAB), 20
    cases = []
    for slot in range(num):
        grammar, output = GRAMMARS[slot % len(GRAMMARS)] if slot % 3 else (None, b"ab")
        p = SamplingParams(temperature=float(slot % 2), grammar=grammar, min_tokens=slot % 4)
        matcher = None if grammar is None else at(grammar, output)
        cases.append((p, output, matcher))
        sampler.assign(slot, p, slot, [EOS], matcher)
    sampler.check()
    history = history_of(*(([7, 8], list(output)) for _, output, _ in cases))
    for _ in range(3):
        slots = rng.permutation(num).astype(np.int32)
        logits = torch.stack([row_of(int(slot)) for slot in slots])
        before = logits.clone()
        tokens = sampler.sample(logits, slots, history.known[slots], history).tokens
        assert torch.equal(logits, before)
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            p, output, matcher = cases[slot]
            alone = sample_one(row_of(slot), p, slot, 2 + len(output), [7, 8], list(output), [EOS], matcher)
            assert alone == token


def test_asking_moves_no_matcher() -> None:
    grammar = Grammar.regex("ab+")
    matcher, p = at(grammar), SamplingParams(grammar=grammar)
    assert {sample_one(row_of(1), p, 0, 0, [], [], matcher=matcher) for _ in range(5)} == {ord("a")}


# Slots -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "matcher"), [({"grammar": Grammar.json()}, None), ({}, at(Grammar.json()))])
def test_a_grammar_and_its_matcher_come_together(p: dict[str, Any], matcher: GrammarMatcher | None) -> None:
    sampler = Sampler(1, VOCAB)
    with pytest.raises(ValueError, match="a grammar needs its matcher and a matcher its grammar"):
        sampler.assign(0, SamplingParams(**p), 0, (), matcher)
    sampler.check()
    with pytest.raises(ValueError, match="no sampling parameters"):
        sampler.sample(torch.zeros(1, VOCAB), int32(0), int32(0), history_of(([], [])))


@pytest.mark.parametrize("how", ["assign", "clear"])
def test_a_slot_forgets_its_grammar(how: str) -> None:
    sampler, grammar = Sampler(1, VOCAB), Grammar.regex("a")
    sampler.assign(0, SamplingParams(grammar=grammar), 0, (), at(grammar))
    if how == "clear":
        sampler.clear(0)
        sampler.check()
    sampler.assign(0, SamplingParams(), 0)
    sampler.check()
    row = torch.zeros(1, VOCAB)
    row[0, 200] = 1.0
    assert sampler.sample(row, int32(0), int32(1), history_of(([1], []))).tokens.tolist() == [200]


def test_check_finds_a_grammar_without_its_matcher_and_a_matcher_without_its_grammar() -> None:
    sampler, grammar = Sampler(2, VOCAB), Grammar.regex("a")
    sampler.assign(0, SamplingParams(grammar=grammar), 0, (), at(grammar))
    sampler.assign(1, SamplingParams(), 0)
    sampler.check()
    matcher = sampler._matchers.pop(0)
    with pytest.raises(CheckFailed, match="slot 0: a grammar without its matcher"):
        sampler.check()
    sampler._matchers.update({0: matcher, 1: matcher})
    with pytest.raises(CheckFailed, match="slot 1: a grammar"):
        sampler.check()


# Refusals --------------------------------------------------------------------------------------------------------


def test_rows_whose_grammar_leaves_nothing_are_named_and_nothing_is_drawn() -> None:
    sampler, grammar = Sampler(4, VOCAB), Grammar.regex("[ab]c")
    wrong = at(grammar)
    wrong.accept(ord("z"))
    sampler.assign(0, SamplingParams(grammar=grammar), 0, (), at(grammar))
    sampler.assign(1, SamplingParams(grammar=grammar), 0, (), wrong)
    sampler.assign(2, SamplingParams(grammar=grammar, temperature=1.0), 0, (), at(grammar))
    sampler.assign(3, SamplingParams(), 0)
    logits = torch.zeros(4, VOCAB)
    logits[2, [ord("a"), ord("b"), *range(256, VOCAB)]] = -torch.inf
    with pytest.raises(BadLogits) as caught:
        sampler.sample(logits, int32(0, 1, 2, 3), int32(1, 1, 1, 1), history_of(*[([1], [])] * 4))
    assert caught.value.rows == (1, 2)
    message = str(caught.value)
    assert message.startswith("the logits of row 1 (and 1 more rows), slot 1, position 1, must leave a token that the ")
    assert "\n" not in message and "doesn't satisfy the grammar" in message  # what the matcher says
    rest = sampler.sample(logits[[0, 3]], int32(0, 3), int32(1, 1), history_of(*[([1], [])] * 4))
    assert rest.tokens.tolist() == [ord("a"), 0]


def test_rows_without_a_grammar_are_refused_first_and_for_their_own_reason() -> None:
    sampler, grammar = Sampler(2, VOCAB), Grammar.regex("a")
    sampler.assign(0, SamplingParams(grammar=grammar), 0, (), at(grammar))
    sampler.assign(1, SamplingParams(presence_penalty=1e308, frequency_penalty=1e308), 0)
    logits = torch.zeros(2, VOCAB)
    logits[0, ord("a")] = -torch.inf
    history = history_of(([1], []), ([], list(range(VOCAB))))  # penalties take every token of row 1 to -inf
    with pytest.raises(BadLogits, match=r"NaN or \+inf or nothing but -inf") as caught:
        sampler.sample(logits, int32(0, 1), int32(1, 1), history)
    assert caught.value.rows == (1,)
    with pytest.raises(BadLogits, match="the grammar allows") as caught:
        sampler.sample(logits[:1], int32(0), int32(1), history)
    assert caught.value.rows == (0,)


# By hand ---------------------------------------------------------------------------------------------------------


def test_a_session_keeps_to_a_grammar_that_the_caller_holds_and_so_does_its_fork() -> None:
    echo = model()
    pool = echo.create_kv_pool(64)
    grammar = Grammar.regex("[0-9]{3}-[a-z]{5}")
    p = SamplingParams(temperature=1.0, seed=4, grammar=grammar)
    session, matcher = Session(echo, pool), compiler().matcher(grammar, echo.eos_token_ids)
    session.eval([5, 6, 7])

    def finish(s: Session, m: GrammarMatcher, output: list[int], p: SamplingParams) -> bytes:
        while True:
            output.append(s.sample(p, 3, m))
            if m.accept(output[-1]):
                return text_of(output)
            s.eval(output[-1:])

    output = [session.sample(p, 3, matcher)]
    assert not matcher.accept(output[0])
    session.eval(output)
    fork, forked = session.fork(), matcher.fork()
    mine = finish(session, matcher, list(output), p)
    assert finish(fork, forked, list(output), p) == mine
    assert mine[:3].isdigit() and mine[3:4] == b"-" and len(mine) == 9
    with pytest.raises(ValueError, match="a grammar needs its matcher"):
        session.sample(p, 3)


def test_one_row_by_hand_needs_no_session() -> None:
    grammar = Grammar.regex("b")
    assert sample_one(torch.zeros(VOCAB), SamplingParams(grammar=grammar), 0, 0, [], [], matcher=at(grammar)) == 98
