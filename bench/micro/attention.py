"""Attention over pages against torch and against the read bound of the machine.

    python bench/micro/attention.py [--threads 2] [--seconds 3] [--isa avx2] [--json]
                                    [--only decode,prefill,cascade,binding]

decode    one new token a sequence, all pages in a shuffled order; against the fastest of three torch forms (their
          gather counted), and against plain vector loads of as many bytes, on the same threads, by turns: once from
          front to back, once page by page in the order of the page table
prefill   a chunk of 512 tokens over 1500 cached ones, against torch's attention over contiguous keys
cascade   32 sequences on one prefix of 1000 tokens, read once or once each
binding   a call for a step without rows: checks, addresses, allocation of the result

Against torch, calls run in blocks: five of one, five of the next, and again from the start until the time is over. The
call in front of each block is not counted, because the threads of whoever ran before may still spin then, on cores
that the next one needs. A time is the median of all counted calls, a ratio that of two medians; of torch's forms the
one with the lowest median counts.

All else takes turns call by call on the same threads, and each figure is the minimum over its turns. The pages of a
layer are read once in a while only (the layers take turns), so that they come from memory, not from the cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median

import numpy as np
import torch
from common import best, by_blocks, by_turns
from torch.nn.functional import scaled_dot_product_attention as sdpa

from paged import _native
from paged.kv.storage import PageStorage
from paged.ops.cpu import CpuBackend
from paged.ops.plan import AttendPlan, make_plan
from paged.spec import KVSpec

PAGE = 16
COLD_BYTES = 256 << 20  # of pages at least, so that no layer stays in a cache


@dataclass
class Setup:
    """Sequences of `length` tokens in shuffled pages of several layers, with one or more new rows each."""

    seqs: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    kv_dtype: str
    rows: int = 1
    storage: PageStorage = field(init=False)
    table: np.ndarray = field(init=False)
    q: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        columns = -(-self.length // PAGE)
        width = torch.float32.itemsize if self.kv_dtype == "fp32" else 2
        layer_bytes = self.seqs * columns * PAGE * self.kv_heads * self.head_dim * 2 * width
        layers = -(-COLD_BYTES // layer_bytes) if self.rows == 1 else 1
        spec = KVSpec(layers, self.kv_heads, self.head_dim)
        self.storage = PageStorage(spec, self.seqs * columns, PAGE, self.kv_dtype)
        CpuBackend().pages(self.storage)  # large pages are asked for before the memory is written
        for start in range(0, self.storage.num_pages, 64):
            part = self.storage.pages[start : start + 64]
            part.copy_(torch.randn(part.shape))
        ids = np.random.default_rng(0).permutation(self.seqs * columns)
        self.table = ids.reshape(self.seqs, columns).astype(np.int32)
        self.q = torch.randn(self.seqs * self.rows, self.heads, self.head_dim)

    @property
    def layers(self) -> int:
        return self.storage.spec.layers

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def bytes_read(self) -> int:
        """K and V of one layer of all sequences."""
        return 2 * self.seqs * self.length * self.kv_heads * self.head_dim * self.storage.codec.dtype.itemsize

    def plan(self) -> AttendPlan:
        q_indptr = np.arange(self.seqs + 1, dtype=np.int32) * self.rows
        return make_plan(PAGE, q_indptr, np.full(self.seqs, self.length, np.int32), self.table)

    def name(self) -> str:
        return f"{self.seqs} x {self.heads}:{self.kv_heads} x {self.head_dim} x {self.length} {self.kv_dtype}"


def torch_forms(s: Setup) -> dict[str, Callable[[int], torch.Tensor]]:
    """Three ways of torch to attend one row a sequence over pages: gather, then attend."""
    ids = torch.from_numpy(s.table).long()
    q = s.q.to(s.storage.codec.dtype)

    def gather(layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (x[rows].transpose(-4, -3).flatten(-3, -2)[..., : s.length, :] for x in s.storage.layer(layer))
        return k, v

    def enable_gqa(layer: int) -> torch.Tensor:
        k, v = gather(layer, ids)
        return sdpa(q.unsqueeze(2), k, v, enable_gqa=True, scale=s.scale)

    def folded(layer: int) -> torch.Tensor:
        k, v = gather(layer, ids)
        return sdpa(q.unflatten(1, (s.kv_heads, -1)), k, v, scale=s.scale)

    def one_by_one(layer: int) -> torch.Tensor:
        out = torch.empty_like(q)
        for i in range(s.seqs):
            k, v = gather(layer, ids[i])
            out[i] = sdpa(q[i].unflatten(0, (s.kv_heads, -1)), k, v, scale=s.scale).flatten(0, 1)
        return out

    return {"enable_gqa": enable_gqa, "folded": folded, "one_by_one": one_by_one}


def decode(backend: CpuBackend, s: Setup, seconds: float) -> dict[str, float | str]:
    plan, order = s.plan(), cycle(range(s.layers))
    pages, kernels = s.storage.pages, backend.kernels
    layer_bytes = s.storage.page_bytes // s.layers
    addresses = pages.data_ptr() + s.table.ravel().astype(np.int64) * s.storage.page_bytes
    part = pages.numel() * pages.element_size() // s.layers

    def ours() -> torch.Tensor:
        return backend.attend(s.q, s.storage, next(order), plan, scale=s.scale)

    def in_table_order() -> None:
        kernels.read_each(addresses + next(order) * layer_bytes, layer_bytes)

    calls = {
        "ours": ours,
        "read": lambda: kernels.read(pages.data_ptr() + next(order) * part, part),
        "read_pages": in_table_order,
    }
    times = {name: best(t) for name, t in by_turns(calls, seconds).items()}
    forms: dict[str, Callable[[], torch.Tensor]] = {
        name: (lambda form=form: form(next(order))) for name, form in torch_forms(s).items()
    }
    forms["ours"] = ours
    against = {name: median(t) for name, t in by_blocks(forms, seconds).items()}
    fastest = min((t, name) for name, t in against.items() if name != "ours")
    want = torch_forms(s)["folded"](0).flatten(1, -2).float()
    error = float((backend.attend(s.q, s.storage, 0, plan, scale=s.scale) - want).abs().max() / want.abs().max())
    return {
        "case": s.name(),
        "ms": times["ours"] * 1e3,
        "gb_per_s": s.bytes_read / times["ours"] / 1e9,
        "read_gb_per_s": part / times["read"] / 1e9,
        "share_of_read": times["read"] * s.bytes_read / part / times["ours"],
        "share_of_read_in_table_order": times["read_pages"] * s.bytes_read / part / times["ours"],
        "median_ms": against["ours"] * 1e3,
        "torch_median_ms": fastest[0] * 1e3,
        "torch_form": fastest[1],
        "times_torch": fastest[0] / against["ours"],
        "difference_from_torch": error,
    }


def prefill(backend: CpuBackend, heads: int, kv_heads: int, head_dim: int, kv_dtype: str, seconds: float) -> dict:
    s = Setup(1, heads, kv_heads, head_dim, 2012, kv_dtype, rows=512)
    plan = s.plan()
    ids = torch.from_numpy(s.table[0]).long()
    k, v = (x[ids].transpose(0, 1).flatten(1, 2)[:, :2012].contiguous()[None] for x in s.storage.layer(0))
    q = s.q.to(k.dtype).transpose(0, 1).contiguous()[None]
    mask = torch.ones(512, 2012, dtype=torch.bool).tril(1500)
    calls = {
        "ours": lambda: backend.attend(s.q, s.storage, 0, plan, scale=s.scale),
        "torch": lambda: sdpa(q, k, v, attn_mask=mask, enable_gqa=True, scale=s.scale),
    }
    times = {name: median(t) for name, t in by_blocks(calls, seconds).items()}
    operations = 4 * heads * head_dim * (512 * 1500 + 512 * 513 // 2)
    return {
        "case": f"512 over 1500, {heads}:{kv_heads} x {head_dim} {kv_dtype}",
        "median_ms": times["ours"] * 1e3,
        "torch_median_ms": times["torch"] * 1e3,
        "times_torch": times["torch"] / times["ours"],
        "gflop_per_s": operations / times["ours"] / 1e9,
    }


def cascade(backend: CpuBackend, kv_dtype: str, heads: int, kv_heads: int, head_dim: int, seconds: float) -> dict:
    s = Setup(32, heads, kv_heads, head_dim, 1010, kv_dtype)
    s.table[:, : 1000 // PAGE] = s.table[0, : 1000 // PAGE]
    plans = []
    for on in (False, True):
        _native.set_cascade(on)
        plans.append(s.plan())
        backend.attend(s.q, s.storage, 0, plans[-1], scale=s.scale)

    def call(on: bool) -> Callable[[], torch.Tensor]:
        order = cycle(range(s.layers))

        def attend() -> torch.Tensor:
            _native.set_cascade(on)
            return backend.attend(s.q, s.storage, next(order), plans[on], scale=s.scale)

        return attend

    same = torch.equal(call(False)(), call(True)())
    times = {name: best(t) for name, t in by_turns({"off": call(False), "on": call(True)}, seconds).items()}
    _native.set_cascade(True)
    return {
        "case": f"32 on 1000 shared tokens, {heads}:{kv_heads} x {head_dim} {kv_dtype}",
        "ms": times["on"] * 1e3,
        "each_ms": times["off"] * 1e3,
        "gain": times["off"] / times["on"],
        "same_bits": same,
    }


def binding(backend: CpuBackend, seconds: float) -> dict[str, float]:
    storage = PageStorage(KVSpec(2, 3, 64), 4, PAGE)
    plan = make_plan(PAGE, np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int32))
    q, k = torch.empty(0, 9, 64), torch.empty(0, 3, 64)

    def attend() -> None:
        for _ in range(1000):
            backend.attend(q, storage, 1, plan, scale=0.125)

    def append() -> None:
        for _ in range(1000):
            backend.append(storage, 1, k, k, plan)

    def kernel() -> None:
        pages, handle, call = backend.pages(storage), plan.handle, backend.kernels.attend
        for _ in range(1000):
            call(handle, pages, 1, q.data_ptr(), 576, 9, 0, q.data_ptr(), 0, 0.125, 0, 0.0)

    times = by_turns({"attend": attend, "append": append, "kernel": kernel}, seconds)
    return {f"{name}_us": best(t) * 1e3 for name, t in times.items()}


def show(title: str, rows: list[dict]) -> None:
    print(f"\n{title}")
    for row in rows:
        print("  " + "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=_native.num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="for each comparison")
    parser.add_argument("--only", default="decode,prefill,cascade,binding")
    parser.add_argument("--isa", default="", help="the instruction set (default: the widest there is)")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    args = parser.parse_args()
    _native.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    backend = CpuBackend(args.isa)
    result: dict[str, object] = {"isa": backend.isa, "threads": args.threads, "torch": torch.__version__}
    print(" ".join(f"{k} {v}" for k, v in result.items()))
    parts = args.only.split(",")
    types = ("fp32", "fp16", "bf16")
    if "decode" in parts:
        shapes = ((32, 9, 3, 64, 1000), (8, 32, 8, 128, 2000))
        result["decode"] = [decode(backend, Setup(*shape, kv_dtype=t), args.seconds) for shape in shapes for t in types]
        show("decode", result["decode"])
    if "prefill" in parts:
        shapes = ((9, 3, 64), (32, 8, 128))
        result["prefill"] = [prefill(backend, *shape, t, args.seconds) for shape in shapes for t in types]
        show("prefill", result["prefill"])
    if "cascade" in parts:
        shapes = ((9, 3, 64), (32, 8, 128))
        result["cascade"] = [cascade(backend, t, *shape, args.seconds) for shape in shapes for t in types]
        show("cascade", result["cascade"])
    if "binding" in parts:
        result["binding"] = binding(backend, args.seconds)
        show("binding (microseconds a call)", [result["binding"]])
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
