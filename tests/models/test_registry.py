"""load_model: what it takes, what it refuses, and what it leaves behind."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import EchoModel
from feeder import Feeder, random_tokens
from safetensors.torch import save_file

import paged
from paged.errors import GeometryMismatch, LoadError, MissingTensor
from paged.models.base import LanguageModel
from paged.models.config import ModelConfig
from paged.models.registry import load_model, pick_device
from paged.models.tiny import random_tensors, tiny_hf_settings
from paged.session import Session
from paged.spec import KVSpec


def save_folder(folder: Path, family: str = "llama", seed: int = 0, **changes) -> dict[str, torch.Tensor]:
    """A Hugging Face folder with random weights, written without transformers."""
    import json

    settings = tiny_hf_settings(family, **changes)
    tensors = random_tensors(ModelConfig.from_hf(settings), seed)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return tensors


class Bare:
    """The least that a model of one's own can be; not a LanguageModel."""

    def __init__(self) -> None:
        self.echo = EchoModel()
        self.spec, self.vocab_size, self.max_seq_len = self.echo.spec, self.echo.vocab_size, 64
        self.fingerprint = "bare"

    def forward(self, batch, storage):
        return self.echo.forward(batch, storage)


def test_load_model_is_public():
    assert paged.load_model is load_model


@pytest.mark.parametrize("as_text", [True, False], ids=["str", "path"])
def test_a_folder_loads_with_its_name_and_limits(tmp_path, as_text):
    folder = tmp_path / "my-model"
    folder.mkdir()
    save_folder(folder, eos_token_id=5)
    model = load_model(str(folder) if as_text else folder, max_seq_len=100)
    assert model.name == "my-model" and model.max_seq_len == 100 and model.vocab_size == 96
    assert model.eos_token_ids == (5,) and model.tokenizer is None and model.chat is None
    assert model.device == torch.device("cpu") and model.default_kv_dtype() == "fp32"
    assert model.spec == KVSpec(3, 2, 16)


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(LoadError, match="no-such-model"):
        load_model(tmp_path / "no-such-model")


def test_a_missing_tensor_is_named_and_nothing_is_made_up(tmp_path):
    tensors = save_folder(tmp_path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(MissingTensor, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["tiny:", "tiny:gpt"])
def test_an_unknown_tiny_model_is_refused_with_the_names_there_are(name):
    with pytest.raises(LoadError, match="tiny:llama"):
        load_model(name)


@pytest.mark.parametrize("bad", [0, -5])
@pytest.mark.parametrize("source", ["tiny:llama", EchoModel(), Bare()], ids=["tiny", "model", "object"])
def test_a_longest_sequence_below_one_is_refused(source, bad):
    with pytest.raises(ValueError, match=f"max_seq_len must be at least 1, got {bad}"):
        load_model(source, max_seq_len=bad)


# Devices


def test_auto_is_a_gpu_if_there_is_one():
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("device", ["gpu", "", "mps", "meta", "cuda:x"])
def test_other_devices_are_refused_with_the_names_there_are(device):
    with pytest.raises(ValueError, match='"auto", "cpu", "cuda"'):
        load_model("tiny:llama", device=device)


def test_a_gpu_that_is_not_there_is_refused_with_the_number_there_are():
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"torch sees {count} GPU"):
        load_model("tiny:llama", device=f"cuda:{count}")


# Models of one's own


def test_a_language_model_comes_back_as_it_is():
    model = EchoModel()
    assert load_model(model) is model
    assert load_model(model, max_seq_len=model.max_seq_len + 1) is model


def test_lowering_the_limit_of_a_model_does_not_alter_it():
    model = EchoModel(max_seq_len=100)
    lowered = load_model(model, max_seq_len=50)
    assert lowered.max_seq_len == 50 and model.max_seq_len == 100
    assert lowered.num_forwards == 0  # what a LanguageModel does not know is the model's own


def test_an_object_with_the_attributes_drives_a_session():
    own = Bare()
    before = dict(vars(own))
    model = load_model(own)
    assert isinstance(model, LanguageModel) and model.eos_token_ids == () and model.tokenizer is None
    session = Session(model, model.create_kv_pool(num_pages=8))
    logits = session.eval([1, 2, 3])
    assert np.array_equal(logits.numpy(), own.echo.oracle([1, 2, 3]))
    assert vars(own) == before


def test_the_view_of_an_object_follows_its_fingerprint_and_its_extras():
    own = Bare()
    model = load_model(own)
    own.fingerprint = "other weights"
    assert model.fingerprint == "other weights"
    own.eos_token_ids, own.name = (7,), "mine"
    assert load_model(own).eos_token_ids == (7,) and load_model(own).name == "mine"
    own.default_kv_dtype = lambda: "fp16"
    own.extra_info = lambda: {"a": 1}
    assert model.default_kv_dtype() == "fp16" and model.extra_info() == {"a": 1}


@pytest.mark.parametrize("name", ["spec", "vocab_size", "max_seq_len", "fingerprint"])
@pytest.mark.parametrize("value", [None, "", 1.5, True], ids=repr)
def test_an_attribute_that_is_missing_or_of_another_type_is_named(name, value):
    own = Bare()
    setattr(own, name, value)
    with pytest.raises(TypeError, match=rf"attribute {name}\b.*Bare has"):
        load_model(own)
    delattr(own, name)
    with pytest.raises(TypeError, match=rf"attribute {name}\b.*Bare has none"):
        load_model(own)


class WithoutForward(LanguageModel):
    spec, vocab_size, max_seq_len, fingerprint = KVSpec(1, 1, 8), 10, 10, "x"


@pytest.mark.parametrize(
    "own",
    [WithoutForward(), 5, None, SimpleNamespace(), ["tiny:llama"]],
    ids=["no forward", "int", "None", "bare", "list"],
)
def test_an_object_that_is_no_model_is_a_type_error(own):
    with pytest.raises(TypeError, match="a model needs the"):
        load_model(own)


# Weights and their fingerprint


def test_two_loads_of_equal_weights_share_a_fingerprint_and_any_change_parts_them(tmp_path):
    def fingerprint(**changes) -> str:
        save_folder(tmp_path, **changes)
        return load_model(tmp_path).fingerprint

    first = fingerprint()
    assert first == fingerprint() and len(first) == 32
    others = [
        fingerprint(seed=1),
        fingerprint(rms_norm_eps=2e-5),
        fingerprint(rope_theta=20000.0),
        fingerprint(tie_word_embeddings=True),
        fingerprint(family="qwen3"),
    ]
    assert len({first, *others}) == 6


def test_a_fingerprint_sees_one_changed_value_of_any_tensor(tmp_path):
    tensors = save_folder(tmp_path, num_hidden_layers=1)
    seen = {load_model(tmp_path).fingerprint}
    for name, values in tensors.items():
        changed = {**tensors, name: values.clone()}
        changed[name].view(-1)[-1] += 1.0
        save_file(changed, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
        seen.add(load_model(tmp_path).fingerprint)
    assert len(seen) == 1 + len(tensors)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_updated_weights_give_what_a_fresh_model_with_them_gives(tmp_path, family, tied):
    save_folder(tmp_path, family, tie_word_embeddings=tied)
    model = load_model(tmp_path)
    old = model.fingerprint
    new = save_folder(tmp_path, family, seed=7, tie_word_embeddings=tied)
    fresh = load_model(tmp_path)
    tokens = random_tokens(30, model.vocab_size)
    want = Feeder(fresh).feed("a", tokens)
    assert not torch.equal(Feeder(model).feed("a", tokens), want)
    for names in ([n for n in new if n.count(".") > 3], [n for n in new if n.count(".") <= 3]):
        model.update_weights({name: new[name] for name in names})
        assert model.fingerprint != old
    assert model.fingerprint == fresh.fingerprint
    assert torch.equal(Feeder(model).feed("a", tokens), want)
    for values in new.values():
        values.zero_()  # the model keeps nothing of what it was given
    assert torch.equal(Feeder(model).feed("a", tokens), want)


def test_one_tensor_can_be_updated_alone(tmp_path):
    tensors = save_folder(tmp_path, "qwen2")
    model = load_model(tmp_path)
    for name in tensors:
        before, kept = model.fingerprint, {n: t.clone() for n, t in model.named_tensors()}
        model.update_weights({name: tensors[name] + 1.0})
        assert model.fingerprint != before
        for other, values in model.named_tensors():
            assert torch.equal(values, tensors[name] + 1.0 if other == name else kept[other]), (name, other)
        model.update_weights({name: tensors[name]})
        assert model.fingerprint == before


def test_a_wrong_update_changes_nothing(tmp_path):
    tensors = save_folder(tmp_path)
    model = load_model(tmp_path)
    before = model.fingerprint
    good = {"model.norm.weight": torch.zeros(48)}
    with pytest.raises(MissingTensor, match=r"found 'model\.norm\.wait'"):
        model.update_weights({**good, "model.norm.wait": torch.zeros(48)})
    with pytest.raises(MissingTensor, match=r"lm_head\.weight must have shape \[96, 48\], found \[48, 96\]"):
        model.update_weights({**good, "lm_head.weight": torch.zeros(48, 96)})
    assert model.fingerprint == before == model.refresh_fingerprint()
    assert torch.equal(model.tensor("model.norm.weight"), tensors["model.norm.weight"])


def test_a_change_made_in_place_shows_after_refresh_fingerprint():
    model = load_model("tiny:llama")
    before = model.fingerprint
    assert model.refresh_fingerprint() == before
    with torch.inference_mode():
        model.tensor("model.embed_tokens.weight")[3, 5] += 1.0
    assert model.fingerprint == before
    assert model.refresh_fingerprint() == model.fingerprint != before


def test_a_pool_of_the_old_weights_is_refused_after_an_update():
    model = load_model("tiny:llama")
    pool = model.create_kv_pool(num_pages=4)
    Session(model, pool).release()
    model.update_weights({"model.norm.weight": torch.zeros(64)})
    with pytest.raises(GeometryMismatch):
        Session(model, pool)


def test_an_unknown_weight_is_a_key_error():
    model = load_model("tiny:llama")
    for name in ("", "lm_head.bias", "model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"):
        with pytest.raises(KeyError):
            model.tensor(name)


# Memory


def test_deleting_a_model_and_its_pool_frees_them():
    for _ in range(3):
        model = load_model("tiny:llama")
        pool = model.create_kv_pool(num_pages=4)
        session = Session(model, pool)
        session.eval([1, 2, 3])
        alive = [weakref.ref(model), weakref.ref(pool), weakref.ref(pool.storage), weakref.ref(model.rotary)]
        del model, pool, session
        gc.collect()
        assert [ref() for ref in alive] == [None] * 4


def test_logits_are_memory_of_their_own():
    model = load_model("tiny:llama")
    session = Session(model, model.create_kv_pool(num_pages=4))
    first = session.eval([1, 2, 3])
    kept = first.clone()
    session.eval([4])
    assert torch.equal(first, kept)
