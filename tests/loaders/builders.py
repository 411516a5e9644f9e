"""Writers of small checkpoints for the tests: Hugging Face folders and GGUF files with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from paged.loaders.checkpoint import expected_tensors
from paged.models.config import ModelConfig

# 6 query heads on 2 kv heads, heads of 32: every row is a whole number of 32-value quantisation blocks.
TINY = {
    "vocab_size": 96,
    "hidden_size": 192,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2.0**-17,  # GGUF stores it as fp32
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "sliding_window": None,
}
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind it at all.",
    "We'll see that it's the user's own cache; they've kept 2024 pages of 16 tokens.",
    "def f(x):\n    return x ** 2  # naïve café\n\n日本語のテキスト 🙂",
]


def hf_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **TINY, "tie_word_embeddings": False, **changes}


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of every tensor that the config calls for, fp32, each different."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_tensors(config).items()}


def write_folder(
    folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], shards: int = 1, **files: Any
) -> Path:
    """A Hugging Face folder; `files` are further JSON files by their stem."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, content in {"config": config, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(weights)}
    for file in set(weight_map.values()):
        save_file({name: weights[name] for name in weights if weight_map[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows as llama.cpp stores Q and K of "llama": row 2i + j of a head is row i + j * head_dim / 2 of the original."""
    rows = weight.shape[0] // num_heads
    order = [h * rows + i + j * rows // 2 for h in range(num_heads) for i in range(rows // 2) for j in range(2)]
    return weight[order]


def gguf_metadata(config: ModelConfig, arch: str) -> dict[str, Any]:
    """The keys without which no GGUF model loads."""
    return {
        f"{arch}.context_length": config.max_seq_len,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_theta,
        f"{arch}.rope.dimension_count": config.head_dim,
    }


def gguf_tensors(config: ModelConfig, weights: dict[str, torch.Tensor], arch: str) -> dict[str, np.ndarray]:
    """GGUF name -> fp32 values as llama.cpp's converter would lay them out."""
    tensors = {}
    for name, weight in weights.items():
        if arch == "llama" and "q_proj" in name:
            weight = interleaved(weight, config.num_heads)
        if arch == "llama" and "k_proj" in name:
            weight = interleaved(weight, config.num_kv_heads)
        if name.startswith("model.layers."):
            _, _, layer, *module, kind = name.split(".")
            name = f"blk.{layer}.{BLOCK_NAMES['.'.join(module)]}.{kind}"
        name = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
                "lm_head.weight": "output.weight"}.get(name, name)  # fmt: skip
        tensors[name] = weight.numpy()
    return tensors


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    arch: str = "llama",
    qtype: Q = Q.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file; matrices are stored as `qtype`, vectors as F32. A None in `metadata` removes a key."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**gguf_metadata(config, arch), **(metadata or {})}.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, values in {**gguf_tensors(config, weights, arch), **(extra or {})}.items():
        kind = qtype if values.ndim > 1 else Q.F32
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def train_bpe(add_bos: bool = False) -> Tokenizer:
    """A byte-level BPE of 390 tokens with the control tokens SPECIAL, as tokenizer.json files have them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=390, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    return tokenizer


def bpe_metadata(pre: str | None = "gpt-2", **changes: Any) -> dict[str, Any]:
    """`tokenizer.ggml.*` keys of the tokenizer that `train_bpe` trains."""
    state = json.loads(train_bpe().to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in state["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
