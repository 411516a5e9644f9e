"""paged.loaders.tokenizer and its files: text to ids and back, without loss, from both kinds of source."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders.builders import CORPUS, SPECIAL, bpe_metadata, train_bpe
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from paged.errors import InvalidRequest, LoadError
from paged.loaders.pretokenizers import PRE_TOKENIZERS
from paged.loaders.tokenizer import Tokenizer
from paged.loaders.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
WORDS = ["'s", "'LL", "12345", "²", "½Ⅷ", "\r\n", "\n\n", "  ", "\t", "é", "e\u0301", "…!?", "word", "Word",
         " the", "日本", "🙂", "\u3000", "$x=1^|~<y>", "_", "\u00a0"]  # fmt: skip
SNIPPETS = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


def from_gguf(**changes: Any) -> Tokenizer:
    tokenizer = tokenizer_from_gguf(bpe_metadata(**changes), "test.gguf")
    assert tokenizer is not None
    return tokenizer


def from_folder(folder: Path, backend: tokenizers.Tokenizer, eos_ids: tuple[int, ...] = (), **config: Any) -> Tokenizer:
    (folder / "tokenizer.json").write_text(backend.to_str())
    tokenizer = tokenizer_from_folder(folder, config, eos_ids)
    assert tokenizer is not None
    return tokenizer


# --- byte-level BPE ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_each_pre_tokenizer_returns_the_text_that_went_in(pre: str) -> None:
    tokenizer = from_gguf(pre=pre)

    @settings(max_examples=40, deadline=None)
    @given(TEXT | SNIPPETS)
    def round_trip(text: str) -> None:
        ids = tokenizer.encode(text, add_special=False)
        expected = normalizers.NFC().normalize_str(text) if PRE_TOKENIZERS[pre].nfc else text
        assert tokenizer.decode(ids, skip_special=False) == expected
        if not any(token in expected for token in SPECIAL):
            assert b"".join(tokenizer.token_bytes(int(i)) for i in ids) == expected.encode()

    round_trip()


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "It's 2024  x\n\n y", ["It", "'s", " 2024", " ", " x", "\n\n", " y"]),
        ("gpt-2", "IT'S", ["IT", "'", "S"]),
        ("smollm", "It's 2024  x", ["It", "'s", " ", "2", "0", "2", "4", " ", " x"]),
        ("smollm", "x² ½", ["x", "²", " ", "½"]),
        ("llama-bpe", "IT'S 12345!\n\n  go", ["IT", "'S", " ", "123", "45", "!\n\n", " ", " go"]),
        ("llama3", "(word)\tok", ["(word", ")", "\tok"]),
        ("qwen2", "IT'S 123\n x", ["IT", "'S", " ", "1", "2", "3", "\n", " x"]),
        ("default", "a+b=12345, ok", ["a", "+", "b", "=", "123", "45", ",", " ok"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
    ],
)
def test_text_is_cut_as_the_name_says(pre: str, text: str, words: list[str]) -> None:
    cut = PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words


@settings(max_examples=200, deadline=None)
@given(TEXT | SNIPPETS)
def test_smollm_cuts_as_its_own_tokenizer_json_does(text: str) -> None:
    published = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    assert PRE_TOKENIZERS["smollm"].build().pre_tokenize_str(text) == published.pre_tokenize_str(text)


@settings(max_examples=200, deadline=None)
@given(TEXT | SNIPPETS)
def test_gpt2_cuts_as_the_package_does(text: str) -> None:
    published = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    assert PRE_TOKENIZERS["gpt-2"].build().pre_tokenize_str(text) == published.pre_tokenize_str(text)


@settings(max_examples=200, deadline=None)
@given(TEXT | SNIPPETS)
def test_qwen2_cuts_as_transformers_does(text: str) -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    published = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    ours = [text[start:end] for _, (start, end) in PRE_TOKENIZERS["qwen2"].build().pre_tokenize_str(text)]
    assert ours == [word for word, _ in published.pre_tokenize_str(text)]


def test_the_same_vocabulary_from_both_sources_gives_the_same_ids(tmp_path: Path) -> None:
    backend = train_bpe()
    gguf, folder = from_gguf(pre="gpt-2"), from_folder(tmp_path, backend, bos_token="<|im_start|>")
    assert gguf.vocab_size == folder.vocab_size == 390
    for text in [*CORPUS, "", " ", "<|im_start|>user\nhi<|im_end|>\n", "unseen 漢字 \x00\x7f"]:
        ids = gguf.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == folder.encode(text).tolist() == backend.encode(text).ids
        assert gguf.decode(ids, skip_special=False) == folder.decode(ids, skip_special=False) == text
    for token in range(390):
        assert gguf.token_bytes(token) == folder.token_bytes(token)
        assert (gguf.token_bytes(token) == b"") == (token < 3)


def test_merges_join_what_they_say_in_their_order() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "bc", "abc", "Ġ"],
        "tokenizer.ggml.merges": ["b c", "a b", "a bc"],
    }
    tokenizer = tokenizer_from_gguf(metadata, "x")
    assert tokenizer is not None
    assert tokenizer.encode("abc").tolist() == [5]
    assert tokenizer.encode("ab").tolist() == [3]
    assert tokenizer.encode("abbc a").tolist() == [3, 4, 6, 0]
    assert [tokenizer.token_bytes(i) for i in (5, 6)] == [b"abc", b" "]


def test_whole_words_skip_the_merges_only_where_the_kind_says_so() -> None:
    tokens, merges = ["a", "b", "c", "ab", "abc", "<s>"], ["a b"]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    for pre, expected in (("llama-bpe", [4]), ("gpt-2", [3, 2])):
        tokenizer = tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": pre}, "x")
        assert tokenizer is not None
        assert tokenizer.encode("abc").tolist() == expected


def test_user_defined_tokens_are_recognised_and_stand_for_their_text(tmp_path: Path) -> None:
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<think>", "  é  "]
    metadata["tokenizer.ggml.token_type"] += [4, 4]
    backend = train_bpe()
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("  é  ", normalized=False)])
    gguf, folder = tokenizer_from_gguf(metadata, "x"), from_folder(tmp_path, backend)
    assert gguf is not None
    for tokenizer in (gguf, folder):
        ids = tokenizer.encode("a<think>b  é  c")
        assert {390, 391} <= set(ids.tolist())
        assert tokenizer.token_bytes(390) == b"<think>"
        assert tokenizer.token_bytes(391) == "  é  ".encode()
        assert tokenizer.decode(ids) == "a<think>b  é  c"


# --- control tokens, BOS, ends -----------------------------------------------------------------------------------


def test_control_tokens_written_in_the_text_are_recognised_and_stand_for_no_text() -> None:
    tokenizer = from_gguf()
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert ids[0] == tokenizer.id_of("<|im_start|>") == 1
    assert ids[-1] == tokenizer.id_of("<|im_end|>") == 2
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"
    assert [tokenizer.token_bytes(i) for i in range(3)] == [b""] * 3
    assert [tokenizer.text_of(i) for i in range(3)] == SPECIAL
    assert tokenizer.id_of("no such token") is None


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False),
     ("tekken", None, True), ("qwen2", None, False)],
)  # fmt: skip
def test_gguf_says_whether_a_bos_is_added_and_the_kind_where_it_does_not(
    pre: str, flag: bool | None, expected: bool
) -> None:
    tokenizer = from_gguf(pre=pre, add_bos_token=flag)
    assert tokenizer.add_bos == expected
    assert tokenizer.encode("hi")[0] == 1 if expected else tokenizer.encode("hi")[0] != 1
    assert tokenizer.encode("hi", add_special=False)[0] != 1
    assert tokenizer.encode("<|im_start|>hi").tolist().count(1) == 1
    assert tokenizer.encode("").tolist() == ([1] if expected else [])


@pytest.mark.parametrize(
    ("processor", "config", "expected"),
    [
        (True, {"bos_token": "<|im_start|>"}, True),
        (True, {}, True),
        (True, {"bos_token": "<|im_start|>", "add_bos_token": False}, False),
        (False, {"bos_token": "<|im_start|>", "add_bos_token": True}, True),
        (False, {"bos_token": "<|im_start|>"}, False),
        (False, {"add_bos_token": True}, False),
        (False, {"bos_token": None}, False),
    ],
)
def test_a_folder_says_whether_a_bos_is_added(tmp_path: Path, processor: bool, config: dict, expected: bool) -> None:
    tokenizer = from_folder(tmp_path, train_bpe(add_bos=processor), **config)
    assert tokenizer.add_bos == expected
    assert tokenizer.encode("hi").tolist().count(1) == expected
    assert tokenizer.encode("<|im_start|>hi").tolist().count(1) == 1


def test_a_token_that_the_settings_name_but_the_vocabulary_lacks_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="the bos_token '<s>' of tokenizer_config.json is not in the vocabulary"):
        tokenizer = from_folder(tmp_path, train_bpe(), bos_token="<s>")
    assert tokenizer.bos_id is None
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("", "")


def test_gguf_ends_at_its_end_token_first_and_at_every_known_control_token() -> None:
    assert from_gguf(eos_token_id=2).eos_ids == (2, 0)
    assert from_gguf(eos_token_id=0).eos_ids == (0, 2)
    assert from_gguf(eos_token_id=5, eot_token_id=6, eom_token_id=7).eos_ids == (5, 6, 7, 0, 2)
    assert from_gguf(eos_token_id=None, token_type=[1] * 390).eos_ids == ()
    assert from_gguf().eos_token == "<|im_end|>"


# --- SentencePiece -----------------------------------------------------------------------------------------------


def pieces_metadata(pieces: dict[str, float], **changes: Any) -> dict[str, Any]:
    pieces = dict(sorted(pieces.items()))  # ids in another order than scores
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + list(pieces.values()),
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


PIECES = {text: -float(i) for i, text in enumerate(
    ["he", "ll", "\u2581he", "llo", "\u2581hello", "wo", "rl", "\u2581wo", "rld", "\u2581world", "lo", "\u2581", "h",
     "e", "l", "o", "w", "r", "d", "or", "é", "\u2581\u2581"])}  # fmt: skip


def sentencepiece_ids(text: str, vocab: dict[str, int], scores: dict[str, float]) -> list[int]:
    """The algorithm as its paper tells it: join the neighbours whose union scores best, the leftmost first."""
    symbols = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    return [i for s in symbols for i in ([vocab[s]] if s in vocab else [3 + byte for byte in s.encode()])]


@settings(max_examples=300, deadline=None)
@given(st.text("helowrd é🙂\n", max_size=25))
def test_sentencepiece_joins_the_best_scored_pieces_first(text: str) -> None:
    metadata = pieces_metadata(PIECES)
    tokenizer = tokenizer_from_gguf(metadata, "x")
    assert tokenizer is not None
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ids = tokenizer.encode(text, add_special=False)
    assert ids.tolist() == sentencepiece_ids(text, vocab, PIECES)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(int(i)) for i in ids) == (b" " * bool(text)) + text.encode()


def test_sentencepiece_knows_bos_bytes_and_the_space_it_adds() -> None:
    tokenizer = tokenizer_from_gguf(pieces_metadata(PIECES), "x")
    assert tokenizer is not None
    assert (tokenizer.add_bos, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.bos_token) == (True, 1, (2,), "<s>")
    assert [tokenizer.token_bytes(i) for i in range(4)] == [b"", b"", b"", b"\0"]
    assert tokenizer.decode([0]) == ""
    ids = tokenizer.encode("hello world")
    assert [tokenizer.text_of(int(i)) for i in ids] == ["<s>", " hello", " world"]
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.encode("<s>hello").tolist() == [1, tokenizer.id_of("\u2581hello")]
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"
    assert tokenizer.decode([3 + byte for byte in "🙂".encode()]) == "🙂"
    without = tokenizer_from_gguf(pieces_metadata(PIECES, add_space_prefix=False, add_bos_token=False), "x")
    assert without is not None
    assert [without.text_of(int(i)) for i in without.encode("hello world")] == ["he", "llo", " world"]
    assert without.decode(without.encode(" hello")) == " hello"


def test_sentencepiece_with_merges_of_its_own_uses_these() -> None:
    tokenizer = tokenizer_from_gguf(pieces_metadata(PIECES, merges=["w o"], scores=None), "x")
    assert tokenizer is not None
    assert [tokenizer.text_of(int(i)) for i in tokenizer.encode("wor", add_special=False)] == [" ", "wo", "r"]


@pytest.mark.parametrize("metaspace", [False, True])
def test_a_sentencepiece_folder_reads_like_its_own_decoder(tmp_path: Path, metaspace: bool) -> None:
    source = tokenizer_from_gguf(pieces_metadata(PIECES), "x")
    assert source is not None
    backend = tokenizers.Tokenizer.from_str(source.backend.to_str())
    if metaspace:
        backend.normalizer = None  # type: ignore[assignment]
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = tokenizers.decoders.Sequence(
            [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace(prepend_scheme="first", split=False)]
        )
    else:
        parts = tokenizers.decoders
        backend.decoder = parts.Sequence(
            [parts.Replace("\u2581", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
        )
    tokenizer = from_folder(tmp_path, backend, bos_token="<s>", eos_token="</s>", add_bos_token=True)
    for text in ("hello world", " hello", "wé 🙂 lo", ""):
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        assert tokenizer.decode(ids) == backend.decode(ids.tolist())
        assert tokenizer.decode(ids) == text or (metaspace and text == " hello")  # Metaspace adds no second space


# --- decoding bytes ----------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=20))
def test_any_bytes_decode_with_marks_for_what_is_not_utf8(data: bytes) -> None:
    tokenizer = from_gguf()
    spelling = {tokenizer.token_bytes(i): i for i in range(3, 259)}
    ids = [spelling[bytes([byte])] for byte in data]
    for given_ids in (ids, np.array(ids, np.int32)):
        assert tokenizer.decode(given_ids) == data.decode("utf-8", "replace")


def test_ids_outside_the_vocabulary() -> None:
    tokenizer = from_gguf()
    assert tokenizer.token_bytes(390) == tokenizer.token_bytes(1 << 31) == b""
    assert tokenizer.decode([390, 999]) == ""
    for call in (tokenizer.token_bytes, lambda i: tokenizer.decode([i])):
        with pytest.raises(InvalidRequest, match="must be at least 0, got -1"):
            call(-1)


# --- bad input, threads ------------------------------------------------------------------------------------------


def test_what_is_not_text_is_refused() -> None:
    tokenizer = from_gguf()
    with pytest.raises(TypeError, match="text must be a str, got bytes"):
        tokenizer.encode(b"hi")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="found a lone surrogate at 2"):
        tokenizer.encode("hi\ud83d")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model must be gpt2 or llama, found 't5'"),
        ({"pre": "chameleon"}, "tokenizer.ggml.pre must be one of .*gpt-2.*, found 'chameleon'"),
        ({"tokens": None}, "expected a list of str for tokenizer.ggml.tokens, found NoneType"),
        ({"tokens": [1, 2]}, "expected a list of str for tokenizer.ggml.tokens"),
        ({"merges": None}, "expected a list of str for tokenizer.ggml.merges"),
        ({"merges": ["x"]}, "expected two tokens in each of tokenizer.ggml.merges, found 'x'"),
        ({"merges": ["not there"]}, "expected merges of two tokens of the vocabulary"),
        ({"token_type": [1]}, "expected 390 entries in tokenizer.ggml.token_type, found 1"),
        ({"bos_token_id": 390}, "expected an id below 390 for tokenizer.ggml.bos_token_id, found 390"),
        ({"eos_token_id": -1}, "expected an id below 390 for tokenizer.ggml.eos_token_id, found -1"),
    ],
)
def test_broken_gguf_keys_are_named(changes: dict, message: str) -> None:
    with pytest.raises(LoadError, match=rf"^some.gguf: {message}"):
        tokenizer_from_gguf(bpe_metadata(**changes), "some.gguf")


def test_scores_must_be_there_for_every_piece() -> None:
    for scores in (None, [0.0]):
        with pytest.raises(LoadError, match=r"^x: expected .* tokenizer.ggml.scores, found"):
            tokenizer_from_gguf(pieces_metadata(PIECES, scores=scores), "x")


@pytest.mark.parametrize("model", [None, "none", "no_vocab"])
def test_no_vocabulary_means_no_tokenizer(model: str | None) -> None:
    assert tokenizer_from_gguf({} if model is None else {"tokenizer.ggml.model": model}, "x") is None


def test_a_folder_without_tokenizer_json_has_no_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_from_folder(tmp_path, {}, ()) is None


def test_an_added_token_of_another_id_is_warned_of_and_none_is_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="tokenizer_config.json: '<a>' should have id 999; tokenizer.json leaves it"):
        from_folder(tmp_path, train_bpe(), added_tokens_decoder={"999": {"content": "<a>"}})
    for entry in ({}, {"content": 3}, "<a>", {"content": "\ud800"}):
        with pytest.raises(LoadError, match=r"tokenizer_config.json: expected .* in added_tokens_decoder, found"):
            from_folder(tmp_path, train_bpe(), added_tokens_decoder={"999": entry})


def test_another_kind_of_tokenizer_json_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(LoadError, match=r"expected a byte-level BPE or a SentencePiece BPE.*found the decoder none"):
        from_folder(tmp_path, backend)
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(LoadError, match="found the decoder WordPiece"):
        from_folder(tmp_path, backend)


def test_an_end_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="the eos token must be an id below 390, found 390"):
        from_folder(tmp_path, train_bpe(), eos_ids=(390,))


def test_b54_truncation_and_padding_of_the_file_are_dropped(tmp_path: Path) -> None:
    backend = train_bpe()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = from_folder(tmp_path, backend)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["truncation"]
    assert tokenizer.decode(tokenizer.encode(CORPUS[0])) == CORPUS[0]


def test_b54_eight_threads_share_one_tokenizer() -> None:
    tokenizer = from_gguf(add_bos_token=True)
    texts = [f"{text} {i}" for i in range(20) for text in CORPUS]
    expected = [tokenizer.encode(text).tolist() for text in texts]

    def work(_: int) -> bool:
        ids = [tokenizer.encode(text).tolist() for text in texts]
        return ids == expected and [tokenizer.decode(i) for i in ids] == texts

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def vocabulary(tmp_path: Path, **changes: int) -> Path:
    """A folder whose tokenizer.json has other ids for some tokens."""
    state = json.loads(train_bpe().to_str())
    state["model"]["vocab"].update(changes)
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    return tmp_path


def test_an_id_of_billions_is_refused_before_a_list_of_all_ids_is_made(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="expected token ids below 16777216, found 4294967295"):
        tokenizer_from_folder(vocabulary(tmp_path, far=2**32 - 1), {}, ())


def test_a_token_that_is_no_text_is_in_no_vocabulary(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="not in the vocabulary"):
        tokenizer_from_folder(vocabulary(tmp_path), {"bos_token": "\ud800"}, ())


@pytest.mark.parametrize("merge", ["ab", ""])
def test_a_merge_of_one_token_is_named(merge: str) -> None:
    with pytest.raises(LoadError, match=f"expected two tokens in each of tokenizer.ggml.merges, found '{merge}'$"):
        from_gguf(merges=[merge])


def test_a_panic_of_the_package_is_a_load_error() -> None:
    # The package writes the joined token into room for the longest one of the vocabulary, and panics: no Exception.
    with pytest.raises(LoadError, match="expected merges of two tokens of the vocabulary, found: "):
        from_gguf(tokens=["a", "b"], token_type=None, merges=["a b"], bos_token_id=None, eos_token_id=None)


def test_the_kind_of_cut_must_be_a_text() -> None:
    with pytest.raises(LoadError, match=r"tokenizer.ggml.pre must be one of .*, found \['gpt-2'\]"):
        from_gguf(pre=["gpt-2"])
