"""Chat templates of every kind that moves a prompt's tokens, and renderers over small tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any

from loaders.builders import bpe_metadata

from paged.loaders.chat import ChatTemplate
from paged.loaders.renderer import ChatRenderer
from paged.loaders.tokenizer import Tokenizer
from paged.loaders.tokenizer_files import tokenizer_from_gguf

# Pieces of which "]@" spans what no probe shows.
WORDS = ["u", "s", "e", "r", "us", "er", "user", "]@", "@x", "]", "@", ">", "a", "[", ":", " ", "\n", "\n\n", "é", "<"]

CLOSE = "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
TURN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + CLOSE
FIRST = "{{ (messages | selectattr('role', 'equalto', 'user') | first).content }}"
TOOLS_HERE = "{% if tools %}[tools]{{ tools | tojson }}{{ eos_token }}\n{% endif %}"

TEMPLATES = {
    # The four of case B47.
    "plain": TURN,
    "bos": "{{ bos_token }}" + TURN,
    "strips": (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]"
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
        "{% else %}{{ m.content }}{% endif %}" + CLOSE
    ),
    "clock": "{{ bos_token }}[system]It is {{ strftime_now('%H:%M') }}.\n" + TURN,
    # Others that real models have.
    "twice": "{{ bos_token }}{{ bos_token }}" + TURN,
    "tools": "{{ bos_token }}" + TOOLS_HERE + TURN,
    "tools after the first question": (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}\n"
        "{% if loop.index == 2 %}" + TOOLS_HERE + "{% endif %}{% endfor %}[assistant]"
    ),
    "tools before the last question": (
        "{{ bos_token }}{% for m in messages %}{% if loop.last %}" + TOOLS_HERE + "{% endif %}"
        "[{{ m.role }}]{{ m.content }}" + CLOSE
    ),
    "ignores the system text": (
        "{{ bos_token }}You help.\n{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}" + CLOSE
    ),
    "refuses a system text": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}" + CLOSE
    ),
    "title": "{{ bos_token }}[title]" + FIRST + "\n" + TURN,
    "title of long chats": (
        "{{ bos_token }}[title]{% if messages | length > 3 %}" + FIRST + "{% else %}new{% endif %}{{ '\\n' }}" + TURN
    ),
    "counts": "{{ bos_token }}{{ messages | length }} messages\n" + TURN,
    "forgets": "{{ bos_token }}{% for m in messages[-2:] %}[{{ m.role }}]{{ m.content }}" + CLOSE,
    "switch": "{{ bos_token }}{% if '/no_think' in messages[-1].content %}[quiet]\n{% endif %}" + TURN,
    "trims": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n{{ m.content | trim }}" + CLOSE,
    "joins": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "no control tokens": "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}### assistant:\n",
    "silent": "{{ bos_token }}Nothing is said.",
    "answers after tools": (
        "{{ bos_token }}{% set ns = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' and not "
        "(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
        "{% set ns.at = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}[{{ m.role }}]"
        "{{ m.content if loop.index0 > ns.at else m.content.split('</think>')[-1] }}" + CLOSE
    ),
}  # fmt: skip


def noon() -> datetime:
    return datetime(2026, 1, 2, 12, 0)


def running() -> Callable[[], datetime]:
    """A clock that is a minute later each time it is looked at."""
    passed = iter(range(1_000_000))
    return lambda: noon() + timedelta(minutes=next(passed))


@cache
def bpe(pre: str = "gpt-2", add_bos: bool = True) -> Tokenizer:
    tokenizer = tokenizer_from_gguf(bpe_metadata(pre, add_bos_token=add_bos), "x")
    assert tokenizer is not None
    return tokenizer


def pieces(words: list[str] = WORDS) -> Tokenizer:
    """SentencePiece, where any two neighbours may join, the first of `words` first; for other text bytes stand."""
    words = [word.replace(" ", "\u2581") for word in words]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(i) for i in range(len(words))],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    tokenizer = tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, "x")
    assert tokenizer is not None
    return tokenizer


def chat_of(
    template: str,
    system: str | None = "Be brief.",
    tools: Any = None,
    tokenizer: Tokenizer | None = None,
    clock: Callable[[], datetime] = noon,
    **variables: Any,
) -> ChatRenderer:
    """A renderer of one of TEMPLATES, or of a source."""
    tokenizer = tokenizer or bpe()
    chat = ChatTemplate(TEMPLATES.get(template, template), tokenizer.bos_token, tokenizer.eos_token, clock)
    return ChatRenderer(SimpleNamespace(chat=chat, tokenizer=tokenizer), system, tools, **variables)


def say(chat: ChatRenderer, *texts: str) -> ChatRenderer:
    """Add texts, of the user and of the assistant in turn."""
    for i, text in enumerate(texts):
        (chat.add_assistant if i % 2 else chat.add_user)(text)
        chat.check()
    return chat
