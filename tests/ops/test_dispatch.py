"""Which backend computes: asked for by name, forced by the environment, or the best there is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paged.errors import NativeMissing
from paged.ops import dispatch, get_backend

HIDE = "import sys; sys.modules['paged._native'] = None; "


def python(code: str, **env: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PAGED_")} | env
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    return (done.stdout + done.stderr).strip()


def test_an_unknown_name_lists_the_names():
    with pytest.raises(ValueError, match="reference, cpu, cuda, got 'gpu'"):
        get_backend(name="gpu")


def test_a_name_is_loaded_once():
    assert get_backend(name="reference") is get_backend(name="reference")
    assert get_backend(name="reference").name == "reference"


def test_the_environment_forces_a_backend(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGED_BACKEND", "reference")
    assert get_backend().name == "reference"
    monkeypatch.setenv("PAGED_BACKEND", "none")
    with pytest.raises(ValueError, match="got 'none'"):
        get_backend()


def test_the_environment_forces_an_instruction_set():
    code = "from paged.ops.cpu import make_backend; print(make_backend().isa)"
    assert python(code, PAGED_CPU_ISA="baseline") == "baseline"
    assert python(code, PAGED_CPU_ISA="sse9").endswith("no kernels for the instruction set 'sse9' on this processor")


def test_the_environment_sets_the_number_of_threads():
    code = "from paged import _native; print(_native.num_threads())"
    assert python(code, PAGED_THREADS="3") == "3"
    assert python(code, PAGED_THREADS="junk") == python(code) == str(len(os.sched_getaffinity(0)))


def test_without_the_native_module_the_reference_computes():
    code = HIDE + "from paged.ops import get_backend; print(get_backend().name)"
    assert python(code) == "reference"


def test_asking_for_a_missing_native_module_ends_in_one_clear_sentence():
    code = HIDE + "from paged.ops import get_backend; get_backend(name='cpu')"
    last = python(code).splitlines()[-1]
    assert last.startswith("paged.errors.NativeMissing: paged._native cannot be imported")
    assert "pip install -e ." in last and "PAGED_BACKEND=reference" in last


def test_another_failure_is_not_hidden_by_the_fallback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PAGED_BACKEND", raising=False)

    def missing(name: str) -> object:
        if name == "cpu":
            raise NativeMissing("gone")
        return name

    monkeypatch.setattr(dispatch, "_load", missing)
    assert get_backend() == "reference"

    def broken(name: str) -> object:
        raise ModuleNotFoundError("No module named 'numpy'")

    monkeypatch.setattr(dispatch, "_load", broken)
    with pytest.raises(ModuleNotFoundError):
        get_backend()
