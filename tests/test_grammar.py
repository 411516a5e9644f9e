"""Grammar: a value, what it is made of, and what it refuses before anything is compiled."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import subprocess
import sys
from types import MappingProxyType

import pytest

import paged
import scheduler
from paged.errors import InvalidRequest
from paged.grammar import Grammar

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["é", None]}}}


def test_a_schema_is_the_same_as_a_dict_and_as_text() -> None:
    made = Grammar.json_schema(SCHEMA)
    assert made == Grammar.json_schema(json.dumps(SCHEMA, indent=3)) == Grammar.json_schema(MappingProxyType(SCHEMA))
    assert (made.kind, json.loads(made.text)) == ("json_schema", SCHEMA)
    assert "é" in made.text


def test_the_order_of_properties_is_part_of_a_schema() -> None:
    turned = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}
    assert Grammar.json_schema(turned) != Grammar.json_schema(SCHEMA)


def test_the_callers_dict_may_change_afterwards() -> None:
    schema = {"type": "object"}
    made = Grammar.json_schema(schema)
    schema["type"] = "string"
    assert made == Grammar.json() == Grammar.json_schema({"type": "object"})


def test_equal_grammars_are_equal_hashable_and_survive_pickling() -> None:
    each = [Grammar.json_schema(SCHEMA), Grammar.json(), Grammar.regex("a"), Grammar.lark('start: "a"')]
    assert len({*each, *each}) == len(each)
    for grammar in each:
        assert pickle.loads(pickle.dumps(grammar)) == grammar == copy.deepcopy(grammar)
    assert Grammar.regex("a") != Grammar.lark("a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        each[0].text = "b"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ("{", InvalidRequest),
        ("", InvalidRequest),
        ("[1]", InvalidRequest),
        ("true", InvalidRequest),
        (5, TypeError),
        (None, TypeError),
        ([], TypeError),
        ({"const": {1, 2}}, TypeError),
        ({"const": math.nan}, TypeError),
        ({"const": SCHEMA.keys()}, TypeError),
    ],
)
def test_what_is_no_schema_is_refused_in_one_sentence(schema: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="a JSON schema must") as caught:
        Grammar.json_schema(schema)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize("text", [None, 5, b"a", ["a"]])
@pytest.mark.parametrize("make", [Grammar.regex, Grammar.lark])
def test_a_text_must_be_a_string(make, text: object) -> None:
    with pytest.raises(TypeError, match="grammar must be a str, got "):
        make(text)


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="one of json_schema, regex, lark, got 'gbnf'"):
        Grammar("gbnf", "root ::= x")


def test_both_packages_export_it_and_it_loads_nothing_heavy() -> None:
    assert paged.Grammar is scheduler.Grammar is Grammar
    code = (
        "import sys, paged; paged.Grammar.json(); sys.exit(bool({'torch', 'numpy', 'llguidance'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
