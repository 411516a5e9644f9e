"""From token ids to the text that a client sees: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

from paged.errors import check


class TextStream:
    """Incremental detokenisation: the text of a growing list of tokens, never part of a character.

    What `push` and the last `flush` return, joined, is `b"".join(bytes of all tokens).decode("utf-8", "replace")`:
    bytes that begin a character wait for the rest of it, bytes that belong to none become U+FFFD.
    A combining mark is a character of its own: it follows what it modifies, which is not repeated.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes(token_id)` gives the bytes that a token stands for; b"" for tokens without text."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, often "". O(bytes of the token)."""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """No token follows: one U+FFFD where a character was cut off, else "". The stream can then start anew."""
        return self._decoder.decode(b"", True)


class _Automaton:
    """Aho-Corasick over the stop strings: a state is the longest end of the text so far that begins one of them.

    (Aho, Corasick: Efficient string matching, CACM 1975.) State 0 is the empty string. Each list has an entry a
    state:

    edges    the longer states, by the character that leads there
    fail     the next shorter end of the text that begins a stop string
    depth    number of characters
    matched  length of the longest stop string that the state ends with, 0: none
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.edges: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.depth = [0]
        self.matched = [0]
        for stop in stops:
            state = 0
            for length, char in enumerate(stop, 1):
                edges = self.edges[state]
                if char not in edges:
                    edges[char] = len(self.edges)
                    self.edges.append({})
                    self.fail.append(0)
                    self.depth.append(length)
                    self.matched.append(0)
                state = edges[char]
            self.matched[state] = len(stop)
        # Breadth first: the state to fall back to is shorter, so it is finished before.
        queue = deque(self.edges[0].values())
        while queue:
            state = queue.popleft()
            self.matched[state] = self.matched[state] or self.matched[self.fail[state]]
            for char, longer in self.edges[state].items():
                self.fail[longer] = self.step(self.fail[state], char)
                queue.append(longer)

    def step(self, state: int, char: str) -> int:
        """The state after one more character. Amortised O(1): each fall back undoes an earlier step."""
        while state and char not in self.edges[state]:
            state = self.fail[state]
        return self.edges[state].get(char, 0)

    def unfinished(self, state: int) -> int:
        """The longest end of `state` that a stop string still continues."""
        while state and not self.edges[state]:
            state = self.fail[state]
        return state


@lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)


class StopMatcher:
    """Finds the first stop string in a stream of text, however the text is cut in pieces.

    The match that ends first wins; of several that end at the same character, the longest. So what is shown does not
    depend on the borders of the pieces, and nobody waits for a longer match. Text that could be the beginning of a
    stop string is held back until it is known not to be; with `include_stop` all of it is shown anyway, and at once.

    Invariant (`check()`): the text held back is the longest end of the text so far that a stop string continues.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`stops` must not be empty strings. O(characters in `stops`), once for each set of stops in use."""
        if "" in stops:
            raise ValueError(f"a stop string must have at least one character, got {stops!r}")
        self._automaton = _automaton(tuple(stops)) if stops else None
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self.stopped = False

    def push(self, text: str, armed: bool = True) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop string is complete).

        Amortised O(text) and a copy of what is held back, however much came before and however many stops there are.
        With `armed` False, stop strings that `text` completes do not count; one that it only begins still may.
        After a stop, further text is neither shown nor looked at.
        """
        if self.stopped:
            return "", True
        automaton = self._automaton
        if automaton is None:
            return text, False
        state, text = self._state, self._held + text
        for end in range(len(self._held), len(text)):
            state = automaton.step(state, text[end])
            if automaton.matched[state]:
                if not armed:
                    state = automaton.unfinished(state)
                    continue
                self._state, self._held, self.stopped = 0, "", True
                return text[: end + 1 if self._include_stop else end + 1 - automaton.matched[state]], True
        held = 0 if self._include_stop else automaton.depth[state]
        self._state, self._held = state, text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """The text held back: no more follows, so it belongs to no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held

    def check(self) -> None:
        """Assert the invariant of the class docstring."""
        depth = self._automaton.depth[self._state] if self._automaton is not None and not self._include_stop else 0
        check(
            len(self._held) == depth, f"{len(self._held)} characters are held back, {depth} could begin a stop string"
        )


class OutputText:
    """The text of one request's output, token by token: TextStream, then StopMatcher.

    Every token that was generated counts: where a stop string cuts the text, its tokens stay in the request's
    token_ids and logprobs (which so have one length) and in its usage. A token id that ends a request has no text
    to show: do not push it.

    `num_tokens` counts the tokens pushed; a stop string that token number `min_tokens` or a later one completes ends
    the request, one that is complete before does not.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._stream = TextStream(token_bytes)
        self._matcher = StopMatcher(stops, include_stop)
        self._min_tokens = min_tokens
        self._shown: list[str] = []
        self.num_tokens = 0

    @property
    def text(self) -> str:
        """All text shown so far. O(text)."""
        return "".join(self._shown)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._matcher.stopped

    def push(self, token_id: int) -> tuple[str, bool]:
        """(new text to show, whether a stop string ended the request). Amortised O(bytes of the token)."""
        self.num_tokens += 1
        return self._show(self._stream.push(token_id))

    def flush(self) -> str:
        """The output is complete: the rest of the text, with one U+FFFD for a character that was cut off."""
        shown, stopped = self._show(self._stream.flush())
        rest = "" if stopped else self._matcher.flush()
        if rest:
            self._shown.append(rest)
        return shown + rest

    def _show(self, text: str) -> tuple[str, bool]:
        delta, stopped = self._matcher.push(text, self.num_tokens >= self._min_tokens)
        if delta:
            self._shown.append(delta)
        return delta, stopped
