"""The codecs of records: bytes, layout, how close a value comes back, and what a record depends on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paged.errors import UnsupportedShape
from paged.kv.codecs import CODECS, RecordCodec, get_codec
from paged.kv.codecs.int4 import INT4, rotate, rotation_size
from paged.kv.codecs.int8 import INT8
from paged.kv.codecs.records import dequantise, group_bounds, quantise
from paged.kv.storage import PageStorage
from paged.spec import KVSpec

RECORDS = [INT8, INT4]
every_codec = pytest.mark.parametrize("codec", RECORDS, ids=lambda codec: codec.name)
HEAD_SIZES = [8, 24, 40, 64, 80, 96, 120, 128, 256]
SMOLLM2 = KVSpec(layers=30, num_kv_heads=3, head_dim=64)

ROWS = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.sampled_from([8, 40, 64, 128])),
    elements=st.floats(-1000.0, 1000.0, width=32),
)


# Bytes and layout -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "share"), [("int8", 0.55), ("int4", 0.31)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_take_no_more_than_their_share_of_bf16(name: str, share: float, head_dim: int, page_size: int) -> None:
    spec = KVSpec(2, 3, head_dim)
    bf16, small = (PageStorage(spec, 1, page_size, kv_dtype).page_bytes for kv_dtype in ("bf16", name))
    assert small <= share * bf16


def test_a_token_of_smollm2_takes_these_many_bytes() -> None:
    sizes = {name: PageStorage(SMOLLM2, 1, 16, name).page_bytes / 16 for name in CODECS}
    assert sizes == {"fp32": 46080, "fp16": 23040, "bf16": 23040, "int8": 12240, "int4": 6840}


@every_codec
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_a_record_is_a_multiple_of_four_bytes_and_as_long_as_it_says(codec: RecordCodec, head_dim: int) -> None:
    records = codec.encode(torch.randn(2, 3, head_dim), torch.randn(2, 3, head_dim))
    assert records.shape == (2, 3, codec.record_bytes(head_dim)) and records.dtype == torch.uint8
    assert codec.record_bytes(head_dim) % 4 == 0


def test_int8_records_hold_codes_of_k_of_v_and_their_scales() -> None:
    k, v = torch.zeros(64), torch.zeros(64)
    k[[0, 1, 63]] = torch.tensor([64.0, 1.0, -2.0])  # scales -0.5 and 2 / 128
    v[5] = -1.0  # scale 2^-7
    record = INT8.encode(k, v)
    signed = record.view(torch.int8).tolist()
    assert signed[0:2] == [-128, -2] and signed[63] == -128 and signed[64 + 5] == -128
    assert sum(x != 0 for x in signed[:128]) == 4
    assert record[128:].view(torch.float16).tolist() == [-0.5, 2 / 128, 2**-7, 0.0]


def test_int4_records_hold_nibbles_of_rotated_k_of_v_scales_and_fifth_bits() -> None:
    k = rotate(torch.arange(64).float() % 32 - 16) / 64  # rotated again they are these whole numbers
    v = torch.arange(64).float() % 16 - 8
    record = INT4.encode(k, v)
    assert len(record) == 76
    assert record[:16].tolist() == [(2 * i % 16) | (2 * i + 1) % 16 << 4 for i in range(16)]
    assert record[32:40].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert record[64:68].view(torch.float16).tolist() == [1.0, 1.0]
    assert record[68:76].tolist() == [0, 0, 255, 255] * 2


@pytest.mark.parametrize(
    ("head_dim", "size", "want"),
    [
        (8, 32, [(0, 8)]),
        (64, 32, [(0, 32), (32, 64)]),
        (80, 32, [(0, 32), (32, 80)]),
        (120, 64, [(0, 120)]),
        (128, 64, [(0, 64), (64, 128)]),
    ],
)
def test_what_is_left_of_a_head_belongs_to_its_last_group(head_dim: int, size: int, want: list) -> None:
    assert group_bounds(head_dim, size) == want


@every_codec
def test_a_head_size_that_is_no_multiple_of_8_is_refused(codec: RecordCodec) -> None:
    with pytest.raises(UnsupportedShape, match=f"{codec.name} pages need a head size that is a multiple of 8, got 12"):
        PageStorage(KVSpec(1, 1, 12), 1, 16, codec.name)


# Values -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, bits=st.sampled_from([4, 5, 8]), size=st.sampled_from([32, 64]))
def test_a_value_comes_back_within_half_a_step_or_a_whole_one_at_the_far_end(rows, bits: int, size: int) -> None:
    x = torch.from_numpy(rows)
    codes, scales = quantise(x, bits, size)
    half = 2 ** (bits - 1)
    assert int(codes.min()) >= -half and int(codes.max()) < half
    back = dequantise(codes, scales, size)
    for g, (first, end) in enumerate(group_bounds(x.shape[-1], size)):
        step = scales[..., g : g + 1].double().abs()
        error = (back - x)[..., first:end].double().abs()
        # The side away from the largest value has one code less. A scale below 2^-14 has few bits, below 2^-25 none.
        far = (codes[..., first:end] == half - 1) * 0.5
        assert (error <= step * (0.5 + far) * 1.001 + step * half * 2**-10 + half * 2**-24).all()


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, bits=st.sampled_from([4, 5, 8]))
def test_what_was_decoded_is_stored_as_it_is(rows, bits: int) -> None:
    once = dequantise(*quantise(torch.from_numpy(rows), bits, 32), 32)
    assert torch.equal(dequantise(*quantise(once, bits, 32), 32), once)


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_a_row_and_its_negative_are_stored_alike(bits: int) -> None:
    x = torch.randn(50, 64)
    codes, scales = quantise(x, bits, 64)
    negative, others = quantise(-x, bits, 64)
    assert torch.equal(codes, negative) and torch.equal(scales, -others)


def test_codes_times_scales_are_exact_in_fp32() -> None:
    codes = torch.arange(-128, 128, dtype=torch.int16).expand(2048, 256)
    scales = torch.randint(0, 0x7C00, (2048, 8), dtype=torch.int16).view(torch.float16)
    exact = codes.double() * scales.double().repeat_interleave(32, 1)
    assert torch.equal(dequantise(codes, scales, 32).double(), exact)


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_rotating_twice_multiplies_and_keeps_every_product(head_dim: int) -> None:
    x, y = torch.randn(2, 5, head_dim, dtype=torch.float64)
    size = rotation_size(head_dim)
    assert head_dim % size == 0 and size & (size - 1) == 0 and size <= 64
    assert torch.allclose(rotate(rotate(x)), x * size)
    assert torch.allclose((rotate(x) * rotate(y)).sum(-1), (x * y).sum(-1) * size)


def test_the_rotation_is_the_hadamard_matrix() -> None:
    rows = rotate(torch.eye(64))
    assert (rows.abs() == 1).all() and (rows @ rows.T == 64 * torch.eye(64)).all()
    assert (rotate(torch.eye(80))[:16, 16:] == 0).all()  # blocks of 16 where the head is no power of two


def test_one_channel_that_is_far_larger_costs_int4_keys_little() -> None:
    k = torch.randn(200, 64)
    k[:, 17] += 30.0
    back, _ = INT4.decode(INT4.encode(k, k), 64)
    _, plain = INT4.decode(INT4.encode(k, k), 64)
    others = torch.arange(64) != 17
    assert float((back - k)[:, others].square().mean()) < 0.05
    assert float((plain - k)[:, others].square().mean()) > 0.5


@every_codec
def test_smaller_is_further_from_the_values(codec: RecordCodec) -> None:
    k, v = torch.randn(2, 300, 64)
    k_back, v_back = codec.decode(codec.encode(k, v), 64)
    k_error, v_error = float((k_back - k).norm() / k.norm()), float((v_back - v).norm() / v.norm())
    low, high = (0.004, 0.009) if codec is INT8 else (0.03, 0.13)
    assert low < k_error < high and low < v_error < high
    assert codec is INT8 or k_error < v_error  # the fifth bit


# What a record depends on -----------------------------------------------------------------------------------------


@every_codec
def test_a_record_depends_on_its_own_row_only(codec: RecordCodec) -> None:
    k, v = torch.randn(2, 40, 3, 64)
    together = codec.encode(k, v)
    for i in (0, 7, 39):
        assert torch.equal(codec.encode(k[i], v[i]), together[i])
        assert torch.equal(codec.encode(k[i, 1], v[i, 1]), together[i, 1])


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_group_with_a_value_that_is_no_number_comes_back_as_none(codec: RecordCodec, bad: float) -> None:
    k, v = torch.randn(2, 4, 128)
    clean_k, clean_v = codec.decode(codec.encode(k, v), 128)
    v[1, 100] = bad
    k[2, 3] = bad
    got_k, got_v = codec.decode(codec.encode(k, v), 128)
    first, end = next(b for b in group_bounds(128, codec.group_size) if b[0] <= 100 < b[1])
    lost = torch.zeros(4, 128, dtype=torch.bool)
    lost[1, first:end] = True
    assert torch.equal(got_v.isnan(), lost) and torch.equal(got_v[~lost], clean_v[~lost])
    assert got_k[2, : codec.group_size].isnan().all() and not got_k[2, codec.group_size :].isnan().any()
    assert torch.equal(got_k[[0, 1, 3]], clean_k[[0, 1, 3]])


@every_codec
def test_values_beyond_every_scale_are_clamped_and_zeros_stay_zeros(codec: RecordCodec) -> None:
    k = torch.zeros(3, 64)
    k[0, 0], k[1, 0] = 3e38, -1e-30
    _, v = codec.decode(codec.encode(k, k), 64)
    assert v.isfinite().all() and float(v[0, 0]) == 65504.0 * (128 if codec is INT8 else 8)
    assert not v[1:].any()
    record = codec.encode(torch.zeros(64), -torch.zeros(64))
    assert torch.equal(record, codec.encode(-torch.zeros(64), torch.zeros(64)))


def test_every_name_gives_its_codec() -> None:
    assert [get_codec(name).name for name in CODECS] == ["fp32", "fp16", "bf16", "int8", "int4"]
