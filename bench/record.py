"""What every benchmark prints and keeps: the figures, with the machine and the commit they were measured on."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str:
    """The short commit id, with "+" where the working tree differs from it."""
    here = Path(__file__).resolve().parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def machine() -> dict[str, Any]:
    """Processor, cores, and the versions that speed depends on."""
    import numpy
    import torch

    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "numpy": numpy.__version__,
    }


def parser(description: str) -> argparse.ArgumentParser:
    """The flags that all benchmarks share."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    p.add_argument("--save", action="store_true", help="also write it to bench/results/")
    return p


def report(name: str, figures: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the figures as JSON if asked to, and keep them if asked to."""
    record = {
        "bench": name,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        **figures,
    }
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{name}-{record['date']}-{record['commit'].rstrip('+')}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"kept in {path.relative_to(RESULTS.parent.parent)}")
    if args.json:
        print(json.dumps(record))
