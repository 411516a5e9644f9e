"""Requests with a grammar in the engine: what they emit, where they end, who else is there, and what goes wrong."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
import torch
from fakes import EchoModel
from grammars import BOS, EOS, EOT, PIECES, VOCAB, Words, model, text_of

from paged import ExtraMissing, InvalidRequest
from paged.draw import token_logprob
from scheduler import Engine, Grammar, SamplingParams

DATE = Grammar.regex(r"(19|20)[0-9]{2}-[01][0-9]")
LETTERS = Grammar.regex("[a-f]{4,9}")
NESTED = Grammar.lark('start: "(" start ")" | "x" | start start')
POINT = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
        "required": ["x", "on"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
ALL = [DATE, LETTERS, NESTED, POINT]


def engine_of(source: EchoModel | None = None, **kwargs) -> Engine:
    kwargs.setdefault("num_pages", 64)
    kwargs.setdefault("max_num_seqs", 16)
    return Engine(source or model(), **kwargs)


def prompts_of(n: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    head = rng.integers(0, 256, 20).tolist()
    return [head + rng.integers(0, 256, int(k)).tolist() for k in rng.integers(1, 40, n)]


def allows(grammar: Grammar, text: str) -> bool:
    """Whether a text belongs to one of the grammars above, decided without llguidance."""
    if grammar is POINT:
        value = json.loads(text)
        return set(value) == {"x", "on"} and 0 <= value["x"] <= 99 and isinstance(value["on"], bool)
    if grammar is NESTED:
        depth = 0
        for char in text:
            depth += {"(": 1, ")": -1, "x": 0}[char]
            assert depth >= 0
        return depth == 0 and "()" not in text and text != ""
    return re.fullmatch(grammar.text, text) is not None


def scripted(script: list[int]) -> EchoModel:
    """A model whose favourite tokens are `script`, each less than the one before, after any prompt."""
    made = model()
    favourites = torch.zeros(VOCAB)
    favourites[script] = torch.arange(len(script), 0, -1).float()
    made.forward = lambda batch, storage: favourites.repeat(len(batch.logit_rows), 1)  # type: ignore[method-assign]
    return made


# What comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_each_output_keeps_to_its_grammar_and_stops_where_that_is_complete(temperature: float) -> None:
    engine = engine_of()
    params = [SamplingParams(temperature=temperature, seed=i, grammar=g) for i, g in enumerate(ALL * 4)]
    for output, p in zip(engine.generate(prompts_of(16), params), params, strict=True):
        assert p.grammar is not None
        if output.finish_reason == "stop":
            assert allows(p.grammar, output.text), output.text
        else:
            assert (p.grammar, output.finish_reason, len(output.token_ids)) == (NESTED, "length", 128)
    engine.check()
    assert engine.pool.num_live == 0


def test_the_token_is_the_best_of_those_allowed() -> None:
    """Against an oracle of its own: the model's logits, masked by the words that can still come."""
    words = Words({b"abba", b"abc", b"cab", b"cabin", b"d"})
    grammar = Grammar.regex("|".join(w.decode() for w in sorted(words.words)))
    echo, prompts = model(), prompts_of(12)
    compared = 0
    for prompt, output in zip(prompts, engine_of(echo).generate(prompts, SamplingParams(grammar=grammar)), strict=True):
        assert output.finish_reason == "stop" and output.text.encode() in words.words
        for i, token in enumerate(output.token_ids):
            before = text_of(output.token_ids[:i])
            may = words.allowed(before, PIECES) | ({EOS, EOT} if before in words.words else set())
            assert token in may
            if not words.forced(before):  # else the tokenizer has a say
                logits = echo.oracle([*prompt, *output.token_ids[:i]])
                assert token == max(sorted(may), key=lambda t: logits[t])
                compared += 1
    assert compared >= 12


def test_top_k_top_p_and_min_p_choose_among_the_allowed_tokens() -> None:
    for narrow in ({"top_k": 1}, {"top_k": 2}, {"top_p": 0.1}, {"min_p": 0.9}):
        params = SamplingParams(temperature=2.0, seed=3, grammar=POINT, **narrow)
        [output] = engine_of().generate([[1, 2, 3]], params)
        assert output.finish_reason == "stop" and allows(POINT, output.text)


def test_bias_and_penalties_are_felt_among_the_allowed_tokens_alone() -> None:
    grammar = Grammar.regex("[xyz]{4}")
    x, y = ord("x"), ord("y")
    engine = engine_of(scripted([x, y]))

    def text(**params) -> str:
        return engine.generate([[1]], SamplingParams(grammar=grammar, **params))[0].text

    assert text() == "xxxx"
    assert text(logit_bias={y: 5.0, ord("!"): 100.0}) == "yyyy"
    assert text(presence_penalty=1.5) == "xyxx"
    assert text(logit_bias={EOS: 1000.0}) == "xxxx"


def test_log_probabilities_are_the_models_without_the_mask() -> None:
    echo = model()
    [output] = engine_of(echo).generate([[1, 2, 3]], SamplingParams(grammar=DATE, logprobs=2))
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    tokens = [1, 2, 3]
    for token, found in zip(output.token_ids, output.logprobs, strict=True):
        assert found == token_logprob(echo.oracle(tokens), token, 2)
        tokens.append(token)


def test_a_grammar_may_name_a_control_token_which_has_no_text() -> None:
    grammar = Grammar.lark('start: <s> "a" <s>')
    [output] = engine_of().generate([[1]], SamplingParams(grammar=grammar))
    assert (output.token_ids, output.text, output.finish_reason) == ([BOS, ord("a"), BOS], "a", "stop")


# Where it ends ---------------------------------------------------------------------------------------------------

A, B, C = b"abc"


def ending(script: list[int], pattern: str, **params):
    engine = engine_of(scripted(script))
    [output] = engine.generate([[1, 2]], SamplingParams(grammar=Grammar.regex(pattern), **params))
    engine.check()
    return output.text, output.finish_reason, output.token_ids


def test_an_end_id_is_drawn_only_where_the_output_may_end() -> None:
    assert ending([EOS, A], "aab?") == ("aa", "stop", [A, A])
    assert ending([A, EOS], "a*", max_tokens=5) == ("aaaaa", "length", [A] * 5)
    assert ending([EOS], "b?") == ("", "stop", [])


def test_a_complete_output_ends_without_an_end_id() -> None:
    assert ending([A], "a{3}") == ("aaa", "stop", [A] * 3)
    assert ending([A], "a{3}", max_tokens=3) == ("aaa", "stop", [A] * 3)
    assert ending([A], "a{3}", max_tokens=2) == ("aa", "length", [A] * 2)
    assert ending([A], "a{3}", ignore_eos=True) == ("aaa", "stop", [A] * 3)
    assert ending([A], "a{3}", include_stop=True) == ("aaa", "stop", [A] * 3)


def test_include_stop_shows_the_end_id() -> None:
    assert ending([EOS, A], "a+", include_stop=True) == ("a", "stop", [A, EOS])


def test_ignored_end_ids_are_no_tokens_of_the_output_either() -> None:
    assert ending([EOS, A], "a+", ignore_eos=True, max_tokens=3) == ("aaa", "length", [A] * 3)


def test_own_end_ids_end_it_where_it_may_end_and_show_nothing() -> None:
    assert ending([B, A], "aab?a?", stop_token_ids=[B]) == ("aa", "stop", [A, A])
    assert ending([EOS, BOS, A], "a+", stop_token_ids=[BOS], ignore_eos=True) == ("a", "stop", [A])


def test_min_tokens_holds_while_anything_but_an_end_may_follow() -> None:
    assert ending([EOS, A, B], "a+b?", min_tokens=4) == ("aaaa", "stop", [A] * 4)
    assert ending([EOS, B, A], "ab?", min_tokens=4) == ("ab", "stop", [A, B])


def test_an_end_that_is_all_that_can_be_drawn_ends_it_before_min_tokens() -> None:
    assert ending([A], "", min_tokens=3) == ("", "stop", [])
    assert ending([A], "", min_tokens=3, include_stop=True) == ("", "stop", [EOS])


def test_a_stop_string_ends_an_output_that_the_grammar_has_not_completed() -> None:
    assert ending([A], "a{9}", stop="aaa") == ("", "stop", [A] * 3)
    assert ending([A], "a{9}", stop="aaa", min_tokens=5)[2] == [A] * 5
    assert ending([A, B], "aab", stop="zz") == ("aab", "stop", [A, A, B])


# promise 1 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix_cache": False},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"page_size": 1, "num_pages": 400},
        {"page_size": 5, "num_pages": 60},
        {"num_pages": 7},
    ],
)
def test_no_setting_and_no_company_changes_a_token(temperature: float, settings: dict) -> None:
    prompts = prompts_of(10)
    params = [
        SamplingParams(max_tokens=24, temperature=temperature, seed=40 + i, grammar=[*ALL, None][i % 5])
        for i in range(10)
    ]
    alone = [engine_of().generate([p], s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
    engine = engine_of(**settings)
    for _ in range(2):  # the second time over a warm cache
        outputs = engine.generate(prompts, params)
        assert [o.token_ids for o in outputs] == alone
        engine.check()


def test_a_preempted_request_goes_on_from_where_its_grammar_was() -> None:
    grammar = Grammar.regex("[a-z]{30}-[a-z]{2}")
    params = SamplingParams(grammar=grammar, max_tokens=60)
    prompts = [[i] * 40 for i in (1, 2, 3)]
    alone = [engine_of().generate([p], params)[0].text for p in prompts]
    engine = engine_of(num_pages=11)
    outputs = engine.generate(prompts, params)
    assert [o.text for o in outputs] == alone
    assert any(o.num_preemptions and len(o.token_ids) > 1 for o in outputs)
    assert all(re.fullmatch(grammar.text, o.text) for o in outputs)


def test_requests_without_a_grammar_ask_no_matcher(monkeypatch) -> None:
    def never(matchers: object) -> None:
        raise AssertionError("a request without a grammar asked for a mask")

    prompts = prompts_of(6)
    params = [SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, temperature=1.0, seed=1)] * 3
    engine = engine_of()
    engine.generate(prompts, SamplingParams(grammar=LETTERS))  # in the same slots before
    monkeypatch.setattr("paged.sampler.allowed_tokens", never)
    outputs = engine.generate(prompts, params)
    assert [o.finish_reason for o in outputs] == ["length"] * 6
    assert [o.token_ids for o in outputs[::2]] == [engine.model.greedy(p, 4) for p in prompts[::2]]


def test_a_step_asks_once_for_all_its_masks(monkeypatch) -> None:
    import paged.sampler

    calls: list[int] = []
    real = paged.sampler.allowed_tokens

    def counted(matchers):
        calls.append(len(matchers))
        return real(matchers)

    monkeypatch.setattr(paged.sampler, "allowed_tokens", counted)
    grammar = Grammar.regex("[xyz]{5}")
    params = [SamplingParams(grammar=grammar), SamplingParams(max_tokens=9), SamplingParams(grammar=grammar, seed=1)]
    engine_of().generate(prompts_of(3), params)
    assert calls == [2] * 5


def test_streams_and_cancelled_requests_have_grammars_too() -> None:
    engine = engine_of()
    stream = engine.stream([1, 2, 3], SamplingParams(grammar=POINT))
    text = "".join(event.text for event in stream)
    assert stream.output is not None and stream.output.text == text and allows(POINT, text)
    name = engine.submit([1, 2, 3], SamplingParams(grammar=LETTERS))
    engine.step()
    assert engine.cancel(name)
    [again] = engine.generate([[1, 2, 3]], SamplingParams(grammar=POINT))
    assert again.text == text
    engine.check()


@pytest.mark.parametrize("kept", [30, 40])
def test_a_request_that_starts_from_a_prefix_keeps_to_its_grammar(kept: int) -> None:
    engine = engine_of()
    prompt = list(range(40))
    params = SamplingParams(grammar=LETTERS, temperature=1.0, seed=8)
    [want] = engine_of().generate([prompt], params)
    [output] = engine.generate([prompt], params, prefix=engine.build_prefix(prompt[:kept]))
    assert output.text == want.text and allows(LETTERS, output.text)
    engine.check()


def test_two_requests_of_one_grammar_compile_it_once() -> None:
    engine = engine_of()
    engine.generate(prompts_of(5), SamplingParams(grammar=Grammar.json_schema(json.loads(POINT.text))))
    engine.generate(prompts_of(5), SamplingParams(grammar=POINT))
    assert engine.grammars._compiled.cache_info().misses == 1


# What goes wrong -------------------------------------------------------------------------------------------------


def test_a_bad_grammar_is_refused_at_submit_and_names_its_place_in_a_batch() -> None:
    engine = engine_of()
    bad = SamplingParams(grammar=Grammar.regex("a("))
    for call in (engine.submit, engine.stream, engine.generate):
        with pytest.raises(InvalidRequest, match=r"^a grammar must be one that llguidance takes, found in this regex"):
            call([1, 2], bad)
    with pytest.raises(InvalidRequest, match=r"prompt 1 of 2: a grammar must be"):
        engine.generate([[1], [2]], [SamplingParams(), bad])
    assert not engine.has_work and engine.stats()["num_admitted"] == 0


def test_a_model_without_a_tokenizer_refuses_a_grammar() -> None:
    engine = engine_of(EchoModel())
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        engine.submit([1], SamplingParams(grammar=LETTERS))
    assert not engine.has_work


def test_without_llguidance_a_grammar_is_refused_and_all_else_runs(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = engine_of()
    with pytest.raises(ExtraMissing, match=r"paged\[structured\]"):
        engine.generate([[1], [2]], [SamplingParams(), SamplingParams(grammar=LETTERS)])
    assert not engine.has_work
    assert engine.generate([[1, 2]], SamplingParams(max_tokens=3))[0].finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_mask_leaves_no_token_fails_alone(temperature: float) -> None:
    """A grammar that meets an end id of the request in its middle, and one whose tokens the model gives -inf."""
    echo = model()
    forward = echo.forward

    def without_digits(batch, storage):
        logits = forward(batch, storage)
        logits[:, [i for i, piece in enumerate(PIECES) if any(c in b"0123456789" for c in piece)]] = -np.inf
        return logits

    echo.forward = without_digits  # type: ignore[method-assign]
    engine = engine_of(echo)
    middle = SamplingParams(grammar=Grammar.regex("[ab]c[ab]"), stop_token_ids=[C], temperature=temperature, seed=1)
    params = [
        SamplingParams(grammar=LETTERS, seed=2, temperature=temperature),
        middle,
        SamplingParams(grammar=Grammar.regex("[ab][0-9]"), seed=3, temperature=temperature),
        SamplingParams(max_tokens=9, logit_bias={5: 1.0}),
    ]
    prompts = prompts_of(4)
    outputs = engine.generate(prompts, params)
    assert [o.finish_reason for o in outputs] == ["stop", "error", "error", "length"]
    for output in (outputs[1], outputs[2]):
        assert "must leave a token that the grammar allows, but do not" in output.error and "\n" not in output.error
        assert len(output.token_ids) == 1
    assert allows(LETTERS, outputs[0].text)
    engine.check()
    assert engine.pool.num_live == 0
    echo.forward = forward  # type: ignore[method-assign]
    again = engine.generate(prompts, SamplingParams(max_tokens=5))  # the slots are as good as new
    assert [o.token_ids for o in again] == [echo.greedy(p, 5) for p in prompts]


def test_nan_and_an_empty_mask_in_one_step_each_give_their_own_reason() -> None:
    echo = model()
    forward = echo.forward

    def poisoned(batch, storage):
        logits = forward(batch, storage)
        logits[batch.q_indptr[1:][batch.logit_rows.argsort()].argsort() == 0] = np.nan
        return logits

    echo.forward = poisoned  # type: ignore[method-assign]
    engine = engine_of(echo)
    dead = SamplingParams(grammar=Grammar.regex("c[ab]"), stop_token_ids=[C])
    outputs = engine.generate([[4] * 5, [5] * 5, [6] * 5], [SamplingParams(max_tokens=1), dead, dead])
    assert [o.finish_reason for o in outputs] == ["error"] * 3
    assert "NaN" in outputs[0].error and all("grammar allows" in o.error for o in outputs[1:])
    engine.check()


# Real weights ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_fills_a_schema_in(smollm2) -> None:
    engine = Engine(smollm2, num_pages=200)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=60, grammar=Grammar.json_schema(schema))
    plain, [output] = (
        engine.generate(["A person as JSON: "], SamplingParams(max_tokens=8)),
        engine.generate(["A person as JSON: "], params),
    )
    assert output.finish_reason == "stop"
    value = json.loads(output.text)
    assert set(value) == {"name", "age"} and isinstance(value["age"], int)
    assert plain[0].token_ids != output.token_ids[:8]
