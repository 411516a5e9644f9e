"""The gated delta rule: right values in torch and in native code, and rows with bits of their own."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paged.kv.state import StatePool
from paged.models import delta
from paged.models.config import DeltaConfig
from paged.models.delta import CONV, DELTA, DeltaStep, GatedDelta, by_rows, delta_state_spec

native = pytest.importorskip("paged._native")

LENGTH = 100  # more than three blocks of 32 tokens
SHAPES = {
    "small": DeltaConfig(2, 4, 16, 16, 4),
    "one head": DeltaConfig(1, 1, 8, 8, 2),
    "wide": DeltaConfig(2, 2, 128, 72, 4),
    "three values a key": DeltaConfig(2, 6, 24, 40, 3),
    "no convolution": DeltaConfig(1, 2, 8, 32, 1),
    "long convolution": DeltaConfig(1, 2, 16, 8, 16),
}
ODD = {
    "odd sizes": DeltaConfig(3, 3, 5, 7, 4),
    "one value": DeltaConfig(1, 2, 1, 1, 3),
    "seventeen taps": DeltaConfig(1, 1, 8, 8, 17),
}


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(shape: DeltaConfig, index: int = 1, seed: int = 0) -> GatedDelta:
    weights = {
        "conv": values(shape.num_channels, 1, shape.conv_kernel, seed=seed) / shape.conv_kernel**0.5,
        "a_log": values(shape.num_value_heads, seed=seed + 1) - 2,
        "dt_bias": values(shape.num_value_heads, seed=seed + 2),
        "norm": 1 + 0.1 * values(shape.value_head_dim, seed=seed + 3),
    }
    return GatedDelta(shape, index, norm_eps=1e-6, **weights)


def inputs(shape: DeltaConfig, rows: int = LENGTH, seed: int = 9) -> torch.Tensor:
    return values(rows, shape.num_channels + shape.value_size + 2 * shape.num_value_heads, seed=seed)


class Steps:
    """Sequences of one layer by name, each in a slot of a pool of two layers whose other slots and layer hold NaN."""

    def __init__(self, layer: GatedDelta, slots: dict[str, int], in_torch: bool = False, kernels=None) -> None:
        self.layer, self.slots, self.lengths = layer, slots, dict.fromkeys(slots, 0)
        self.pool = StatePool(delta_state_spec(layer.shape, 2), 9)
        for plane in self.pool.planes.values():
            plane.fill_(math.nan)
            for slot in slots.values():
                plane[slot, layer.index] = 0.0
        kernels = None if in_torch else kernels or native.Kernels("")
        layer._kernels = lambda projected: kernels  # type: ignore[method-assign]

    def step(self, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        counts = [len(r) for r in rows.values()]
        for name, count in zip(rows, counts, strict=True):
            self.lengths[name] += count
        q_indptr = np.cumsum([0, *counts]).astype(np.int32)
        lens = ints(*(self.lengths[name] for name in rows))
        with self.pool.advance(ints(*(self.slots[name] for name in rows)), q_indptr, lens) as slots:
            x = torch.cat(list(rows.values())) if len(rows) > 1 else next(iter(rows.values()))
            out = self.layer(x, DeltaStep(slots, q_indptr, self.pool))
        assert out.dtype == torch.float32 and out.shape[1] == self.layer.shape.value_size
        return dict(zip(rows, out.split(counts), strict=True))

    def feed(self, name: str, x: torch.Tensor, chunk: int = 0) -> torch.Tensor:
        return torch.cat([self.step({name: piece})[name] for piece in x.split(chunk or len(x))])

    def state(self, name: str) -> list[torch.Tensor]:
        return [plane[self.slots[name], self.layer.index].clone() for plane in self.pool.planes.values()]

    def untouched(self) -> bool:
        """Whether the other layer and the slots of no sequence still hold NaN and nothing else."""
        others = [slot for slot in range(self.pool.num_slots) if slot not in self.slots.values()]
        planes = self.pool.planes.values()
        return all(bool(p[others].isnan().all()) and bool(p[:, 1 - self.layer.index].isnan().all()) for p in planes)


def oracle(layer: GatedDelta, x: torch.Tensor) -> torch.Tensor:
    """float64, one token and one head at a time, from the formulas."""
    shape, out = layer.shape, []
    conv, channels = layer.conv.double(), shape.num_channels
    mixed, z, b, a = x.double().split([channels, shape.value_size, *[shape.num_value_heads] * 2], 1)
    padded = torch.cat([torch.zeros(shape.conv_kernel - 1, channels, dtype=torch.float64), mixed])
    mixed = F.silu(torch.stack([(padded[t : t + shape.conv_kernel] * conv).sum(0) for t in range(len(x))]))
    for head in range(shape.num_value_heads):
        key_head = head * shape.num_key_heads // shape.num_value_heads
        size, dim = shape.key_head_dim, shape.value_head_dim
        q = mixed[:, key_head * size : (key_head + 1) * size]
        k = mixed[:, shape.key_size + key_head * size : shape.key_size + (key_head + 1) * size]
        v = mixed[:, 2 * shape.key_size + head * dim : 2 * shape.key_size + (head + 1) * dim]
        q, k = (y / (y.square().sum(1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        state = torch.zeros(size, dim, dtype=torch.float64)
        rows = []
        for t in range(len(x)):
            state = state * torch.exp(-layer.decay[head] * F.softplus(a[t, head] + layer.dt_bias[head]))
            state = state + torch.outer(k[t], torch.sigmoid(b[t, head]) * (v[t] - state.T @ k[t]))
            rows.append(state.T @ q[t] / size**0.5)
        o = torch.stack(rows)
        o = o / (o.square().mean(1, keepdim=True) + layer.norm_eps).sqrt() * layer.norm
        out.append(o * F.silu(z[:, head * dim : (head + 1) * dim]))
    return torch.cat(out, 1)


def available(isa: str) -> bool:
    try:
        native.Kernels(isa)
    except ValueError:
        return False
    return True


WAYS = ["torch", *(isa for isa in ("baseline", "avx2", "avx512") if available(isa))]


def start(layer: GatedDelta, way: str, **slots: int) -> Steps:
    return Steps(layer, slots, in_torch=way == "torch", kernels=None if way == "torch" else native.Kernels(way))


# Values


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHAPES)
def test_values_are_those_of_the_formulas_in_float64(name: str, way: str) -> None:
    layer = make(SHAPES[name])
    x = inputs(layer.shape, 60)
    got = start(layer, way, a=3).feed("a", x, 23)
    torch.testing.assert_close(got.double(), oracle(layer, x), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ODD)
def test_sizes_that_the_native_code_refuses_are_computed_in_torch(name: str) -> None:
    layer = make(ODD[name])
    x = inputs(layer.shape, 40)
    assert layer._kernels(x) is None
    torch.testing.assert_close(start(layer, "torch", a=3).feed("a", x).double(), oracle(layer, x), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_layer_of_transformers_between_its_projections(way: str) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    shape = SHAPES["three values a key"]
    config = qwen.Qwen3_5TextConfig(
        hidden_size=32,
        linear_num_key_heads=shape.num_key_heads,
        linear_num_value_heads=shape.num_value_heads,
        linear_key_head_dim=shape.key_head_dim,
        linear_value_head_dim=shape.value_head_dim,
        linear_conv_kernel_dim=shape.conv_kernel,
    )
    layer, peer = make(shape), qwen.Qwen3_5GatedDeltaNet(config, 0).eval()
    x = values(1, 100, 32)
    with torch.inference_mode():
        for seed, weight in enumerate(peer.parameters()):
            weight.copy_(0.4 * values(*weight.shape, seed=seed))
        peer.A_log.sub_(2)
        layer.conv.copy_(peer.conv1d.weight[:, 0].T)
        layer.decay.copy_(peer.A_log.exp())
        layer.dt_bias.copy_(peer.dt_bias)
        layer.norm.copy_(peer.norm.weight)
        projected = [p(x)[0] for p in (peer.in_proj_qkv, peer.in_proj_z, peer.in_proj_b, peer.in_proj_a)]
        got = peer.out_proj(start(layer, way, a=0).feed("a", torch.cat(projected, 1), 64))
        want = peer(x)[0]
    assert want.std() > 0.5
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_a_state_after_a_prefix_is_the_last_inputs_and_the_sum_of_what_was_written(way: str) -> None:
    layer = make(SHAPES["small"])
    x = inputs(layer.shape, 20)
    steps = start(layer, way, a=5)
    steps.feed("a", x, 7)
    history, state = steps.state("a")
    assert torch.equal(history, x[-3:, : layer.shape.num_channels])
    other = start(make(SHAPES["small"]), "torch", a=5)
    other.feed("a", x)
    torch.testing.assert_close(state, other.state("a")[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale", [0.0, 1e-20, 30.0, 1e4])
def test_extreme_inputs_give_what_float64_gives(scale: float, way: str) -> None:
    """Among them: vectors of length 0, gates that are shut, decays of 0 and of 1, values that silu takes to -0."""
    layer = make(SHAPES["small"])
    layer.decay[0] = 1e-9  # forgets nothing even where softplus is large
    x = scale * inputs(layer.shape, 40)
    got = start(layer, way, a=0).feed("a", x, 13)
    want = oracle(layer, x)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=1e-5 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_are_not_numbers_stay_in_their_sequence(way: str) -> None:
    layer = make(SHAPES["small"])
    x = inputs(layer.shape, 10)
    want = start(layer, way, a=0).feed("a", x)
    steps = start(layer, way, a=0, b=1)
    got = steps.step({"b": torch.full_like(x, math.nan), "a": x})
    assert got["b"].isnan().all() and torch.equal(got["a"], want)


# Bits


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads(), native.num_threads()
    torch.set_num_threads(request.param)
    native.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before[0])
    native.set_num_threads(before[1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["small", "wide", "three values a key"])
def test_a_rows_bits_do_not_depend_on_chunks(name: str, way: str, threads: int) -> None:
    layer = make(SHAPES[name])
    x = inputs(layer.shape)
    whole = start(layer, way, a=2)
    want = whole.feed("a", x)
    for chunk in (1, 7, 33, 64):
        steps = start(layer, way, a=4)
        assert torch.equal(steps.feed("a", x, chunk), want), f"chunks of {chunk}"
        assert all(torch.equal(x, y) for x, y in zip(steps.state("a"), whole.state("a"), strict=True))
        assert steps.untouched()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_a_rows_bits_do_not_depend_on_neighbours_slots_or_order(way: str, seed: int, threads: int) -> None:
    layer, rng = make(SHAPES["three values a key"]), np.random.default_rng(seed)
    rows = {name: inputs(layer.shape, n, seed=n) for name, n in (("a", 90), ("b", 41), ("c", 7), ("d", 64))}
    want = {name: start(layer, way, **{name: 0}).feed(name, x) for name, x in rows.items()}
    slots = rng.permutation(9)[:4].tolist()
    steps = start(layer, way, **dict(zip(rows, slots, strict=True)))
    got: dict[str, list[torch.Tensor]] = {name: [] for name in rows}
    while any(steps.lengths[name] < len(x) for name, x in rows.items()):
        names = [name for name in rng.permutation(list(rows)).tolist() if rng.random() < 0.8]
        cut = {n: rows[n][steps.lengths[n] : steps.lengths[n] + int(rng.integers(1, 40))] for n in names}
        cut = {name: x for name, x in cut.items() if len(x)}
        if cut:
            for name, out in steps.step(cut).items():
                got[name].append(out)
    for name, pieces in got.items():
        assert torch.equal(torch.cat(pieces), want[name]), name
    assert steps.untouched()


@pytest.mark.parametrize("way", WAYS)
def test_a_restored_snapshot_continues_with_the_same_bits(way: str) -> None:
    layer = make(SHAPES["small"])
    x = inputs(layer.shape, 50)
    want = start(layer, way, a=0).feed("a", x)
    steps = start(layer, way, a=0, b=7)
    steps.feed("a", x[:31])
    saved = steps.pool.snapshot(0)
    steps.feed("a", x[31:40])
    steps.pool.restore(7, saved)
    steps.lengths["b"] = 31
    got = steps.step({"b": x[31:], "a": x[40:]})
    assert torch.equal(got["b"], want[31:]) and torch.equal(got["a"], want[40:])


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_sequences_that_take_no_part_are_zeros_and_move_nothing(way: str) -> None:
    layer = make(SHAPES["small"])
    x = inputs(layer.shape, 9)
    want = start(layer, way, a=4).feed("a", x)
    steps = start(layer, way, a=4)
    padding = torch.full((1, x.shape[1]), math.nan)
    q_indptr, lens = ints(0, 1, 10, 10, 11), ints(0, 9, 3, 0)
    with steps.pool.advance(ints(0, 4, 1, 0), q_indptr, lens) as slots:
        out = layer(torch.cat([padding, x, padding]), DeltaStep(slots, q_indptr, steps.pool))
    assert torch.equal(out[1:10], want) and not out[[0, 10]].any()
    assert steps.untouched()


@pytest.mark.parametrize("way", WAYS)
def test_a_step_without_rows_moves_nothing(way: str) -> None:
    layer = make(SHAPES["small"])
    steps = start(layer, way, a=4)
    steps.feed("a", inputs(layer.shape, 5))
    before = steps.state("a")
    with steps.pool.advance(ints(4), ints(0, 0), ints(5)) as slots:
        assert layer(inputs(layer.shape, 0), DeltaStep(slots, ints(0, 0), steps.pool)).shape == (0, 64)
    assert all(torch.equal(x, y) for x, y in zip(before, steps.state("a"), strict=True)) and steps.untouched()


@pytest.mark.parametrize("way", WAYS)
def test_rows_may_lie_apart(way: str) -> None:
    layer = make(SHAPES["small"])
    x = inputs(layer.shape, 12)
    want = start(layer, way, a=0).feed("a", x)
    apart = F.pad(x, (3, 5), value=math.nan)[:, 3:-5]
    assert torch.equal(start(layer, way, a=0).feed("a", apart), want)
    turned = x.t().contiguous().t()
    assert torch.equal(start(layer, way, a=0).feed("a", turned), want)


# What the torch version stands on


def each_alone(function, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([function(x[i : i + 1].contiguous()) for i in range(len(x))])


FUNCTIONS = {"silu": F.silu, "sigmoid": torch.sigmoid, "exp": torch.exp, "softplus": F.softplus}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", [1, 4, 7, 32, 100, 515])
def test_by_rows_gives_a_row_the_same_bits_at_every_number_of_rows(name: str, width: int, threads: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return by_rows(FUNCTIONS[name], x)

    x = 3 * values(331, width)
    want = each_alone(function, x)
    torch.testing.assert_close(want, FUNCTIONS[name](x))
    for count in (2, 3, 65, 331):
        assert torch.equal(function(x[-count:]), want[-count:]), count
    wide = F.pad(x, (1, 2))
    assert torch.equal(function(wide[:, 1:-2]), want) and torch.equal(wide[:, 1:-2], x)


def test_a_row_longer_than_one_threads_share_is_still_the_same(threads: int) -> None:
    x = values(3, delta._SERIAL + 40)
    assert torch.equal(by_rows(torch.sigmoid, x), each_alone(lambda row: by_rows(torch.sigmoid, row), x))


def test_plain_functions_do_depend_on_the_number_of_rows() -> None:
    """Else by_rows would be for nothing."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this processor's exp may round the same in vectors and outside")
    x = 3 * values(333, 7)
    assert not torch.equal(F.silu(x), each_alone(F.silu, x))


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 31, 128])
def test_a_tree_sum_is_the_sum_whatever_lies_beside_it(length: int) -> None:
    x = values(6, length, 5)
    got = delta._tree_sum(x)
    torch.testing.assert_close(got, x.sum(1))
    assert torch.equal(delta._tree_sum(x[2:3, :, 4:]), got[2:3, 4:])


@pytest.mark.parametrize("kernel", [1, 2, 5])
def test_the_order_of_a_step_finds_each_input(kernel: int) -> None:
    """Ragged rows over shuffled slots, some sequences without a part, against lists."""
    counts, slots = [3, 0, 1, 6, 2], ints(4, 8, -1, 0, 7)
    q_indptr = np.cumsum([0, *counts]).astype(np.int32)
    order = delta._Order.of(DeltaStep(slots, q_indptr, None), kernel, torch.device("cpu"))  # type: ignore[arg-type]
    assert order.rows is not None and order.rows.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11]
    assert order.slots.tolist() == [0, 4, 7, 8] and order.widths == [3, 3, 2, 1, 1, 1]
    first = {0: 3, 4: 0, 7: 9, 8: 11}  # rows of each slot, counted without those of slot -1
    pool = [f"{slot} before {back}" for slot in (0, 4, 7, 8) for back in range(kernel - 1, 0, -1)] + list(range(11))
    for slot, count in ((0, 6), (4, 3), (7, 2)):
        whole = [f"{slot} before {back}" for back in range(kernel - 1, 0, -1)] + [first[slot] + i for i in range(count)]
        for i in range(count):
            assert [pool[j] for j in order.taps[first[slot] + i].tolist()] == whole[i : i + kernel]
        kept = order.kept[order.slots.tolist().index(slot)].tolist()
        assert [pool[j] for j in kept] == whole[len(whole) - (kernel - 1) :]
    assert order.times.tolist() == [3, 0, 9, 4, 1, 10, 5, 2, 6, 7, 8]


# Which way is taken


def test_native_code_is_taken_where_it_can_be(monkeypatch) -> None:
    layer = make(SHAPES["small"])
    x = inputs(layer.shape, 3)
    monkeypatch.delenv("PAGED_BACKEND", raising=False)
    assert isinstance(layer._kernels(x), native.Kernels)
    assert layer._kernels(x.bfloat16()) is None and layer._kernels(x.to("meta")) is None
    monkeypatch.setenv("PAGED_BACKEND", "reference")
    assert layer._kernels(x) is None


def test_rows_in_bf16_are_computed_in_fp32() -> None:
    layer = make(SHAPES["small"])
    x = inputs(layer.shape, 9).bfloat16()
    got = start(layer, "torch", a=0).feed("a", x)
    assert torch.equal(got, start(layer, "torch", a=0).feed("a", x.float()))


def test_a_state_has_the_history_of_each_layer_and_a_matrix_for_each_head() -> None:
    spec = delta_state_spec(SHAPES["three values a key"], 5)
    assert [(p.name, p.shape, p.dtype) for p in spec.planes] == [
        (CONV, (5, 2, 2 * 48 + 240), "fp32"),
        (DELTA, (5, 6, 24, 40), "fp32"),
    ]
    assert delta_state_spec(SHAPES["no convolution"], 1).planes[0].shape == (1, 0, 80)


@pytest.mark.parametrize("sizes", [(1, 1, 12, 8, 4), (1, 1, 8, 20, 4), (1, 1, 8, 8, 17)])
def test_the_native_layer_refuses_sizes_it_does_not_compute(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiples of 8, and the convolution have at most 16 taps"):
        native.DeltaLayer(*sizes, 0, 0, 0, 0, 1e-6)


def test_the_native_step_refuses_lengths_that_do_not_fit() -> None:
    layer = native.DeltaLayer(1, 1, 8, 8, 4, 0, 0, 0, 0, 1e-6)
    with pytest.raises(ValueError, match=r"S \+ 1 and S rows"):
        native.Kernels("").delta(layer, ints(0, 1), ints(0, 1), 0, 1, 0, 1, 0, 1, 0, 0)


def test_the_cuts_of_a_sequence_are_many(threads: int) -> None:
    """Every cut of a short sequence in two, and in three, in native code."""
    layer = make(SHAPES["one head"])
    x = inputs(layer.shape, 9)
    want = start(layer, WAYS[-1], a=0).feed("a", x)
    cuts = [(0, i, j, 9) for i in range(1, 9) for j in range(i, 9)]
    for cut in cuts:
        steps = start(layer, WAYS[-1], a=1)
        got = [steps.step({"a": x[i:j]})["a"] for i, j in pairwise(cut) if j > i]
        assert torch.equal(torch.cat(got), want), cut
