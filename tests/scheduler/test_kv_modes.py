"""KV modes of the token-level API: by name, and by TinyLoop's environment variables."""

from __future__ import annotations

import pytest

from paged.errors import UnsupportedShape
from scheduler.model import Model, kv_dtype_from_env

NAMES = {
    (): "fp32",
    ("INT8",): "int8",
    ("INT4",): "int4",
    ("H_MODE",): "fp32-h",
    ("INT8", "H_MODE"): "int8-h",
    ("INT4", "H_MODE"): "int4-h",
}


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
def test_the_environment_names_the_mode(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in names:
        monkeypatch.setenv(f"TINYLOOP_KV_{name}", "1")
    assert kv_dtype_from_env("fp32") == NAMES[names]


@pytest.mark.parametrize("value", ["", "0", "false", "False"])
def test_a_variable_may_say_no(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INT8", "INT4", "H_MODE"):
        monkeypatch.setenv(f"TINYLOOP_KV_{name}", value)
    assert kv_dtype_from_env("bf16") == "bf16"


def test_two_widths_are_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLOOP_KV_INT8", "1")
    monkeypatch.setenv("TINYLOOP_KV_INT4", "1")
    with pytest.raises(ValueError, match="unset one"):
        Model("tiny:looped", 128, num_pages=100)


def test_it_is_read_at_construction_and_an_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLOOP_KV_INT8", "1")
    with Model("tiny:looped", 128, num_pages=200) as model:
        monkeypatch.delenv("TINYLOOP_KV_INT8")
        assert model.config()["kv_dtype"] == "int8"
        assert len(model.generate([1, 2, 3], max_tokens=4)) == 7
    monkeypatch.setenv("TINYLOOP_KV_INT4", "1")
    with Model("tiny:looped", 128, num_pages=200, kv_dtype="bf16") as model:
        assert model.config()["kv_dtype"] == "bf16"


def test_store_h_is_refused_where_it_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLOOP_KV_H_MODE", "1")
    with pytest.raises(UnsupportedShape, match="would cost more memory"):
        Model("tiny:looped", 128, num_pages=200)
