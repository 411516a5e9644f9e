"""What the binding refuses: sizes, numbers and shapes that no kernel could take. Addresses it has to believe."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

_native = pytest.importorskip("paged._native", reason="needs the compiled module")

MEMORY = torch.zeros(1 << 16)
ADDRESS = MEMORY.data_ptr()


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def pages(num_pages: int = 4, layers: int = 1, kv_heads: int = 2, page_size: int = 16, head_dim: int = 64, dtype=0):
    return _native.Pages(ADDRESS, num_pages, layers, kv_heads, page_size, head_dim, dtype)


def plan(page_size: int = 16):
    return _native.Plan(page_size, i32(0, 1), i32(20), np.zeros((1, 2), np.int32), np.array([3]))


def attend(page_size: int = 16, layer: int = 0, q_heads: int = 2, dtype: int = 0, window: int = 0) -> None:
    kernels = _native.Kernels("baseline")
    kernels.attend(plan(page_size), pages(), layer, ADDRESS, 64, q_heads, dtype, ADDRESS, 0, 0.1, window, 0.0)


def append(page_size: int = 16, layer: int = 0, dtype: int = 0) -> None:
    _native.Kernels("baseline").append(plan(page_size), pages(), layer, ADDRESS, 64, ADDRESS, 64, dtype)


def delta(*q_indptr: int) -> None:
    layer = _native.DeltaLayer(1, 1, 8, 8, 4, ADDRESS, ADDRESS, ADDRESS, ADDRESS, 1e-6)
    slots = np.zeros(len(q_indptr) - 1, np.int32)
    places = (ADDRESS, 64) * 3
    _native.Kernels("baseline").delta(layer, i32(*q_indptr), slots, *places, ADDRESS, ADDRESS)


def lookup():
    found = _native.PageLookup(4, 1)
    found.insert(5, -1, i32(1, 2, 3, 4))
    return found


def match(parent: int, num_pages: int, nodes: int) -> None:
    node_tokens, node_parent = np.zeros((nodes, 4), np.int32), np.full(nodes, -1, np.int32)
    lookup().match(parent, i32(1, 2, 3, 4), num_pages, node_tokens, node_parent)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: attend(q_heads=0), "q_heads must be a multiple"),
        (lambda: attend(q_heads=3), "q_heads must be a multiple"),
        (lambda: plan().describe(1, 2, 0), "q_heads must be a multiple"),
        (lambda: plan().describe(1, 0, 0), "q_heads must be a multiple"),
        (lambda: attend(page_size=64), "one page_size"),
        (lambda: attend(layer=1), "layer must be"),
        (lambda: attend(layer=-1), "layer must be"),
        (lambda: attend(dtype=3), "fp32, fp16 or bf16"),
        (lambda: attend(window=-1), "window must be"),
        (lambda: append(page_size=64), "one page_size"),
        (lambda: append(layer=10**6), "layer must be"),
        (lambda: append(dtype=9), "fp32, fp16 or bf16"),
        (lambda: pages(kv_heads=0), "sizes must be positive"),
        (lambda: pages(page_size=0), "sizes must be positive"),
        (lambda: pages(head_dim=512), "multiple of 8 and at most 256"),
        (lambda: pages(head_dim=4), "multiple of 8 and at most 256"),
        (lambda: pages(head_dim=-8), "multiple of 8 and at most 256"),
        (lambda: pages(dtype=9), "dtype 0 to 4"),
        (lambda: delta(1, 2), "rise from 0"),
        (lambda: delta(0, 10, 3), "rise from 0"),
        (lambda: _native.DeltaLayer(0, 1, 8, 8, 4, 0, 0, 0, 0, 1e-6), "must be positive"),
        (lambda: _native.DeltaLayer(3, 2, 8, 8, 4, 0, 0, 0, 0, 1e-6), "multiple of its key heads"),
        (lambda: _native.DeltaLayer(1, 1, 8, 8, 0, 0, 0, 0, 0, 1e-6), "must be positive"),
        (lambda: lookup().insert(0, 10**9, i32(1, 2, 3, 4)), "a parent must be a node"),
        (lambda: lookup().insert_all(i32(-1), i32(-1), i32(1, 2, 3, 4).reshape(1, 4)), "a number from 0 on"),
        (lambda: lookup().insert_all(i32(0), i32(9), i32(1, 2, 3, 4).reshape(1, 4)), "a parent must be a node"),
        (lambda: match(10**9, 1, 6), "a parent must be a node"),
        (lambda: match(-1, 1, 5), "the parent of every node"),
        (lambda: match(-1, 2**62, 6), "num_pages pages"),
    ],
)
def test_what_no_kernel_could_take_is_refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_fewer_threads_than_asked_do_the_work() -> None:
    """A container may allow a process only so many threads: those that run share the work."""
    code = """
import resource, numpy as np, torch
from paged import _native
memory = torch.arange(4000 * 32, dtype=torch.float32)
pages = _native.Pages(memory.data_ptr(), 4000, 1, 1, 2, 8, 0)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)  # room for a dozen stacks
_native.set_num_threads(1000)
source = np.arange(2000, dtype=np.int32)
for _ in range(20):
    _native.copy_pages(pages, source, source + 2000)
assert torch.equal(memory[:64000], memory[64000:])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
