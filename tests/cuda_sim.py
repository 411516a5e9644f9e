"""The CUDA kernels on the CPU, as a backend named "cuda-sim": built from csrc/sim and csrc/cuda when first asked for.

The library lies in build/sim, in a folder named by the hash of its sources, so that a change of a kernel rebuilds it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from paged.ops.cuda import HEAD_SIZES, CudaBackend
from paged.ops.cuda_work import Cut

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-DPAGED_SIM", "-fno-strict-aliasing", "-ffp-contract=off", f"-I{CSRC}")
TYPES = ("Fp16", "Bf16")

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

    def configure(self, order: str = "forward", copies: str = "late", workers: int = 1, seed: int = 0) -> None:
        """`order` of the lanes: forward, reverse, random; cp.async takes effect late (at its wait) or early."""
        self._lib.paged_sim_configure(
            ("forward", "reverse", "random").index(order), ("late", "early").index(copies), workers, seed
        )

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


def sources(csrc: Path = CSRC) -> list[Path]:
    """Every file that the simulation is built from."""
    return sorted(p for folder in ("sim", "cuda") for p in (csrc / folder).rglob("*") if p.is_file())


def digest(*extra: object) -> str:
    """A name for one build: hash of the sources, this file and `extra`."""
    state = hashlib.sha256(repr(extra).encode())
    for path in (*sources(), Path(__file__)):
        state.update(path.name.encode() + path.read_bytes())
    return state.hexdigest()[:16]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


def instance_source(kind: str, head_size: int) -> str:
    """What CMake writes from instances/instance.cu.in."""
    text = (CSRC / "cuda" / "instances" / "instance.cu.in").read_text()
    return text.replace("@TYPE@", kind).replace("@HEAD_SIZE@", str(head_size))


@cache
def build() -> Path:
    """The shared library; compiled (about 40 s on two cores) where the cached one is of other sources."""
    folder = ROOT / "build" / "sim" / digest()
    target = folder / "libpaged_sim.so"
    if target.exists():
        return target
    work = folder / f"tmp-{os.getpid()}"
    work.mkdir(parents=True, exist_ok=True)
    units = [(path, []) for path in sorted((CSRC / "sim").glob("*.cpp"))]
    units.append((CSRC / "cuda" / "launch.cu", ["-x", "c++"]))
    for kind in TYPES:
        for size in HEAD_SIZES:
            path = work / f"{kind}_{size}.cpp"
            path.write_text(instance_source(kind, size))
            units.append((path, []))
    objects = [work / f"{path.stem}.o" for path, _ in units]
    with ThreadPoolExecutor(2) as pool:
        commands = [
            ["g++", *FLAGS, *flags, "-c", str(path), "-o", str(out)]
            for (path, flags), out in zip(units, objects, strict=True)
        ]
        list(pool.map(run, commands))
    library = work / target.name
    run(["g++", "-shared", *map(str, objects), "-o", str(library), "-pthread"])
    library.replace(target)  # two test workers may build at once: the last one wins, both files are equal
    shutil.rmtree(work, ignore_errors=True)
    return target


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
