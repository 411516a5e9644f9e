"""What nvcc makes of the kernels: registers, spills, and the instructions that they were written for.

No time is measured here; counts do not depend on the machine. The disassembler is optional:
`pip install nvidia-cuda-nvdisasm`.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from cuda_sim import CSRC, ROOT, instance_source

from paged.ops.cuda_work import wide_rows

NVCC = shutil.which("nvcc") or ""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not NVCC, reason="nvcc is not on the path")]

ARCH = "sm_90"
INSTANCES = [("Fp16", 64), ("Bf16", 80), ("Fp16", 96), ("Bf16", 128), ("Fp16", 256), ("Int8", 64), ("Int4", 64)]

# The most registers a thread may take on sm_90, of the 65536 that all threads of a processor share: up to 168 leave
# room for three blocks of 128 threads, up to 255 for two. A narrow item has 32 threads only.
SIMPLE_CEILINGS = {1: 128, 2: 160, 3: 168}


def ceilings(head_dim: int) -> dict[str, int]:
    most = {f"simple {group}": registers for group, registers in SIMPLE_CEILINGS.items()}
    return most | {"tensor 1": 255, f"tensor {wide_rows(head_dim) // 16}": 168 if head_dim == 64 else 255}


@dataclass
class Kernel:
    registers: int = 0
    spilled: int = -1
    stack: int = -1
    sass: Counter[str] = field(default_factory=Counter)


def name_of(mangled: str) -> str:
    """ "tensor 4" for tensor_kernel with 4 warps, "simple 2" for simple_kernel of a group of 2."""
    found = re.search(r"(\w*?\d)(tensor|simple|merge|append|append_records|rotate|copy)_kernel(.*)", mangled)
    assert found, mangled
    numbers = re.findall(r"Li(\d+)E", found[3])
    return f"{found[2]} {numbers[-1]}" if numbers else found[2]


@cache
def disassembler() -> str:
    found = shutil.which("nvdisasm")
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        found = found or next((str(p) for p in Path(folder).rglob("bin/nvdisasm")), None)
    return found or ""


def compile_cubin(source: str, folder: Path) -> tuple[Path, dict[str, Kernel]]:
    """The cubin of a text, and what ptxas says of each kernel."""
    unit, cubin = folder / "unit.cu", folder / "unit.cubin"
    unit.write_text(source)
    command = [NVCC, "-std=c++17", "-O3", f"-arch={ARCH}", "-cubin", "-Xptxas", "-v", f"-I{CSRC}", str(unit)]
    done = subprocess.run([*command, "-o", str(cubin)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels: dict[str, Kernel] = {}
    current = Kernel()
    for line in (done.stdout + done.stderr).splitlines():
        if found := re.search(r"Compiling entry function '(\w+)'", line):
            current = kernels[name_of(found[1])] = Kernel()
        if found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            current.stack, current.spilled = int(found[1]), int(found[2]) + int(found[3])
        if found := re.search(r"Used (\d+) registers", line):
            current.registers = int(found[1])
    return cubin, kernels


def count_sass(cubin: Path, kernels: dict[str, Kernel]) -> None:
    done = subprocess.run([disassembler(), "-c", str(cubin)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    current = Counter()
    for line in done.stdout.splitlines():
        if found := re.match(r"\s*\.section\s+\.text\.(\w+)", line):
            current = kernels[name_of(found[1])].sass
        if found := re.search(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", line):
            current[found[1]] += 1


def count(kernel: Kernel, prefix: str) -> int:
    return sum(n for name, n in kernel.sass.items() if name == prefix or name.startswith(prefix + "."))


@pytest.fixture(scope="module", params=INSTANCES, ids=lambda i: f"{i[0]}-{i[1]}")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("cubin")
    cubin, kernels = compile_cubin(instance_source(*request.param), folder)
    return request.param, cubin, kernels


def test_no_kernel_spills_and_each_keeps_to_its_registers(compiled) -> None:
    (_, head_dim), _, kernels = compiled
    most = ceilings(head_dim)
    assert set(kernels) == set(most)
    for name, kernel in kernels.items():
        assert kernel.spilled == 0 and kernel.stack == 0, (name, kernel)
        assert 0 < kernel.registers <= most[name], (name, kernel.registers)


def test_the_kernels_hold_the_instructions_they_were_written_for(compiled) -> None:
    if not disassembler():
        pytest.skip("nvdisasm is not here (pip install nvidia-cuda-nvdisasm)")
    (kind, head_dim), cubin, kernels = compiled
    record = kind.startswith("Int")  # decoded on the way into shared memory, from words of 4 bytes
    count_sass(cubin, kernels)
    for name, kernel in kernels.items():
        assert count(kernel, "LDL") == count(kernel, "STL") == 0, name  # nothing lives in local memory
        if name.startswith("tensor"):
            tile = 32 if head_dim > 128 else 64
            # `tile` keys by head_dim, twice: queries times keys, probabilities times values, each 16 x 8 x 16 a step.
            # The path for values that are not finite holds as many again.
            products = 2 * (tile // 8) * (head_dim // 16)
            assert count(kernel, "HMMA.16816.F32") + count(kernel, "HMMA.16816.F32.BF16") >= products, name
            # K and V: 16 bytes from global to shared memory
            assert count(kernel, "LDGSTS.E.BYPASS.128") >= 4 or record, name
            assert count(kernel, "LDGSTS") == 0 or not record, name
            assert count(kernel, "LDSM") >= products // 2, name
            assert count(kernel, "LDG.E.128") > 0, name
        else:
            assert count(kernel, "HMMA") == 0, name
            # Four keys under way, K and V.
            assert count(kernel, "LDG.E" if record else "LDG.E.128") >= 8, name
            assert count(kernel, "LDGSTS") == 0, name


def test_append_and_copy_move_16_bytes_at_a_time_and_nothing_spills(tmp_path: Path) -> None:
    cubin, kernels = compile_cubin('#include "cuda/launch.cu"\n', tmp_path)
    assert set(kernels) == {"append", "append_records", "rotate", "copy", "merge"}
    for name, kernel in kernels.items():
        assert kernel.spilled == 0 and kernel.registers <= 64, (name, kernel)
    if not disassembler():
        pytest.skip("nvdisasm is not here (pip install nvidia-cuda-nvdisasm)")
    count_sass(cubin, kernels)
    for name in ("append", "copy"):
        assert count(kernels[name], "LDG.E.128") > 0 and count(kernels[name], "STG.E.128") > 0, name


def test_the_module_builds_loads_without_a_driver_and_says_so() -> None:
    # Kept between runs: a second build does nothing. One head size and one architecture, about 40 s of one core.
    pytest.importorskip("nanobind")
    if not shutil.which("cmake"):
        pytest.skip("cmake is not on the path")
    folder = ROOT / "build" / "cuda-test"
    options = ["-DPAGED_CUDA=ON", "-DPAGED_CUDA_ARCHS=90-real", "-DPAGED_CUDA_HEAD_SIZES=64"]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    for command in (
        ["cmake", *generator, "-S", str(CSRC), "-B", str(folder), f"-DPython_EXECUTABLE={sys.executable}", *options],
        ["cmake", "--build", str(folder), "--parallel", "2", "--target", "_cuda"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    code = """
import _cuda
error, count = _cuda.device_count()
print(error, count, _cuda.error_name(35))
pool, rows = _cuda.Pool(), _cuda.Rows()
pool.pages, pool.head_dim, pool.kv_heads, pool.type = 4096, 64, 1, 1
assert (pool.pages, pool.type, pool.layers) == (4096, 1, 0)
_cuda.append(pool, 0, rows, 0)                 # no rows: nothing is launched
pool.head_dim = 63
try:
    _cuda.append(pool, 0, rows, 0)
except RuntimeError as refused:
    print(refused)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder / "cuda", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.endswith("CUDA driver version is insufficient for CUDA runtime version")
    assert second == "the CUDA launch failed: invalid argument"
    if not Path("/dev/nvidiactl").exists():
        assert first.startswith("35 0 ")
