"""Looped models by name, from a folder with our own fields, and out of plain ones; SmolLM2 among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import EchoModel
from feeder import Feeder, random_tokens
from safetensors.torch import save_file

from paged.errors import LoadError
from paged.models.base import LanguageModel
from paged.models.config import LoopConfig, ModelConfig
from paged.models.llama import LlamaModel
from paged.models.looped import LoopedModel
from paged.models.registry import load_model
from paged.models.tiny import random_tensors, tiny_hf_settings

LOOPED: dict[str, Any] = {"model_type": "looped", "loop_layers": [1, 2], "num_loops": 4, "max_loops": 6}


def save_folder(folder: Path, family: str = "llama", **changes: Any) -> Path:
    settings = {key: value for key, value in tiny_hf_settings(family, **changes).items() if value != "left out"}
    plain = {key: value for key, value in settings.items() if "loop" not in key}
    tensors = random_tensors(ModelConfig.from_hf({**plain, "model_type": family}))
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def logits(model: LanguageModel, depth: int = 0, length: int = 20) -> torch.Tensor:
    feeder = Feeder(model, num_pages=1024)
    if depth:
        feeder.depths["a"] = depth
    return feeder.feed("a", random_tokens(length, model.vocab_size))


# A config of our own


def test_a_folder_of_a_looped_model_loads_as_one(tmp_path):
    model = load_model(save_folder(tmp_path, **LOOPED), max_seq_len=100)
    assert isinstance(model, LoopedModel) and model.max_seq_len == 100
    assert (model.loop_layers, model.default_loops, model.max_loops) == ((1, 2), 4, 6)
    save_folder(tmp_path)
    plain = load_model(tmp_path)
    assert isinstance(plain, LlamaModel) and not isinstance(plain, LoopedModel)
    assert (plain.default_loops, plain.max_loops) == (0, 0)
    assert torch.equal(logits(model, 1), logits(plain)) and not torch.equal(logits(model), logits(plain))


def test_depths_that_a_config_leaves_out_are_eight_and_thirty_two():
    config = ModelConfig.from_hf(tiny_hf_settings(model_type="looped", loop_layers=[0, 3]))
    assert config.loop == LoopConfig((0, 3), 8, 32)
    config = ModelConfig.from_hf(tiny_hf_settings(model_type="looped", loop_layers=[0, 3], num_loops=40))
    assert config.loop == LoopConfig((0, 3), 40, 40)
    config = ModelConfig.from_hf(tiny_hf_settings(model_type="looped", loop_layers=[0, 3], max_loops=4))
    assert config.loop == LoopConfig((0, 3), 4, 4)


def test_any_family_may_have_the_fields(tmp_path):
    changes = {key: value for key, value in LOOPED.items() if key != "model_type"}
    model = load_model(save_folder(tmp_path, "qwen3", **changes))
    assert isinstance(model, LoopedModel) and model.config.family == "qwen3" and model.config.qk_norm


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"loop_layers": "left out"}, r"expected a list \[a, b\] for loop_layers, found None"),
        ({"loop_layers": 3}, r"expected a list \[a, b\] for loop_layers, found 3"),
        ({"loop_layers": [1]}, r"loop_layers must be two layer numbers \(a, b\), got \(1,\)"),
        ({"loop_layers": [1, 2.5]}, r"loop_layers must be two layer numbers \(a, b\), got \(1, 2.5\)"),
        ({"loop_layers": [2, 2]}, r"must be a run \(a, b\) of the 3 layers, got \(2, 2\)"),
        ({"loop_layers": [1, 4]}, r"must be a run \(a, b\) of the 3 layers, got \(1, 4\)"),
        ({"loop_layers": [-1, 2]}, r"must be a run \(a, b\) of the 3 layers, got \(-1, 2\)"),
        ({"num_loops": 0}, "num_loops must be a positive int, got 0"),
        ({"num_loops": 7}, "num_loops must be at most max_loops 6, got 7"),
        ({"num_loops": "four"}, "expected an integer for num_loops, found 'four'"),
        ({"max_loops": 10**9}, "max_loops must be at most 64, got 1000000000"),
    ],
)
def test_a_config_that_cannot_loop_names_the_file_and_the_field(tmp_path, changes, message):
    folder = save_folder(tmp_path, **{**LOOPED, **changes})
    with pytest.raises(LoadError, match=rf"config\.json: .*{message}"):
        load_model(folder)


# Out of a plain model


def test_any_run_of_layers_of_a_plain_model_can_be_looped(tmp_path):
    folder = save_folder(tmp_path, "qwen2")
    plain = load_model(folder)
    for layers in [(0, 1), (0, 3), (1, 2), (2, 3)]:
        model = load_model(folder, loop_layers=layers, loops=2)
        assert isinstance(model, LoopedModel)
        assert (model.loop_layers, model.default_loops, model.max_loops) == (layers, 2, 32)
        assert torch.equal(logits(model, 1), logits(plain))
        assert not torch.equal(logits(model), logits(plain))
        assert model.fingerprint != plain.fingerprint


def test_loop_arguments_replace_what_a_config_says(tmp_path):
    folder = save_folder(tmp_path, **LOOPED)

    def loop(**arguments: Any) -> LoopConfig | None:
        model = load_model(folder, **arguments)
        assert isinstance(model, LoopedModel)
        return model.config.loop

    assert loop(loops=2) == LoopConfig((1, 2), 2, 6)
    assert loop(loops=9) == LoopConfig((1, 2), 9, 9)
    assert loop(max_loops=3) == LoopConfig((1, 2), 3, 3)
    assert loop(max_loops=12) == LoopConfig((1, 2), 4, 12)
    assert loop(loop_layers=(0, 2)) == LoopConfig((0, 2), 4, 6)
    assert loop(loop_layers=(0, 2), loops=1, max_loops=1) == LoopConfig((0, 2), 1, 1)


def test_tiny_models_take_the_same_arguments():
    model = load_model("tiny:llama", loop_layers=(0, 1), loops=3)
    assert isinstance(model, LoopedModel) and model.after_group == 0 and model.name == "tiny:llama"
    assert torch.equal(logits(model, 1), logits(load_model("tiny:llama")))
    assert load_model("tiny:looped", loops=2).default_loops == 2


def test_what_cannot_loop_is_refused():
    with pytest.raises(LoadError, match=r"this llama model has no looped layers; give loop_layers=\(a, b\)"):
        load_model("tiny:llama", loops=4)
    with pytest.raises(LoadError, match="the layers of a hybrid cannot loop"):
        load_model("tiny:hybrid", loop_layers=(0, 1))
    with pytest.raises(LoadError, match=r"a run \(a, b\) of the 2 layers, got \(1, 3\)"):
        load_model("tiny:llama", loop_layers=(1, 3))
    with pytest.raises(LoadError, match="num_loops must be at most max_loops 3, got 4"):
        load_model("tiny:looped", loops=4, max_loops=3)
    for arguments in ({"loop_layers": (0, 1)}, {"loops": 2}, {"max_loops": 2}):
        with pytest.raises(ValueError, match="for models on disk, got a EchoModel"):
            load_model(EchoModel(), **arguments)


def test_a_model_behind_a_lower_limit_is_still_looped():
    model = load_model("tiny:looped")
    lowered = load_model(model, max_seq_len=50)
    assert lowered is not model and (lowered.default_loops, lowered.max_loops) == (8, 32)
    assert torch.equal(logits(lowered, 3), logits(model, 3))


# Real weights


@pytest.fixture(scope="module")
def smollm2_looped():
    try:
        model = load_model("smollm2", loop_layers=(10, 20), loops=2, max_loops=4)
    except LoadError as error:
        pytest.skip(f"the default model is not here: {error}")
    assert isinstance(model, LoopedModel)
    return model


@pytest.mark.slow
def test_smollm2_with_one_loop_is_smollm2(smollm2, smollm2_looped):
    model = smollm2_looped
    assert (model.spec.layers, model.spec.num_groups, model.first_group) == (10, 6, 2)
    assert model.tokenizer is not None and model.chat is not None and model.fingerprint != smollm2.fingerprint
    tokens = smollm2.tokenizer.encode("The capital of France is").tolist()
    feeder, plain = Feeder(model, num_pages=64), Feeder(smollm2, num_pages=64)
    feeder.depths["a"] = 1
    for _ in range(8):
        got, want = (f.step({"a": tokens}, wanted="last")["a"] for f in (feeder, plain))
        assert torch.equal(got, want)
        tokens = [int(want.argmax())]


@pytest.mark.slow
def test_smollm2_at_three_depths_in_one_batch_goes_on_to_a_fourth(smollm2_looped):
    model = smollm2_looped
    tokens = {str(depth): random_tokens(40, model.vocab_size, depth) for depth in (1, 2, 4)}
    alone = {}
    for name, prompt in tokens.items():
        feeder = Feeder(model, num_pages=64)
        feeder.depths["a"] = int(name)
        alone[name] = feeder.feed("a", prompt, 13)
    feeder = Feeder(model, num_pages=128)
    feeder.depths = {name: int(name) for name in tokens}
    together = feeder.step(tokens)
    assert all(torch.equal(together[name], alone[name]) for name in tokens)
    feeder = Feeder(model, num_pages=128)
    feeder.depths["4"] = 2
    _, residual = model.run_loops(feeder.batch({"4": tokens["4"]}), feeder.storage)
    feeder.depths["4"], feeder.lengths["4"] = 4, 0
    logits, _ = model.run_loops(feeder.batch({"4": tokens["4"]}), feeder.storage, residual, 2)
    assert torch.equal(logits, alone["4"])
