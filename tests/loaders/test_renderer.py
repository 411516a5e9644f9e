"""paged.loaders.renderer: the prompt of a chat, and up to where other prompts have the same tokens."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loaders.chats import FIRST, TEMPLATES, TURN, WORDS, bpe, chat_of, noon, pieces, running, say
from tokenizers import AddedToken

import paged
from paged.errors import CheckFailed, InvalidRequest, LoadError
from paged.loaders.borders import common_prefix
from paged.loaders.chat import ChatTemplate
from paged.loaders.open import open_checkpoint
from paged.loaders.renderer import ChatRenderer, MarkedPrompt
from paged.loaders.tokenizer import Tokenizer

TOOLS = [{"type": "function", "function": {"name": "f", "description": "naïve <b>", "parameters": {}}}]
OTHER_TOOLS = [{"type": "function", "function": {"name": "g"}}, *TOOLS]
BRIEF = "[system]Be brief.</s>\n"
THOUGHT = "<think>They greet.</think>Hello"
REFUSES = "refuses a system text"


@pytest.fixture(scope="module")
def smollm2_checkpoint() -> Any:
    try:
        return open_checkpoint("smollm2")
    except LoadError as error:
        pytest.skip(str(error))


def text_of(prompt: MarkedPrompt, mark: int, tokenizer: Tokenizer | None = None) -> str:
    """The text of the first `mark` tokens, with <s> and </s> for what begins and ends a turn."""
    text = (tokenizer or bpe()).decode(prompt.tokens[:mark], skip_special=False)
    return text.replace("<|im_start|>", "<s>").replace("<|im_end|>", "</s>")


def texts_of(prompt: MarkedPrompt) -> list[str]:
    marks = (prompt.head, prompt.opening, prompt.stable, prompt.messages_end)
    return [text_of(prompt, mark) for mark in marks]


def expect_in_order(prompt: MarkedPrompt) -> None:
    marks = [0, prompt.head, prompt.opening, prompt.stable, prompt.messages_end, len(prompt.tokens)]
    assert marks == sorted(marks)
    assert prompt.tokens.dtype == np.int32


def expect_same(one: MarkedPrompt, other: MarkedPrompt, mark: str) -> None:
    """The tokens up to a mark are the first ones of the other prompt too, whichever of the two gives it."""
    for n in (getattr(one, mark), getattr(other, mark)):
        assert one.tokens[:n].tolist() == other.tokens[:n].tolist(), (mark, n)


# --- what the marks are ------------------------------------------------------------------------------------------


def test_the_marks_of_a_first_turn() -> None:
    prompt = say(chat_of("bos"), "Hi there").render_marked()
    opening = "<s>[system]Be brief.</s>\n[user]"
    assert texts_of(prompt) == ["<s>[", opening, opening, opening + "Hi there</s>\n"]
    assert text_of(prompt, len(prompt.tokens)) == opening + "Hi there</s>\n[assistant]"
    expect_in_order(prompt)


def test_the_marks_of_a_later_turn() -> None:
    prompt = say(chat_of("bos"), "Hi there", THOUGHT, "Who?").render_marked()
    opening = "<s>[system]Be brief.</s>\n[user]"
    stable = f"{opening}Hi there</s>\n[assistant]{THOUGHT}</s>\n[user]"
    assert texts_of(prompt) == ["<s>[", opening, stable, stable + "Who?</s>\n"]


@pytest.mark.parametrize(
    ("name", "opening", "stable"),
    [
        ("plain", "<s>[system]Be brief.</s>\n[user]", f"Hi</s>\n[assistant]{THOUGHT}</s>\n[user]"),
        ("strips", "<s>[system]Be brief.</s>\n[user]", "Hi</s>\n[assistant]Hello</s>\n[user]"),
        (
            "clock",
            "<s>[system]It is 12:00.\n[system]Be brief.</s>\n[user]",
            f"Hi</s>\n[assistant]{THOUGHT}</s>\n[user]",
        ),
        ("ignores the system text", "<s>You help.\n[user]", f"Hi</s>\n[assistant]{THOUGHT}</s>\n[user]"),
        ("title", "<s>[title]", f"Hi\n[system]Be brief.</s>\n[user]Hi</s>\n[assistant]{THOUGHT}</s>\n[user]"),
        ("counts", "<s>", f"4 messages\n[system]Be brief.</s>\n[user]Hi</s>\n[assistant]{THOUGHT}</s>\n[user]"),
        ("forgets", "<s>[", f"assistant]{THOUGHT}</s>\n[user]"),
        ("switch", "<s>[", ""),
        ("answers after tools", "<s>[system]Be brief.</s>\n[user]", "Hi</s>\n[assistant]"),
        (
            "no control tokens",
            "<s>### system:\nBe brief.\n\n### user:",
            f"\nHi\n\n### assistant:\n{THOUGHT}\n\n### user:",
        ),
        ("silent", "<s>Nothing is said.", ""),
    ],
)
def test_a_template_that_moves_things_gives_smaller_marks(name: str, opening: str, stable: str) -> None:
    prompt = say(chat_of(name), "Hi", THOUGHT, "Who?").render_marked()
    assert text_of(prompt, prompt.opening) == opening
    assert text_of(prompt, prompt.stable) == opening + stable


def test_tools_belong_to_the_opening_where_the_template_puts_them_before_the_question() -> None:
    listed = '[tools][{"type": "function", "function": {"name": "f"}}]</s>\n'
    tools = [{"type": "function", "function": {"name": "f"}}]
    first = say(chat_of("tools", tools=tools), "Hi").render_marked()
    assert texts_of(first)[:2] == ["<s>[", f"<s>{listed}[system]Be brief.</s>\n[user]"]
    after = say(chat_of("tools after the first question", tools=tools), "Hi", "Hello", "Who?").render_marked()
    assert texts_of(after)[1] == "<s>[system]Be brief.</s>\n[user]"
    assert texts_of(after)[2] == f"<s>[system]Be brief.</s>\n[user]Hi</s>\n{listed}[assistant]Hello</s>\n[user]"


def test_tools_that_move_with_the_last_question_leave_the_opening() -> None:
    listed = '[tools][{"type": "function", "function": {"name": "f"}}]</s>\n'
    chat = chat_of("tools before the last question", tools=[{"type": "function", "function": {"name": "f"}}])
    first = say(chat, "Hi").render_marked()
    assert texts_of(first)[1] == f"<s>[system]Be brief.</s>\n{listed}[user]"
    chat.add_assistant("Hello")
    later = say(chat, "Who?").render_marked()
    assert texts_of(later)[1] == "<s>[system]Be brief.</s>\n["
    assert texts_of(later)[2] == f"<s>[system]Be brief.</s>\n[user]Hi</s>\n[assistant]Hello</s>\n{listed}[user]"


def test_a_title_that_says_by_chance_what_first_turns_say_is_not_in_the_opening() -> None:
    """Long chats begin with their first question, short ones with "new"; this one's first question is "new"."""
    chat = say(chat_of("title of long chats"), "new")
    assert texts_of(chat.render_marked())[1] == "<s>[title]new\n[system]Be brief.</s>\n[user]"
    chat.add_assistant("Hello")
    chat.add_user("Who?")
    later = chat.render_marked()
    assert texts_of(later)[1] == "<s>[title]"
    assert texts_of(later)[2] == "<s>[title]new\n[system]Be brief.</s>\n[user]new</s>\n[assistant]Hello</s>\n[user]"


def test_a_second_question_near_the_front_of_long_chats_is_not_in_the_opening_either() -> None:
    source = "{{ bos_token }}[title]{{ messages[3].content if messages | length > 5 else 'new' }}{{ '\\n' }}" + TURN
    chat = say(chat_of(source), "Hi", "Hello", "new", "So?", "Bye")
    prompt = chat.render_marked()
    assert text_of(prompt, len(prompt.tokens)).startswith("<s>[title]new\n[system]")
    assert texts_of(prompt)[1] == "<s>[title]"


def test_what_follows_near_the_front_of_long_chats_may_join_what_stands_before_it() -> None:
    """ "]" may become "]@", which no probe shows."""
    source = "{{ bos_token }}[{% if messages | length > 3 %}u]" + FIRST + "{% else %}u]new{% endif %}</s>\n" + TURN
    openings = []
    for first in ("new", "us", "@"):
        prompt = say(chat_of(source, tokenizer=pieces()), first, "Hello", "Who?").render_marked()
        openings.append([pieces().text_of(i) for i in prompt.tokens[: prompt.opening].tolist()])
    assert openings == [["<s>", " ", "[", "u"]] * 3


def test_what_long_chats_have_in_place_of_the_opening_may_join_what_stands_before_it() -> None:
    """Here "]" precedes the only message, and ":" each of several: "e" may become "e:@" in long chats alone."""
    tokenizer = pieces([":@", "e:@", *(word for word in WORDS if word != "]@")])
    source = "{% for m in messages %}e{{ ':' if messages | length > 1 else ']' }}{{ m.content }}{% endfor %}"
    for first in ("us", "@"):
        chat = say(chat_of(source, None, tokenizer=tokenizer), first)
        assert chat.render_marked().opening == len(["<s>", " ", "e", "]"])
        chat.add_assistant("Hello")
        assert say(chat, "Who?").render_marked().opening == len(["<s>", " "])


def test_where_the_tools_go_ends_the_head_of_chats_without_tools_too() -> None:
    source = "{{ bos_token }}You help.\n{% if tools %}{{ tools | tojson }}{% endif %}It is late.{{ '\\n' }}" + TURN
    for tools in (None, TOOLS):
        prompt = say(chat_of(source, tools=tools), "Hi").render_marked()
        assert text_of(prompt, prompt.head) == "<s>You help."


def test_a_system_text_that_a_template_knows_ends_the_head() -> None:
    source = "{{ bos_token }}{% if 'brief' in messages[0].content %}Few words.\n{% endif %}" + TURN
    prompt = say(chat_of(source), "Hi").render_marked()
    assert texts_of(prompt)[:2] == ["<s>", "<s>Few words.\n[system]Be brief.</s>\n[user]"]
    assert texts_of(say(chat_of(source, "Be kind."), "Hi").render_marked())[0] == "<s>["


def test_a_clock_that_runs_ends_every_mark() -> None:
    chat = say(chat_of("clock", clock=running()), "Hi", "Hello", "Who?")
    for _ in range(3):
        prompt = chat.render_marked()
        expect_in_order(prompt)
        assert re.fullmatch(r"<s>\[system\]It is( 1[2-9]?:?)?", text_of(prompt, prompt.stable))
        assert prompt.head > 0


def test_a_clock_that_moved_since_the_opening_was_found_ends_it() -> None:
    times = [12]
    tokenizer = bpe()
    template = ChatTemplate("{{ bos_token }}It is {{ now() }} h.\n" + TURN, tokenizer.bos_token, tokenizer.eos_token)
    model = SimpleNamespace(chat=template, tokenizer=tokenizer)
    chat = say(ChatRenderer(model, now=lambda: times[0]), "Hi")
    assert text_of(chat.render_marked(), chat.render_marked().opening) == "<s>It is 12 h.\n[user]"
    times[0] = 34
    prompt = chat.render_marked()
    assert text_of(prompt, prompt.opening) in ("<s>It is", "<s>It is ")
    assert text_of(prompt, prompt.stable) == "<s>It is 34 h.\n[user]"


def test_without_a_question_the_opening_ends_where_a_question_would_begin() -> None:
    prompt = chat_of("bos").render_marked()
    assert texts_of(prompt)[1:] == ["<s>[system]Be brief.</s>\n"] * 3, "the generation prompt is not part of it"


def test_an_empty_chat_has_marks_too() -> None:
    prompt = chat_of("bos", system=None).render_marked()
    assert text_of(prompt, len(prompt.tokens)) == "<s>[assistant]"
    assert (prompt.head, prompt.opening, prompt.stable, prompt.messages_end) == (1, 1, 1, 1)


def test_the_last_message_of_the_user_is_what_varies_wherever_it_stands() -> None:
    chat = say(chat_of("bos"), "Hi", "I look.")
    chat.add({"role": "tool", "content": "42"})
    prompt = chat.render_marked()
    assert texts_of(prompt)[2] == "<s>[system]Be brief.</s>\n[user]"
    assert texts_of(prompt)[3] == "<s>[system]Be brief.</s>\n[user]Hi</s>\n[assistant]I look.</s>\n[tool]42</s>\n"


def test_other_messages_before_the_first_question_belong_to_the_opening() -> None:
    chat = chat_of("bos", system=None)
    chat.add({"role": "developer", "content": "Obey."})
    assert texts_of(chat.render_marked())[1] == "<s>[developer]Obey.</s>\n"
    chat.add({"role": "assistant", "content": "I do."})
    chat.add_user("Hi")
    chat.check()
    assert texts_of(chat.render_marked())[1] == "<s>[developer]Obey.</s>\n[assistant]I do.</s>\n[user]"


def test_a_message_of_parts_is_marked_as_one_of_text() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{{ eos_token }}\n{% endfor %}"
    )
    parts, plain = chat_of(source), chat_of(source)
    parts.add({"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " all"}]})
    plain.add_user("Hi all")
    one, other = parts.render_marked(), plain.render_marked()
    assert one.tokens.tolist() == other.tokens.tolist()
    assert (one.opening, one.stable) == (other.opening, other.stable)


def test_a_template_that_refuses_every_other_text_gives_no_mark_but_the_end() -> None:
    source = "{{ bos_token }}{% if messages[-1].content != 'Hi' %}{{ raise_exception('no') }}{% endif %}" + TURN
    prompt = say(chat_of(source), "Hi").render_marked()
    assert (prompt.head, prompt.opening, prompt.stable) == (0, 0, 0)
    assert text_of(prompt, prompt.messages_end).endswith("Hi</s>\n")


def test_one_other_text_does_not_tell_where_the_users_text_begins() -> None:
    """All that this template takes begins alike, so that what stands before it cannot be told from it."""
    source = "{{ bos_token }}{% if messages[-1].content[:5] != 'Hello' %}{{ raise_exception('no') }}{% endif %}" + TURN
    prompt = say(chat_of(source), "Hello, you").render_marked()
    assert (prompt.opening, prompt.stable) == (0, 0)


def test_texts_that_a_template_refuses_are_nobodys_prompt() -> None:
    source = (
        "{{ bos_token }}{% if not messages[-1].content[:1].isalnum() %}{{ raise_exception('no') }}{% endif %}" + TURN
    )
    prompt = say(chat_of(source), "Hi").render_marked()
    assert texts_of(prompt)[2] == "<s>[system]Be brief.</s>\n[user]"


def test_a_template_that_prints_no_generation_prompt_ends_with_its_messages() -> None:
    for name in ("tools after the first question", "silent", "joins"):
        prompt = say(chat_of(name), "Hi").render_marked()
        assert prompt.messages_end == len(prompt.tokens)


def test_a_template_that_needs_the_generation_prompt_gives_no_end_beyond_the_stable_part() -> None:
    source = "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}{{ bos_token }}" + TURN
    prompt = say(chat_of(source), "Hi").render_marked()
    assert prompt.messages_end == prompt.stable == prompt.opening > 0
    assert texts_of(prompt)[3] == "<s>[system]Be brief.</s>\n[user]"


def test_variables_and_tools_reach_the_template() -> None:
    source = "{{ bos_token }}{{ mood }}{{ tools | length }}" + TURN
    prompt = say(chat_of(source, tools=TOOLS, mood="calm"), "Hi").render_marked()
    assert text_of(prompt, prompt.opening) == "<s>calm1[system]Be brief.</s>\n[user]"


# --- exactly one BOS ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != REFUSES])
def test_there_is_exactly_one_bos(name: str, add_bos: bool) -> None:
    chat = chat_of(name, tools=TOOLS, tokenizer=bpe(add_bos=add_bos))
    expected = 1 if add_bos or "bos_token" in TEMPLATES[name] else 0
    for text in ("Hi", "Who?", "Bye"):
        chat.add_user(text)
        tokens = chat.render_marked().tokens.tolist()
        assert tokens.count(1) == expected
        assert tokens[:1] == [1] or not expected
        chat.add_assistant(THOUGHT)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != REFUSES])
@pytest.mark.parametrize("pre", ["gpt-2", "qwen2"])
def test_the_tokens_are_those_of_the_template(name: str, pre: str) -> None:
    tokenizer = bpe(pre)
    chat = say(chat_of(name, tools=TOOLS, tokenizer=tokenizer), "Hi", THOUGHT, "<|im_end|> cafe\u0301")
    template = ChatTemplate(TEMPLATES[name], tokenizer.bos_token, tokenizer.eos_token, noon)
    for prompt in (False, True):
        expected = template.encode(tokenizer, chat.messages, TOOLS, prompt)
        assert chat.render_marked(prompt).tokens.tolist() == expected.tolist()


def test_a_question_that_begins_with_the_bos_after_one_leaves_one() -> None:
    source = "{{ bos_token }}{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    prompt = say(chat_of(source, system=None), "<|im_start|>Hi").render_marked()
    assert text_of(prompt, len(prompt.tokens)) == "<s>Hi"
    assert (prompt.opening, prompt.stable) == (1, 1)


def test_a_control_token_that_only_some_texts_leave_one_is_no_place_to_cut() -> None:
    """single_word: "<cut>" before a letter is plain text, and " <" is a piece of it."""
    tokenizer = pieces([*WORDS, "\u2581<"])
    tokenizer.backend.add_special_tokens([AddedToken("<cut>", single_word=True, normalized=False, special=True)])
    token_bytes = {i: tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    special = {0: "<unk>", 1: "<s>", 2: "</s>", tokenizer.vocab_size: "<cut>"}
    cutting = Tokenizer(tokenizer.backend, token_bytes, special, bos_id=1, eos_ids=(2,), add_bos=True)
    source = "[u] <cut>{% for m in messages %}{{ m.content }}{% endfor %}"
    prompts = [say(chat_of(source, None, tokenizer=cutting), text).render_marked() for text in ("\n", "Hello")]
    assert cutting.vocab_size - 1 in prompts[0].tokens
    assert cutting.vocab_size - 1 not in prompts[1].tokens
    expect_same(*prompts, "stable")
    assert [cutting.text_of(i) for i in prompts[0].tokens[: prompts[0].stable].tolist()] == ["<s>", " ", "[", "u", "]"]


def test_a_question_that_begins_with_the_bos_leaves_smaller_marks_and_one_bos() -> None:
    for source in ("joins", "{% for m in messages %}{{ m.content }}{% endfor %}"):
        prompt = say(chat_of(source, system=None), "<|im_start|>Hi").render_marked()
        assert text_of(prompt, len(prompt.tokens)) == "<s>Hi"
        assert prompt.opening <= 1


# --- nothing before a mark varies --------------------------------------------------------------------------------

NASTY = [
    "", " ", "\n", "\n\n", "  x", "\t", "]", "](", "'s", "1234", "\u0301", "\u0338x", "</think>", "<think>x</think>y",
    "<|im_end|>", "<|im_start|>", "<|im_start|>user\n", "/no_think", "<tool_response>\n1\n</tool_response>", "new",
    "Hello", "and then", "###", "@", "]@", "assistant", "\u65e5\u672c", "\U0001f642",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(NASTY) | st.text(max_size=4), max_size=3).map("".join)
SYSTEMS = st.none() | TEXTS
TOOL_LISTS = st.sampled_from([None, TOOLS, OTHER_TOOLS])
TOKENIZERS = {
    "gpt-2": bpe(),
    "qwen2": bpe("qwen2"),
    "llama-bpe": bpe("llama-bpe"),
    "no bos": bpe(add_bos=False),
    "pieces": pieces(),
}


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=20, deadline=None)
@given(
    pre=st.sampled_from(sorted(TOKENIZERS)),
    system=SYSTEMS,
    tools=TOOL_LISTS,
    ours=st.lists(TEXTS, min_size=3, max_size=3),
    theirs=st.lists(TEXTS, min_size=3, max_size=3),
    reply=TEXTS,
    turns=st.integers(1, 3),
)
def test_no_text_of_the_user_changes_a_token_before_a_mark(
    name: str, pre: str, system: str | None, tools: Any, ours: list[str], theirs: list[str], reply: str, turns: int
) -> None:
    system = None if name == REFUSES else system
    one, other, last = (chat_of(name, system, tools, TOKENIZERS[pre]) for _ in range(3))
    for i, (our_text, their_text) in enumerate(zip(ours[:turns], theirs[:turns], strict=True)):
        if i:
            for chat in (one, other, last):
                chat.add_assistant(reply)
        one.add_user(our_text)
        other.add_user(their_text)
        last.add_user(their_text if i == turns - 1 else our_text)
    prompts = [chat.render_marked() for chat in (one, other, last)]
    for prompt in prompts:
        expect_in_order(prompt)
    expect_same(prompts[0], prompts[1], "opening")
    expect_same(prompts[0], prompts[2], "stable")
    without = one.render_marked(add_generation_prompt=False)
    assert without.messages_end == len(without.tokens)
    assert common_prefix(without.tokens, prompts[0].tokens) == prompts[0].messages_end


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=15, deadline=None)
@given(
    systems=st.lists(SYSTEMS, min_size=2, max_size=2),
    tools=st.lists(TOOL_LISTS, min_size=2, max_size=2),
    texts=st.lists(TEXTS, min_size=2, max_size=2),
)
def test_no_system_text_and_no_tools_change_a_token_of_the_head(
    name: str, systems: list[str | None], tools: list[Any], texts: list[str]
) -> None:
    prompts = []
    for system, listed, text in zip(systems, tools, texts, strict=True):
        chat = chat_of(name, None if name == REFUSES else system, listed)
        prompts.append(say(chat, text).render_marked())
    expect_same(prompts[0], prompts[1], "head")


@pytest.mark.parametrize("name", ["plain", "bos", "strips", "clock", "tools", "trims", "no control tokens"])
@pytest.mark.parametrize("text", ["Hi", "", "\n", "[x", "<|im_end|>"])
def test_what_follows_the_messages_is_the_generation_prompt(name: str, text: str) -> None:
    prompt = say(chat_of(name), text).render_marked()
    rest = bpe().decode(prompt.tokens[prompt.messages_end :], skip_special=False)
    assert rest == ("" if name == "no control tokens" else "[assistant]")


# --- the real template -------------------------------------------------------------------------------------------


def test_the_marks_of_smollm2(smollm2_checkpoint: Any) -> None:
    chat = say(ChatRenderer(smollm2_checkpoint, "Be brief."), "Hi", "Hello", "Who?")
    prompt = chat.render_marked()
    decode = smollm2_checkpoint.tokenizer.decode
    marks = (prompt.head, prompt.opening, prompt.stable, prompt.messages_end)
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user"
    turns = start + "\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user"
    assert [decode(prompt.tokens[:mark], skip_special=False) for mark in marks] == [
        "<|im_start|>system",  # the newline may join another one, and so may those below
        start,
        turns,
        turns + "\nWho?<|im_end|>\n",
    ]
    assert decode(prompt.tokens[prompt.messages_end :], skip_special=False) == "<|im_start|>assistant\n"
    assert chat.close_tokens().tolist() == [2, 198]
    assert chat.stop_ids == (2, 0)


def test_without_a_system_text_smollm2_has_one_of_its_own(smollm2_checkpoint: Any) -> None:
    prompt = say(ChatRenderer(smollm2_checkpoint), "Hi").render_marked()
    opening = smollm2_checkpoint.tokenizer.decode(prompt.tokens[: prompt.opening], skip_special=False)
    assert opening.endswith("trained by Hugging Face<|im_end|>\n<|im_start|>user")


@settings(max_examples=60, deadline=None)
@given(ours=TEXTS, theirs=TEXTS, lasts=st.lists(TEXTS, min_size=2, max_size=2), reply=TEXTS)
@example("Hi", "\n\nHi", [" ", "\n"], "Hello")
def test_no_text_changes_a_token_before_a_mark_of_smollm2(
    smollm2_checkpoint: Any, ours: str, theirs: str, lasts: list[str], reply: str
) -> None:
    chats = [ChatRenderer(smollm2_checkpoint, "Be brief.") for _ in range(3)]
    prompts = [
        say(chat, *texts).render_marked()
        for chat, texts in zip(
            chats, [(ours, reply, lasts[0]), (ours, reply, lasts[1]), (theirs, reply, lasts[1])], strict=True
        )
    ]
    expect_same(prompts[0], prompts[1], "stable")
    expect_same(prompts[0], prompts[2], "opening")
    expect_in_order(prompts[0])
    n = len(prompts[0].tokens)
    assert n - prompts[0].messages_end == len(smollm2_checkpoint.tokenizer.encode("<|im_start|>assistant\n"))


# --- what is computed once ---------------------------------------------------------------------------------------


class CountingTokenizer:
    """Stands in for a tokenizer's `encode`, and notes how long the texts are."""

    def __init__(self, chat: ChatRenderer) -> None:
        self.lengths: list[int] = []
        self.encode = chat._tokenizer.encode

    def __call__(self, text: str, add_special: bool = True) -> Any:
        self.lengths.append(len(text))
        return self.encode(text, add_special)


@pytest.mark.parametrize("name", ["bos", "strips", "tools before the last question", "counts"])
def test_long_chats_are_tokenised_once_a_turn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = bpe("smollm")
    chat = chat_of(name, "Be brief. ", TOOLS, tokenizer)
    say(chat, *["How are you? " * 20, "Fine. " * 20] * 10, "Who?")
    chat.render_marked()
    counting = CountingTokenizer(chat)
    monkeypatch.setattr(tokenizer, "encode", counting)
    prompt = chat.render_marked()
    whole = len(tokenizer.decode(prompt.tokens, skip_special=False))
    assert [length for length in counting.lengths if length > 200] == [whole]


def test_the_head_and_the_opening_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[int] = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, messages: Any, *args: Any, **variables: Any) -> str:
        rendered.append(len(messages))
        return render(self, messages, *args, **variables)

    chat = say(chat_of("bos"), "Hi", "Hello", "Who?")
    monkeypatch.setattr(ChatTemplate, "render", counted)
    chat.render_marked()
    chat.close_tokens()
    first = [n for n in rendered if 0 < n < 4]
    rendered.clear()
    chat.render_marked()
    chat.close_tokens()
    assert len(first) > 30
    assert set(rendered) == {0, 4}, "0: texts that are rendered already"


def test_marks_that_were_remembered_are_those_of_a_new_chat() -> None:
    for name in TEMPLATES:
        system = None if name == REFUSES else "Be brief."
        grown = chat_of(name, system, TOOLS)
        for i, text in enumerate(("Hi", THOUGHT, "Who?", "I", "Bye")):
            say(grown, text) if i % 2 == 0 else grown.add_assistant(text)
            fresh = chat_of(name, system, TOOLS)
            for message in grown.messages[len(fresh.messages) :]:
                fresh.add(message)
            one, other = grown.render_marked(), fresh.render_marked()
            assert (one.head, one.opening, one.stable, one.messages_end) == (
                other.head, other.opening, other.stable, other.messages_end
            )  # fmt: skip
            assert one.tokens.tolist() == other.tokens.tolist()


# --- the end of a reply ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "bos", "strips", "clock", "title", "tools"])
def test_a_reply_with_its_close_begins_the_next_prompt(name: str) -> None:
    chat = say(chat_of(name), "Hi")
    before = chat.render_marked().tokens.tolist()
    reply = bpe().encode("Hello", add_special=False).tolist()
    history = before + reply + chat.close_tokens().tolist()
    assert bpe().decode(chat.close_tokens(), skip_special=False) == "<|im_end|>\n"
    chat.add_assistant("Hello")
    assert chat.render_marked(add_generation_prompt=False).tokens.tolist() == history
    assert say(chat, "Who?").render_marked().tokens[: len(history)].tolist() == history


def test_what_only_the_end_of_a_chat_has_closes_no_reply() -> None:
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ eos_token }}"
    chat = chat_of(source)
    assert chat.close_tokens().tolist() == []
    assert chat.stop_ids == (2, 0)


def test_a_close_that_joins_what_comes_before_or_after_it_is_none() -> None:
    """No tokens behind those of the reply read as they will in the next prompt."""
    words = ["k]", *WORDS, "J", "ac", "k", "x"]
    before = chat_of("{% for m in messages %}{{ m.content }}]x{{ eos_token }}{% endfor %}", tokenizer=pieces(words))
    assert before.close_tokens().tolist() == []
    source = "{% for m in messages %}{{ '\\n' }}{{ m.role }}: {{ m.content }}#\n{% endfor %}"
    after = chat_of(source, tokenizer=pieces(["#", *WORDS]))
    assert [after._tokenizer.text_of(i) for i in after.close_tokens().tolist()] == ["#"]


@pytest.mark.parametrize("name", ["silent", "joins", REFUSES])
def test_a_template_without_a_close_gives_none(name: str) -> None:
    chat = chat_of(name)
    assert chat.close_tokens().tolist() == []
    assert chat.close_tokens().dtype == np.int32


def test_a_control_token_that_closes_a_reply_ends_it() -> None:
    source = "{% for m in messages %}{{ m.content }}<|im_start|>\n{% endfor %}"
    chat = chat_of(source, tokenizer=bpe(add_bos=False))
    assert chat.close_tokens()[0] == 1
    assert chat.stop_ids == (1, 2, 0)
    text_closes = chat_of("{% for m in messages %}{{ m.content }}#{% endfor %}")
    assert text_closes.stop_ids == (2, 0)


def test_the_end_tokens_of_the_model_come_before_those_of_the_tokenizer() -> None:
    template = ChatTemplate(TURN, bpe().bos_token, bpe().eos_token)
    model = SimpleNamespace(chat=template, tokenizer=bpe(), eos_token_ids=(7, 2))
    assert ChatRenderer(model).stop_ids == (2, 7, 0)


def test_close_tokens_are_a_copy() -> None:
    chat = chat_of("bos")
    chat.close_tokens()[:] = 0
    assert chat.close_tokens().tolist() == [2, 201]


# --- the messages ------------------------------------------------------------------------------------------------


def test_messages_are_copied_in_and_out() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = chat_of("tools", tools=tools)
    message = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    chat.add(message)
    message["content"][0]["text"] = "Ho"  # type: ignore[index]
    tools.clear()
    chat.messages[0]["content"] = "changed"
    chat.messages[1]["content"][0]["text"] = "changed"
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    assert '"f"' in text_of(chat.render_marked(), 99)


@pytest.mark.parametrize("message", ["hi", {"content": "x"}, None, ["role"], 3])
def test_a_message_without_a_role_is_refused_and_leaves_the_chat_as_it_was(message: Any) -> None:
    chat = say(chat_of("bos"), "Hi")
    with pytest.raises(InvalidRequest, match='a message must be an object with a "role", got'):
        chat.add(message)
    assert len(chat.messages) == 2
    chat.check()


def test_messages_that_the_template_refuses_are_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="no system"):
        say(chat_of(REFUSES), "Hi").render_marked()
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        say(chat_of("bos"), "\ud800").render_marked()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (SimpleNamespace(chat=None, tokenizer=bpe(), name="tiny"), "tiny has no chat template"),
        (SimpleNamespace(chat=ChatTemplate(TURN), tokenizer=None), "SimpleNamespace has no tokenizer"),
        (object(), "object has no chat template"),
    ],
)
def test_a_model_that_cannot_chat_is_an_error_that_says_what_is_missing(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^a chat needs a model with a chat template and a tokenizer, and {message}$"):
        ChatRenderer(model)


def test_a_system_text_must_be_a_text() -> None:
    with pytest.raises(TypeError, match="system must be a str or None, got list"):
        chat_of("bos", system=["Be brief."])  # type: ignore[arg-type]


def test_a_chat_ends_with_whole_messages() -> None:
    with pytest.raises(TypeError, match="a chat continues no message"):
        chat_of("bos", continue_final_message=True)


def test_an_empty_system_text_is_a_system_text() -> None:
    assert chat_of("bos", system="").messages == [{"role": "system", "content": ""}]
    assert chat_of("bos", system=None).messages == []


def test_check_notices_what_was_broken() -> None:
    chat = say(chat_of("bos"), "Hi")
    chat.render_marked()
    chat.check()
    kept = chat._messages
    for broken, message in (
        ([*kept, {"content": "x"}], "no role"),
        (kept[1:], "the system text is not the first message"),
        ([kept[0], {"role": "system"}, kept[1]], None),
        ([], "the system text"),
    ):
        chat._messages = broken
        if message is None:
            chat.check()
            continue
        with pytest.raises(CheckFailed, match=message):
            chat.check()
    chat._messages = kept
    assert chat._opening is not None
    chat._opening = chat._opening._replace(num_messages=2)
    with pytest.raises(CheckFailed, match="the opening holds a message of the user"):
        chat.check()
    chat._opening = chat._opening._replace(num_messages=3)
    with pytest.raises(CheckFailed, match="the opening belongs to messages that are not there"):
        chat.check()


def test_both_names_are_public() -> None:
    assert paged.ChatRenderer is ChatRenderer
    assert paged.MarkedPrompt is MarkedPrompt
    with pytest.raises(AttributeError):
        chat_of("bos").render_marked().head = 3  # type: ignore[misc]
