"""Grammar: what the output of a request must look like. A value; loads neither torch nor the library that obeys it."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paged.errors import InvalidRequest

KINDS = ("json_schema", "regex", "lark")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that an output belongs to, for `SamplingParams.grammar`. Made by one of the class methods.

    kind  "json_schema", "regex" or "lark"
    text  the schema as JSON, the regular expression, or the Lark grammar

    It is about the bytes of the output, from its first token on. Equal grammars are compiled once. Whether one can be
    compiled is known at submit (`GrammarCompiler`), since that needs the package llguidance.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequest(f"Grammar.kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not isinstance(self.text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a {self.kind} grammar must be a str, got {reprlib.repr(self.text)}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that a schema describes: a dict, or its JSON text. Properties come in the order of the schema.

        A keyword that llguidance does not implement is refused at submit. Its own options stand in the schema: a model
        that fills its output with white space needs `"x-guidance": {"whitespace_flexible": false}`.
        InvalidRequest if a text is no JSON or no object, TypeError if a dict holds what JSON cannot.
        """
        if isinstance(schema, str):
            try:
                parsed = json.loads(schema)
            except ValueError as error:
                raise InvalidRequest(f"a JSON schema must be JSON, found {error}") from None
        elif isinstance(schema, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            parsed = dict(schema)
        else:
            raise TypeError(f"a JSON schema must be a dict or a str, got {reprlib.repr(schema)}")
        if not isinstance(parsed, dict):
            raise InvalidRequest(f"a JSON schema must be an object, got {reprlib.repr(parsed)}")
        try:
            return cls("json_schema", json.dumps(parsed, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TypeError(f"a JSON schema must hold what JSON can, found: {error}") from None

    @classmethod
    def json(cls) -> Grammar:
        """Any JSON object: what servers call JSON mode."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that `pattern` matches as a whole, in the syntax of Rust's regex crate."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A context-free grammar in llguidance's dialect of Lark, with a rule `start`; `<|name|>` is a control token.

        It must not name an id that ends the request: such an id is allowed where the grammar is complete, there alone.
        """
        return cls("lark", text)
