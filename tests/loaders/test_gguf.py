"""paged.loaders.gguf: what was written comes back under Hugging Face names and layouts; damage is a LoadError."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize
from loaders.builders import bpe_metadata, hf_config, interleaved, random_weights, write_gguf

from paged.errors import LoadError, MissingTensor
from paged.loaders.gguf import half_split_rows, hf_name, read_gguf
from paged.models.config import ModelConfig, RopeScaling

pytestmark = pytest.mark.filterwarnings("error")
QUANTISED = [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0]


def config_of(arch: str = "llama", **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(hf_config(arch, **changes))


def written(tmp_path: Path, arch: str = "llama", seed: int = 0, **options: Any) -> Path:
    config = config_of(arch)
    return write_gguf(tmp_path / "model.gguf", config, random_weights(config, seed), arch, **options)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("qtype", QUANTISED, ids=lambda q: q.name)
def test_tensors_come_back_in_the_layout_of_hugging_face(tmp_path: Path, arch: str, qtype: Q) -> None:
    config = config_of(arch)
    weights = random_weights(config)
    checkpoint = read_gguf(write_gguf(tmp_path / "model.gguf", config, weights, arch, qtype))
    assert checkpoint.config == config
    assert sorted(checkpoint.tensors.names()) == sorted(weights)
    for name, weight in weights.items():
        kind = qtype if weight.ndim > 1 else Q.F32
        expected = torch.from_numpy(np.array(dequantize(quantize(weight.numpy(), kind), kind)))
        found = checkpoint.tensors.get(name)
        assert checkpoint.tensors.shape(name) == tuple(weight.shape)
        assert found.dtype == torch.float32
        assert torch.equal(found, expected), name
        assert torch.allclose(found, weight, atol=0.5), name


def test_the_rotary_rows_of_llama_are_put_back_and_those_of_qwen_left_alone(tmp_path: Path) -> None:
    for arch in ("llama", "qwen2"):
        config = config_of(arch)
        weights = random_weights(config)
        tensors = read_gguf(write_gguf(tmp_path / f"{arch}.gguf", config, weights, arch)).tensors
        for module, heads in (("q_proj", 6), ("k_proj", 2)):
            name = f"model.layers.1.self_attn.{module}.weight"
            raw = {t.name: t.data for t in gguf.GGUFReader(tmp_path / f"{arch}.gguf").tensors}
            stored = torch.tensor(raw[f"blk.1.attn_{module[0]}.weight"])
            assert torch.equal(stored, weights[name]) == (arch == "qwen2")
            assert torch.equal(stored, interleaved(weights[name], heads)) == (arch == "llama")
            assert torch.equal(tensors.get(name), weights[name])


def test_interleaved_rows_rotate_like_half_split_rows() -> None:
    """The promise behind the permutation: scores after rotation are the same in both layouts."""
    heads, dim, position = 3, 8, 5
    q = torch.randn(heads * dim, generator=torch.Generator().manual_seed(1))
    angles = position * 100.0 ** (-torch.arange(0, dim, 2) / dim)
    half = q.view(heads, 2, dim // 2)
    turned = torch.stack([half[:, 0] * angles.cos() - half[:, 1] * angles.sin(),
                          half[:, 0] * angles.sin() + half[:, 1] * angles.cos()], 1)  # fmt: skip
    pairs = interleaved(q[:, None], heads)[:, 0].view(heads, dim // 2, 2)
    neighbours = torch.stack([pairs[..., 0] * angles.cos() - pairs[..., 1] * angles.sin(),
                              pairs[..., 0] * angles.sin() + pairs[..., 1] * angles.cos()], -1)  # fmt: skip
    order = half_split_rows(heads * dim, heads)
    assert torch.allclose(neighbours.reshape(-1)[order], turned.reshape(-1))


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 2), (6, 32), (2, 64), (9, 10)])
def test_half_split_rows_undo_the_converter(num_heads: int, head_dim: int) -> None:
    weight = torch.arange(num_heads * head_dim * 3.0).view(-1, 3)
    assert torch.equal(interleaved(weight, num_heads)[half_split_rows(len(weight), num_heads)], weight)


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_biases_are_read_and_those_of_q_and_k_are_put_back(tmp_path: Path, bias: str) -> None:
    config = config_of(**{bias: True})
    weights = random_weights(config)
    checkpoint = read_gguf(write_gguf(tmp_path / "model.gguf", config, weights))
    assert checkpoint.config == config
    biases = [name for name in weights if name.endswith(".bias")]
    assert biases
    for name in biases:
        assert torch.equal(checkpoint.tensors.get(name), weights[name]), name


def test_without_an_output_tensor_the_head_is_tied(tmp_path: Path) -> None:
    config = config_of(tie_word_embeddings=True)
    checkpoint = read_gguf(write_gguf(tmp_path / "model.gguf", config, random_weights(config)))
    assert checkpoint.config.tie_embeddings
    assert "lm_head.weight" not in checkpoint.tensors.names()


def test_rope_freqs_become_factors_and_are_no_extra_tensor(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    path = written(tmp_path, extra={"rope_freqs.weight": factors})
    checkpoint = read_gguf(path)
    assert checkpoint.config.rope_scaling == RopeScaling("factors", factors=tuple(factors.tolist()))
    assert "rope_freqs.weight" not in checkpoint.tensors.names()


@pytest.mark.parametrize("qtype", [Q.F16, Q.BF16, Q.Q4_0, Q.F32], ids=lambda q: q.name)
def test_as_stored_keeps_half_types_and_gives_fp32_for_quantised_ones(tmp_path: Path, qtype: Q) -> None:
    tensors = read_gguf(written(tmp_path, qtype=qtype)).tensors
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = {Q.F16: torch.float16, Q.BF16: torch.bfloat16}.get(qtype, torch.float32)
    assert tensors.get(name, None).dtype == stored
    assert torch.equal(tensors.get(name, None).float(), tensors.get(name))
    assert tensors.get("model.norm.weight", None).dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(tensors.get(name, dtype), tensors.get(name).to(dtype))


def test_each_read_is_memory_of_its_own(tmp_path: Path) -> None:
    tensors = read_gguf(written(tmp_path)).tensors
    for name in ("model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"):
        before = tensors.get(name)
        tensors.get(name).zero_()
        assert torch.equal(tensors.get(name), before)


@pytest.mark.parametrize("values", [1, 100, 1000])
def test_the_size_of_the_chunks_changes_nothing(tmp_path: Path, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = read_gguf(written(tmp_path, qtype=Q.Q5_1)).tensors
    whole = {name: tensors.get(name) for name in tensors.names()}
    monkeypatch.setattr("paged.loaders.gguf._CHUNK_VALUES", values)
    assert all(torch.equal(tensors.get(name), tensor) for name, tensor in whole.items())


def test_reading_a_tensor_needs_little_memory_beside_it(tmp_path: Path) -> None:
    config = config_of(vocab_size=65536)
    tensors = read_gguf(write_gguf(tmp_path / "model.gguf", config, random_weights(config), qtype=Q.Q8_0)).tensors
    tracemalloc.start()  # sees the arrays of numpy, and not the tensor itself: 65536 * 192 * 4 bytes, 50 MB
    tensors.get("model.embed_tokens.weight")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


def test_the_tokenizer_and_the_template_are_those_of_the_metadata(tmp_path: Path) -> None:
    metadata = {**bpe_metadata(), "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
                "tokenizer.chat_template.tool_use": "{{ tools }}"}  # fmt: skip
    config = config_of(vocab_size=390)
    checkpoint = read_gguf(write_gguf(tmp_path / "model.gguf", config, random_weights(config), metadata=metadata))
    assert checkpoint.tokenizer is not None
    assert checkpoint.chat is not None
    assert checkpoint.eos_token_ids == checkpoint.tokenizer.eos_ids == (2, 0)
    assert checkpoint.chat.render([{"role": "user", "content": "hi"}]) == "<|im_start|>hi<|im_end|>"
    assert checkpoint.chat.render([], []) == "[]"
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("naïve 🙂")) == "naïve 🙂"


def test_a_file_without_tokenizer_or_template_has_none(tmp_path: Path) -> None:
    checkpoint = read_gguf(written(tmp_path))
    assert (checkpoint.tokenizer, checkpoint.chat, checkpoint.eos_token_ids) == (None, None, ())


def test_names_without_a_counterpart_stay_and_are_warned_of(tmp_path: Path) -> None:
    assert hf_name("blk.11.ffn_down.bias") == "model.layers.11.mlp.down_proj.bias"
    assert hf_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"
    path = written(tmp_path, extra={"blk.0.ffn_gate_exps.weight": np.zeros((2, 2), np.float32)})
    with pytest.warns(UserWarning, match="ignored tensors .* blk.0.ffn_gate_exps.weight$"):
        read_gguf(path)


def test_a_missing_tensor_is_called_as_the_file_would_call_it(tmp_path: Path) -> None:
    config = config_of()
    for name, stored in (
        ("model.layers.1.self_attn.o_proj.weight", "blk.1.attn_output.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        weights = random_weights(config)
        del weights[name]
        with pytest.raises(
            MissingTensor, match=rf"model.gguf: {stored}: expected a tensor of shape \[.*\], found none"
        ):
            read_gguf(write_gguf(tmp_path / "model.gguf", config, weights))


def test_a_wrong_shape_names_both(tmp_path: Path) -> None:
    config = config_of()
    weights = {**random_weights(config), "model.layers.0.mlp.up_proj.weight": torch.zeros(32, 192)}
    with pytest.raises(MissingTensor, match=r"blk.0.ffn_up.weight: expected shape \[96, 192\], found \[32, 192\]"):
        read_gguf(write_gguf(tmp_path / "model.gguf", config, weights))


def test_a_tensor_that_is_not_there_cannot_be_read(tmp_path: Path) -> None:
    tensors = read_gguf(written(tmp_path)).tensors
    with pytest.raises(MissingTensor, match=r"expected tensor no\.such, found none"):
        tensors.get("no.such")


def test_a_type_that_cannot_be_dequantised_is_refused_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, extra={"output.weight": np.zeros((96, 192), np.int8)})
    content = path.read_bytes()
    at = content.index(b"output.weight") + len(b"output.weight") + 4 + 16  # after the name: dims, then the type
    assert content[at] == Q.F32
    path.write_bytes(content[:at] + struct.pack("<I", Q.Q8_1) + content[at + 4 :])
    with pytest.raises(LoadError, match=r"output\.weight is stored as Q8_1, which .* not dequantise"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"split.count": 3}, "expected a whole model in one file, found one part of 3"),
        ({"llama.block_count": None}, "expected an integer for llama.block_count"),
        ({"llama.block_count": 3}, "blk.2.attn_q.weight: expected a tensor"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model must be gpt2 or llama, found 'bert'"),
        ({"tokenizer.chat_template": "{% for %}"}, "model.gguf: expected a Jinja chat template"),
    ],
)
def test_what_the_metadata_lacks_is_named(tmp_path: Path, metadata: dict, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        read_gguf(written(tmp_path, metadata=metadata))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with b'GGUF', found b''"),
        (b"GG", "begins with b'GGUF', found b'GG'"),
        (b"PK\x03\x04 and more", r"found b'PK\\x03\\x04'"),
        (b"GGUF", "version 2 or 3, little-endian, found version 0"),
        (b"GGUF\x01\0\0\0", "found version 1"),
        (b"GGUF\x09\0\0\0" + bytes(100), "found version 9"),
        (b"GGUF\0\0\0\x03" + bytes(100), r"found version 50331648 \(a big-endian file\?\)"),
        (b"GGUF\x03\0\0\0", "expected at least 24 bytes, found 8: the file is cut off"),
        (b"GGUF\x03\0\0\0" + bytes(16), "general.architecture must be one of .* found None"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, "expected at least .* bytes, found 24"),
    ],
)
def test_what_is_not_gguf_is_one_load_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=message) as error:
        read_gguf(path)
    assert str(path) in str(error.value)


def test_a_path_that_cannot_be_read_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="expected a readable GGUF file, found No such file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(LoadError, match="expected a readable GGUF file, found Is a directory"):
        read_gguf(tmp_path)


def small_file(tmp_path: Path) -> Path:
    """About 10 kB, half of it header."""
    config = ModelConfig("llama", 8, 2, 1, 1, 1, 2, 2, tie_embeddings=True)
    metadata = {
        "general.name": "small",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab", "\u2581", "<0x00>"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, 0.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 6],
        "tokenizer.chat_template": "{{ messages }}",
    }
    return write_gguf(tmp_path / "small.gguf", config, random_weights(config), metadata=metadata)


def test_a_file_cut_off_anywhere_is_a_load_error(tmp_path: Path) -> None:
    path = small_file(tmp_path)
    content = path.read_bytes()
    read_gguf(path)
    end = len(content) - 24  # the last tensor is padded to the alignment of 32 bytes
    for size in [*range(0, end, 7), end - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(LoadError, match="expected"):
            read_gguf(path)


@pytest.mark.filterwarnings("ignore")
def test_no_flipped_byte_does_worse_than_a_load_error(tmp_path: Path) -> None:
    path = small_file(tmp_path)
    content = path.read_bytes()
    numbers = random.Random(0)
    header = content.index(b"output_norm.weight") + 64
    outcomes = set()
    for position in [*range(24), *(numbers.randrange(header) for _ in range(400))]:
        damaged = bytearray(content)
        damaged[position] = numbers.choice([0, 255, damaged[position] ^ 1 << numbers.randrange(8)])
        path.write_bytes(damaged)
        try:
            checkpoint = read_gguf(path)
            for name in checkpoint.tensors.names():
                checkpoint.tensors.get(name)
            outcomes.add("read")
        except LoadError as error:
            assert str(path) in str(error)
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize("item", [gguf.GGUFValueType.UINT8, gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY])
def test_a_damaged_count_neither_hangs_nor_fills_the_memory(tmp_path: Path, item: int) -> None:
    key = b"general.tags"
    field = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, item, 1 << 62)
    path = tmp_path / "long.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field + bytes(4096))
    with pytest.raises(LoadError, match=r"expected at least \d{19,} bytes|expected an array of numbers or strings"):
        read_gguf(path)


def test_the_header_means_what_the_package_reads_in_it(tmp_path: Path) -> None:
    """Our quick reader of array fields against the plain one."""
    from paged.loaders.gguf import _open, _value

    path = written(tmp_path, metadata={**bpe_metadata(), "x.floats": [1.5, -2.0], "x.flags": [True, False], "x.n": 3})
    quick, plain = _open(path), gguf.GGUFReader(path)
    assert list(quick.fields) == list(plain.fields)
    for name, field in plain.fields.items():
        if not name.startswith("GGUF."):
            assert _value(path, quick.fields[name]) == field.contents(), name
    assert [t.name for t in quick.tensors] == [t.name for t in plain.tensors]


def test_rope_factors_in_two_dimensions_are_counted(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="rope factors must be 16 positive numbers, got 32"):
        read_gguf(written(tmp_path, extra={"rope_freqs.weight": np.ones((2, 16), np.float32)}))
