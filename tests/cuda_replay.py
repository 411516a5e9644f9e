"""The CUDA kernels in a process of their own: recorded steps, sanitizers, and kernels with planted faults."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from cuda_cases import TOLERANCE, Case, answer, make
from cuda_sim import CSRC, FLAGS, TYPES, compile_unit, instance_source, link

from paged.kv.codecs.int4 import rotate, rotation_size
from paged.ops.cuda_work import Cut, build_work, table_offsets

REPLAY = Path(__file__).resolve().parent / "cuda" / "replay.cpp"
SANITIZERS = {
    "none": (),
    "address": ("-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-g1", "-fsanitize=thread", "-DPAGED_SIM_TSAN"),
}
ORDERS, COPIES = ("forward", "reverse", "random"), ("late", "early")


@dataclass(frozen=True)
class Fault:
    """A planted fault: in `file` of csrc/cuda, occurrence `nth` of `old` becomes `new`."""

    file: str
    old: str
    new: str
    nth: int = 0


def record(case: Case, cut: Cut, path: Path, *, bad_page: bool = False) -> None:
    """Write a step, its work and its answer. With `bad_page` the last sequence's first page id is one too large."""
    step = make(case)
    storage, plan, options = step.storage, step.plan, step.options()
    work = build_work(
        plan, heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, window=case.window, cut=cut
    )
    tables, offsets = table_offsets(plan)
    want_out, want_lse = answer(step)
    # The step's own rows are appended by the kernel: they are taken out of the pages first. One page is copied.
    after = storage.pages.clone()
    spare = np.setdiff1d(np.arange(storage.num_pages), plan.page_table)[:1].astype(np.int32)
    source = plan.page_table[-1, -(-case.kv_lens[-1] // case.page_size) - 1 :][:1].astype(np.int32)
    after[int(spare[0])] = after[int(source[0])]
    lens = list(enumerate(zip(case.kv_lens, case.q_lens, strict=True)))
    k, v = (torch.cat([rows[s][n - q :] for s, (n, q) in lens]).float() for rows in step.given)
    pages, at = torch.from_numpy(plan.slots // case.page_size), torch.from_numpy(plan.slots % case.page_size)
    lost = torch.full_like(k, float("nan"))
    storage.write(step.layer, pages, at, lost, lost)
    q = step.q.float()
    if case.kv_dtype == "int4":  # as the backend hands them over
        size = rotation_size(case.head_dim)
        k, q, options = rotate(k), rotate(q), {**options, "scale": options["scale"] / size}
    if bad_page:
        tables[offsets[-1]] = storage.num_pages
    rows = plan.num_rows
    arrays = {
        "pages": storage.pages.view(torch.uint8).numpy(),
        "want_pages": after.view(torch.uint8).numpy(),
        "k": k.contiguous().numpy(),
        "v": v.contiguous().numpy(),
        "slots": plan.slots,
        "from": source,
        "to": spare,
        "q": q.contiguous().numpy(),
        "out": np.full((rows, case.heads, case.head_dim), np.nan, np.float32),
        "lse": np.full((rows, case.heads), np.nan, np.float32),
        "want_out": want_out.float().numpy(),
        "want_lse": want_lse.float().numpy(),
        "items": work.items,
        "merges": work.merges,
        "rows": work.rows,
        "positions": plan.positions,
        "tables": tables,
        "part_base": work.part_base,
        "partials": np.full(work.num_partials * case.heads * (case.head_dim + 2), np.nan, np.float32),
    }
    numbers = {
        "num_pages": storage.num_pages,
        "layers": case.layers,
        "kv_heads": case.kv_heads,
        "page_size": case.page_size,
        "head_dim": case.head_dim,
        "type": TYPES.index(case.kv_dtype.capitalize()),
        "layer": step.layer,
        "num_rows": rows,
        "copies": 1,
        "heads": case.heads,
        **options,
        "num_wide": work.num_wide,
        "num_narrow": work.num_narrow,
        "num_simple": work.num_simple,
        "num_merges": len(work.merges),
        "folds": int(work.folds),
        "tolerance": TOLERANCE[case.kv_dtype] * float(want_out.abs().max()),
    }
    with path.open("wb") as file:
        for name, value in numbers.items():
            file.write(f"{name} number {float(value)!r}\n".encode())
        for name, array in arrays.items():
            file.write(f"{name} bytes {array.nbytes}\n".encode() + array.tobytes() + b"\n")


@cache
def build(sanitizer: str = "none", instances: tuple[tuple[str, int], ...] = (("Fp16", 64),), *faults: Fault) -> Path:
    """The replay program with the kernels of `instances`, and `faults` planted in a copy of their sources.

    Only the instances are compiled with the faults: launchers and merge are those of the other programs.
    """
    sizes = sorted({size for _, size in instances})
    own = (f"-DPAGED_HEAD_SIZES={','.join(map(str, sizes))}", *SANITIZERS[sanitizer])
    flags = (*FLAGS, *own)
    # ThreadSanitizer must not see the runtime itself: it watches the kernels, in the order that the runtime declares.
    plain = tuple(f for f in flags if f != "-fsanitize=thread")
    missing = [(kind, size) for kind in TYPES for size in sizes if (kind, size) not in instances]
    jobs = [(f'#include "{unit}"\n', plain, CSRC) for unit in ("sim/fiber.cpp", "sim/simt.cpp")]
    jobs += [('#include "cuda/launch.cu"\n', flags, CSRC), (REPLAY.read_text(), flags, CSRC)]
    jobs += [(_missing_source(missing), flags, CSRC)]
    with ThreadPoolExecutor(2) as pool, _planted(faults) as root:
        jobs += [(instance_source(*instance), flags, root) for instance in instances]
        objects = list(pool.map(lambda job: compile_unit(*job), jobs))
    return link("replay", objects, own)


@contextmanager
def _planted(faults: tuple[Fault, ...]) -> Iterator[Path]:
    """csrc itself, or a copy of it with the faults."""
    if not faults:
        yield CSRC
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for part in ("sim", "cuda", "include"):
            shutil.copytree(CSRC / part, root / part)
        for fault in faults:
            target = root / "cuda" / fault.file
            parts = target.read_text().split(fault.old)
            assert len(parts) > fault.nth + 1, f"{fault.file} does not hold {fault.old!r} {fault.nth + 1} times"
            head, tail = fault.old.join(parts[: fault.nth + 1]), fault.old.join(parts[fault.nth + 1 :])
            target.write_text(head + fault.new + tail)
        yield root


def _missing_source(instances: list[tuple[str, int]]) -> str:
    """Stand-ins for the instances that a launcher names and a small build leaves out."""
    lines = ['#include "cuda/attention.cuh"', "namespace paged::cuda {"]
    lines.append("template <class T, int kDim> int attend_items(const AttendParams&, int, Stream);")
    for kind, size in instances:
        lines.append(f"template <> int attend_items<{kind}, {size}>(const AttendParams&, int, Stream) {{ return 1; }}")
    return "\n".join([*lines, "}", ""])


def run(program: Path, case: Path, order: str = "forward", copies: str = "late") -> subprocess.CompletedProcess[str]:
    """Replay one recorded step. Exit code 0: equal to the answer; 66: ThreadSanitizer, 67: another sanitizer."""
    command = [str(program), str(case), str(ORDERS.index(order)), str(COPIES.index(copies)), "1"]
    if shutil.which("setarch"):  # ThreadSanitizer wants addresses where it expects them
        command = ["setarch", "-R", *command]
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0:exitcode=67", "UBSAN_OPTIONS": "exitcode=67"}
    env["TSAN_OPTIONS"] = "exitcode=66"
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, errors="replace")
