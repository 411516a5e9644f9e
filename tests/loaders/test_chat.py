"""paged.loaders.chat: templates as Hugging Face writes them, in a sandbox, with exactly one BOS (case B47)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders.builders import bpe_metadata
from transformers.utils.chat_template_utils import render_jinja_template

from paged.errors import InvalidRequest, LoadError
from paged.loaders.chat import ChatTemplate
from paged.loaders.tokenizer import Tokenizer
from paged.loaders.tokenizer_files import tokenizer_from_gguf

BOS, EOS = "<|im_start|>", "<|im_end|>"
TURNS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PLAIN = TURNS
WITH_BOS = "{{ bos_token }}" + TURNS
TWICE = "{{ bos_token }}{{ bos_token }}" + TURNS
STRIPS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CLOCK = "{{ bos_token }}[system]It is {{ strftime_now('%H:%M') }}.\n" + TURNS
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>greet back</think>Hello"},
    {"role": "user", "content": "Who are you?"},
]


def noon() -> datetime:
    return datetime(2026, 1, 2, 12, 0)


def tokenizer_of(add_bos: bool, bos: int | None = 1) -> Tokenizer:
    tokenizer = tokenizer_from_gguf(bpe_metadata(add_bos_token=add_bos, bos_token_id=bos), "x")
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    "template", [PLAIN, WITH_BOS, TWICE, STRIPS, CLOCK], ids=["plain", "bos", "twice", "strips", "clock"]
)
@pytest.mark.parametrize("add_bos", [False, True])
def test_b47_there_is_exactly_one_bos(template: str, add_bos: bool) -> None:
    tokenizer = tokenizer_of(add_bos)
    chat = ChatTemplate(template, tokenizer.bos_token, tokenizer.eos_token, clock=noon)
    for turns in range(len(CHAT) + 1):
        ids = chat.encode(tokenizer, CHAT[:turns]).tolist()
        expected = 1 if add_bos or template is not PLAIN else 0
        assert ids.count(1) == expected, "a model that wants no BOS, and a template that writes none: none"
        assert ids[:1] == [1] * expected or not expected
        text = chat.render(CHAT[:turns]).replace(BOS, "")
        assert tokenizer.decode(ids, skip_special=False) == BOS * expected + text


def test_b47_a_bos_inside_the_text_is_left_alone() -> None:
    tokenizer = tokenizer_of(add_bos=True)
    chat = ChatTemplate("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", BOS, EOS)
    ids = chat.encode(tokenizer, CHAT).tolist()
    assert ids.count(1) == 3
    assert ids[1] != 1


def test_b47_a_model_without_bos_gets_none() -> None:
    tokenizer = tokenizer_of(add_bos=True, bos=None)
    chat = ChatTemplate(WITH_BOS, tokenizer.bos_token, tokenizer.eos_token)
    assert tokenizer.bos_id is None
    assert 1 not in chat.encode(tokenizer, CHAT).tolist()


@pytest.mark.parametrize("template", [PLAIN, WITH_BOS, CLOCK], ids=["plain", "bos", "clock"])
def test_b47_each_turn_begins_with_the_turns_before_it(template: str) -> None:
    tokenizer = tokenizer_of(add_bos=True)
    chat = ChatTemplate(template, BOS, EOS, clock=noon)
    for turns in (1, 2):
        before = chat.encode(tokenizer, CHAT[:turns], add_generation_prompt=False).tolist()
        after = chat.encode(tokenizer, CHAT[: turns + 1], add_generation_prompt=False).tolist()
        assert after[: len(before)] == before


def test_b47_a_template_that_strips_thoughts_shares_up_to_the_last_user_turn() -> None:
    tokenizer = tokenizer_of(add_bos=True)
    chat = ChatTemplate(STRIPS, BOS, EOS)
    first = chat.encode(tokenizer, CHAT[:1], add_generation_prompt=True).tolist()
    answered = chat.encode(tokenizer, CHAT[:2], add_generation_prompt=False).tolist()
    asked = chat.encode(tokenizer, CHAT).tolist()
    assert answered[: len(first)] == first
    assert asked[: len(first)] == first
    assert asked[: len(answered)] != answered
    assert "greet back" not in chat.render(CHAT)


def test_b47_a_clock_that_stands_still_keeps_the_head_and_one_that_runs_does_not() -> None:
    times = iter([datetime(2026, 1, 2, 12, 0), datetime(2026, 1, 2, 12, 1)])
    running = ChatTemplate(CLOCK, BOS, EOS, clock=lambda: next(times))
    assert running.render(CHAT) != running.render(CHAT)
    standing = ChatTemplate(CLOCK, BOS, EOS, clock=noon)
    assert standing.render(CHAT) == standing.render(CHAT)
    assert standing.render(CHAT).startswith(BOS + "[system]It is 12:00.\n")


def test_without_a_clock_of_its_own_the_time_is_now() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]) >= "2024"


TEMPLATES = [
    PLAIN, WITH_BOS, TWICE, STRIPS,
    "{%- if tools %}\n  {{- tools | tojson(indent=2) }}\n{%- endif %}\n{% for m in messages %}\n  {{ m.role }}\n"
    "{% endfor %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m | tojson }}{% break %}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ messages[0].content | trim }} {{ messages[-1]['content'].strip() }} {{ x is defined }} {{ enable_thinking }}",
    "    {% if true %}\n  indented\n    {% endif %}\nend {{ '<&\u00e9>' | tojson }} {{ messages | length }}",
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "description": "naïve <b>", "parameters": {}}}]


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
@pytest.mark.parametrize("prompt", [False, True])
def test_a_template_renders_as_transformers_renders_it(template: str, prompt: bool) -> None:
    ours = ChatTemplate(template, BOS, EOS).render(CHAT, TOOLS, prompt, enable_thinking=False)
    theirs, _ = render_jinja_template(
        [CHAT], TOOLS, chat_template=template, add_generation_prompt=prompt,
        bos_token=BOS, eos_token=EOS, enable_thinking=False,
    )  # fmt: skip
    assert ours == theirs[0]


@pytest.mark.parametrize("template", [PLAIN, WITH_BOS, TURNS.replace("m.content", "m.content | trim")])
@pytest.mark.parametrize("content", ["Well", "Well, ", " Well\n", "", "a " + EOS])
def test_the_last_message_is_left_open_as_transformers_leaves_it(template: str, content: str) -> None:
    chat = [*CHAT, {"role": "assistant", "content": content}]
    ours = ChatTemplate(template, BOS, EOS).render(chat, continue_final_message=True)
    theirs, _ = render_jinja_template(
        [chat], chat_template=template, continue_final_message=True, bos_token=BOS, eos_token=EOS
    )
    assert ours == theirs[0]
    assert chat[-1] == {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (PLAIN, []),
        (PLAIN, [{"role": "assistant", "content": None}]),
        (PLAIN, [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}]),
        ("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", CHAT),
        ("{{ messages[-1].content.split('are')[-1] }}", CHAT),
    ],
)
def test_a_message_that_cannot_be_left_open_is_refused(template: str, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="continue"):
        ChatTemplate(template).render(messages, continue_final_message=True)


def test_what_is_left_open_is_encoded_so() -> None:
    tokenizer, chat = tokenizer_of(True), ChatTemplate(WITH_BOS, BOS, EOS)
    open_end = chat.encode(tokenizer, CHAT, continue_final_message=True).tolist()
    assert open_end == tokenizer.encode(chat.render(CHAT, continue_final_message=True)).tolist()
    assert open_end == chat.encode(tokenizer, CHAT, add_generation_prompt=False).tolist()[: len(open_end)]


@pytest.mark.parametrize(("tools", "expected"), [(None, "plain Hi"), ([], "tools Hi"), (TOOLS, "tools Hi")])
def test_a_template_of_its_own_renders_prompts_with_tools(tools: Any, expected: str) -> None:
    say = " {{ messages[0].content }}"
    assert ChatTemplate("plain" + say, tool_use="tools" + say).render(CHAT, tools) == expected


def test_documents_are_none_where_there_are_none() -> None:
    chat = ChatTemplate("{{ documents is none }}{{ documents }}")
    assert (chat.render(CHAT), chat.render(CHAT, documents=[1])) == ("TrueNone", "False[1]")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text(max_size=20)), max_size=4))
def test_any_contents_are_rendered_verbatim(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    text = ChatTemplate(PLAIN, BOS, EOS).render(messages, add_generation_prompt=False)
    assert text == "".join(f"[{role}]{content}{EOS}\n" for role, content in turns)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[9].content.x }}", "has no element 9"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update({'a': 1}) }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include 'x' %}", "no loader"),
        ("{{ messages | tojson(nonsense=1) }}", "unexpected keyword"),
    ],
)
def test_whatever_a_template_does_is_one_clear_error(template: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^here: could not render 3 messages: .*{message}"):
        ChatTemplate(template, where="here").render(CHAT)
    assert CHAT[0] == {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{", "{% for x in %}", "{% endif %}", "{% nosuchtag %}", "{{ messages | nosuchfilter }}", 3, None],
)
def test_a_source_that_does_not_compile_is_a_load_error(source: Any) -> None:
    with pytest.raises(LoadError, match=r"^here: expected a Jinja chat template, found"):
        ChatTemplate(source, where="here")
    if source is not None:
        with pytest.raises(LoadError, match=r"^here: expected a Jinja chat template, found"):
            ChatTemplate("fine", where="here", tool_use=source)


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(LoadError, match=r"\(line 3\)$"):
        ChatTemplate("one\ntwo\n{% if %}")


@pytest.mark.parametrize("messages", ["hi", "", {"role": "user"}, ["hi"], [{"content": "no role"}], [None], None, 3])
def test_what_is_not_a_list_of_messages_is_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match='messages must be a sequence of objects with a "role"'):
        ChatTemplate(PLAIN).render(messages)


def test_the_messages_of_the_caller_are_not_changed() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ChatTemplate("{% for m in messages %}{% set m = 3 %}{% endfor %}").render(messages)
    assert messages == [{"role": "user", "content": "Hi"}]


def test_eight_threads_share_one_template() -> None:
    chat = ChatTemplate(STRIPS, BOS, EOS)
    expected = chat.render(CHAT)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: chat.render(CHAT), range(64))) == {expected}
