"""Small GGUF files whose tokenizer transformers builds as well: both give the same ids.

Not for "smollm", whose digits transformers does not split: test_tokenizer.py has the cut that SmolLM2 publishes.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders.builders import CORPUS, bpe_metadata, hf_config, random_weights, write_gguf

from paged.loaders.gguf import read_gguf
from paged.loaders.tokenizer import Tokenizer
from paged.models.config import ModelConfig

# Digits alone: transformers cuts runs of other numerals as GPT-2 does, whatever the file says.
TEXT = st.text(
    st.characters(exclude_categories=["Cs", "Nd", "Nl", "No"]) | st.sampled_from("019 '\n\t<|>"), max_size=40
)
WORDS = ["I'll", "WE'VE", " don't", "12345", " 7", "\r\n", "\n\n ", "   ", "\t", "naïve", "e\u0301", "…", "!?)",
         "HelloWorld", " the", "日本", "🙂", "\u3000", "$x=1^|~", "_", "\u00a0", "<|im_end|>"]  # fmt: skip
SNIPPETS = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


def both(tmp_path: Path, arch: str, metadata: dict[str, Any]) -> tuple[Tokenizer, Any]:
    from transformers import AutoTokenizer

    config = ModelConfig.from_hf(hf_config(arch, vocab_size=len(metadata["tokenizer.ggml.tokens"])))
    path = write_gguf(tmp_path / "model.gguf", config, random_weights(config), arch, metadata=metadata)
    ours = read_gguf(path).tokenizer
    assert ours is not None
    return ours, AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name, local_files_only=True)


@pytest.mark.parametrize(
    ("arch", "pre"),
    [("llama", "gpt-2"), ("llama", "llama-bpe"), ("llama", "tekken"), ("qwen2", "qwen2"),
     ("qwen3", "qwen2")],
)  # fmt: skip
def test_a_byte_level_vocabulary_gives_the_ids_that_transformers_gives(tmp_path: Path, arch: str, pre: str) -> None:
    ours, peer = both(tmp_path, arch, bpe_metadata(pre=pre, add_bos_token=False))
    composes = ours.decode(ours.encode("e\u0301")) == "é"
    assert composes == (pre == "qwen2"), "Qwen's own tokenizer composes accents; transformers drops that with the file"
    for text in CORPUS:
        assert ours.encode(text).tolist() == peer(text, add_special_tokens=False)["input_ids"]

    @settings(max_examples=150, deadline=None)
    @given(TEXT | SNIPPETS)
    def agree(text: str) -> None:
        text = unicodedata.normalize("NFC", text) if composes else text
        assert ours.encode(text).tolist() == peer(text, add_special_tokens=False)["input_ids"]

    agree()


@pytest.mark.parametrize("space", [True, False])
def test_a_sentencepiece_vocabulary_gives_the_ids_that_transformers_gives(tmp_path: Path, space: bool) -> None:
    words = ["\u2581", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "llo", "\u2581he", "\u2581hello", "\u2581w", "or",
             "\u2581wor", "ld", "\u2581world", "\u2581\u2581"]  # fmt: skip
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": space,
    }
    ours, peer = both(tmp_path, "llama", metadata)
    for text in ("hello world", "hello  world", "wor é 🙂 hello", "x", "held\nhold"):
        ids = ours.encode(text, add_special=False).tolist()
        if space:
            assert ids == peer(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == text
    assert ours.encode("hello").tolist()[0] == peer("hello")["input_ids"][0] == 1
