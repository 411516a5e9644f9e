"""PackedLinear: right values, and rows whose bits depend on nothing but themselves."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from paged.models import linear
from paged.models.linear import TILE, PackedLinear, RowMode, row_mode

# [N, K] of SmolLM2's products, then shapes that fill no register, one output, deep sums, narrow inputs.
SMOLLM2 = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
ODD = [(1, 1), (1, 64), (5, 3), (33, 17), (100, 33), (7, 1000), (96, 48), (250, 129), (16, 4096)]
ROWS = [*range(1, 65), 100, 128, 200, 256]
FEW_ROWS = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 64, 100]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows_that_differ(product, x: torch.Tensor, counts) -> list[int]:
    """The row counts at which the first or the last rows of x get other bits than in one product of all."""
    whole = product(x)
    return [
        n for n in counts if not torch.equal(product(x[:n]), whole[:n]) or not torch.equal(product(x[-n:]), whole[-n:])
    ]


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def no_modes(monkeypatch):
    """As in a process that has probed nothing yet."""
    monkeypatch.setattr(linear, "_modes", {})


@pytest.mark.parametrize("shape", SMOLLM2 + ODD, ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_a_row_has_the_same_bits_at_every_number_of_rows(shape, with_bias, threads):
    n, k = shape
    product = PackedLinear(values(n, k, seed=1), values(n, seed=2) if with_bias else None)
    assert rows_that_differ(product, values(128, k), FEW_ROWS) == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_every_product_of_smollm2_is_row_exact_up_to_512_rows(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        for n, k in [*SMOLLM2, (49152, 576)]:
            product = PackedLinear(values(n, k, seed=1))
            counts = [*ROWS, 512] if n < 10_000 else [1, 2, 3, 4, 8, 16, 17, 64, 100]
            x = values(512 if n < 10_000 else 128, k)
            assert rows_that_differ(product, x, counts) == [], (n, k)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SMOLLM2 + ODD, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 40])
def test_the_product_is_that_of_float64(shape, rows):
    n, k = shape
    weight, bias, x = values(n, k, seed=1), values(n, seed=2), values(rows, k)
    want = F.linear(x.double(), weight.double(), bias.double())
    for product, right in ((PackedLinear(weight), want - bias), (PackedLinear(weight, bias), want)):
        got = product(x)
        assert got.shape == (rows, n) and got.dtype == torch.float32
        torch.testing.assert_close(got.double(), right, rtol=0, atol=1e-6 * k + 1e-5)


def test_no_rows_give_no_rows():
    assert PackedLinear(values(5, 3))(values(0, 3)).shape == (0, 5)


def test_rows_may_lie_apart_in_memory():
    product, x = PackedLinear(values(33, 17)), values(9, 40)[:, :17]
    assert torch.equal(product(x), product(x.contiguous()))


@pytest.mark.parametrize("shape", SMOLLM2[:1] + ODD, ids=str)
def test_the_weight_comes_back_bit_for_bit(shape):
    weight = values(*shape)
    assert torch.equal(PackedLinear(weight).dense(), weight)


def test_packing_keeps_no_reference_to_the_given_weight():
    weight = values(64, 32)
    product = PackedLinear(weight)
    if product.mode.kind != "packed":
        pytest.skip(f"this processor computes in {product.mode}")
    alive = weakref.ref(weight)
    del weight
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_left_to_torch(dtype):
    weight, x = values(8, 4).to(dtype), values(3, 4).to(dtype)
    product = PackedLinear(weight)
    assert product.mode == RowMode("plain")
    assert torch.equal(product(x), F.linear(x, weight))
    assert product.dense() is weight


def test_probing_leaves_the_global_generator_alone(no_modes):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    PackedLinear(torch.ones(24, 8))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_each_shape_is_probed_once(no_modes, monkeypatch):
    probed = []
    choose = linear._choose_mode
    monkeypatch.setattr(linear, "_choose_mode", lambda w, p: probed.append(tuple(w.shape)) or choose(w, p))
    for shape in [(8, 4), (8, 4), (4, 8), (8, 4)]:
        PackedLinear(torch.ones(shape))
    assert probed == [(8, 4), (4, 8)]


# What happens where oneDNN's product is not row-exact, or not there. Each stand-in is wrong in one way.


def only_exact_from_two_rows(x, packed, bias):
    out = F.linear(x, packed.to_dense() if packed.is_mkldnn else packed, bias)
    rows = torch.stack([(row * packed.to_dense()).sum(-1) for row in x]) if len(x) else out
    rows = rows if bias is None else rows + bias
    return rows + 1e-3 if len(x) == 1 else rows


def never_exact(x, packed, bias):
    return F.linear(x, packed.to_dense(), bias) + 1e-3 * len(x)


def test_one_row_is_padded_to_two_where_a_product_of_one_row_differs(no_modes, monkeypatch):
    monkeypatch.setattr(linear, "_packed_product", only_exact_from_two_rows)
    product = PackedLinear(values(12, 6), values(12))
    assert product.mode == RowMode("packed", 2)
    assert rows_that_differ(product, values(40, 6), range(1, 41)) == []
    assert row_mode() == "oneDNN prepacked, one row padded to two"


def test_tiles_of_fixed_rows_take_over_where_no_number_of_rows_is_exact(no_modes, monkeypatch):
    monkeypatch.setattr(linear, "_packed_product", never_exact)
    weight, bias, x = values(48, 24, seed=1), values(48, seed=2), values(70, 24)
    product = PackedLinear(weight, bias)
    assert product.mode.kind == "tile" and product.mode.rows in (1, TILE)
    assert rows_that_differ(product, x, range(1, 71)) == []
    torch.testing.assert_close(product(x), F.linear(x, weight, bias), rtol=0, atol=1e-4)
    assert product.dense() is weight
    assert "fixed tiles of" in row_mode()
    assert product(values(0, 24)).shape == (0, 48)


def test_tiles_take_over_where_torch_has_no_onednn(no_modes, monkeypatch):
    monkeypatch.setattr(linear, "_pack", lambda weight: None)
    product = PackedLinear(values(48, 24))
    assert product.mode.kind == "tile"
    assert rows_that_differ(product, values(40, 24), range(1, 41)) == []


def test_rows_are_computed_one_by_one_where_the_place_in_a_tile_matters(no_modes, monkeypatch):
    linear_of_torch = F.linear

    def uneven(x, weight, bias=None):
        return linear_of_torch(x, weight, bias) + 1e-3 * torch.arange(len(x))[:, None]

    monkeypatch.setattr(linear, "_pack", lambda weight: None)
    monkeypatch.setattr(linear.F, "linear", uneven)
    product = PackedLinear(values(12, 6))
    assert product.mode == RowMode("tile", 1)
    assert rows_that_differ(product, values(20, 6), range(1, 21)) == []
    assert row_mode() == "fixed tiles of 1 row"


def test_a_missing_operator_counts_as_no_onednn(monkeypatch):
    class Missing:
        def __getattr__(self, name):
            raise AttributeError(name)

    monkeypatch.setattr(linear.torch.ops, "mkldnn", Missing(), raising=False)
    assert linear._pack(values(4, 4)) is None


def test_row_mode_names_each_mode_in_use_once(no_modes):
    first = row_mode()
    assert first == str(next(iter(linear._modes.values())))
    linear._modes.clear()
    linear._modes.update({(n, 1, 1): RowMode("tile", 16) for n in range(3)})
    linear._modes[(9, 1, 1)] = RowMode("packed", 2)
    assert row_mode() == "fixed tiles of 16 rows; oneDNN prepacked, one row padded to two"
