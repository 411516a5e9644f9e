"""paged.loaders.borders: how many leading tokens no text that follows can change."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders.chats import WORDS, pieces
from loaders.chats import bpe as bpe_of_chats
from tokenizers import AddedToken

from paged.errors import LoadError
from paged.loaders.borders import PROBES, Borders, common_prefix
from paged.loaders.open import open_checkpoint
from paged.loaders.tokenizer import Tokenizer


def bpe(pre: str = "gpt-2") -> Tokenizer:
    return bpe_of_chats(pre, add_bos=False)


@pytest.fixture(scope="module")
def smollm2_tokenizer() -> Tokenizer:
    try:
        tokenizer = open_checkpoint("smollm2").tokenizer
    except LoadError as error:
        pytest.skip(str(error))
    assert tokenizer is not None
    return tokenizer


def spell(tokenizer: Tokenizer, ids: Any) -> list[str]:
    return [tokenizer.text_of(int(i)) for i in ids]


def settled(tokenizer: Tokenizer, fixed: str) -> np.ndarray:
    """The tokens of `fixed` that stand whatever follows."""
    borders = Borders.of(tokenizer)
    prompts = [tokenizer.encode(fixed + probe) for probe in borders.probes]
    return prompts[0][: borders.settled(prompts)]


def test_probes_begin_unlike_each_other_so_that_the_place_where_texts_part_is_known() -> None:
    starts = [probe[:1] for probe in PROBES]
    assert len(set(starts)) == len(starts) - 1, "only the two that a template may look for share their '<'"
    assert sorted(starts, key=starts.count)[-2:] == ["<", "<"]


def test_a_piece_that_spans_the_place_gives_up_the_token_before_it() -> None:
    """No probe begins with @, so that only the vocabulary tells that "]" may become part of "]@"."""
    assert not any(probe.startswith("@") for probe in Borders.of(pieces()).probes)
    assert spell(pieces(), settled(pieces(), "[user]")) == ["<s>", " ", "[", "user"]
    without = pieces([word for word in WORDS if word != "]@"])
    assert spell(without, settled(without, "[user]")) == ["<s>", " ", "[", "user", "]"]


def test_the_text_that_follows_is_used_as_far_as_it_is_known() -> None:
    """ "us" could become "user", but not before "[": what is known to follow rules that out."""
    tokenizer = pieces()
    assert spell(tokenizer, settled(tokenizer, "us[us")) == ["<s>", " ", "us", "["]
    assert spell(tokenizer, settled(tokenizer, "use[")) == ["<s>", " ", "us", "e", "["]


def test_a_piece_that_ends_inside_the_known_text_spans_too() -> None:
    """With "@" behind it "b" is taken from ":b", and so "a" gets the ":"."""
    tokenizer = pieces(["b@", ":b", "a:", "x", "a", ":", "b", "@", " "])
    assert spell(tokenizer, tokenizer.encode("xa:b")) == ["<s>", " ", "x", "a", ":b"]
    assert spell(tokenizer, tokenizer.encode("xa:b@")) == ["<s>", " ", "x", "a:", "b@"]
    assert spell(tokenizer, settled(tokenizer, "xa:b")) == ["<s>", " ", "x"]


def test_what_is_given_up_is_known_to_follow_what_stands_before_it() -> None:
    """With "@" behind it "]" joins "]@" and "a" joins "a]@"; "e" could become "eax", but not where "]" follows."""
    tokenizer = pieces(["]@", "a]@", "ax", "eax", "s", "e", "a", "]", "@", "x", " "])
    assert spell(tokenizer, tokenizer.encode("sea]")) == ["<s>", " ", "s", "e", "a", "]"]
    assert spell(tokenizer, settled(tokenizer, "sea]")) == ["<s>", " ", "s", "e"]


def test_what_follows_a_control_token_cannot_change_it() -> None:
    tokenizer = pieces([*WORDS, "</s>x"])
    assert spell(tokenizer, settled(tokenizer, "us</s>")) == ["<s>", " ", "us", "</s>"]
    assert spell(bpe(), settled(bpe(), "<|im_start|>")) == ["<|im_start|>"]


def test_no_piece_begins_in_the_spelling_of_a_control_token() -> None:
    tokenizer = pieces([*WORDS, ">us["])
    assert spell(tokenizer, settled(tokenizer, "</s>us["))[-3:] == [" ", "us", "["]


def test_a_control_token_before_the_place_ends_what_pieces_can_span() -> None:
    tokenizer = bpe()
    assert spell(tokenizer, tokenizer.encode("<|im_start|>he")) == ["<|im_start|>", "he"]
    stands = settled(tokenizer, "the<|im_end|>\n<|im_start|>he")
    assert spell(tokenizer, stands) == ["t", "he", "<|im_end|>", "\n", "<|im_start|>"]


@pytest.mark.parametrize("mark", ["\u0301", "\u0338", "\u0323", "\u030c"])
@pytest.mark.parametrize("fixed", ["<user>", "say: e", "say: D", "caf\u00e9 e\n", "\u65e5\u672c\u304b"])
def test_an_accent_that_composes_with_the_last_character_changes_nothing_that_stands(fixed: str, mark: str) -> None:
    tokenizer = bpe("qwen2")
    stands = settled(tokenizer, fixed)
    assert tokenizer.encode(fixed + mark)[: len(stands)].tolist() == stands.tolist()


def test_only_where_a_normalizer_composes_is_the_last_character_given_up() -> None:
    fixed = "<user>"
    assert len(settled(bpe(), fixed)) == len(bpe().encode(fixed))
    assert len(settled(bpe("qwen2"), fixed)) < len(bpe("qwen2").encode(fixed))
    assert spell(pieces(), settled(pieces(), "us["))[-1] == "["


def test_nothing_composes_with_a_space() -> None:
    assert spell(bpe("qwen2"), settled(bpe("qwen2"), "[user\n")) == ["[", "use", "r"]


def test_a_control_token_that_swallows_spaces_before_it_is_among_the_probes() -> None:
    alone = pieces([word for word in WORDS if "\n" not in word])
    assert spell(alone, settled(alone, "us[\n"))[-2:] == ["[", "\n"]
    alone.backend.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False, special=True)])
    swallowing = Tokenizer(
        alone.backend,
        {i: alone.token_bytes(i) for i in range(alone.vocab_size)},
        {0: "<unk>", 1: "<s>", 2: "</s>", alone.vocab_size: "<mask>"},
        bos_id=1,
        add_bos=True,
    )
    assert "<mask>x" in Borders.of(swallowing).probes
    assert spell(swallowing, swallowing.encode("us[\n<mask>")) == ["<s>", " ", "us", "[", "<mask>"]
    assert spell(swallowing, settled(swallowing, "us[\n")) == ["<s>", " ", "us", "["]


def test_less_than_two_prompts_do_not_tell() -> None:
    borders = Borders.of(bpe())
    assert borders.settled([]) == 0
    assert borders.settled([bpe().encode("the system")]) == 0


def test_prompts_that_are_equal_or_empty_are_no_error() -> None:
    tokenizer = bpe()
    borders = Borders.of(tokenizer)
    ids = tokenizer.encode("<|im_start|>he")
    assert borders.settled([ids, ids]) == 1, "whatever follows: the word may go on"
    assert borders.settled([ids, ids[:0]]) == 0
    assert borders.settled([ids[:0], ids[:0]]) == 0


def test_control_tokens_are_listed_as_a_text_spells_them() -> None:
    tokenizer = bpe()
    borders = Borders.of(tokenizer)
    ids = tokenizer.encode("<|im_start|>a<|im_end|>b<|im_start|>")
    assert sorted(borders.controls_in(ids)) == ["<|im_end|>", "<|im_start|>"]
    assert borders.controls_in(tokenizer.encode("none here")) == []


def test_a_vocabulary_is_read_once_and_forgotten_with_its_tokenizer() -> None:
    tokenizer = pieces()
    assert Borders.of(tokenizer) is Borders.of(tokenizer)
    assert Borders.of(tokenizer) is not Borders.of(pieces())
    gc.collect()
    before = len(Borders._known)
    del tokenizer
    gc.collect()
    assert len(Borders._known) == before - 1


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "smollm", "qwen2", "tekken"])
@pytest.mark.parametrize(
    "fixed", ["[user]", "### User:\n", "User: ", "<|im_start|>user\n", "Q 12", "x\n\n", "it'", "ABC"]
)
def test_no_piece_of_the_vocabulary_as_what_follows_changes_what_stands(pre: str, fixed: str) -> None:
    tokenizer = bpe(pre)
    stands = settled(tokenizer, fixed).tolist()
    for token in range(tokenizer.vocab_size):
        for follows in (tokenizer.text_of(token), tokenizer.text_of(token)[1:], tokenizer.text_of(token) + " x"):
            assert tokenizer.encode(fixed + follows)[: len(stands)].tolist() == stands, (fixed, follows)


JOINING = pieces()


@settings(max_examples=300, deadline=None)
@given(st.text("user]@[:>a \n", max_size=8), st.text("user]@[:>a \n\u0301\u65e5", max_size=8))
def test_where_any_neighbours_may_join_no_text_changes_what_stands(fixed: str, follows: str) -> None:
    tokenizer = JOINING
    stands = settled(tokenizer, fixed).tolist()
    assert tokenizer.encode(fixed + follows)[: len(stands)].tolist() == stands


@settings(max_examples=300, deadline=None)
@given(fixed=st.text("[]aeus:#>12' \n<|", max_size=12), follows=st.text(max_size=6))
def test_the_tokens_of_smollm2_that_stand_are_changed_by_no_text(
    smollm2_tokenizer: Tokenizer, fixed: str, follows: str
) -> None:
    stands = settled(smollm2_tokenizer, "<|im_start|>" + fixed).tolist()
    assert stands[0] == 1
    text = "<|im_start|>" + fixed + follows
    assert smollm2_tokenizer.encode(text)[: len(stands)].tolist() == stands


@pytest.mark.slow
@pytest.mark.parametrize("fixed", ["[user]", "### User:\n", "User: ", "say \u201c"])
def test_none_of_the_pieces_of_smollm2_changes_what_stands(smollm2_tokenizer: Tokenizer, fixed: str) -> None:
    stands = settled(smollm2_tokenizer, fixed).tolist()
    assert stands, "something stands in each"
    texts = [smollm2_tokenizer.text_of(token) for token in range(smollm2_tokenizer.vocab_size)]
    for text in texts:
        assert smollm2_tokenizer.encode(fixed + text)[: len(stands)].tolist() == stands, text


@pytest.mark.parametrize(
    ("arrays", "n"),
    [
        ([[1, 2, 3]], 3),
        ([[1, 2, 3], [1, 2]], 2),
        ([[1, 2], [1, 3], [1, 2]], 1),
        ([[], [1]], 0),
        ([[5], [6]], 0),
        ([[1, 2, 3], [1, 2, 3, 4], [1, 2, 3]], 3),
    ],
)
def test_a_common_prefix_is_that_of_all(arrays: list[list[int]], n: int) -> None:
    assert common_prefix(*(np.array(array, np.int32) for array in arrays)) == n
