"""GrammarCompiler and GrammarMatcher: masks against finite languages, control tokens, forced text, forks, errors."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading

import numpy as np
import pytest
from grammars import BOS, EOS, EOT, PIECES, VOCAB, Words, compiler, feed, text_of, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders.test_tokenizer import PIECES as PIECES_OF_HELLO
from loaders.test_tokenizer import pieces_metadata

import paged
from paged.errors import ExtraMissing, InvalidRequest
from paged.grammar import Grammar
from paged.loaders.tokenizer_files import tokenizer_from_gguf
from paged.matcher import GrammarCompiler, allowed_tokens

COMPILER = compiler()


def allowed(matcher) -> list[int]:
    [row] = allowed_tokens([matcher])
    assert row.shape == (matcher.vocab_size,) and row.dtype == np.bool_
    return np.flatnonzero(row).tolist()


def matcher_of(grammar: Grammar, end_ids=(EOS, EOT)):
    return COMPILER.matcher(grammar, end_ids)


# Against finite languages ----------------------------------------------------------------------------------------

SMALL = [b"a", b"b", b"c", b"ab", b"ba", b"abc", b"cc", b"bca", b"\xff", b"\xff<x>", b""]
SMALL_END = len(SMALL)
SMALL_COMPILER = compiler([*SMALL, b""], SMALL_END + 1)
words = st.sets(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=5)


@settings(deadline=None, max_examples=150)
@given(words, st.sampled_from(["regex", "lark"]), st.randoms(use_true_random=False))
def test_masks_are_those_of_the_language(words: set[str], kind: str, random) -> None:
    if kind == "regex":
        grammar = Grammar.regex("|".join(sorted(words)))
    else:
        grammar = Grammar.lark("start: " + " | ".join(f'"{word}"' for word in sorted(words)))
    oracle, output = Words({word.encode() for word in words}), b""
    matcher = SMALL_COMPILER.matcher(grammar, [SMALL_END])
    while True:
        got, want = set(allowed(matcher)), oracle.allowed(output, SMALL)
        assert matcher.may_end == (output in oracle.words) == (SMALL_END in got)
        got -= {SMALL_END}
        assert got <= want and bool(got) == bool(want)
        if not oracle.forced(output):
            assert got == want
        if not got:
            break
        token = random.choice(sorted(got))
        output += SMALL[token]
        assert matcher.accept(token) == (oracle.rest(output) == [b""])
    assert output in oracle.words and not matcher.error


@settings(deadline=None, max_examples=60)
@given(
    st.sets(st.sampled_from(["é", "ab", "a", 'q"q', "", "true", "日本", "\n", "🙂"]), min_size=1),
    st.randoms(use_true_random=False),
)
def test_any_path_through_a_schema_is_json_that_the_schema_describes(values: set[str], random) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": sorted(values)}, "é": {"type": "integer", "minimum": -5, "maximum": 12}},
        "required": ["é"],
        "additionalProperties": False,
    }
    matcher = matcher_of(Grammar.json_schema(schema))
    output: list[int] = []
    for _ in range(400):
        token = random.choice([t for t in allowed(matcher) if t not in (9, 10, 13, 32)] or allowed(matcher))
        if token in (EOS, EOT):
            break
        output.append(token)
        if matcher.accept(token):
            break
    value = json.loads(text_of(output))
    assert set(value) <= {"a", "é"} and -5 <= value["é"] <= 12 and value.get("a", min(values)) in values
    assert matcher.may_end


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False))
def test_any_path_through_a_regex_is_matched_by_it(random) -> None:
    pattern = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])(-[0-9é]{1,3})?"
    matcher = matcher_of(Grammar.regex(pattern))
    output: list[int] = []
    while True:
        token = random.choice(allowed(matcher))
        if token in (EOS, EOT):
            break
        output.append(token)
        if matcher.accept(token):
            break
    assert re.fullmatch(pattern, text_of(output).decode())


# Ends ------------------------------------------------------------------------------------------------------------


def test_end_ids_are_allowed_only_where_the_output_may_end() -> None:
    matcher = matcher_of(Grammar.regex("ab?"))
    a, b = ord("a"), ord("b")
    assert not {EOS, EOT} & set(allowed(matcher)) and not matcher.may_end
    assert not matcher.accept(a)
    assert allowed(matcher) == [b, EOS, EOT] and matcher.may_end
    assert matcher.accept(b)
    assert allowed(matcher) == [EOS, EOT]


def test_an_end_id_that_stands_for_text_is_an_end_and_no_text() -> None:
    brace = ord("}")
    matcher = matcher_of(Grammar.regex(r"a\}?b?"), [brace])
    assert brace not in allowed(matcher)
    assert not matcher.accept(ord("a"))
    assert allowed(matcher) == [ord("b"), brace]
    assert matcher.accept(brace)
    within = matcher_of(Grammar.regex(r"a\}b"), [brace])
    feed(within, b"a")
    assert allowed(within) == []


def test_end_ids_outside_the_vocabulary_do_no_harm() -> None:
    assert allowed(matcher_of(Grammar.regex("a?"), [VOCAB, 2**31, -1, EOS])) == [ord("a"), EOS]


@pytest.mark.parametrize(
    ("grammar", "output"),
    [
        (Grammar.regex("a{3}"), b"aaa"),
        (Grammar.regex("(ab|cd){2}"), b"abcd"),
        (Grammar.regex("x|xyz"), b"xyz"),
        (Grammar.lark('start: "a" start "b" | "c"'), b"aacbb"),
        (Grammar.json_schema({"type": "array", "items": {"const": 1}, "maxItems": 2}), b"[1,1]"),
        (Grammar.json_schema({"const": "é"}), '"é"'.encode()),
        (Grammar.json(), b"{}"),
    ],
)
@pytest.mark.parametrize("end_ids", [(), (EOS,)])
def test_an_output_is_complete_with_its_last_token_and_not_before(grammar: Grammar, output: bytes, end_ids) -> None:
    matcher = matcher_of(grammar, end_ids)
    assert feed(matcher, output) == [False] * (len(output) - 1) + [True]
    assert matcher.may_end and not matcher.error and allowed(matcher) == list(end_ids)


def test_without_end_ids_an_output_is_complete_where_no_token_of_the_vocabulary_goes_on() -> None:
    pieces = [b"a", b"b"]
    grammar = Grammar.regex("ab(c+)?")
    assert feed(compiler(pieces, 2).matcher(grammar), [0, 1]) == [False, True]
    assert feed(compiler([*pieces, b""], 3).matcher(grammar, [2]), [0, 1]) == [False, False]
    assert feed(compiler([*pieces, b"c"], 3).matcher(grammar), [0, 1]) == [False, False]


def test_an_empty_grammar_may_only_end() -> None:
    assert allowed(matcher_of(Grammar.regex(""))) == [EOS, EOT]


# The vocabulary --------------------------------------------------------------------------------------------------


def test_control_tokens_come_only_where_a_grammar_names_them() -> None:
    matcher = matcher_of(Grammar.lark('start: "a" <s> "b"'))
    assert allowed(matcher) == [ord("a")]
    assert feed(matcher, [ord("a")]) == [False] and allowed(matcher) == [BOS]
    assert feed(matcher, [BOS, ord("b")]) == [False, True]
    anything = set(allowed(matcher_of(Grammar.regex("(?s:.)*"))))
    assert not anything & {BOS, *range(EOT + 1, VOCAB)} and {EOS, EOT} <= anything


def test_a_token_of_bytes_that_are_no_text_is_never_taken_for_a_control_token() -> None:
    with pytest.raises(InvalidRequest, match="unknown special token"):
        SMALL_COMPILER.matcher(Grammar.lark('start: "a" <x>'))


def test_a_name_in_the_text_is_spelled_and_not_the_control_token() -> None:
    matcher = matcher_of(Grammar.lark('start: "<s>"'))
    assert feed(matcher, b"<s>") == [False, False, True]


def test_characters_of_several_tokens_are_whole_at_the_end() -> None:
    matcher = matcher_of(Grammar.regex("[日é]"))
    first = set(allowed(matcher))
    assert first == {0xE6, 0xC3, PIECES.index(b"\xc3\xa9")}
    assert feed(matcher, "日".encode()) == [False, False, True]


def test_text_that_a_grammar_forces_comes_in_the_tokenizers_own_tokens() -> None:
    tokens = paged.load_model("smollm2").tokenizer
    assert tokens is not None
    smollm2 = GrammarCompiler(tokens, tokens.vocab_size)
    text = 'He said: "unbelievable", 日本語 <|im_end|>'
    matcher = smollm2.matcher(Grammar.lark(f"start: {json.dumps(text, ensure_ascii=False)} /[0-9]/"))
    output: list[int] = []
    while True:
        choice = allowed(matcher)
        if len(choice) > 5:
            break
        output.append(choice[0])
        assert not matcher.accept(choice[0])
    assert tokens.decode(output) == text
    assert output[:5] == tokens.encode(text)[:5].tolist()
    assert not set(output) & set(tokens.eos_ids)  # "<|im_end|>" was spelled


SENTENCEPIECE = tokenizer_from_gguf(pieces_metadata(PIECES_OF_HELLO), "x")
assert SENTENCEPIECE is not None
SENTENCEPIECE_BYTES = [SENTENCEPIECE.token_bytes(i) for i in range(SENTENCEPIECE.vocab_size)]
SENTENCEPIECE_COMPILER = GrammarCompiler(SENTENCEPIECE, SENTENCEPIECE.vocab_size)


@settings(deadline=None, max_examples=100)
@given(st.sets(st.text("helowrd é", min_size=1, max_size=12), min_size=1, max_size=4), st.randoms())
def test_a_sentencepiece_vocabulary_whose_bytes_have_two_tokens_each_finds_every_way(words: set[str], random) -> None:
    """Pieces, and beside them a token for every byte."""
    grammar = Grammar.lark("start: " + " | ".join(json.dumps(word, ensure_ascii=False) for word in sorted(words)))
    matcher = SENTENCEPIECE_COMPILER.matcher(grammar, SENTENCEPIECE.eos_ids)
    oracle, output = Words({word.encode() for word in words}), b""
    while True:
        got, want = set(allowed(matcher)), oracle.allowed(output, SENTENCEPIECE_BYTES)
        assert (2 in got) == matcher.may_end == (output in oracle.words)
        got -= {2}
        assert got <= want and bool(got) == bool(want) and not matcher.error
        if not oracle.forced(output):
            assert got == want
        if not got:
            break
        token = random.choice(sorted(got))
        output += SENTENCEPIECE_BYTES[token]
        matcher.accept(token)
    assert output in oracle.words


def test_forced_text_in_a_sentencepiece_vocabulary_takes_no_space_that_is_not_there() -> None:
    matcher = SENTENCEPIECE_COMPILER.matcher(Grammar.lark('start: "hello world hello" /[ed]/'))
    pieces = []
    while len(choice := allowed(matcher)) == 1:
        pieces.append(SENTENCEPIECE_BYTES[choice[0]])
        assert not matcher.accept(choice[0])
    assert b"".join(pieces) == b"hello world hello"[: len(b"".join(pieces))]
    assert pieces[:3] == [b"he", b"llo", b" world"]


class Spaced:
    """A tokenizer that puts a space before every text, as SentencePiece does."""

    pieces = (b" ", b"\n", b"a", b"b", b"c", b" a", b"ab", b"bc", b"\nb")

    def __init__(self, hungry: bool = False) -> None:
        self.hungry = hungry

    def encode(self, text: str, add_special: bool = True) -> np.ndarray:
        rest, ids = b" " + text.encode(), []
        while rest:
            sizes = [1] if not self.hungry else [2, 1]
            size = next(n for n in sizes if rest[:n] in self.pieces)
            ids.append(self.pieces.index(rest[:size]))
            rest = rest[size:]
        return np.array(ids, np.int32)

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def text_of(self, token: int) -> str:
        return self.pieces[token].decode()


@pytest.mark.parametrize(("hungry", "first"), [(False, b"b"), (True, b"bc")])
def test_a_tokenizer_that_puts_a_space_first_is_asked_behind_a_line_break(hungry: bool, first: bytes) -> None:
    """Where it joins the line break with the text too, the text is cut into the longest tokens."""
    spaced = GrammarCompiler(Spaced(hungry), len(Spaced.pieces))
    matcher = spaced.matcher(Grammar.lark('start: "bcab" /[ab]/'))
    assert allowed(matcher) == [Spaced.pieces.index(first)]


def test_text_that_no_token_spells_leaves_no_token_and_says_so() -> None:
    lacking = compiler([b"a", b"b"], 2).matcher(Grammar.regex("abc"))
    assert feed(lacking, [0, 1]) == [False, False]
    assert allowed(lacking) == []


# Several at once -------------------------------------------------------------------------------------------------


def test_masks_of_several_are_those_of_each_alone() -> None:
    grammars = [Grammar.regex("[ab]+"), Grammar.json(), Grammar.lark('start: "x" | "xy"'), Grammar.regex("")]
    matchers = [matcher_of(grammar) for grammar in grammars * 8]
    for i, matcher in enumerate(matchers[::4]):
        feed(matcher, b"a" * i)
    alone = [allowed(matcher.fork()) for matcher in matchers]
    for order in (range(32), range(31, -1, -1)):
        rows = allowed_tokens([matchers[i] for i in order])
        assert [np.flatnonzero(row).tolist() for row in rows] == [alone[i] for i in order]


def test_a_fork_goes_its_own_way() -> None:
    matcher = matcher_of(Grammar.regex("a[bc]d"))
    feed(matcher, b"a")
    other = matcher.fork()
    assert feed(matcher, b"b") == [False] and feed(other, b"cd") == [False, True]
    assert not matcher.may_end and other.may_end and feed(matcher, b"d") == [True]


def test_equal_grammars_are_compiled_once_and_never_share_their_place() -> None:
    grammar = Grammar.regex("a(b|c)+[0-9]{7}")
    before = COMPILER._compiled.cache_info().misses
    first, second = matcher_of(grammar), matcher_of(Grammar.regex("a(b|c)+[0-9]{7}"))
    assert COMPILER._compiled.cache_info().misses == before + 1
    feed(first, b"abc")
    assert allowed(second) == allowed(matcher_of(grammar)) == [ord("a"), PIECES.index(b"ab")]


def test_threads_may_compile_and_ask_at_once() -> None:
    results: list[list[int]] = []

    def work(i: int) -> None:
        matcher = matcher_of(Grammar.regex(f"a{{{i % 3 + 1}}}b"))
        done = feed(matcher, b"a" * (i % 3 + 1) + b"b")
        results.append([*allowed(matcher), done.count(True)])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[EOS, EOT, 1]] * 12


def test_a_forked_child_fills_masks_on_threads_of_its_own() -> None:
    matchers = [matcher_of(Grammar.regex("ab")) for _ in range(4)]
    want = allowed_tokens(matchers)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for its parent's threads would wait for ever
        os._exit(0 if (allowed_tokens(matchers) == want).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "found"),
    [
        (Grammar.regex("a(b"), "unclosed group"),
        (Grammar.lark("start: nothing_here"), "nothing_here"),
        (Grammar.lark('start: "a" <|nope|>'), "nope"),
        (Grammar.lark("@@@"), "@"),
        (Grammar.json_schema({"type": "nope"}), "nope"),
        (Grammar.json_schema({"type": "string", "minLength": 3, "maxLength": 1}), "Unsatisfiable"),
        (Grammar.json_schema({"if": {"const": 1}}), "if"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_in_one_sentence(grammar: Grammar, found: str) -> None:
    with pytest.raises(InvalidRequest, match=found) as caught:
        COMPILER.matcher(grammar)
    message = str(caught.value)
    assert message.startswith("a grammar must be one that llguidance takes, found in this ")
    assert "\n" not in message and len(message) < 300


def test_a_matcher_that_took_a_wrong_token_is_in_error_and_allows_nothing() -> None:
    matcher = matcher_of(Grammar.regex("ab"))
    assert matcher.error == ""
    assert not matcher.accept(ord("x"))
    assert matcher.error and "\n" not in matcher.error and allowed(matcher) == []
    assert not matcher.accept(ord("a")) and not matcher.may_end
    mixed = allowed_tokens([matcher, matcher_of(Grammar.regex("ab"))])
    assert not mixed[0].any() and np.flatnonzero(mixed[1]).tolist() == [ord("a")]


def test_a_model_without_a_tokenizer_has_no_grammars() -> None:
    with pytest.raises(InvalidRequest, match="this model has no tokenizer"):
        GrammarCompiler(None, VOCAB)


def test_without_the_package_the_message_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ExtraMissing, match=r"llguidance: pip install 'paged\[structured\]'") as caught:
        GrammarCompiler(tokenizer(), VOCAB)
    assert isinstance(caught.value, ImportError) and isinstance(caught.value, paged.PagedError)
