"""A chat as it grows: its prompt tokens, and the places in them up to which other prompts have the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paged.errors import InvalidRequest, check
from paged.loaders.borders import PROBES, Borders, common_prefix
from paged.loaders.chat import ChatTemplate, Message
from paged.loaders.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paged.ops.plan import Int32

Tools = Sequence[Mapping[str, Any]] | None
Chat = tuple[Sequence[Message], Tools]

# Encodes a text that is rendered already by the one rule for BOS, that of ChatTemplate.encode.
_AS_IT_IS = ChatTemplate("{{ text }}")

# Tools for the prompts that tell what all prompts share; and a reply that no template prints by itself.
_TOOLS: Sequence[Mapping[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": about}}},
        },
    }
    for name, about in (("add", "Adds one."), ("look_up", "Finds it."))
]
_REPLY = "Quizzical zephyrs vex Jack"
# Characters behind the place where texts part that show how a tokenizer goes on there.
_PART = 64


@dataclass(frozen=True, eq=False)
class MarkedPrompt:
    """A prompt, and marks in it: numbers of leading tokens, 0 where the template gives no such place.

    tokens        int32 [n]
    head          they are the same whatever the system text, the tools and the messages are
    opening       they are the same whatever the user says: system text, tools, and how the user's first turn begins
    stable        they are the same whatever the user says last: the turns before it, and how that turn begins
    messages_end  they end with the close of the last message; the generation prompt follows

    0 <= head <= opening <= stable <= messages_end <= n.
    """

    tokens: Int32
    head: int = 0
    opening: int = 0
    stable: int = 0
    messages_end: int = 0


class _Opening(NamedTuple):
    """What prompts share whatever the user says: after this many messages, in characters and in tokens."""

    num_messages: int
    num_characters: int
    tokens: Int32


class ChatRenderer:
    """The messages of one chat, rendered by the template of a model; it also tells what other prompts share with it.

    A mark is found by rendering the chat with other texts in place of what may vary, and by giving up the tokens
    before that place which some text could still change. A template that prints what varies further to the front (a
    title, a clock that runs) gives a smaller mark, never a wrong one. Whatever else the prompt says, such as the
    date, counts as fixed.

    A chat belongs to one thread.

    Invariants: each message has a role; a system text is the first message; what is remembered of the opening
    belongs to the messages that stand before the user's first one.
    """

    def __init__(
        self,
        model: Any,
        system: str | None = None,
        tools: Tools = None,
        **variables: Any,
    ) -> None:
        """`model` is anything with `chat` and `tokenizer`, such as a LanguageModel or a Checkpoint; `variables` are
        handed to the template (such as enable_thinking=False). ValueError if it has no template or no tokenizer."""
        chat: ChatTemplate | None = getattr(model, "chat", None)
        tokenizer: Tokenizer | None = getattr(model, "tokenizer", None)
        if chat is None or tokenizer is None:
            name = getattr(model, "name", "") or type(model).__name__
            missing = "chat template" if chat is None else "tokenizer"
            raise ValueError(f"a chat needs a model with a chat template and a tokenizer, and {name} has no {missing}")
        if "continue_final_message" in variables:
            raise TypeError("a chat continues no message, its marks end with whole ones; use ChatTemplate.encode")
        if not isinstance(system, str | None):
            raise TypeError(f"system must be a str or None, got {type(system).__name__}")
        self._chat = chat
        self._tokenizer = tokenizer
        self._borders = Borders.of(tokenizer)
        self._eos_ids = (*getattr(model, "eos_token_ids", ()), *tokenizer.eos_ids)
        self._tools = None if tools is None else deepcopy(list(tools))
        self._variables = variables
        self._system: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._system)
        self._head: Int32 | None = None
        self._opening: _Opening | None = None
        self._close: Int32 | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the messages, the system text first."""
        return deepcopy(self._messages)

    def add_user(self, text: str) -> None:
        """Append what the user says."""
        self.add({"role": "user", "content": text})

    def add_assistant(self, text: str) -> None:
        """Append what the model replied, without its end token."""
        self.add({"role": "assistant", "content": text})

    def add(self, message: Message) -> None:
        """Append a copy of any message, such as one of the role "tool". InvalidRequest if it has no role."""
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidRequest(f'a message must be an object with a "role", got {message!r:.80}')
        self._messages.append(deepcopy(dict(message)))

    def render_marked(self, add_generation_prompt: bool = True) -> MarkedPrompt:
        """The tokens of the messages so far, as ChatTemplate.encode gives them (one BOS at most), with the marks.

        Costs a tokenisation of the prompt and about twenty renderings, of which only what follows the last control
        token that they share is tokenised (all of it in a template without control tokens). The head and the
        opening cost as much again, once a chat; the opening each turn where later turns begin unlike the first.
        InvalidRequest where the template fails on the messages.
        """
        text = self._render(self._messages, self._tools, add_generation_prompt)
        tokens = self._encode(text)
        users = [i for i, message in enumerate(self._messages) if message["role"] == "user"]
        opening = self._common_opening(text, tokens, users)
        stable = opening
        if users:
            others = self._renderings((self._saying(users[-1:], probe), self._tools) for probe in self._borders.probes)
            stable = self._settled(tokens, [text, *others])
        closed = self._renderings([(self._messages, self._tools)], add_generation_prompt=False)
        begin, tails = self._tails(tokens, [text, *closed])
        end = begin + common_prefix(*tails) if closed else stable
        stable = min(stable, end)
        opening = min(opening, stable)
        return MarkedPrompt(tokens, min(self._common_head(tokens), opening), opening, stable, end)

    def close_tokens(self) -> Int32:
        """Tokens `int32 [n]` that close a turn of the assistant after its text; none if the template closes nothing.

        With them behind it, a reply reads as it will in the next prompt. Rendered once a chat.
        """
        if self._close is None:
            self._close = self._find_close()
        return np.array(self._close)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a reply: the control token that closes the assistant's turn, and the model's end tokens."""
        first = [token for token in self.close_tokens()[:1].tolist() if not self._tokenizer.token_bytes(token)]
        return tuple(dict.fromkeys((*first, *self._eos_ids)))

    def check(self) -> None:
        """Assert the invariants of the class docstring. O(messages)."""
        check(all("role" in message for message in self._messages), "a message has no role")
        check(self._messages[: len(self._system)] == self._system, "the system text is not the first message")
        if self._opening is not None:
            before = [message["role"] for message in self._messages[: self._opening.num_messages]]
            check(len(before) == self._opening.num_messages, "the opening belongs to messages that are not there")
            check("user" not in before, "the opening holds a message of the user")

    def _render(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool) -> str:
        return self._chat.render(messages, tools, add_generation_prompt, **self._variables)

    def _renderings(self, chats: Iterable[Chat], add_generation_prompt: bool = True) -> list[str]:
        """The texts of those chats that the template does not refuse: what it refuses is nobody's prompt."""
        texts: list[str] = []
        for messages, tools in chats:
            try:
                texts.append(self._render(messages, tools, add_generation_prompt))
            except InvalidRequest:
                continue
        return texts

    def _encode(self, text: str) -> Int32:
        return _AS_IT_IS.encode(self._tokenizer, [], text=text)

    def _saying(self, users: Sequence[int], text: str) -> list[Message]:
        """The messages, with `text` said in those at `users`."""
        said = {i: {**self._messages[i], "content": text} for i in users}
        return [said.get(i, message) for i, message in enumerate(self._messages)]

    def _settled(self, tokens: Int32, texts: Sequence[str]) -> int:
        """Leading ones of `tokens`, which are those of texts[0], that all texts share whatever follows.

        0 for fewer than three texts: two may begin alike by chance.
        """
        if len(texts) < 3:
            return 0
        begin, tails = self._tails(tokens, texts)
        return begin + self._borders.settled(tails)

    def _tails(self, tokens: Int32, texts: Sequence[str]) -> tuple[int, list[Int32]]:
        """Tokens of each text from position `begin` on, before which they are all equal; `tokens` are of texts[0].

        What follows a control token is tokenised by itself, so the last one before the texts part is a place to cut.
        """
        shared = _shared(texts)
        cut = max((texts[0].rfind(name, 0, shared) for name in self._borders.controls_in(tokens)), default=0)
        if cut > 0:
            tails = [self._tokenizer.encode(text[cut:], add_special=False) for text in texts]
            begin = len(tokens) - len(tails[0])
            same_start = all(tail[0] == tails[0][0] for tail in tails)
            if same_start and np.array_equal(tokens[begin:], tails[0]):
                return begin, tails
        return 0, [tokens, *(self._encode(text) for text in texts[1:])]

    def _common_opening(self, text: str, tokens: Int32, users: Sequence[int]) -> int:
        probes = self._borders.probes
        before = users[0] if users else len(self._messages)
        if self._opening is None or self._opening.num_messages != before:
            start = self._messages[:before]
            asked = [[*start, {"role": "user", "content": probe}] for probe in probes]
            texts = self._renderings((messages, self._tools) for messages in asked)
            self._opening = _Opening(before, _shared(texts), self._common(texts))
        opening = common_prefix(tokens, self._opening.tokens)
        if len(users) > 1:
            # A template may render later turns differently near the front, and print there what the user said.
            few = self._renderings((self._saying(users, probe), self._tools) for probe in PROBES[:3])
            if opening < len(self._opening.tokens) or _shared([text, *few]) < self._opening.num_characters:
                texts = [text, *self._renderings((self._saying(users, probe), self._tools) for probe in probes)]
                size = _shared(texts) + _PART
                opening = min(opening, len(self._common([text[:size] for text in texts])))
        return opening

    def _common_head(self, tokens: Int32) -> int:
        if self._head is None:
            probes = self._borders.probes
            kinds = (None, _TOOLS[:1], _TOOLS)
            users = [{"role": "user", "content": probe} for probe in probes]
            systems = [{"role": "system", "content": probe} for probe in reversed(probes)]
            chats = [[system, user] for system, user in zip(systems, users, strict=True)]
            chats += [[user] for user in users[:6]]
            self._head = self._common(self._renderings((chat, kinds[i % 3]) for i, chat in enumerate(chats)))
        return common_prefix(tokens, self._head)

    def _common(self, texts: Sequence[str]) -> Int32:
        """The leading tokens that prompts share whatever follows."""
        tokens = self._encode(texts[0]) if texts else np.empty(0, np.int32)
        return np.array(tokens[: self._settled(tokens, texts)])

    def _find_close(self) -> Int32:
        ended: list[Message] = [*self._system, {"role": "user", "content": PROBES[0]}]
        ended.append({"role": "assistant", "content": _REPLY})
        followed = [*ended, {"role": "user", "content": PROBES[1]}]
        texts = self._renderings([(ended, self._tools), (followed, self._tools)], add_generation_prompt=False)
        if len(texts) < 2 or not all(_REPLY in text for text in texts):
            return np.empty(0, np.int32)
        start, reply, after = texts[0].rpartition(_REPLY)
        close = after[: _shared([text.rpartition(_REPLY)[2] for text in texts])]
        said, closed = self._encode(start + reply), self._encode(start + reply + close)
        if common_prefix(said, closed) < len(said):
            return np.empty(0, np.int32)
        return np.array(closed[len(said) : common_prefix(closed, self._encode(texts[1]))])


def _shared(texts: Sequence[str]) -> int:
    """Leading characters that all texts share. O(characters)."""
    characters = [np.frombuffer(text.encode("utf-32-le"), np.uint32) for text in texts]
    return common_prefix(*characters) if characters else 0
