"""Every example runs, as a user would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("[0-9]*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_the_example_runs(path: Path, smollm2) -> None:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


@pytest.mark.slow
def test_the_code_of_the_readme_runs_as_it_stands(smollm2) -> None:
    text = (EXAMPLES[0].parent.parent / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n", 1)[1].split("```", 1)[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("prompt tokens were cached") == 2


@pytest.mark.slow
@pytest.mark.parametrize("page", ["caching", "sampling", "which-api"])
def test_the_code_of_a_page_runs_as_it_stands(page: str, smollm2, tmp_path) -> None:
    text = (EXAMPLES[0].parent.parent / "docs" / f"{page}.md").read_text(encoding="utf-8")
    code = "\n".join(block.split("```", 1)[0] for block in text.split("```python\n")[1:])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
