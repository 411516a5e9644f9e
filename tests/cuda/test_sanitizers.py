"""The kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: nothing to report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cuda_sim
import pytest
from cuda_cases import CORE, Case
from cuda_replay import build, record, run

from paged.ops.cuda_work import Cut

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(cuda_sim.missing_compiler()), reason=cuda_sim.missing_compiler()),
]

INSTANCES = (("Bf16", 64), ("Fp16", 64), ("Fp16", 256), ("Int8", 64), ("Int4", 64))
RECORDS = [replace(CORE[2], kv_dtype="int8", fp32=True), replace(CORE[4], kv_dtype="int4", page_size=1)]
CASES = [
    *CORE,
    *RECORDS,
    replace(CORE[1], head_dim=256),
    Case((280, 30), (9, 20), head_dim=256, softcap=5.0, window=100),
]
CUTS = {"split": Cut(min_blocks=1 << 20), "whole": Cut(min_blocks=0, simple=True)}
LANES = [("forward", "late"), ("random", "early")]


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_a_sanitizer_has_nothing_to_report(sanitizer: str, cut: Cut, tmp_path: Path) -> None:
    program = build(sanitizer, INSTANCES)
    for case in CASES:
        record(case, cut, tmp_path / "case")
        for order, copies in LANES:
            done = run(program, tmp_path / "case", order, copies)
            if "FATAL: ThreadSanitizer" in done.stderr:
                pytest.skip(done.stderr.strip().splitlines()[0])
            assert done.returncode == 0, f"{case} {order} {copies}\n{done.stdout}{done.stderr[:6000]}"
            assert done.stdout.startswith("EQUAL")
