"""What `paged info` prints: versions, the backend in use, and what an engine's pool looks like."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scheduler.engine import Engine


def platform_info() -> dict[str, Any]:
    """Versions, the backend that computes attention, and how matrix products keep rows apart."""
    import numpy
    import torch

    import paged
    from paged.models.linear import row_mode
    from paged.ops.dispatch import get_backend

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = get_backend(device)
    facts: dict[str, Any] = {
        "paged": paged.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "device": device,
        "torch_threads": torch.get_num_threads(),
        "backend": backend.name,
    }
    facts.update({f"backend_{name}": value for name, value in backend.info().items()})
    facts["matrix_rows"] = row_mode()
    return facts


def engine_info(engine: Engine) -> dict[str, Any]:
    """A model's geometry and the pool that an engine made for it."""
    model, pool, storage = engine.model, engine.pool, engine.pool.storage
    assert storage is not None
    return {
        "model": model.name,
        "vocab_size": model.vocab_size,
        "max_seq_len": model.max_seq_len,
        "layers": model.spec.layers,
        "page_groups": model.spec.num_groups,
        "kv_heads": model.spec.num_kv_heads,
        "head_dim": model.spec.head_dim,
        "kv_dtype": storage.kv_dtype,
        "page_size": pool.page_size,
        "page_bytes": storage.page_bytes,
        "bytes_per_token": storage.page_bytes * model.spec.num_groups // pool.page_size,
        "num_pages": pool.num_pages,
        "pool_tokens": pool.num_pages // model.spec.num_groups * pool.page_size,
        **model.extra_info(),
    }
