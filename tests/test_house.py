"""The house rules: import direction, import cost, file sizes, public names, lint and types."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(p for folder in ("paged", "scheduler") for p in (ROOT / folder).rglob("*.py"))
LIMIT = 500


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def tool(name: str) -> str:
    found = Path(sys.executable).parent / name
    where = str(found) if found.exists() else shutil.which(name)
    if where is None:
        pytest.skip(f"{name} is not installed")
    return where


@pytest.mark.parametrize("package", ["paged", "scheduler"])
def test_every_public_name_exists_and_all_is_sorted(package: str) -> None:
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    assert sorted(module.__all__, key=str.casefold) == sorted(module.__all__, key=str.casefold)
    for name in module.__all__:
        assert getattr(module, name) is not None, name
    assert set(dir(module)) >= set(module.__all__)
    assert set(module._HOME) == set(module.__all__) - {"__version__"}


@pytest.mark.parametrize("package", ["paged", "scheduler"])
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        importlib.import_module(package).no_such_name  # noqa: B018


def test_importing_the_packages_loads_no_torch_and_little_else() -> None:
    code = "import sys, paged, scheduler; print(*sorted(sys.modules))"
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "numpy", "gguf", "tokenizers", "transformers", "jinja2"}
    assert len(loaded) < 150  # a count, not a time: a bare interpreter has about 60


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_two_things(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LIMIT


def test_no_native_file_is_two_things() -> None:
    files = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh", ".inc"}]
    assert files
    for path in files:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LIMIT, path


def test_every_module_says_what_it_is() -> None:
    for path in SOURCES:
        assert path.read_text(encoding="utf-8").lstrip().startswith('"""'), path


def test_ruff_finds_nothing() -> None:
    done = run(tool("ruff"), "check", ".")
    assert done.returncode == 0, done.stdout
    done = run(tool("ruff"), "format", "--check", ".")
    assert done.returncode == 0, done.stdout


def test_imports_run_from_scheduler_to_paged_and_never_back() -> None:
    done = run(tool("lint-imports"))
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_pyright_finds_nothing() -> None:
    done = run(tool("pyright"))
    if "error" in done.stderr and not done.stdout:
        pytest.skip(f"pyright cannot run here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stdout[-4000:]
