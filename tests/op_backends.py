"""The backends that the tests of the operations run on, and a seed that is new in every run.

PAGED_TEST_SEED repeats a run. Another backend joins every test of the grid with one entry in BACKENDS.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import cuda_cases
import cuda_sim
import numpy as np
import pytest

from paged.errors import NativeMissing, UnsupportedShape
from paged.ops.dispatch import Backend
from paged.ops.reference import ReferenceBackend

ISAS = ("baseline", "avx2", "avx512")


@cache
def native(isa: str) -> Backend:
    """The CPU backend of one instruction set; a skip, with its reason, where this machine lacks it."""
    try:
        from paged.ops.cpu import CpuBackend
    except NativeMissing as error:
        pytest.skip(str(error))
    try:
        return CpuBackend(isa)
    except ValueError as error:
        pytest.skip(str(error))


class _SkipsWhatIsNotBuilt:
    """The CUDA kernels in their simulation; a test of pages that they are not built for is skipped."""

    def __init__(self) -> None:
        if reason := cuda_sim.missing_compiler():
            pytest.skip(reason)
        self._backend = cuda_sim.make_backend()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._backend, name)

        def guarded(*args: Any, **options: Any) -> Any:
            try:
                return call(*args, **options)
            except UnsupportedShape as error:
                if "the CUDA kernels" in str(error):
                    pytest.skip(str(error))
                raise

        return guarded


BACKENDS = {
    "reference": ReferenceBackend,
    **{f"cpu-{isa}": lambda isa=isa: native(isa) for isa in ISAS},
    "cuda-sim": _SkipsWhatIsNotBuilt,
}


def tolerance(name: str, kv_dtype: str, limit: float) -> float:
    """`limit`, or what tensor cores allow: they multiply queries and probabilities in the pages' type."""
    return max(limit, cuda_cases.TOLERANCE.get(kv_dtype, limit)) if name == "cuda-sim" else limit


every_backend = pytest.mark.parametrize("name", BACKENDS)
every_isa = pytest.mark.parametrize("isa", ISAS)


def fresh_seed() -> int:
    """A seed that is printed, so that pytest shows it where a test fails."""
    text = os.environ.get("PAGED_TEST_SEED")
    seed = int(text) if text else int(np.random.SeedSequence().generate_state(1)[0])
    print(f"PAGED_TEST_SEED={seed}")
    return seed
