"""Page ids whose byte offsets pass 2^31 and 2^32 elements (B05), in memory that is mostly never touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from op_backends import BACKENDS, every_backend, fresh_seed

from paged.kv.storage import PageStorage
from paged.ops.plan import make_plan
from paged.spec import KVSpec

# kv heads 8, head 128, page 16: 32,768 elements a page and layer for K and V.
LIMITS = [(1, 65_536), (1, 131_072), (24, 5_461)]


@every_backend
@pytest.mark.parametrize("layers, limit", LIMITS)
def test_offsets_are_64_bits_wide(name: str, layers: int, limit: int):
    try:
        storage = PageStorage(KVSpec(layers, 8, 128), limit + 20, 16, "fp16")
    except RuntimeError as error:
        pytest.skip(f"this machine does not give the address space: {error}")
    torch.manual_seed(fresh_seed() % 2**31)
    high = np.array([[limit + 19, limit - 6, limit + 3, limit - 1]], np.int32)
    rows, q = torch.randn(2, 60, 8, 128), torch.randn(60, 16, 128)
    backend = BACKENDS[name]()
    results = []
    for table in (np.array([[0, 1, 2, 3]], np.int32), high):
        plan = make_plan(16, np.array([0, 60], np.int32), np.array([60], np.int32), table)
        backend.append(storage, layers - 1, rows[0], rows[1], plan)
        results.append(backend.attend(q, storage, layers - 1, plan, scale=0.1))
    assert torch.equal(results[0], results[1]) and results[0].isfinite().all()
    backend.copy_pages(storage, high[0, :1].copy(), np.array([9], np.int32))
    assert torch.equal(storage.pages[9, layers - 1], storage.pages[limit + 19, layers - 1])


@every_backend
def test_page_ids_around_16_bits(name: str):
    storage = PageStorage(KVSpec(1, 1, 8), 65_550, 1)
    ids = np.arange(65_530, 65_546, dtype=np.int32)[None]
    plan = make_plan(1, np.array([0, 16], np.int32), np.array([16], np.int32), ids)
    rows = torch.arange(16.0)[:, None, None].expand(16, 1, 8).contiguous()
    backend = BACKENDS[name]()
    backend.append(storage, 0, rows * 0, rows, plan)
    out = backend.attend(torch.ones(16, 1, 8), storage, 0, plan, scale=1.0)
    assert torch.allclose(out[:, 0, 0], torch.arange(16.0) / 2)  # equal weights: the mean of 0..p


@every_backend
def test_a_storage_that_grew_is_bound_anew(name: str):
    storage = PageStorage(KVSpec(1, 1, 8), 2, 4)
    backend = BACKENDS[name]()
    plan = make_plan(4, np.array([0, 3], np.int32), np.array([3], np.int32), np.array([[1]], np.int32))
    rows = torch.randn(3, 1, 8)
    backend.append(storage, 0, rows, rows, plan)
    before = backend.attend(rows, storage, 0, plan, scale=1.0)
    storage.grow(50)
    assert torch.equal(backend.attend(rows, storage, 0, plan, scale=1.0), before)
    far = make_plan(4, np.array([0, 3], np.int32), np.array([3], np.int32), np.array([[49]], np.int32))
    backend.append(storage, 0, rows, rows, far)
    assert torch.equal(backend.attend(rows, storage, 0, far, scale=1.0), before)
