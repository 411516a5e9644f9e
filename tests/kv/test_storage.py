"""PageStorage: shapes, bytes, growth, and the codecs that say how a value is kept."""

from __future__ import annotations

import pytest
import torch
from byhand import expect_check_fails
from fakes import EchoModel

from paged.errors import UnsupportedShape
from paged.kv.codecs import get_codec
from paged.kv.pages import PagePool
from paged.kv.storage import PageStorage
from paged.spec import KVSpec

SPEC = KVSpec(layers=3, num_kv_heads=2, head_dim=5)


def test_a_page_is_one_contiguous_blob_of_layers_k_and_v_heads_positions_values() -> None:
    storage = PageStorage(SPEC, num_pages=7, page_size=4)
    assert storage.pages.shape == (7, 3, 2, 2, 4, 5)
    assert storage.pages[3].is_contiguous()
    storage.check()


@pytest.mark.parametrize(("kv_dtype", "width"), [("fp32", 4), ("fp16", 2), ("bf16", 2)])
def test_page_bytes_is_what_the_pages_take(kv_dtype: str, width: int) -> None:
    storage = PageStorage(SPEC, 7, 4, kv_dtype)
    assert storage.page_bytes == 3 * 2 * 2 * 4 * 5 * width
    assert storage.page_bytes * 7 == storage.pages.numel() * storage.pages.element_size()


def test_a_layer_is_a_view_of_the_pages() -> None:
    storage = PageStorage(SPEC, 4, 4)
    storage.pages.zero_()
    k, v = storage.layer(1)
    assert k.shape == v.shape == (4, 2, 4, 5)
    k[2], v[2] = 1.0, 2.0
    assert storage.pages[2, 1, 0].unique().tolist() == [1.0]
    assert storage.pages[2, 1, 1].unique().tolist() == [2.0]
    assert not storage.pages[2, 0].any()


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_a_page_of_records_is_one_contiguous_blob_too(kv_dtype: str) -> None:
    spec = KVSpec(layers=3, num_kv_heads=2, head_dim=40)
    storage = PageStorage(spec, 7, 4, kv_dtype)
    record = {"int8": 84, "int4": 52}[kv_dtype]
    assert storage.pages.shape == (7, 3, 2, 4, record) and storage.pages.dtype == torch.uint8
    assert storage.page_bytes == 3 * 2 * 4 * record
    storage.check()
    before = storage.pages.clone()
    storage.grow(9)
    assert torch.equal(storage.pages[:7], before)
    storage.check()


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8", "int4"])
def test_rows_that_are_written_are_read_where_they_were_put(kv_dtype: str) -> None:
    spec = KVSpec(layers=3, num_kv_heads=2, head_dim=40)
    storage = PageStorage(spec, 7, 4, kv_dtype)
    storage.pages.zero_()
    k, v = torch.randn(2, 3, 2, 40)
    ids, offsets = torch.tensor([6, 0, 6]), torch.tensor([3, 1, 0])
    storage.write(1, ids, offsets, k, v)
    for plane, rows in zip(storage.layer(1), (k, v), strict=True):
        assert plane.shape == (7, 2, 4, 40)
        stored = plane[ids, :, offsets].float()
        assert float((stored - rows).norm() / rows.norm()) < 0.15
        assert int(plane.any(-1).sum()) == 3 * 2
    assert not storage.layer(0)[0].any() and not storage.layer(2)[1].any()
    for got, want in zip(storage.gather(1, torch.tensor([6, 6, 2])), storage.layer(1), strict=True):
        assert torch.equal(got, want[[6, 6, 2]])


def test_ten_positions_take_less_than_half_of_a_flat_slab() -> None:
    storage = PageStorage(SPEC, num_pages=64, page_size=16)
    slab = SPEC.page_values(1024) * 4
    pages = -(-10 // 16)
    assert pages * storage.page_bytes < slab / 2


def test_growth_keeps_ids_and_bytes() -> None:
    storage = PageStorage(SPEC, 3, 4)
    storage.pages.copy_(torch.arange(storage.pages.numel()).view(storage.pages.shape))
    before = storage.pages.clone()
    storage.grow(8)
    assert storage.num_pages == 8
    assert torch.equal(storage.pages[:3], before)
    storage.check()
    storage.grow(5)
    assert storage.num_pages == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_pages": 0}, "num_pages must be at least 1, got 0"),
        ({"num_pages": 4, "page_size": 0}, "page_size must be at least 1 token, got 0"),
    ],
)
def test_sizes_without_a_page_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(UnsupportedShape, match=message):
        PageStorage(SPEC, **arguments)


def test_an_unknown_codec_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="bf16, fp16, fp32, int4, int8, got 'int3'"):
        PageStorage(SPEC, 4, 4, "int3")


def test_fp16_clamps_what_it_cannot_hold_and_the_others_do_not() -> None:
    values = torch.tensor([1e6, -1e6, 65504.0, 0.5, float("inf")])
    assert get_codec("fp16").encode(values).tolist() == [65504.0, -65504.0, 65504.0, 0.5, 65504.0]
    assert get_codec("fp32").encode(values) is values
    assert get_codec("bf16").encode(values)[4].item() == float("inf")


@pytest.mark.parametrize("fields", [{"layers": 0}, {"num_kv_heads": 0}, {"head_dim": -1}, {"num_groups": 0}])
def test_a_spec_without_size_is_refused(fields: dict[str, int]) -> None:
    good = {"layers": 1, "num_kv_heads": 1, "head_dim": 8}
    with pytest.raises(ValueError, match=f"{next(iter(fields))} must be a positive int"):
        KVSpec(**{**good, **fields})


@pytest.mark.parametrize("windows", [(), (0, 0), (-1,)])
def test_a_spec_needs_one_window_for_each_group(windows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one window >= 0 for each of 1 groups"):
        KVSpec(1, 1, 8, 1, windows)


# A pool made by a model -------------------------------------------------------------------------------------------


def test_a_models_pool_is_sized_by_pages_by_bytes_or_for_four_full_sequences() -> None:
    model = EchoModel(max_seq_len=100, num_groups=2)
    one = 1 * 2 * 1 * 16 * 8 * 4
    assert model.create_kv_pool(5).num_pages == 5
    assert model.create_kv_pool(num_bytes=3 * one + 7).num_pages == 3
    assert model.create_kv_pool().num_pages == 4 * 2 * 7
    with pytest.raises(ValueError, match=f"at least one page of {one} bytes, got 10"):
        model.create_kv_pool(num_bytes=10)
    with pytest.raises(UnsupportedShape, match="page_size"):
        model.create_kv_pool(5, page_size=0)


# check() ----------------------------------------------------------------------------------------------------------


def test_check_notices_pages_that_are_not_contiguous() -> None:
    storage = PageStorage(SPEC, 4, 4)
    storage.pages = storage.pages.transpose(4, 5).contiguous().transpose(4, 5)
    expect_check_fails(storage, "not contiguous")


def test_check_notices_another_shape() -> None:
    storage = PageStorage(SPEC, 4, 4)
    storage.pages = torch.zeros(4, 3, 2, 2, 5, 4)
    expect_check_fails(storage, "has shape")


def test_check_notices_another_size() -> None:
    storage = PageStorage(SPEC, 4, 4)
    storage.pages = storage.pages.half()
    expect_check_fails(storage, "bytes")


def test_the_pools_check_notices_storage_of_another_size() -> None:
    pool = PagePool(4, 4, PageStorage(SPEC, 4, 4))
    pool.check()
    assert pool.storage is not None
    pool.storage.grow(5)
    expect_check_fails(pool, "differ in size")
