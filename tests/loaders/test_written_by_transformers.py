"""Folders that transformers itself writes: models of each family, whole and in shards, and their tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaders.builders import CORPUS, SPECIAL, hf_config, train_bpe
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.models.auto import CONFIG_MAPPING

from paged.loaders.open import open_checkpoint
from paged.loaders.tokenizer_files import tokenizer_from_folder
from paged.models.config import ModelConfig

pytestmark = pytest.mark.filterwarnings("error:.*ignored:UserWarning")
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


def saved(folder: Path, family: str, dtype: torch.dtype = torch.float32, shard: str = "1GB", **changes: Any) -> Any:
    values = {k: v for k, v in hf_config(family, **changes).items() if k != "model_type"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**values)).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["1GB", "100KB"])
def test_a_saved_model_is_read_back_weight_by_weight(tmp_path: Path, family: str, tied: bool, shard: str) -> None:
    model = saved(tmp_path, family, shard=shard, tie_word_embeddings=tied)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "100KB")
    checkpoint = open_checkpoint(tmp_path)
    expected = model.state_dict()
    if tied:
        del expected["lm_head.weight"]
    assert set(checkpoint.tensors.names()) == set(expected)
    for name, weight in expected.items():
        assert torch.equal(checkpoint.tensors.get(name), weight), name


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                                       "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
        ("mistral", {"sliding_window": 24}),
        ("qwen2", {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                                       "original_max_position_embeddings": 32}}),
    ],
)  # fmt: skip
def test_the_config_that_transformers_saves_means_what_it_was_made_from(
    tmp_path: Path, family: str, changes: dict
) -> None:
    saved(tmp_path, family, **changes)
    assert open_checkpoint(tmp_path).config == ModelConfig.from_hf(hf_config(family, **changes))


def test_half_precision_is_kept_where_asked_for(tmp_path: Path) -> None:
    model = saved(tmp_path, "qwen3", torch.bfloat16)
    tensors = open_checkpoint(tmp_path).tensors
    for name, weight in model.state_dict().items():
        assert tensors.get(name, None).dtype == torch.bfloat16
        assert torch.equal(tensors.get(name, None), weight)
        assert torch.equal(tensors.get(name), weight.float())


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_saved_tokenizer_and_its_template_give_the_same_ids(tmp_path: Path, add_bos: bool) -> None:
    saved(tmp_path, "llama", vocab_size=390)
    peer = PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(add_bos), bos_token=SPECIAL[1], eos_token=SPECIAL[2], chat_template=TEMPLATE
    )
    peer.save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[2, 0], bos_token_id=1).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    tokenizer, chat = checkpoint.tokenizer, checkpoint.chat
    assert tokenizer is not None
    assert chat is not None
    assert (tokenizer.bos_id, tokenizer.add_bos, checkpoint.eos_token_ids) == (1, add_bos, (2, 0))
    for text in [*CORPUS, "", "  ", "<|im_start|>user\nhi<|im_end|>", "日本 🙂 e\u0301"]:
        ids = peer(text)["input_ids"]
        doubled = add_bos and text.startswith(SPECIAL[1])  # transformers puts a second one there
        assert tokenizer.encode(text).tolist() == (ids[1:] if doubled else ids)
        assert tokenizer.decode(ids) == peer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The fox."}]
    assert chat.render(messages) == peer.apply_chat_template(messages, tokenize=False)
    assert chat.encode(tokenizer, messages).tolist() == peer.apply_chat_template(messages)["input_ids"]


def from_folder(folder: Path, backend: Tokenizer, **settings: Any) -> Any:
    (folder / "tokenizer.json").write_text(backend.to_str())
    return tokenizer_from_folder(folder, settings, ())


def test_tokens_that_only_the_settings_add_are_tokens_as_transformers_has_it(tmp_path: Path) -> None:
    backend = train_bpe()
    first = backend.get_vocab_size()
    entries = {
        str(first + 1): {"content": "<b>", "special": False, "normalized": False},
        str(first): {"content": "<a>", "special": True},
        "2": {"content": SPECIAL[2], "special": True},
    }
    tokenizer = from_folder(tmp_path, backend, added_tokens_decoder=entries)
    peer = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        added_tokens_decoder={int(index): AddedToken(**entry) for index, entry in entries.items()},
    )
    for text in ("x<a>y<b> z", "<b><a>", SPECIAL[2]):
        ids = tokenizer.encode(text).tolist()
        assert ids == peer(text)["input_ids"]
        assert tokenizer.decode(ids) == peer.decode(ids, skip_special_tokens=True)
    assert (tokenizer.vocab_size, tokenizer.decode([first, first + 1])) == (first + 2, "<b>")


def test_a_named_end_token_is_a_control_token_as_transformers_has_it(tmp_path: Path) -> None:
    tokenizer = from_folder(tmp_path, train_bpe(), eos_token="nd")
    peer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="nd")
    for text in ("sand and hand", "nd", "the dog"):
        ids = tokenizer.encode(text).tolist()
        assert ids == peer(text)["input_ids"]
        assert tokenizer.decode(ids) == peer.decode(ids, skip_special_tokens=True)
    assert tokenizer.token_bytes(tokenizer.eos_ids[0]) == b""


def test_links_are_followed_as_download_caches_lay_them(tmp_path: Path) -> None:
    model = saved(tmp_path / "blobs", "llama", shard="100KB")
    links = tmp_path / "snapshot"
    links.mkdir()
    for number, path in enumerate(sorted((tmp_path / "blobs").iterdir())):
        blob = path.rename(path.with_name(f"{number:040x}"))
        (links / path.name).symlink_to(blob)
    tensors = open_checkpoint(links).tensors
    assert torch.equal(tensors.get("model.norm.weight"), model.state_dict()["model.norm.weight"])
