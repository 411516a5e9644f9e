"""What importing the packages costs, in fresh processes.

python bench/micro/imports.py --json

Prints the median wall time of a process that imports `paged` and `scheduler`, that of one that imports nothing, and
whether torch was loaded.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record


def seconds(code: str, repeats: int) -> float:
    """Median wall seconds of a fresh process that runs `code`."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    p = record.parser(__doc__ or "")
    p.add_argument("--repeats", type=int, default=15, help="processes of each kind (default: %(default)s)")
    args = p.parse_args()
    imports = seconds("import paged, scheduler", args.repeats)
    nothing = seconds("pass", args.repeats)
    loaded = subprocess.run([sys.executable, "-c", "import paged, scheduler, sys; sys.exit('torch' in sys.modules)"])
    print(f"import paged, scheduler: {imports * 1e3:.0f} ms a process, {nothing * 1e3:.0f} ms without the import")
    figures = {"import_s": round(imports, 4), "nothing_s": round(nothing, 4), "loads_torch": bool(loaded.returncode)}
    record.report("imports", figures, args)


if __name__ == "__main__":
    main()
