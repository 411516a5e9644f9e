"""The packaged SmolLM2-135M-Instruct: a real GGUF file, its tokenizer, its template and its weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.errors import LoadError
from paged.loaders.chat import ChatTemplate
from paged.loaders.checkpoint import Checkpoint
from paged.loaders.open import find_smollm2, open_checkpoint
from paged.loaders.tokenizer import Tokenizer
from paged.models.config import ModelConfig

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's what they've said; I'm sure you'll agree, she'd too.",
    "  leading spaces,\ttabs\t\tand\n\n\nnewlines \r\n and trailing   ",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)  # O(2**n)\n",
    '{"key": [1, 2.5, -3e10, null, true], "nested": {"a": "b"}}',
    "naïve café — “quotes” … Straße, año, œuvre, Ελληνικά, русский язык, עברית, العربية, हिन्दी",
    "日本語のテキスト、中文文本，한국어 텍스트 ไทย",
    "🙂👩‍👩‍👧‍👦🇫🇷 e\u0301 \u00a0\u3000\u200b",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "x<|endoftext|>y <repo_name> <|im_start",
    "On 2024-01-15 at 12:30 there were 1234567 pages of 16 tokens.",
    "",
]

# The model has no tokens for these control characters, nor for bytes that begin code points which nobody uses.
ABSENT = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    try:
        find_smollm2()
    except LoadError as error:
        pytest.skip(str(error))
    return open_checkpoint("smollm2")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    assert checkpoint.tokenizer is not None
    return checkpoint.tokenizer


@pytest.fixture(scope="module")
def chat(checkpoint: Checkpoint) -> ChatTemplate:
    assert checkpoint.chat is not None
    return checkpoint.chat


def test_its_settings_are_those_of_the_model_card(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config == ModelConfig(
        "llama", vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
        intermediate_size=1536, rms_norm_eps=config.rms_norm_eps, rope_theta=100000.0, max_seq_len=8192,
        tie_embeddings=True,
    )  # fmt: skip
    assert len(checkpoint.tensors.names()) == 272
    assert checkpoint.eos_token_ids == (2, 0)


def test_its_tokens_are_the_known_ones(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (49152, 1, (2, 0), False)
    assert tokenizer.encode("The capital of France is").tolist() == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("<|im_end|>").tolist() == [tokenizer.id_of("<|im_end|>")] == [2]
    assert tokenizer.token_bytes(3575) == b" capital"


def test_its_digits_are_split_one_by_one(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.token_bytes(int(i)).decode() for i in tokenizer.encode("In 2024, 1234")]
    assert pieces == ["In", " ", "2", "0", "2", "4", ",", " ", "1", "2", "3", "4"]


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    kept = bytes(byte for byte in text.encode() if byte not in ABSENT)
    assert tokenizer.decode(ids, skip_special=False) == kept.decode("utf-8", "replace")
    assert ids.dtype == np.int32
    assert ((ids >= 0) & (ids < 49152)).all()


def test_any_token_decodes_to_its_bytes(tokenizer: Tokenizer) -> None:
    assert {len(tokenizer.token_bytes(i)) for i in range(17)} == {0}
    spelled = {tokenizer.token_bytes(i) for i in range(17, 49152)}
    assert len(spelled) == 49152 - 17
    assert {byte for byte in range(256) if bytes([byte]) not in spelled} == ABSENT


def test_its_template_opens_with_the_system_text_and_one_bos(tokenizer: Tokenizer, chat: ChatTemplate) -> None:
    messages = [{"role": "user", "content": "What is gravity?"}]
    text = chat.render(messages)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = chat.encode(tokenizer, messages)
    assert ids[0] == 1
    assert ids[1] != 1
    assert tokenizer.decode(ids, skip_special=False) == text
    assert chat.render([{"role": "system", "content": "Be brief."}], add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
    )


@pytest.mark.slow
def test_its_tokenizer_agrees_with_the_one_transformers_builds_from_the_file(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    path = find_smollm2()
    peer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    for text in CORPUS:
        assert tokenizer.encode(text, add_special=False).tolist() == peer(text, add_special_tokens=False)["input_ids"]

    # transformers cuts this file as GPT-2 does: other numerals than 0 to 9 are the one difference.
    @settings(max_examples=500, deadline=None)
    @given(
        st.text(
            st.characters(exclude_categories=["Cs", "Nd", "Nl", "No"]) | st.sampled_from(" 's\n\t0123<|>"), max_size=40
        )
    )
    def agree(text: str) -> None:
        assert tokenizer.encode(text, add_special=False).tolist() == peer(text, add_special_tokens=False)["input_ids"]

    agree()


@pytest.mark.slow
def test_its_weights_are_those_that_transformers_reads(checkpoint: Checkpoint) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF weights only with accelerate")
    from transformers import AutoModelForCausalLM

    path = find_smollm2()
    peer = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype="float32", local_files_only=True
    ).state_dict()
    for name in checkpoint.tensors.names():
        assert torch.equal(checkpoint.tensors.get(name), peer[name]), name


@pytest.mark.slow
def test_a_peer_model_with_its_weights_knows_the_capital_of_france(
    checkpoint: Checkpoint, tokenizer: Tokenizer, chat: ChatTemplate
) -> None:
    """Wrong row orders, tied heads or token ids all end in babble."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = checkpoint.config
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads, rms_norm_eps=config.rms_norm_eps, tie_word_embeddings=True,
            rope_theta=config.rope_theta, max_position_embeddings=config.max_seq_len,
        )
    )  # fmt: skip
    weights = {name: checkpoint.tensors.get(name) for name in checkpoint.tensors.names()}
    peer.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    ids = chat.encode(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    out = peer.generate(
        torch.from_numpy(ids.astype(np.int64))[None], max_new_tokens=12, do_sample=False, eos_token_id=2
    )
    assert tokenizer.decode(out[0, len(ids) :].numpy()) == "The capital of France is Paris."
