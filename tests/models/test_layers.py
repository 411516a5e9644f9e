"""RMSNorm and SwiGLU: right values, and rows whose bits depend on nothing but themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paged.models import layers
from paged.models.layers import RMSNorm, silu_mul

ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 200, 333]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return RMSNorm(weight, eps)(x, torch.empty(x.shape))


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    return silu_mul(gate_up, torch.empty(len(gate_up), gate_up.shape[1] // 2))


def rows_that_differ(function, x: torch.Tensor) -> list[int]:
    """Row counts at which the first, the last or some middle rows of x get other bits than in one call with all."""
    whole, wrong = function(x), []
    for n in (n for n in ROWS if n <= len(x)):
        starts = {0, (len(x) - n) // 2, len(x) - n}
        if any(not torch.equal(function(x[s : s + n].contiguous()), whole[s : s + n]) for s in starts):
            wrong.append(n)
    return wrong


@pytest.mark.parametrize("width", [1, 5, 8, 16, 48, 64, 576, 1000, 4096])
def test_norm_is_that_of_float64(width):
    x, weight = 3 * values(9, width), values(width, seed=1)
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(norm(x, weight).double(), want, rtol=1e-6, atol=1e-6)


def test_norm_agrees_with_torch_for_tiny_and_huge_rows():
    x = torch.stack([values(64) * s for s in (0.0, 1e-8, 1e-3, 1.0, 1e3, 1e8)])
    weight = values(64, seed=1)
    torch.testing.assert_close(norm(x, weight), F.rms_norm(x, (64,), weight, 1e-5), rtol=1e-5, atol=1e-7)


def test_norm_per_head_uses_the_weight_of_each_head():
    x, weight = values(5, 3, 16), values(3, 16, seed=1)
    got = norm(x, weight)
    for head in range(3):
        torch.testing.assert_close(got[:, head], F.rms_norm(x[:, head], (16,), weight[head], 1e-5))


def test_norm_leaves_its_input_and_its_weight_alone():
    x, weight = values(4, 8), values(8, seed=1)
    kept_x, kept_weight = x.clone(), weight.clone()
    layer = RMSNorm(weight, 1e-5)
    out = torch.empty(4, 8)
    assert layer(x, out) is out
    assert torch.equal(x, kept_x) and torch.equal(layer.weight, kept_weight)


@pytest.mark.parametrize("width", [5, 16, 48, 64, 576, 1000, 4096])
def test_a_normalised_row_has_the_same_bits_at_every_number_of_rows(width, threads):
    weight = values(width, seed=1)
    assert rows_that_differ(lambda x: norm(x, weight), values(333, width)) == []


@pytest.mark.parametrize("dim", [2, 16, 64, 128])
def test_a_normalised_head_has_the_same_bits_at_every_number_of_rows(dim, threads):
    weight = values(6, dim, seed=1)

    def strided(x):  # as q and k lie inside the product that holds q, k and v
        wide = torch.cat([x, x], dim=1)
        return norm(wide[:, :6], weight)

    assert rows_that_differ(strided, values(200, 6, dim)) == []


@pytest.mark.parametrize("width", [1, 5, 31, 32, 80, 160, 528, 1000, 1536])
@pytest.mark.parametrize("rows", [1, 2, 7, 70])
def test_swiglu_is_that_of_float64(width, rows):
    x = 4 * values(rows, 2 * width)
    wide = x.double()
    want = F.silu(wide[:, :width]) * wide[:, width:]
    torch.testing.assert_close(swiglu(x).double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [1, 5, 31, 80, 160, 528, 1000, 1536, 8960])
def test_a_row_of_swiglu_has_the_same_bits_at_every_number_of_rows(width, threads):
    rows = 333 if width < 2000 else 33
    assert rows_that_differ(swiglu, 4 * values(rows, 2 * width)) == []


@pytest.mark.parametrize("value", [0.0, -0.0, 100.0, -100.0, 1e4, -1e4])
def test_swiglu_of_extreme_gates_is_finite(value):
    out = swiglu(torch.full((3, 64), value))
    assert out.isfinite().all()
    torch.testing.assert_close(out, F.silu(torch.full((3, 32), value)) * value)


def test_swiglu_leaves_its_input_alone():
    for rows in (2, 500):
        x = values(rows, 256)
        kept = x.clone()
        swiglu(x)
        assert torch.equal(x, kept)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 12, 16, 64])
@pytest.mark.parametrize("size", [32768, 32800, 65536, 99999 * 32, 528 * 63, 528 * 333, 1536 * 512, 8960 * 33])
def test_the_cut_of_an_array_leaves_whole_vectors_to_each_thread(size, count):
    cut = layers._whole_vectors(size, count)
    assert 0 <= cut <= size and size - cut <= layers._SERIAL + layers._VECTOR * count
    for part in (cut, size - cut):
        # How torch shares out a loop: at most one thread for each started 32768 elements, equal parts rounded up.
        shares = min(count, -(-part // layers._SERIAL)) or 1
        share = -(-part // shares)
        assert shares == 1 or share % layers._VECTOR == 0
