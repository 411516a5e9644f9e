"""Steps for the CUDA kernels, made from a few numbers: pages, plan, query, and a dense float64 answer.

The answer is computed here from dense arrays, with nothing of `paged` in it but the plan's definition.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from poison import poison

from paged.kv.storage import PageStorage
from paged.ops.plan import AttendPlan, make_plan
from paged.spec import KVSpec

TOLERANCE = {"fp16": 1e-3, "bf16": 1e-2, "int8": 2e-3, "int4": 2e-3}


@dataclass(frozen=True)
class Case:
    """One step. `shared`: tokens at the start that all sequences hold on the same pages."""

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    kv_dtype: str = "fp16"
    window: int = 0
    softcap: float = 0.0
    fp32: bool = False
    shared: int = 0
    seed: int = 0
    layers: int = 2
    spread: float = 1.0

    def __str__(self) -> str:
        changed = [
            f"{name}={value}"
            for name, value in self.__dict__.items()
            if name not in ("kv_lens", "q_lens") and value != getattr(Case, name)
        ]
        lens = "+".join(f"{k}:{q}" for k, q in zip(self.kv_lens, self.q_lens, strict=True))
        return " ".join([lens, *changed]).replace(" ", ",")


@dataclass
class Step:
    """A case with its memory. `k` and `v` are the dense rows as the pages hold them, decoded where they are records;
    one `[kv_len, kv_heads, head_dim]` a sequence."""

    case: Case
    storage: PageStorage
    plan: AttendPlan
    q: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    given: list[list[torch.Tensor]]  # k and v as they were before they were stored

    @property
    def layer(self) -> int:
        return self.case.layers - 1

    def options(self) -> dict[str, float]:
        c = self.case
        return {"scale": c.head_dim**-0.5, "window": c.window, "softcap": c.softcap}

    def empty_lse(self) -> torch.Tensor:
        return torch.full(self.q.shape[:2], float("nan"))


def make(case: Case) -> Step:
    """Pages in a random order, NaN wherever nothing was written; page ids that no row may read are -1."""
    c, rng = case, torch.Generator().manual_seed(case.seed)
    kv_lens = np.array(c.kv_lens, np.int32)
    columns = -(-kv_lens // c.page_size)
    shared_pages = c.shared // c.page_size
    num_pages = int(columns.sum()) + 2
    storage = PageStorage(KVSpec(c.layers, c.kv_heads, c.head_dim), num_pages, c.page_size, c.kv_dtype)
    poison(storage)
    table = np.full((len(kv_lens), int(columns.max(initial=1))), -1, np.int32)
    free = iter(np.random.default_rng(case.seed).permutation(num_pages))
    for s, count in enumerate(columns):
        table[s, :count] = [next(free) for _ in range(count)]
        if s:
            table[s, :shared_pages] = table[0, :shared_pages]
    plain = storage.codec.dtype.is_floating_point
    dtype = storage.codec.dtype if plain else torch.float32
    dense: list[list[torch.Tensor]] = [[], []]
    for rows in dense:
        for s, length in enumerate(kv_lens):
            x = (torch.randn(int(length), c.kv_heads, c.head_dim, generator=rng) * c.spread).to(dtype)
            if s and c.shared:
                x[: shared_pages * c.page_size] = rows[0][: shared_pages * c.page_size]
            rows.append(x)
    given = [list(rows) for rows in dense]
    for s, length in enumerate(kv_lens):
        at = np.arange(length)
        ids, offsets = torch.from_numpy(table[s, at // c.page_size]).long(), torch.from_numpy(at % c.page_size)
        storage.write(c.layers - 1, ids, offsets, dense[0][s], dense[1][s])
        if not plain:
            for rows, plane in zip(dense, storage.layer(c.layers - 1), strict=True):
                rows[s] = plane[ids, :, offsets]
    q_indptr = np.concatenate([[0], np.cumsum(c.q_lens)]).astype(np.int32)
    plan = make_plan(c.page_size, q_indptr, kv_lens, table)
    if c.window:  # what lies in front of every row's window is gone
        for s, length in enumerate(kv_lens):
            first = max(0, int(length) - c.q_lens[s] - c.window + 1)
            table[s, : first // c.page_size] = -1
    q = torch.randn(plan.num_rows, c.heads, c.head_dim, generator=rng) * c.spread
    return Step(case, storage, plan, q if c.fp32 else q.to(dtype), dense[0], dense[1], given)


def answer(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, lse) of every row in float64; a row without keys gives 0 and -inf."""
    c = step.case
    group = c.heads // c.kv_heads
    out = torch.zeros(step.q.shape, dtype=torch.float64)
    lse = torch.full(step.q.shape[:2], float("-inf"), dtype=torch.float64)
    row = 0
    for s, length in enumerate(c.kv_lens):
        k, v = (x[s].double().repeat_interleave(group, dim=1) for x in (step.k, step.v))
        for i in range(c.q_lens[s]):
            position = length - c.q_lens[s] + i
            low = max(0, position - c.window + 1) if c.window else 0
            if position >= 0:
                scores = torch.einsum("hd,khd->hk", step.q[row].double(), k[low : position + 1]) * c.head_dim**-0.5
                if c.softcap:
                    scores = c.softcap * torch.tanh(scores / c.softcap)
                lse[row] = torch.logsumexp(scores, dim=1)
                out[row] = torch.einsum("hk,khd->hd", torch.softmax(scores, dim=1), v[low : position + 1])
            row += 1
    return out, lse


def check(case: Case, out: torch.Tensor, lse: torch.Tensor, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Finite first (a NaN passes any comparison of maxima), then the tolerance of the stored type."""
    assert out.isfinite().all(), f"{case}: {int((~out.isfinite()).sum())} values are not finite"
    tolerance = TOLERANCE[case.kv_dtype]
    scale = max(float(want[0].abs().max()), 1e-3)
    error = float((out.double() - want[0]).abs().max()) / scale
    assert error < tolerance, f"{case}: relative error {error:.2e}"
    empty = want[1] == float("-inf")
    assert torch.equal(lse == float("-inf"), empty)
    if not empty.all():
        error = float((lse.double() - want[1])[~empty].abs().max())
        assert error < tolerance * 2, f"{case}: lse is off by {error:.2e}"


# What the lane orders, the copy modes, the cuts and the sanitizers are each run on: small, and every branch once.
CORE = [
    Case((5,), (1,)),
    Case((300, 17, 64), (1, 1, 1), heads=3, kv_heads=1),
    Case((290, 33), (40, 33), heads=8, kv_heads=2, page_size=7),
    Case((270, 600), (3, 70), heads=2, kv_heads=2, kv_dtype="bf16", window=129, softcap=15.0, page_size=48),
    Case((290, 270, 257), (1, 5, 2), shared=256, fp32=True, heads=4, kv_heads=1),
]


def with_dim(case: Case, head_dim: int) -> Case:
    return replace(case, head_dim=head_dim)
