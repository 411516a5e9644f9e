"""Chat messages to prompt text, by the Jinja template that comes with a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paged.errors import InvalidRequest, LoadError
from paged.loaders.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paged.ops.plan import Int32

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template, in a sandbox where it can change and reach nothing.

    It sees what Hugging Face templates expect: `messages`, `tools`, `add_generation_prompt`, `bos_token`,
    `eos_token`, `raise_exception(text)`, `strftime_now(format)`, a `tojson` that escapes no HTML, `break` and
    `continue`, and `{% generation %}`. Rendering from several threads is safe.

    A template that prints the time changes the head of every prompt each minute, and no prefix is shared then: give
    a `clock` that stands still, or that changes once a day.
    """

    def __init__(
        self,
        source: str,
        bos: str = "",
        eos: str = "",
        clock: Callable[[], datetime] = datetime.now,
        where: str = "chat template",
    ) -> None:
        """Compile `source`; `where` names it in errors."""
        self.source = source
        self.bos = bos
        self.eos = eos
        self.where = where
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, TypeError, RecursionError) as error:
            raise LoadError(f"{where}: expected a Jinja chat template, found: {_describe(error)}") from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text. `variables` are handed to the template (such as enable_thinking=False).

        Raises InvalidRequest where the messages are not objects with a "role", or where the template fails on them.
        """
        listed = isinstance(messages, Sequence) and not isinstance(messages, str)
        if not listed or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise InvalidRequest('messages must be a sequence of objects with a "role" and mostly a "content"')
        try:
            return self._template.render(
                {"bos_token": self.bos, "eos_token": self.eos, **variables},
                messages=[dict(message) for message in messages],
                tools=None if tools is None else list(tools),
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program: anything may come out of it
            raise InvalidRequest(
                f"{self.where}: could not render {len(messages)} messages: {_describe(error)}"
            ) from None

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> Int32:
        """Token ids `int32 [n]` of the rendered messages, with exactly one BOS where template or tokenizer give any."""
        ids = tokenizer.encode(self.render(messages, tools, add_generation_prompt, **variables))
        first = 0
        while first + 1 < len(ids) and ids[first] == ids[first + 1] == tokenizer.bos_id:
            first += 1
        return ids[first:]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; here it only lets its body through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options)


def _describe(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text} (line {line})" if line else text
