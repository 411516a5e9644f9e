"""The thread pool under the native backend: forks, callers in parallel, sizes, and arrays that a step holds."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from cuda_cases import Case, Step, make
from op_backends import native

_native = pytest.importorskip("paged._native", reason="needs the compiled module")

CASE = Case((700, 90, 1030), (1, 40, 1), heads=6, kv_heads=2, kv_dtype="fp32", fp32=True)


@pytest.fixture(autouse=True)
def default_threads() -> Iterator[None]:
    threads = _native.num_threads()
    yield
    _native.set_num_threads(threads)


def attend(step: Step) -> torch.Tensor:
    step.plan.handle = None
    return native("baseline").attend(step.q, step.storage, step.layer, step.plan, scale=0.125)


def test_the_number_of_threads_is_at_least_one():
    for asked, got in ((0, 1), (-3, 1), (1, 1), (5, 5)):
        _native.set_num_threads(asked)
        assert _native.num_threads() == got


def test_a_pool_that_grows_and_shrinks_computes_the_same():
    step = make(CASE)
    _native.set_num_threads(1)
    want = attend(step)
    for threads in (2, 5, 3, 1, 8, 2):
        _native.set_num_threads(threads)
        for _ in range(5):
            assert torch.equal(attend(step), want)


def test_a_forked_child_starts_its_own_threads():
    _native.set_num_threads(3)
    step = make(CASE)
    want = attend(step)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that waits for its parent's threads ends here
        before = len(os.listdir("/proc/self/task"))
        same = all(torch.equal(attend(step), want) for _ in range(3))
        os._exit(0 if same and len(os.listdir("/proc/self/task")) == before + 2 else 1)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
    assert torch.equal(attend(step), want)


def test_callers_in_parallel_do_not_disturb_each_other():
    _native.set_num_threads(3)
    steps = [make(Case((700 + 50 * i, 30), (1, 9), kv_dtype="fp32", fp32=True, seed=i)) for i in range(4)]
    wants = [attend(step) for step in steps]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(40):
            if not torch.equal(attend(steps[i]), wants[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong and not any(t.is_alive() for t in threads)


def test_one_plan_may_be_used_by_callers_in_parallel():
    _native.set_num_threads(2)
    step = make(CASE)
    want = attend(step)
    results: list[bool] = []

    def work() -> None:
        for _ in range(30):
            out = native("baseline").attend(step.q, step.storage, step.layer, step.plan, scale=0.125)
            results.append(torch.equal(out, want))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(results) == 90 and all(results)


def test_a_plan_keeps_its_arrays_alive_and_unchanged():
    # B56: what was handed to step k stays as it was while step k + 1 is made and run.
    first, second = make(CASE), make(Case((40, 55), (1, 2), kv_dtype="fp32", fp32=True, seed=9))
    want = attend(first)
    arrays = [first.plan.q_indptr, first.plan.kv_lens, first.plan.page_table, first.plan.slots]
    copies = [a.copy() for a in arrays]
    attend(second)
    assert all(np.array_equal(a, b) for a, b in zip(arrays, copies, strict=True))
    handle = first.plan.handle
    out = torch.empty_like(want)
    pages = native("baseline").pages(first.storage)  # pyright: ignore
    del arrays
    first.plan.page_table = first.plan.kv_lens = first.plan.q_indptr = first.plan.slots = np.zeros(0, np.int32)  # pyright: ignore
    gc.collect()
    native("baseline").kernels.attend(  # pyright: ignore
        handle, pages, 1, first.q.data_ptr(), first.q.stride(0), 6, 0, out.data_ptr(), 0, 0.125, 0, 0.0
    )
    assert torch.equal(out, want)


def test_a_result_is_memory_of_its_own():
    step = make(CASE)
    one = attend(step)
    kept = one.clone()
    step.q.mul_(-1)
    two = attend(step)
    assert torch.equal(one, kept) and one.data_ptr() != two.data_ptr()


def test_a_storage_is_not_kept_alive_by_the_backend():
    step = make(CASE)
    attend(step)
    gone = weakref.ref(step.storage)
    del step
    gc.collect()
    assert gone() is None


def test_reading_covers_every_byte():
    data = torch.zeros(3_000_001, dtype=torch.uint8)
    kernels = _native.Kernels("baseline")
    assert kernels.read(data.data_ptr(), len(data)) == 0
    for at in (0, 31, 2**20, 3_000_000):
        data[at] = 1
        assert kernels.read(data.data_ptr(), len(data)) != 0
        data[at] = 0
