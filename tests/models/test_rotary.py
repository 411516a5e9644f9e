"""Rotary embedding: frequencies of each scaling against transformers, the table, and the rotation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from paged.models import rotary
from paged.models.config import RopeScaling
from paged.models.rotary import Rotary, Rotation, rope_frequencies

NONE = RopeScaling()
SCALINGS = {
    "none": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, own ramp": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
    },
    "yarn, not truncated": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 1024,
        "truncate": False,
    },
    "yarn, own attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 0.75,
    },
}


def angles(position: int, head_dim: int, theta: float) -> np.ndarray:
    return position * theta ** (-np.arange(0, head_dim, 2) / head_dim)


def turned(x: torch.Tensor, positions: list[int], table: Rotary) -> torch.Tensor:
    return Rotation(table, np.array(positions, np.int32), x.shape[1])(x)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("dim, theta", [(16, 10000.0), (64, 500000.0), (128, 1000000.0)])
def test_frequencies_are_those_of_transformers(name, dim, theta):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from paged.models.config import ModelConfig
    from paged.models.tiny import tiny_hf_settings

    rope = {"rope_type": "default", "rope_theta": theta, **SCALINGS[name]}
    settings = tiny_hf_settings("llama", head_dim=dim, max_position_embeddings=512, rope_parameters=rope)
    oracle = LlamaRotaryEmbedding(transformers.LlamaConfig(**settings))
    scaling = ModelConfig.from_hf(settings).rope_scaling
    got = rope_frequencies(dim, theta, scaling)
    np.testing.assert_allclose(got, oracle.inv_freq.double().numpy(), rtol=2e-6)
    assert Rotary(dim, theta, scaling, 16).attention_factor == pytest.approx(oracle.attention_scaling)


def test_explicit_factors_divide_each_frequency():
    factors = tuple(1.0 + i for i in range(8))
    got = rope_frequencies(16, 10000.0, RopeScaling("factors", factors=factors))
    np.testing.assert_allclose(got * factors, rope_frequencies(16, 10000.0, NONE), rtol=1e-15)


def test_a_scaling_of_factor_one_changes_nothing():
    plain = rope_frequencies(64, 10000.0, NONE)
    for scaling in (
        RopeScaling("linear", 1.0),
        RopeScaling("llama3", 1.0, 8192),
        RopeScaling("yarn", 1.0, 8192),
        RopeScaling("factors", factors=(1.0,) * 32),
    ):
        np.testing.assert_allclose(rope_frequencies(64, 10000.0, scaling), plain, rtol=1e-12)


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    plain = rope_frequencies(128, 500000.0, NONE)
    got = rope_frequencies(128, 500000.0, RopeScaling("llama3", 8.0, 8192, 1.0, 4.0))
    wave = 2 * math.pi / plain
    assert np.array_equal(got[wave < 8192 / 4], plain[wave < 8192 / 4])
    np.testing.assert_allclose(got[wave > 8192], plain[wave > 8192] / 8)
    between = (wave > 8192 / 4) & (wave < 8192)
    assert between.any() and (got[between] < plain[between]).all() and (got[between] > plain[between] / 8).all()


def test_the_table_is_the_float64_value_rounded_once():
    table = Rotary(64, 10000.0, NONE, 8192)
    positions = np.array([0, 1, 2, 511, 512, 513, 4095, 8191], np.int32)
    cos, sin = table.rows(positions)
    for row, position in enumerate(positions.tolist()):
        angle = angles(position, 64, 10000.0)
        np.testing.assert_allclose(cos[row, 0, 0].numpy(), np.cos(angle), rtol=0, atol=6e-8)
        np.testing.assert_allclose(sin[row, 0, 1].numpy(), np.sin(angle), rtol=0, atol=6e-8)
        assert torch.equal(sin[row, 0, 0], -sin[row, 0, 1])


@pytest.mark.parametrize("limit", [1, 5, 100, 512, 513, 3000, 8192])
def test_a_row_of_the_table_does_not_depend_on_how_far_the_table_reaches(limit):
    whole = Rotary(48, 10000.0, NONE, 8192)
    cos, sin = whole.rows(np.array([8191], np.int32))  # grows it to its end
    part = Rotary(48, 10000.0, NONE, limit)
    positions = np.unique(np.linspace(0, limit - 1, 200).astype(np.int32))
    for mine, theirs in zip(part.rows(positions), whole.rows(positions), strict=True):
        assert torch.equal(mine, theirs)
    assert len(cos) == len(sin) == 1


def test_the_table_grows_only_as_far_as_positions_are_asked_for():
    table = Rotary(16, 10000.0, NONE, 100_000)
    table.rows(np.array([3], np.int32))
    assert len(table._tables[0]) == rotary._PIECE
    table.rows(np.array([3, 600], np.int32))
    assert len(table._tables[0]) == 2 * rotary._PIECE
    table.rows(np.array([70_000], np.int32))
    assert len(table._tables[0]) == 70_001
    table.rows(np.array([99_999], np.int32))
    assert len(table._tables[0]) == 100_000


def test_a_position_the_model_cannot_hold_is_refused_with_both_numbers():
    table = Rotary(16, 10000.0, NONE, 64)
    with pytest.raises(ValueError, match=r"below the model's 64, got 64"):
        table.rows(np.array([0, 64], np.int32))


def test_a_padding_row_counts_as_position_zero_and_no_rows_are_no_error():
    table = Rotary(16, 10000.0, NONE, 64)
    cos, sin = table.rows(np.array([-1, 0], np.int32))
    assert torch.equal(cos[0], cos[1]) and torch.equal(sin[0], sin[1])
    assert len(table.rows(np.zeros(0, np.int32))[0]) == 0


@pytest.mark.parametrize("dim", [2, 16, 48, 64])
def test_rotation_turns_pairs_of_the_two_halves(dim):
    x = torch.randn(3, 5, dim, generator=torch.Generator().manual_seed(0))
    positions = [0, 7, 100]
    got = turned(x, positions, Rotary(dim, 10000.0, NONE, 128))
    for row, position in enumerate(positions):
        pairs = torch.complex(x[row, :, : dim // 2].double(), x[row, :, dim // 2 :].double())
        want = pairs * torch.exp(1j * torch.from_numpy(angles(position, dim, 10000.0)))
        torch.testing.assert_close(got[row].double(), torch.cat([want.real, want.imag], -1), rtol=0, atol=1e-6)


def test_rotated_products_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(1))
    table = Rotary(64, 10000.0, NONE, 4096)
    scores = [
        float((turned(q, [at + 9], table).double() * turned(k, [at], table).double()).sum()) for at in (0, 50, 4000)
    ]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-5)


def test_rotated_rows_have_the_same_bits_at_every_number_of_rows():
    table = Rotary(16, 10000.0, NONE, 4096)
    x = torch.randn(300, 12, 16, generator=torch.Generator().manual_seed(0))
    positions = [(7 * i) % 4096 for i in range(300)]
    whole = turned(x, positions, table)
    for n in (1, 2, 3, 5, 17, 64, 255):
        assert torch.equal(turned(x[-n:].contiguous(), positions[-n:], table), whole[-n:])
        assert torch.equal(turned(x[:n].contiguous(), positions[:n], table), whole[:n])


def test_yarn_multiplies_both_sine_and_cosine():
    scaling = RopeScaling("yarn", 4.0, 128, attention_factor=1.25)
    table = Rotary(16, 10000.0, scaling, 64)
    cos, sin = table.rows(np.arange(64, dtype=np.int32))
    length = cos[:, 0, 0].square() + sin[:, 0, 1].square()
    torch.testing.assert_close(length, torch.full_like(length, 1.25**2))


def test_one_rotation_serves_many_layers_and_strided_inputs():
    table = Rotary(16, 10000.0, NONE, 64)
    rotation = Rotation(table, np.array([3, 9], np.int32), 5)
    wide = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    for start in (0, 3):
        x = wide[:, start : start + 5]
        kept = wide.clone()
        assert torch.equal(rotation(x), turned(x.contiguous(), [3, 9], table))
        assert torch.equal(wide, kept)
