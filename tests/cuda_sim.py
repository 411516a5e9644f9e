"""The CUDA kernels on the CPU, as a backend named "cuda-sim": built from csrc/sim and csrc/cuda when first asked for.

Objects lie in build/sim, named by the hash of what they are made of, so that a change of a kernel rebuilds it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from paged.ops.cuda import HEAD_SIZES, CudaBackend
from paged.ops.cuda_work import Cut

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-DPAGED_SIM", "-fno-strict-aliasing", "-ffp-contract=off")
TYPES = ("Fp16", "Bf16", "Int8", "Int4")
CACHE = ROOT / "build" / "sim"

_P, _I, _L, _F, _B = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_bool


def _record(name: str, **fields: Any) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


# The structs of csrc/cuda/api.h.
Pool = _record("Pool", pages=_P, num_pages=_L, layers=_I, kv_heads=_I, page_size=_I, head_dim=_I, type=_I)
Rows = _record("Rows", k=_P, v=_P, slots=_P, num_rows=_L, fp32=_B)
Query = _record("Query", q=_P, out=_P, lse=_P, heads=_I, fp32=_B, scale=_F, window=_I, softcap=_F)
Work = _record(
    "Work",
    **dict.fromkeys(("wide", "narrow", "simple"), _P),
    **dict.fromkeys(("num_wide", "num_narrow", "num_simple"), _I),
    **dict.fromkeys(("rows", "positions", "tables", "part_base", "merges"), _P),
    num_merges=_I,
    partials=_P,
    folds=_B,
)


class SimModule:
    """The functions of `paged._cuda` over the simulation; streams are ignored. RuntimeError tells of a fault."""

    Pool, Rows, Query, Work = Pool, Rows, Query, Work

    def __init__(self, path: Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        self._lib.paged_sim_message.restype = ctypes.c_char_p
        self._lib.paged_sim_copy_pages.argtypes = [_P, _P, _P, _I]
        self._lib.paged_sim_rotate.argtypes = [_P, _L, _I]

    def configure(self, order: str = "forward", copies: str = "late", workers: int = 1, seed: int = 0) -> None:
        """`order` of the lanes: forward, reverse, random; cp.async takes effect late (at its wait) or early."""
        self._lib.paged_sim_configure(
            ("forward", "reverse", "random").index(order), ("late", "early").index(copies), workers, seed
        )

    def rotate(self, values: int, count: int, size: int, stream: int) -> None:
        self._check(self._lib.paged_sim_rotate(values, count, size))

    def append(self, pool: Any, layer: int, rows: Any, stream: int) -> None:
        self._check(self._lib.paged_sim_append(ctypes.byref(pool), layer, ctypes.byref(rows)))

    def copy_pages(self, pool: Any, src: int, dst: int, count: int, stream: int) -> None:
        self._check(self._lib.paged_sim_copy_pages(ctypes.byref(pool), src, dst, count))

    def attend(self, pool: Any, layer: int, query: Any, work: Any, stream: int) -> None:
        self._check(self._lib.paged_sim_attend(ctypes.byref(pool), layer, ctypes.byref(query), ctypes.byref(work)))

    def _check(self, code: int) -> None:
        if code == -1:
            raise RuntimeError(self._lib.paged_sim_message().decode())
        if code:
            raise RuntimeError(f"the launcher returned {code}")


def missing_compiler() -> str:
    """Why the simulation cannot be built here; empty if it can."""
    return "" if shutil.which("g++") else "the CUDA simulation needs g++, which is not on the path"


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


def instance_source(kind: str, head_size: int) -> str:
    """What CMake writes from instances/instance.cu.in."""
    text = (CSRC / "cuda" / "instances" / "instance.cu.in").read_text()
    return text.replace("@TYPE@", kind).replace("@HEAD_SIZE@", str(head_size))


@cache
def _digest_of(root: Path) -> bytes:
    """Hash of every file that a unit under `root` may include."""
    state = hashlib.sha256()
    for path in sorted(p for folder in ("sim", "cuda", "include") for p in (root / folder).rglob("*") if p.is_file()):
        state.update(path.name.encode() + path.read_bytes())
    return state.digest()


@contextmanager
def _made_once(target: Path) -> Iterator[Path | None]:
    """A path to write `target` to, or None if it is there: test workers that want one file make it once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            yield None
            return
        new = target.with_suffix(".new")
        yield new
        new.replace(target)  # only a whole file ever has the name


def compile_unit(text: str, flags: tuple[str, ...] = FLAGS, root: Path = CSRC) -> Path:
    """The object file of a C++ text that includes files of `root`; from the cache if nothing changed."""
    name = hashlib.sha256(repr((text, flags)).encode() + _digest_of(root)).hexdigest()[:20]
    target = CACHE / f"{name}.o"
    with _made_once(target) as new:
        if new is not None:
            source = target.with_suffix(".cpp")
            source.write_text(text)
            run(["g++", *flags, f"-I{root}", "-c", str(source), "-o", str(new)])
    return target


def link(name: str, objects: list[Path], flags: tuple[str, ...] = ()) -> Path:
    """`objects` linked into a file whose name begins with `name`."""
    target = CACHE / f"{name}-{hashlib.sha256(repr((objects, flags)).encode()).hexdigest()[:20]}"
    with _made_once(target) as new:
        if new is not None:
            run(["g++", *map(str, objects), "-o", str(new), "-pthread", *flags])
    return target


@cache
def build() -> Path:
    """The shared library with every instance; compiled (about 40 s of one core) where its sources changed."""
    units = [f'#include "{unit}"\n' for unit in ("sim/fiber.cpp", "sim/simt.cpp", "sim/library.cpp", "cuda/launch.cu")]
    units += [instance_source(kind, size) for kind in TYPES for size in HEAD_SIZES]
    with ThreadPoolExecutor(2) as pool:
        return link("libpaged_sim", list(pool.map(compile_unit, units)), ("-shared",))


def module() -> SimModule:
    """The simulation as a module; skips are the caller's (see `missing_compiler`)."""
    return SimModule(build())


def make_backend(
    cut: Cut | None = None, order: str = "forward", copies: str = "late", workers: int = 1, seed: int = 0
) -> CudaBackend:
    """The backend "cuda-sim". The settings of lanes and copies are those of the last backend made."""
    sim = module()
    sim.configure(order, copies, workers, seed)
    return CudaBackend(sim, cut or Cut(min_blocks=8), name="cuda-sim")
