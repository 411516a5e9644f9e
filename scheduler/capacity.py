"""How many pages an engine takes when nobody says."""

from __future__ import annotations

import os

from paged.kv.storage import PageStorage
from paged.models.base import LanguageModel

CPU_SHARE = 0.25  # of the machine's memory; pages that are never written stay untouched
GPU_SHARE = 0.85  # of what the weights leave free
GPU_STATE_SHARE = 0.1  # of the same, for checkpoints


def memory_bytes(model: LanguageModel, gpu_share: float = GPU_SHARE) -> int:
    """Bytes that the pages may take on the model's device."""
    if model.device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(model.device)
        return int(free * gpu_share)
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * CPU_SHARE)


def default_state_bytes(model: LanguageModel) -> int:
    """Bytes that checkpoints of recurrent state may take, their pages included."""
    return memory_bytes(model, GPU_STATE_SHARE)


def default_num_pages(model: LanguageModel, page_size: int, kv_dtype: str, max_num_seqs: int) -> int:
    """As many pages as the memory share holds, but no more than `max_num_seqs` sequences of full length can use."""
    codec = model.default_kv_dtype() if kv_dtype == "auto" else kv_dtype
    page_bytes = PageStorage(model.spec, 1, page_size, codec, "cpu", model.input_size).page_bytes
    groups = model.spec.view().num_groups  # of a looped model: those of its default depth
    useful = max_num_seqs * groups * -(-model.max_seq_len // page_size)
    return max(groups, min(memory_bytes(model) // page_bytes, useful))
