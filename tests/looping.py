"""What the tests of looped models share: configs of every kind of loop, and the plain model with a loop written out."""

from __future__ import annotations

from dataclasses import replace

import torch
from feeder import Feeder

from paged.models.config import ModelConfig
from paged.models.llama import LlamaModel
from paged.models.looped import LoopedModel
from paged.models.tiny import TINY_LOOPED, random_tensors, tiny_hf_settings

LENGTH = 45  # more than two pages of 16, more than the longest window below

MIXED = {
    "num_hidden_layers": 5,
    "use_sliding_window": True,
    "sliding_window": 9,
    "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "full", "sliding", "sliding")],
}
ODD = {"hidden_size": 44, "intermediate_size": 53, "attention_bias": True, "mlp_bias": True}
CASES: dict[str, tuple[str, dict, tuple[int, int]]] = {
    "layers before": ("llama", {}, (1, 3)),
    "layers after": ("llama", {}, (0, 2)),
    "layers before and after": ("llama", {}, (1, 2)),
    "all layers": ("llama", {}, (0, 3)),
    "odd sizes, biases": ("llama", ODD, (1, 2)),
    "tied": ("qwen2", {"tie_word_embeddings": True}, (0, 1)),
    "one window": ("mistral", {"sliding_window": 8}, (1, 2)),
    "mixed windows": ("qwen3", MIXED, (1, 4)),
    "windows in the loop alone": ("qwen3", MIXED, (3, 5)),
}


def config_of(case: str, max_loops: int = 8) -> ModelConfig:
    family, changes, layers = CASES[case]
    config = ModelConfig.from_hf(tiny_hf_settings(family, **changes))
    return config.with_loop(layers, 3, max_loops)


def looped(config: ModelConfig = TINY_LOOPED) -> LoopedModel:
    return LoopedModel(config, random_tensors(config, seed=3).__getitem__)


def unrolled(config: ModelConfig, loops: int) -> LlamaModel:
    """The plain model whose layers are those that a looped one runs, in that order."""
    assert config.loop is not None
    a, b = config.loop.layers
    order = [*range(a), *list(range(a, b)) * loops, *range(b, config.num_layers)]
    tensors = random_tensors(config, seed=3)
    types = tuple(config.layer_types[i] for i in order) if config.layer_types else ()
    plain = replace(config, loop=None, num_layers=len(order), layer_types=types)

    def read(name: str) -> torch.Tensor:
        if not name.startswith("model.layers."):
            return tensors[name]
        _, _, layer, rest = name.split(".", 3)
        return tensors[f"model.layers.{order[int(layer)]}.{rest}"]

    return LlamaModel(plain, read)


def at_depth(model: LoopedModel, tokens: list[int], depth: int, chunk: int = 0, page_size: int = 16) -> torch.Tensor:
    """Logits of all rows of one sequence."""
    feeder = Feeder(model, page_size, num_pages=2048, seed=page_size)
    feeder.depths["a"] = depth
    return feeder.feed("a", tokens, chunk)
