"""paged.loaders.safetensors: Hugging Face folders, whole and damaged (case B46: never random numbers)."""

from __future__ import annotations

import json
import random
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from loaders.builders import hf_config, random_weights, train_bpe, write_folder
from safetensors.torch import save_file

from paged.errors import LoadError, MissingTensor
from paged.loaders.safetensors import read_safetensors
from paged.models.config import ModelConfig

pytestmark = pytest.mark.filterwarnings("error")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def weights_of(**changes: Any) -> dict[str, torch.Tensor]:
    return random_weights(ModelConfig.from_hf(hf_config(**changes)))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_comes_back_as_it_was_saved(tmp_path: Path, family: str, shards: int) -> None:
    weights = weights_of(family=family)
    checkpoint = read_safetensors(write_folder(tmp_path, hf_config(family), weights, shards))
    assert set(checkpoint.tensors.names()) == set(weights)
    assert checkpoint.config == ModelConfig.from_hf(hf_config(family))
    assert checkpoint.source == checkpoint.tensors.source == str(tmp_path)
    for name, weight in weights.items():
        assert checkpoint.tensors.shape(name) == tuple(weight.shape)
        assert torch.equal(checkpoint.tensors.get(name), weight)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [None, torch.float32, torch.bfloat16])
def test_a_tensor_comes_in_the_type_asked_for_or_as_stored(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype | None
) -> None:
    weights = {name: weight.to(stored) for name, weight in weights_of().items()}
    tensors = read_safetensors(write_folder(tmp_path, hf_config(), weights)).tensors
    tensor = tensors.get(HEAD, wanted)
    assert tensor.dtype == (wanted or stored)
    assert torch.equal(tensor, weights[HEAD].to(wanted or stored))


def test_a_tensor_outlives_its_file_and_belongs_to_its_reader(tmp_path: Path) -> None:
    weights = weights_of()
    tensors = read_safetensors(write_folder(tmp_path, hf_config(), weights)).tensors
    first, second = tensors.get(HEAD, None), tensors.get(HEAD, None)
    first.zero_()
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(second, weights[HEAD])


def test_b46_without_a_head_a_tied_model_uses_the_embedding(tmp_path: Path) -> None:
    config = hf_config(tie_word_embeddings=True)
    checkpoint = read_safetensors(write_folder(tmp_path, config, weights_of(tie_word_embeddings=True)))
    assert checkpoint.config.tie_embeddings
    assert HEAD not in checkpoint.tensors.names()


def test_b46_without_a_head_an_untied_model_is_refused(tmp_path: Path) -> None:
    weights = weights_of()
    del weights[HEAD]
    with pytest.raises(
        MissingTensor, match=r"lm_head.weight: expected a tensor of shape \[96, 192\], found none .*tie"
    ):
        read_safetensors(write_folder(tmp_path, hf_config(), weights))


def test_b46_with_both_a_tied_model_uses_the_embedding_and_says_so_if_they_differ(tmp_path: Path) -> None:
    config = hf_config(tie_word_embeddings=True)
    weights = weights_of()
    same = {**weights, HEAD: weights[EMBEDDING].clone()}
    checkpoint = read_safetensors(write_folder(tmp_path / "same", config, same))
    assert HEAD not in checkpoint.tensors.names()
    with pytest.warns(UserWarning, match="lm_head.weight: ignored, as tie_word_embeddings is true.*differs"):
        checkpoint = read_safetensors(write_folder(tmp_path / "other", config, weights))
    assert HEAD not in checkpoint.tensors.names()
    assert torch.equal(checkpoint.tensors.get(EMBEDDING), weights[EMBEDDING])


def test_b46_a_tied_model_may_have_been_saved_with_the_head_alone(tmp_path: Path) -> None:
    weights = weights_of()
    embedding = weights.pop(EMBEDDING)
    weights[HEAD] = embedding
    tensors = read_safetensors(write_folder(tmp_path, hf_config(tie_word_embeddings=True), weights)).tensors
    assert HEAD not in tensors.names()
    assert torch.equal(tensors.get(EMBEDDING), embedding)


@pytest.mark.parametrize("shards", [1, 2])
def test_b46_a_missing_tensor_is_named_with_its_place_and_shape(tmp_path: Path, shards: int) -> None:
    weights = weights_of()
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(MissingTensor) as error:
        read_safetensors(write_folder(tmp_path, hf_config(), weights, shards))
    assert str(tmp_path) in str(error.value)
    assert "model.layers.1.mlp.up_proj.weight: expected a tensor of shape [96, 192], found none" in str(error.value)


@pytest.mark.parametrize("shards", [1, 2])
def test_b46_a_wrong_shape_is_named_with_file_and_both_shapes(tmp_path: Path, shards: int) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    weights = {**weights_of(), name: torch.zeros(32, 192)}
    with pytest.raises(MissingTensor) as error:
        read_safetensors(write_folder(tmp_path, hf_config(), weights, shards))
    file = "model.safetensors" if shards == 1 else "model-00001-of-00002.safetensors"
    assert f"{tmp_path / file}: {name}: expected shape [64, 192], found [32, 192]" in str(error.value)


def test_b46_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, hf_config(), weights_of(), shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(LoadError, match=r"model-00002-of-00002.safetensors: expected a shard .*found no such file"):
        read_safetensors(tmp_path)


def test_b46_a_shard_without_its_tensor_is_named(tmp_path: Path) -> None:
    weights = weights_of()
    write_folder(tmp_path, hf_config(), weights, shards=2)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    save_file({"model.norm.weight": weights["model.norm.weight"]}, shard)
    with pytest.raises(MissingTensor, match=rf"{shard.name}: expected tensor {EMBEDDING}, which .*index.json places"):
        read_safetensors(tmp_path)


def test_b46_an_unknown_extra_tensor_is_a_warning(tmp_path: Path) -> None:
    weights = {**weights_of(), "model.layers.0.spare": torch.zeros(3)}
    with pytest.warns(UserWarning, match="ignored tensors .*model.layers.0.spare"):
        checkpoint = read_safetensors(write_folder(tmp_path, hf_config(), weights))
    assert torch.equal(checkpoint.tensors.get("model.layers.0.spare"), torch.zeros(3))


def test_the_frequencies_that_old_checkpoints_carry_are_no_news(tmp_path: Path) -> None:
    weights = {**weights_of(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    read_safetensors(write_folder(tmp_path, hf_config(), weights))


def test_a_tensor_that_is_not_there_cannot_be_read(tmp_path: Path) -> None:
    tensors = read_safetensors(write_folder(tmp_path, hf_config(), weights_of())).tensors
    for call in (tensors.get, tensors.shape):
        with pytest.raises(MissingTensor, match=r"expected tensor no\.such\.weight, found none"):
            call("no.such.weight")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
def test_quantised_weights_are_refused_not_read_as_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    weights = {**weights_of(), name: torch.zeros(96, 192).to(dtype)}
    with pytest.raises(LoadError, match=rf"{name}: expected one of F64, F32, F16, BF16, found"):
        read_safetensors(write_folder(tmp_path, hf_config(), weights))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def header_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def huge_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def text_instead(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


@pytest.mark.parametrize("damage", [truncated, header_cut, huge_header, emptied, text_instead])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_damaged_file_is_one_load_error_that_names_it(tmp_path: Path, damage: Any, shards: int) -> None:
    write_folder(tmp_path, hf_config(), weights_of(), shards)
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    damage(path)
    with pytest.raises(LoadError, match=f"{path.name}: expected a whole safetensors file, found: "):
        read_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "expected an object weight_map"),
        ({"weight_map": ["x"]}, "expected an object weight_map"),
        ({"weight_map": {"a": 3}}, "expected an object weight_map"),
        (
            {"weight_map": {"a": "../secret.safetensors"}},
            "expected the plain name of a file for a, found '../secret.safetensors'",
        ),
        ({"weight_map": {"a": "/etc/passwd"}}, "expected the plain name of a file for a, found '/etc/passwd'"),
        ([], "expected a JSON object, found list"),
    ],
)
def test_a_strange_index_is_refused(tmp_path: Path, index: Any, message: str) -> None:
    write_folder(tmp_path, hf_config(), weights_of(), shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match=rf"model.safetensors.index.json: {message}"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", "config.json: expected a JSON file, found Expecting"),
        ("config.json", "[]", "config.json: expected a JSON object, found list"),
        ("generation_config.json", "nope", "generation_config.json: expected a JSON file"),
        ("generation_config.json", '{"eos_token_id": "x"}', "expected an id or a list of ids for eos_token_id"),
        ("generation_config.json", '{"eos_token_id": true}', "expected an id or a list of ids for eos_token_id"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: expected a JSON file"),
        ("tokenizer.json", "{}", "tokenizer.json: expected a tokenizer that the tokenizers package reads"),
        ("chat_template.jinja", "{% if", "chat_template.jinja: expected a Jinja chat template"),
        ("tokenizer_config.json", '{"chat_template": 3}', "tokenizer_config.json: expected a Jinja chat template"),
    ],
)
def test_a_broken_companion_file_is_named(tmp_path: Path, file: str, text: str, message: str) -> None:
    write_folder(tmp_path, hf_config(), weights_of())
    (tmp_path / file).write_text(text)
    with pytest.raises(LoadError, match=message):
        read_safetensors(tmp_path)


def test_a_folder_without_weights_says_what_it_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    with pytest.raises(LoadError, match=r"expected model.safetensors or model.safetensors.index.json, found neither"):
        read_safetensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(LoadError, match=r"found only pytorch_model.bin, and pickles are not read"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "named", "expected"),
    [
        (None, None, None, ()),
        (2, None, None, (2,)),
        ([2, 0], 2, None, (2, 0)),
        (None, [0, 2], "<|im_end|>", (0, 2)),
        (None, None, {"content": "<|im_end|>"}, (2,)),
    ],
)
def test_end_tokens_are_gathered_from_all_files(
    tmp_path: Path, generation: Any, config: Any, named: Any, expected: tuple[int, ...]
) -> None:
    write_folder(
        tmp_path,
        hf_config(eos_token_id=config),
        weights_of(),
        generation_config={"eos_token_id": generation},
        tokenizer_config={"eos_token": named},
    )
    (tmp_path / "tokenizer.json").write_text(train_bpe().to_str())
    checkpoint = read_safetensors(tmp_path)
    assert checkpoint.eos_token_ids == expected
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.eos_ids == expected


def test_a_folder_without_tokenizer_still_has_its_end_tokens(tmp_path: Path) -> None:
    checkpoint = read_safetensors(write_folder(tmp_path, hf_config(eos_token_id=7), weights_of()))
    assert (checkpoint.tokenizer, checkpoint.chat, checkpoint.eos_token_ids) == (None, None, (7,))


@pytest.mark.parametrize(
    "template",
    [
        "inline {{ bos_token }}",
        [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "inline {{ bos_token }}"}],
    ],
)  # fmt: skip
def test_the_template_comes_from_its_own_file_first(tmp_path: Path, template: Any) -> None:
    settings = {"chat_template": template, "bos_token": "<|im_start|>"}
    write_folder(tmp_path, hf_config(), weights_of(), tokenizer_config=settings)
    (tmp_path / "tokenizer.json").write_text(train_bpe().to_str())
    chat = read_safetensors(tmp_path).chat
    assert chat is not None
    assert chat.render([]) == "inline <|im_start|>"
    (tmp_path / "chat_template.jinja").write_text("file")
    chat = read_safetensors(tmp_path).chat
    assert chat is not None
    assert chat.render([]) == "file"


def test_templates_have_the_end_token_of_the_tokenizer_not_the_first_of_the_model(tmp_path: Path) -> None:
    """Llama 3.1 names the end of a text first, and closes turns with another token."""
    settings = {"chat_template": "{{ eos_token }}", "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}
    generation = {"eos_token_id": [0, 2]}
    write_folder(tmp_path, hf_config(), weights_of(), tokenizer_config=settings, generation_config=generation)
    (tmp_path / "tokenizer.json").write_text(train_bpe().to_str())
    checkpoint = read_safetensors(tmp_path)
    assert checkpoint.chat is not None
    assert checkpoint.chat.render([]) == "<|im_end|>"
    assert checkpoint.eos_token_ids == (0, 2)


def test_tokens_that_only_the_special_tokens_map_names_are_known(tmp_path: Path) -> None:
    settings = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": "<|im_start|>", "eos_token": None}
    tokens = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}}
    write_folder(tmp_path, hf_config(), weights_of(), tokenizer_config=settings, special_tokens_map=tokens)
    (tmp_path / "tokenizer.json").write_text(train_bpe().to_str())
    checkpoint = read_safetensors(tmp_path)
    assert checkpoint.chat is not None
    assert checkpoint.chat.render([]) == "<|im_start|><|im_end|>"
    assert checkpoint.eos_token_ids == (2,)


def test_prompts_with_tools_have_the_template_that_is_named_for_them(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "listed {{ tools }}"}]
    write_folder(tmp_path, hf_config(), weights_of(), tokenizer_config={"chat_template": templates})
    chat = read_safetensors(tmp_path).chat
    assert chat is not None
    assert (chat.render([]), chat.render([], [{"x": 1}])) == ("plain", "listed [{'x': 1}]")
    (tmp_path / "chat_template.jinja").write_text("file")
    chat = read_safetensors(tmp_path).chat
    assert chat is not None
    assert chat.render([], []) == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("further {{ tools }}")
    chat = read_safetensors(tmp_path).chat
    assert chat is not None
    assert (chat.render([]), chat.render([], [])) == ("file", "further []")


def test_no_flipped_byte_of_any_file_does_worse_than_a_load_error(tmp_path: Path) -> None:
    sizes = {"hidden_size": 12, "head_dim": 2, "intermediate_size": 4, "num_hidden_layers": 1, "vocab_size": 390}
    settings = {"bos_token": "<|im_start|>", "chat_template": "{{ messages }}"}
    write_folder(tmp_path, hf_config(**sizes), weights_of(**sizes), tokenizer_config=settings)
    (tmp_path / "tokenizer.json").write_text(train_bpe().to_str())
    numbers = random.Random(0)
    outcomes = set()
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        for _ in range(60):
            damaged = bytearray(content)
            damaged[numbers.randrange(min(len(content), 3000))] = numbers.randrange(256)
            path.write_bytes(damaged)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    checkpoint = read_safetensors(tmp_path)
                except LoadError as error:
                    assert str(tmp_path) in str(error)
                    outcomes.add((path.name, "refused"))
                else:
                    assert checkpoint.tensors.get(EMBEDDING).shape == (390, 12)
                    outcomes.add((path.name, "read"))
        path.write_bytes(content)
    assert {name for name, outcome in outcomes if outcome == "refused"} == {path.name for path in tmp_path.iterdir()}


def test_a_template_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, hf_config(), weights_of())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(LoadError, match=r"chat_template.jinja: expected a chat template in UTF-8"):
        read_safetensors(tmp_path)


def test_templates_of_odd_names_are_passed_over(tmp_path: Path) -> None:
    templates = [{"name": [], "template": "no"}, {"name": "default", "template": "yes"}]
    write_folder(tmp_path, hf_config(), weights_of(), tokenizer_config={"chat_template": templates})
    checkpoint = read_safetensors(tmp_path)
    assert checkpoint.chat is not None and checkpoint.chat.source == "yes"


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_brackets_without_end_are_a_load_error(tmp_path: Path, file: str) -> None:
    write_folder(tmp_path, hf_config(), weights_of())
    (tmp_path / file).write_text("[" * 100_000)
    with pytest.raises(LoadError, match=f"{file}: expected a JSON file"):
        read_safetensors(tmp_path)
