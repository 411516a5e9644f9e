"""The oracle: plain torch, one sequence at a time, in float64.

Every other backend is measured against this one, and it takes the place of a missing native module. It computes in
float64 and rounds once, so that its results hardly depend on how a step was cut. Slow: use it to check, not to serve.
"""

from __future__ import annotations

import torch

from paged.kv.storage import PageStorage
from paged.ops.checks import check_append, check_attend, check_lse, check_page_ids
from paged.ops.plan import AttendPlan, Int32, check_plan


class ReferenceBackend:
    """`Backend` in plain torch; works on every device and for every head size, ratio and page size."""

    name = "reference"

    def append(self, storage: PageStorage, layer: int, k: torch.Tensor, v: torch.Tensor, plan: AttendPlan) -> None:
        """Store the step's K and V rows at `plan.slots`; rows whose slot is -1 are skipped. O(T)."""
        check_append(storage, layer, k, v, plan)
        check_plan(plan, storage.num_pages)
        kept = torch.from_numpy(plan.slots >= 0)
        slots = torch.from_numpy(plan.slots)[kept].to(storage.device)
        pages, offsets = slots // plan.page_size, slots % plan.page_size
        kept = kept.to(storage.device)
        storage.write(layer, pages, offsets, k[kept], v[kept])

    def attend(
        self,
        q: torch.Tensor,
        storage: PageStorage,
        layer: int,
        plan: AttendPlan,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of `q [T, q_heads, head_dim]` over the pages, in float64; see `Backend.attend`.

        A row that sees no key (position -1) becomes 0, its lse -inf.
        """
        check_attend(q, storage, layer, plan, window, softcap)
        check_plan(plan, storage.num_pages)
        if lse is not None:
            check_lse(lse, q)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for s in range(plan.num_seqs):
            first, last = int(plan.q_indptr[s]), int(plan.q_indptr[s + 1])
            end = int(plan.kv_lens[s])
            if last == first:
                continue
            # Keys that no row of the sequence sees are never read: their pages may be gone, or hold NaN.
            start = max(0, end - (last - first) - window + 1) if window else 0
            k, v = self._gather(storage, layer, plan, s, start, end)
            rows, sums = self._attend_one(q[first:last], k, v, end - (last - first), start, scale, window, softcap)
            out[first:last] = rows.to(q.dtype)
            if lse is not None:
                lse[first:last] = sums.to(torch.float32)
        return out

    @staticmethod
    def _gather(
        storage: PageStorage, layer: int, plan: AttendPlan, s: int, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of positions start..end of sequence s, each float64 `[kv_heads, end - start, head_dim]`."""
        size = plan.page_size
        first_page = start // size
        ids = torch.from_numpy(plan.page_table[s, first_page : -(-end // size)]).long().to(storage.device)
        if len(ids) and int(ids.min()) < 0:
            raise ValueError(f"sequence {s} has a page id of {int(ids.min())} where its rows read; expected 0 or more")
        low = start - first_page * size
        planes = []
        for plane in storage.gather(layer, ids):
            rows = plane.transpose(0, 1).flatten(1, 2)
            planes.append(rows[:, low : low + end - start].to(torch.float64))
        return planes[0], planes[1]

    @staticmethod
    def _attend_one(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: int,
        start: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `q [n, q_heads, head_dim]` at `position..` against keys at `start..`; (output, lse `[n, q_heads]`).

        A row that sees a value which is not finite becomes NaN there, and no other row does.
        """
        n, heads, dim = q.shape
        kv_heads, keys = k.shape[:2]
        grouped = q.to(torch.float64).reshape(n, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        scores = (grouped @ k.unsqueeze(1).transpose(2, 3)) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(position, position + n, device=q.device)[:, None]
        key = torch.arange(start, start + keys, device=q.device)[None, :]
        seen = key <= at
        if window:
            seen &= key > at - window
        scores = scores.masked_fill(~seen, float("-inf"))
        sums = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - sums.unsqueeze(-1)).masked_fill(~seen, 0.0)
        lost = ~v.isfinite()
        out = weights @ v.masked_fill(lost, 0.0).unsqueeze(1)
        if lost.any():
            bad = (seen.to(torch.float64) @ lost.to(torch.float64)) > 0
            out = out.masked_fill(bad.unsqueeze(1), float("nan"))
        return out.permute(2, 0, 1, 3).reshape(n, heads, dim), sums.permute(2, 0, 1).reshape(n, heads)

    def copy_pages(self, storage: PageStorage, src: Int32, dst: Int32) -> None:
        """Copy whole pages `src[i]` to `dst[i]`."""
        check_page_ids(storage, src, dst)
        to = torch.from_numpy(dst).long().to(storage.device)
        storage.pages[to] = storage.pages[torch.from_numpy(src).long().to(storage.device)]

    def info(self) -> dict[str, str | int]:
        """Nothing beside the name: torch runs it, in float64."""
        return {}


def make_backend() -> ReferenceBackend:
    """The reference backend; it needs nothing but torch."""
    return ReferenceBackend()
