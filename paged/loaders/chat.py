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

_HERE = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of a message that is to go on; the space tells of trimming


class ChatTemplate:
    """A compiled template, in a sandbox where it can change and reach nothing.

    It sees what Hugging Face templates expect: `messages`, `tools`, `documents`, `add_generation_prompt`, `bos_token`,
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
        tool_use: str | None = None,
    ) -> None:
        """Compile `source`; `where` names it in errors. `tool_use` takes its place wherever tools are given."""
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
            self._tool_use = self._template if tool_use is None else environment.from_string(tool_use)
        except (jinja2.TemplateError, TypeError, RecursionError) as error:
            raise LoadError(f"{where}: expected a Jinja chat template, found: {_describe(error)}") from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text. `variables` are handed to the template (such as enable_thinking=False).

        With `continue_final_message` the text ends with the last message, for the model to go on with it: nothing
        closes it, and no generation prompt follows. Raises InvalidRequest where the messages are not objects with a
        "role", where the template fails on them, or where it does not print the message that is to be continued.
        """
        listed = isinstance(messages, Sequence) and not isinstance(messages, str)
        if not listed or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise InvalidRequest('messages must be a sequence of objects with a "role" and mostly a "content"')
        said = [dict(message) for message in messages]
        content = said[-1].get("content") if said else None
        if continue_final_message:
            if not isinstance(content, str):
                raise InvalidRequest(
                    f"continue_final_message needs a last message whose content is a str, got {content!r:.80}"
                )
            said[-1]["content"] = content + _HERE
        try:
            text = (self._template if tools is None else self._tool_use).render(
                {"bos_token": self.bos, "eos_token": self.eos, "documents": None, **variables},
                messages=said,
                tools=None if tools is None else list(tools),
                add_generation_prompt=add_generation_prompt and not continue_final_message,
            )
        except Exception as error:  # a template is a program: anything may come out of it
            raise InvalidRequest(
                f"{self.where}: could not render {len(messages)} messages: {_describe(error)}"
            ) from None
        return self._continued(text, str(content)) if continue_final_message else text

    def _continued(self, text: str, content: str) -> str:
        """What stands before the mark; where the template has trimmed the message, without spaces at its end."""
        before, found, after = text.rpartition(_HERE.strip())
        if not found or content.strip() not in before:
            raise InvalidRequest(
                f"{self.where}: could not continue the final message, of which the template leaves out a part: "
                f"{content!r:.80}"
            )
        return before if after.startswith(_HERE[-1]) else before.rstrip()

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> Int32:
        """Token ids `int32 [n]` of the rendered messages, with exactly one BOS where template or tokenizer give any."""
        text = self.render(messages, tools, add_generation_prompt, continue_final_message, **variables)
        ids = tokenizer.encode(text)
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
