"""Kernels with a planted fault must fail: what the simulation and the sanitizers are trusted to find.

Each fault is an edit of the kernel that ships. If an edit no longer applies, the kernel has changed: move the fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import cuda_sim
import pytest
from cuda_cases import Case
from cuda_replay import COPIES, ORDERS, Fault, build, record, run

from paged.ops.cuda_work import Cut

pytestmark = [
    pytest.mark.slow,  # each compiles one kernel: 3 to 15 s
    pytest.mark.skipif(bool(cuda_sim.missing_compiler()), reason=cuda_sim.missing_compiler()),
]

# Two wide items, of four warps and with rows masked differently, over five tiles and two splits, in one walk; and one
# narrow item that folds. The simple one walks three splits.
TENSOR = (Case((290, 300), (40, 2), heads=2, kv_heads=1, page_size=7, spread=2.0), Cut(min_blocks=0))
SIMPLE = (Case((600,), (1,), heads=2, kv_heads=1, spread=2.0), Cut(min_blocks=0, simple=True))
RECORD = (Case((290, 300), (40, 2), heads=2, kv_heads=1, page_size=7, kv_dtype="int4", fp32=True), Cut(min_blocks=0))
WIDE_LATE = "cp_async_wait<1>();\n    __syncthreads();\n    if (tile < last) load(k_plane"
WIDE_V = "cp_async_wait<1>();\n    __syncthreads();\n    if (tile < last) load(v_plane"
SUMS = "#pragma unroll\n    for (int i = 0; i < kEach"


def without(text: str, part: str) -> str:
    assert part in text
    return text.replace(part, "")


def tensor(old: str, new: str) -> Fault:
    return Fault("tensor.cuh", old, new)


def simple(old: str, new: str) -> Fault:
    return Fault("simple.cuh", old, new)


def records(old: str, new: str) -> Fault:
    return Fault("records.cuh", old, new)


BARRIERS = {
    "tensor before the next K": tensor(WIDE_LATE, without(WIDE_LATE, "__syncthreads();\n")),
    "tensor before the next V": tensor(WIDE_V, without(WIDE_V, "__syncthreads();\n")),
    "tensor before the first tile": tensor(
        "__syncthreads();\n  if (last >= first) load(k_plane", "if (last >= first) load(k_plane"
    ),
    "simple after the bases": simple("__syncthreads();  // the bases are there", "// the bases are there"),
    "simple before the sums": simple(f"__syncthreads();\n{SUMS}", SUMS),
}

FAULTS = {
    **BARRIERS,
    "no wait for K": tensor(WIDE_LATE, without(WIDE_LATE, "cp_async_wait<1>();\n")),
    "no wait for V": tensor(WIDE_V, without(WIDE_V, "cp_async_wait<1>();\n")),
    "K into the slot that is read": tensor("tile + 1, (slot + 2) % 3", "tile + 1, (slot + 1) % 3"),
    "V before its slot is free": tensor(WIDE_V, "if (tile < last) load(v_plane, tile + 1, slot);\n    " + WIDE_V),
    "a row of bases too few": tensor("bases[tile % 2 * kTile + tid", "bases[tid"),
    "the mask one key late": tensor("key > position[c / 2]", "key > position[c / 2] + 1"),
    "the window one key wide": tensor("key < low[c / 2]", "key < low[c / 2] - 1"),
    "fragments of K exchanged": tensor("T::mma(s[2 * n], a, b[0], b[1])", "T::mma(s[2 * n], a, b[0], b[2])"),
    "fragments of V not transposed": tensor("ldmatrix_trans(b, v_row", "ldmatrix(b, v_row"),
    "a fold that forgets": tensor("*sum = folded ?", "*sum = false ?"),
    "a row's sum over two lanes": tensor("l[r] += __shfl_xor_sync(kAllLanes, l[r], 2);", ""),
    "warps folded out of place": simple("from += kGroup * (kDim + 2);", "from += kDim + 2;"),
    "halves of a byte exchanged": records("word >> 4 * i & 15", "word >> 4 * (i ^ 1) & 15"),
    "fifth bits in reverse": records("fifth >> i & 1", "fifth >> (7 - i) & 1"),
    "values off by one": records("kValue ? 8 : 16", "kValue ? 7 : 16"),
    "the scales of K for V": records("const int group = kValue * kGroups<kDim> + ", "const int group = "),
}


def case_of(fault: Fault) -> tuple[Case, Cut]:
    return {"tensor.cuh": TENSOR, "simple.cuh": SIMPLE, "records.cuh": RECORD}[fault.file]


def outcomes(fault: Fault, folder: Path) -> Iterator[tuple[int, str]]:
    """(exit code, line) of each order and copy mode in turn."""
    case, cut = case_of(fault)
    if "low[c" in fault.old:
        case = Case((290, 300), (40, 2), heads=2, kv_heads=1, window=70, spread=2.0)
    record(case, cut, folder / "case")
    program = build("none", ((case.kv_dtype.capitalize(), 64),), fault)
    for order in ORDERS:
        for copies in COPIES:
            done = run(program, folder / "case", order, copies)
            yield done.returncode, f"{order} {copies}: {done.stdout.strip()}"


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_kernel_with_a_fault_differs_from_the_answer(fault: Fault, tmp_path: Path) -> None:
    lines = []
    for code, line in outcomes(fault, tmp_path):
        if code:  # some order and mode finds it: enough, the suite runs all of them
            return
        lines.append(line)
    raise AssertionError("\n".join(lines))


@pytest.mark.parametrize("kind, case", [("tensor", TENSOR), ("simple", SIMPLE), ("records", RECORD)])
def test_the_same_steps_without_a_fault_are_equal(kind: str, case: tuple[Case, Cut], tmp_path: Path) -> None:
    record(*case, tmp_path / "case")
    program = build("none", ((case[0].kv_dtype.capitalize(), 64),))
    for order in ORDERS:
        for copies in COPIES:
            done = run(program, tmp_path / "case", order, copies)
            assert done.returncode == 0, (kind, order, copies, done.stdout)


@pytest.mark.parametrize("fault", BARRIERS.values(), ids=BARRIERS.keys())
def test_thread_sanitizer_names_a_missing_barrier(fault: Fault, tmp_path: Path) -> None:
    record(*case_of(fault), tmp_path / "case")
    done = run(build("thread", (("Fp16", 64),), fault), tmp_path / "case")
    if "FATAL: ThreadSanitizer" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[0])
    assert done.returncode == 66, done.stdout + done.stderr[-2000:]
    assert "data race" in done.stderr


MEETINGS = {
    "a shuffle in a branch": (
        tensor(
            "top[r] = fmaxf(top[r], __shfl_xor_sync(kAllLanes, top[r], 2));",
            "if (tid % 32 < 24) top[r] = fmaxf(top[r], __shfl_xor_sync(kAllLanes, top[r], 2));",
        ),
        r"24 of 128 threads wait in a warp op that never completes|with mask ffffffff while thread",
    ),
    "a shuffle that eight lanes never reach": (
        tensor(
            "const int split = item",
            "if (tid >= 120) l[0] += __shfl_xor_sync(kAllLanes, l[0], 1);\n  const int split = item",
        ),
        r"8 of 128 threads wait in a warp op that never completes \(block 0,0,0: thread 120 in __shfl_xor_sync",
    ),
    "two masks": (
        tensor(
            "l[r] += __shfl_xor_sync(kAllLanes, l[r], 1);",
            "l[r] += __shfl_xor_sync(tid % 32 < 16 ? 0xFFFFu : kAllLanes, l[r], 1);",
        ),
        r"with mask ffffffff while thread \d+ is in \w+ with mask|with mask 0000ffff while|never completes",
    ),
    "a barrier in a branch": (
        tensor("    if (!folds) continue;", "    if (tid < 64) __syncthreads();\n    if (!folds) continue;"),
        r"never completes|FAULT",
    ),
    "a mask without the lane itself": (
        simple("__shfl_xor_sync(kAllLanes, dot, bit)", "__shfl_xor_sync(0xFFFEu, dot, bit)"),
        r"calls __shfl_xor_sync with mask 0000fffe that lacks its own lane",
    ),
}


@pytest.mark.parametrize("fault, message", MEETINGS.values(), ids=MEETINGS.keys())
def test_lanes_that_do_not_meet_end_the_launch_with_a_message(fault: Fault, message: str, tmp_path: Path) -> None:
    for code, line in outcomes(fault, tmp_path):
        assert code == 2, line
        assert re.search(message, line), line


def test_address_sanitizer_finds_a_page_id_past_the_pool(tmp_path: Path) -> None:
    record(*TENSOR, tmp_path / "case", bad_page=True)
    done = run(build("address"), tmp_path / "case")
    assert done.returncode == 67, done.stdout
    assert "heap-buffer-overflow" in done.stderr


def test_address_sanitizer_finds_shared_memory_that_is_too_small(tmp_path: Path) -> None:
    record(*TENSOR, tmp_path / "case")
    fault = tensor("return kBases + kRing + (kQueryStays", "return kBases + kRing - 16 + (kQueryStays")
    done = run(build("address", (("Fp16", 64),), fault), tmp_path / "case")
    assert done.returncode == 67, done.stdout
    assert "heap-buffer-overflow" in done.stderr


def test_undefined_behaviour_sanitizer_finds_a_load_that_is_not_aligned(tmp_path: Path) -> None:
    record(*TENSOR, tmp_path / "case")
    fault = tensor("kStride = kDim + 8", "kStride = kDim + 4")
    done = run(build("address", (("Fp16", 64),), fault), tmp_path / "case")
    assert done.returncode == 67, done.stdout
    assert "misaligned address" in done.stderr
