"""paged.loaders.checkpoint: the list of tensors that a config calls for, and what a source must offer."""

from __future__ import annotations

import pytest
import torch
from loaders.builders import hf_config
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.models.auto import CONFIG_MAPPING

from paged.errors import MissingTensor
from paged.loaders.checkpoint import TensorSource, check_tensors, expected_tensors
from paged.models.config import ModelConfig

MODELS = {
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}


class Listed(TensorSource):
    """A source that has names and shapes only: whoever reads a tensor fails."""

    source = "listed"

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_the_tensors_of_a_config_are_those_of_the_transformers_model(family: str, changes: dict) -> None:
    values = hf_config(family, **changes)
    config = CONFIG_MAPPING[family](**{k: v for k, v in values.items() if k != "model_type"})
    with torch.device("meta"):
        model = MODELS[family](config)
    peer = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if values["tie_word_embeddings"]:
        del peer["lm_head.weight"]
    assert expected_tensors(ModelConfig.from_hf(values)) == peer


def test_a_complete_source_is_accepted_without_reading_a_tensor() -> None:
    config = ModelConfig.from_hf(hf_config())
    shapes = expected_tensors(config)
    assert check_tensors(config, Listed(shapes), place=str) == list(shapes)


@pytest.mark.parametrize("name", list(expected_tensors(ModelConfig.from_hf(hf_config("qwen2")))))
def test_each_tensor_is_missed_by_name_and_refused_in_another_shape(name: str) -> None:
    config = ModelConfig.from_hf(hf_config("qwen2"))
    shapes = expected_tensors(config)
    other = (*shapes[name][:-1], shapes[name][-1] + 1)
    with pytest.raises(MissingTensor) as error:
        check_tensors(config, Listed({**shapes, name: other}), place=lambda n: f"here: {n}")
    assert f"here: {name}: expected shape {list(shapes[name])}, found {list(other)}" in str(error.value)
    del shapes[name]
    with pytest.raises(MissingTensor, match=rf"^here: {name}: expected a tensor of shape \[.*\], found none"):
        check_tensors(config, Listed(shapes), place=lambda n: f"here: {n}")


def test_extra_tensors_are_named_in_one_warning_and_harmless_ones_in_none() -> None:
    config = ModelConfig.from_hf(hf_config())
    shapes = expected_tensors(config)
    extra = {f"extra.{i}": (1,) for i in range(7)}
    with pytest.warns(UserWarning, match="listed: ignored .* llama .*: extra.0, .*, extra.4 and 2 more$") as caught:
        check_tensors(config, Listed({**shapes, **extra}), place=str)
    assert len(caught) == 1
    check_tensors(config, Listed({**shapes, "x.inv_freq": (1,)}), place=str, harmless=r"inv_freq$")


def test_a_source_contains_its_names_only() -> None:
    source = Listed({"a": (1,)})
    assert "a" in source
    assert "b" not in source
    for call in (TensorSource().names, lambda: TensorSource().shape("a"), lambda: TensorSource().get("a")):
        with pytest.raises(NotImplementedError):
            call()
