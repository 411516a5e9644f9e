"""A row has the same bits whatever surrounds it: batch, chunk, pages, threads, splits, shared prefixes (promise 1)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_backends import every_isa, fresh_seed, native
from poison import poison, refill

from paged.kv.storage import PageStorage
from paged.ops.plan import AttendPlan, make_plan
from paged.spec import KVSpec

_native = pytest.importorskip("paged._native", reason="needs the compiled module")

LENGTH = 1100  # three splits of 512 positions
SHAPES = [(64, 9, 3, "fp32"), (128, 8, 2, "bf16"), (80, 4, 4, "fp16"), (40, 16, 2, "fp32"), (64, 5, 1, "bf16")]
SHAPES += [(64, 9, 3, "int8"), (64, 9, 3, "int4"), (128, 8, 2, "int4"), (80, 4, 4, "int8"), (24, 5, 1, "int4")]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_window = pytest.mark.parametrize("window", [0, 300])


@pytest.fixture(autouse=True)
def default_settings() -> Iterator[None]:
    threads, cascade = _native.num_threads(), _native.cascade()
    yield
    _native.set_num_threads(threads)
    _native.set_cascade(cascade)


class Sequence:
    """Rows of one sequence of LENGTH positions in shuffled pages, and the attention of any part of them."""

    def __init__(self, isa: str, shape: tuple[int, int, int, str], page_size: int = 16, seed: int | None = None):
        self.head_dim, self.heads, self.kv_heads, kv_dtype = shape
        self.backend = native(isa)
        self.page_size = page_size
        rng = np.random.default_rng(fresh_seed() if seed is None else seed)
        torch.manual_seed(int(rng.integers(2**31)))
        pages = -(-LENGTH // page_size)
        self.storage = PageStorage(KVSpec(1, self.kv_heads, self.head_dim), pages + 5, page_size, kv_dtype)
        poison(self.storage)
        self.table = rng.permutation(pages + 5)[:pages].astype(np.int32)
        self.q = torch.randn(LENGTH, self.heads, self.head_dim)
        self.kv = torch.randn(2, LENGTH, self.kv_heads, self.head_dim)
        self.backend.append(self.storage, 0, self.kv[0], self.kv[1], self.plan((0, LENGTH)))

    def plan(self, *parts: tuple[int, int]) -> AttendPlan:
        """Rows `first..end` of the sequence as many sequences, one for each of `parts`, in one step."""
        q_indptr = np.concatenate([[0], np.cumsum([end - first for first, end in parts])]).astype(np.int32)
        kv_lens = np.array([end for _, end in parts], np.int32)
        return make_plan(self.page_size, q_indptr, kv_lens, np.tile(self.table, (len(parts), 1)))

    def attend(self, *parts: tuple[int, int], window: int = 0, softcap: float = 0.0) -> torch.Tensor:
        q = torch.cat([self.q[first:end] for first, end in parts])
        plan = self.plan(*parts)
        return self.backend.attend(q, self.storage, 0, plan, scale=0.1, window=window, softcap=softcap)


@every_isa
@every_shape
@every_window
def test_decodes_and_chunks_of_any_size_equal_the_whole_prompt(isa: str, shape: tuple, window: int):
    s = Sequence(isa, shape)
    _native.set_num_threads(1)
    whole = s.attend((0, LENGTH), window=window)
    for first, end in (
        (0, 1),
        (63, 64),
        (64, 65),
        (511, 512),
        (512, 513),
        (1099, 1100),
        (100, 107),
        (430, 580),
        (900, 1100),
    ):
        assert torch.equal(s.attend((first, end), window=window), whole[first:end]), (first, end)


@every_isa
@every_shape
@every_window
@pytest.mark.parametrize("threads", [2, 7])
def test_threads_and_the_splits_that_they_bring_change_nothing(isa: str, shape: tuple, window: int, threads: int):
    s = Sequence(isa, shape)
    parts = ((1099, 1100), (600, 601), (700, 730))
    _native.set_num_threads(1)
    whole, mixed = s.attend((0, LENGTH), window=window), s.attend(*parts, window=window)
    _native.set_num_threads(threads)
    alone = s.plan((1099, 1100))
    s.backend.attend(s.q[1099:], s.storage, 0, alone, scale=0.1)
    assert alone.handle.describe(s.heads, s.kv_heads, 0)["merges"] > 0  # the keys were divided among threads
    assert torch.equal(s.attend((0, LENGTH), window=window), whole)
    assert torch.equal(s.attend(*parts, window=window), mixed)
    assert torch.equal(s.attend((1099, 1100), window=window), whole[1099:])


@every_isa
@every_shape
def test_neighbours_change_nothing(isa: str, shape: tuple):
    s = Sequence(isa, shape)
    _native.set_cascade(False)
    alone = s.attend((777, 778))
    for parts in (((777, 778), (0, 1)), ((5, 900), (777, 778)), ((777, 778),) * 9, ((776, 779),)):
        out = s.attend(*parts)
        row = sum(end - first for first, end in parts[: parts.index((777, 778))]) if (777, 778) in parts else 1
        assert torch.equal(out[row : row + 1], alone), parts


@every_isa
@every_shape
def test_page_size_and_page_ids_change_nothing(isa: str, shape: tuple):
    seed = fresh_seed()
    want = Sequence(isa, shape, 16, seed).attend((1000, LENGTH), softcap=3.0)
    for page_size in (1, 5, 64, 256):
        assert torch.equal(Sequence(isa, shape, page_size, seed).attend((1000, LENGTH), softcap=3.0), want), page_size


@every_isa
@every_shape
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("prefix", [128, 500, 1024])
def test_reading_shared_pages_once_changes_nothing(isa: str, shape: tuple, threads: int, prefix: int):
    s = Sequence(isa, shape)
    rng = np.random.default_rng(fresh_seed())
    count = 6
    shared = prefix // 16
    tails = rng.choice(np.setdiff1d(s.table, s.table[:shared]), size=(count, 3))
    table = np.concatenate([np.tile(s.table[:shared], (count, 1)), tails], axis=1).astype(np.int32)
    refill(s.storage, 0.5)
    q_lens = rng.integers(1, 4, count)
    kv_lens = (shared * 16 + rng.integers(3, 40, count)).astype(np.int32)
    q = torch.randn(int(q_lens.sum()), s.heads, s.head_dim)
    results = []
    for cascade in (False, True):
        _native.set_cascade(cascade)
        _native.set_num_threads(threads)
        plan = make_plan(16, np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32), kv_lens, table)
        lse = torch.empty(len(q), s.heads)
        results.append((s.backend.attend(q, s.storage, 0, plan, scale=0.1, lse=lse), lse))
        sharers = plan.handle.describe(s.heads, s.kv_heads, 0)["shared_seqs"]
        assert sharers >= count - 1 if cascade else sharers == 0
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@every_isa
def test_a_forked_page_table_shares_only_what_is_the_same(isa: str):
    # Three branches: all share 10 pages, two of them 20. Whatever is read together, each row equals itself alone.
    s = Sequence(isa, SHAPES[0])
    table = np.tile(s.table[:24], (3, 1))
    table[2, 10:] = s.table[30:44]
    table[1, 20:] = s.table[50:54]
    lens = np.array([380, 370, 384], np.int32)
    q = torch.randn(3, s.heads, s.head_dim)
    together = s.backend.attend(q, s.storage, 0, make_plan(16, np.arange(4, dtype=np.int32), lens, table), scale=0.1)
    for i in range(3):
        plan = make_plan(16, np.array([0, 1], np.int32), lens[i : i + 1], table[i : i + 1].copy())
        assert torch.equal(s.backend.attend(q[i : i + 1], s.storage, 0, plan, scale=0.1)[0], together[i])


@every_isa
def test_denormals_of_the_calling_thread_change_nothing(isa: str):
    s = Sequence(isa, SHAPES[0])
    s.storage.pages[:, :, 1] *= 1e-38
    want = s.attend((1000, LENGTH))
    assert want.abs().max() < 1e-37
    torch.set_flush_denormal(True)
    try:
        got = s.attend((1000, LENGTH))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got, want)


@st.composite
def ragged(draw: st.DrawFn) -> dict:
    parts = []
    for _ in range(draw(st.integers(1, 5))):
        end = draw(st.integers(1, LENGTH))
        parts.append((max(0, end - draw(st.integers(1, 40))), end))
    return {"parts": parts, "window": draw(st.sampled_from([0, 1, 17, 64, 513])), "threads": draw(st.integers(1, 5))}


@every_isa
@settings(max_examples=25, deadline=None)
@given(step=ragged())
def test_any_ragged_step_gives_each_row_its_own_bits(isa: str, step: dict):
    s = _kept(isa)
    _native.set_num_threads(1)
    whole = s.attend((0, LENGTH), window=step["window"])
    _native.set_num_threads(step["threads"])
    out = s.attend(*step["parts"], window=step["window"])
    assert torch.equal(out, torch.cat([whole[first:end] for first, end in step["parts"]]))


_sequences: dict[str, Sequence] = {}


def _kept(isa: str) -> Sequence:
    if isa not in _sequences:
        _sequences[isa] = Sequence(isa, (16, 4, 2, "fp32"))
    return _sequences[isa]
