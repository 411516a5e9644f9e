"""Every type of weight that the gguf package dequantises, read by value, by rows and by many threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize
from loaders.builders import gguf_metadata, gguf_tensors, hf_config, interleaved, random_weights

from paged.loaders.gguf import read_gguf
from paged.models.config import ModelConfig

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales overflow

# Rows of 256 values hold whole blocks of every type.
CONFIG = ModelConfig.from_hf(
    hf_config(hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64, num_hidden_layers=1)
)


def dequantisable(qtype: Q) -> bool:
    try:
        dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[qtype][1]), np.uint8), qtype)
    except NotImplementedError:
        return False
    return True


TYPES = [qtype for qtype in Q if dequantisable(qtype)]


def random_rows(shape: tuple[int, int], qtype: Q, seed: int) -> np.ndarray:
    """Bytes that are a valid tensor of the type: any are, but that a scale may come out infinite or no number."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    return np.random.default_rng(seed).integers(0, 256, (shape[0], shape[1] // block_values * block_bytes), np.uint8)


def write(path: Path, qtype: Q) -> dict[str, np.ndarray]:
    """A file whose matrices are random bytes; returns their values by GGUF name."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in gguf_metadata(CONFIG, "llama").items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    values: dict[str, np.ndarray] = {}
    for seed, (name, weight) in enumerate(gguf_tensors(CONFIG, random_weights(CONFIG), "llama").items()):
        kind = qtype if weight.ndim > 1 else Q.F32
        data = random_rows(weight.shape, kind, seed) if weight.ndim > 1 else weight
        writer.add_tensor(name, data, raw_dtype=kind)
        values[name] = dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def same(found: torch.Tensor, expected: Any) -> bool:
    return np.array_equal(found.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_each_type_is_read_value_by_value(tmp_path: Path, qtype: Q) -> None:
    expected = write(tmp_path / "model.gguf", qtype)
    tensors = read_gguf(tmp_path / "model.gguf").tensors
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        assert same(tensors.get(ours), expected[theirs])
    for module, heads in (("q", 4), ("k", 2)):
        found = tensors.get(f"model.layers.0.self_attn.{module}_proj.weight")
        assert same(interleaved(found, heads), expected[f"blk.0.attn_{module}.weight"])
        assert not same(found, expected[f"blk.0.attn_{module}.weight"])


def test_the_types_that_files_come_in_are_among_them() -> None:
    names = {qtype.name for qtype in TYPES}
    assert {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"} <= names
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"} <= names


def test_threads_may_read_tensors_side_by_side(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", Q.Q4_0)
    tensors = read_gguf(tmp_path / "model.gguf").tensors
    names = tensors.names() * 4
    alone = {name: tensors.get(name).numpy() for name in tensors.names()}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(tensors.get, names))
    assert all(same(tensor, alone[name]) for name, tensor in zip(names, found, strict=True))


@pytest.mark.parametrize("qtype", [Q.F32, Q.Q8_0, Q.Q6_K], ids=lambda q: q.name)
def test_bf16_and_fp16_are_the_rounded_fp32_values(tmp_path: Path, qtype: Q) -> None:
    write(tmp_path / "model.gguf", qtype)
    tensors = read_gguf(tmp_path / "model.gguf").tensors
    for name in ("lm_head.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"):
        exact = tensors.get(name)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            assert torch.equal(tensors.get(name, dtype).nan_to_num(), exact.to(dtype).nan_to_num())
