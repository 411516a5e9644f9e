"""Incremental detokenisation and stop strings: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paged.text import OutputText, StopMatcher, TextStream, _Automaton


def stream_of(pieces: list[bytes]) -> TextStream:
    """A stream whose token i stands for pieces[i]."""
    return TextStream(pieces.__getitem__)


def deltas(pieces: list[bytes]) -> list[str]:
    """What each token shows, then what the flush shows."""
    stream = stream_of(pieces)
    return [stream.push(i) for i in range(len(pieces))] + [stream.flush()]


# Characters split over tokens


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"\xf0\x9f", b"\x98\x80"], ["", "😀", ""]),
        ([b"\xe8", b"\xaa", b"\x9e"], ["", "", "語", ""]),
        ([b"\xc3", b"\xa9"], ["", "é", ""]),
        ([b"e", "\u0301".encode()], ["e", "\u0301", ""]),
        ([b"e", b"\xcc", b"\x81"], ["e", "", "\u0301", ""]),
        ([b"a\xc3", b"\xa9b"], ["a", "éb", ""]),
        (["🏳️‍🌈".encode()[:5], "🏳️‍🌈".encode()[5:9], "🏳️‍🌈".encode()[9:]], ["🏳", "\ufe0f", "\u200d🌈", ""]),
        ([b"ok", b"\xf0\x9f"], ["ok", "", "\ufffd"]),
        ([b"\xf0\x9f"], ["", "\ufffd"]),
        ([b"a", b"\x80", b"b"], ["a", "\ufffd", "b", ""]),
        ([b"\xe8", b"b"], ["", "\ufffdb", ""]),
        ([b"\xe8\xaa", b"\xe8\xaa\x9e"], ["", "\ufffd語", ""]),
        ([b"\xff\xfe", b"a"], ["\ufffd\ufffd", "a", ""]),
        ([b"\xed\xa0", b"\x80"], ["", "\ufffd\ufffd\ufffd", ""]),
        ([b"", b"a", b""], ["", "a", "", ""]),
        ([], [""]),
    ],
)
def test_a_character_is_shown_when_it_is_complete(pieces: list[bytes], shown: list[str]) -> None:
    assert deltas(pieces) == shown
    assert "".join(shown) == b"".join(pieces).decode("utf-8", "replace")


# Bytes that make hard cases likely: ASCII, leads and continuations of two, three and four bytes, never-valid ones.
HARD = st.lists(
    st.sampled_from([b"a", b"\x80", b"\xbf", b"\xc3", b"\xa9", b"\xe2", b"\xed", b"\xa0", b"\xf0", b"\x9f", b"\x98"]),
    max_size=30,
).map(b"".join)
BYTES = st.one_of(st.binary(max_size=40), HARD, st.text(max_size=20).map(lambda s: s.encode("utf-8", "surrogatepass")))


def cut(data: bytes, borders: list[int]) -> list[bytes]:
    at = [0, *sorted(b % (len(data) + 1) for b in borders), len(data)]
    return [data[a:b] for a, b in pairwise(at)]


BORDERS = st.lists(st.integers(0, 1000), max_size=20)


@settings(deadline=None)
@given(BYTES, BORDERS)
@example(b"\xf0\x90\x80", [1, 2])
@example(b"\xe0\x80\x80", [1])
@example(b"\xf4\x90\x80\x80", [1, 2, 3])
def test_the_joined_stream_equals_decoding_all_bytes_at_once(data: bytes, borders: list[int]) -> None:
    pieces = cut(data, borders)
    assert "".join(deltas(pieces)) == data.decode("utf-8", "replace")


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=20), BORDERS)
def test_whole_text_never_shows_a_replacement_mark_of_its_own(text: str, borders: list[int]) -> None:
    pieces = cut(text.encode(), borders)
    stream, seen = stream_of(pieces), ""
    for i in range(len(pieces)):
        seen += stream.push(i)
        assert text.startswith(seen)
        # All that is complete is shown: what is missing is less than a character.
        assert len(b"".join(pieces[: i + 1])) - len(seen.encode()) < 4
    assert seen == text and stream.flush() == ""


def test_a_flushed_stream_starts_anew() -> None:
    stream = stream_of([b"\xe8", b"\xaa\x9e", b"a"])
    assert stream.push(0) == "" and stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.push(1) == "\ufffd\ufffd" and stream.push(2) == "a" and stream.flush() == ""


def test_each_token_is_looked_up_once() -> None:
    seen: list[int] = []

    def token_bytes(token_id: int) -> bytes:
        seen.append(token_id)
        return b"\xe8"

    stream = TextStream(token_bytes)
    for token_id in (5, 6, 7):
        stream.push(token_id)
    assert seen == [5, 6, 7]


# Stop strings


def feed(matcher: StopMatcher, pieces: list[str], armed: list[bool] | None = None) -> tuple[list[str], bool]:
    """What each push shows up to the stop, then what the flush shows; check() after every step."""
    shown: list[str] = []
    for i, piece in enumerate(pieces):
        visible, stopped = matcher.push(piece, armed is None or armed[i])
        matcher.check()
        shown.append(visible)
        if stopped:
            return shown, True
    shown.append(matcher.flush())
    matcher.check()
    return shown, False


def oracle(text: str, stops: list[str], include_stop: bool, first: int = 0) -> tuple[str, bool]:
    """The rule, by trying every end after `first` in turn: the match that ends first, then the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending and end > first:
            return text[: end if include_stop else end - max(map(len, ending))], True
    return text, False


CASES: list[tuple[list[str], list[str], str, str, bool]] = [
    # pieces, stops, shown, shown with include_stop, stopped
    (["DEF", "G", "HI", "J"], ["DEFGHIJ"], "", "DEFGHIJ", True),
    (["brown", " fox", " jumps"], ["own fox"], "br", "brown fox", True),
    (["Paris"], ["Pari"], "", "Pari", True),
    (["xabc"], ["ab", "abc"], "x", "xab", True),
    (["xabc"], ["abc", "ab"], "x", "xab", True),
    (["x", "a", "b", "c"], ["ab", "abc"], "x", "xab", True),
    (["DEF", "G", "X"], ["DEFGHIJ"], "DEFGX", "DEFGX", False),
    (["DEFG"], ["DEFGHIJ"], "DEFG", "DEFG", False),
    (["abcabd"], ["abcabe", "bd"], "abca", "abcabd", True),
    (["aaa", "ab"], ["aab"], "aa", "aaaab", True),
    (["ababab", "c"], ["ababc"], "ab", "abababc", True),
    (["xabcd"], ["abcd", "bc"], "xa", "xabc", True),
    (["xabc"], ["bc", "abc", "c"], "x", "xabc", True),
    (["one\n", "\nHuman", ":"], ["\n\nHuman:"], "one", "one\n\nHuman:", True),
    (["hi ", "😀", "!"], ["😀!"], "hi ", "hi 😀!", True),
    (["a", "", "b"], ["ab"], "", "ab", True),
    (["abc"], [], "abc", "abc", False),
    ([], ["a"], "", "", False),
]


@pytest.mark.parametrize(("pieces", "stops", "shown", "included", "stopped"), CASES)
def test_a_stop_string_is_cut_wherever_the_tokens_end(
    pieces: list[str], stops: list[str], shown: str, included: str, stopped: bool
) -> None:
    for include_stop, expected in ((False, shown), (True, included)):
        for cutting in (pieces, list("".join(pieces)), ["".join(pieces)]):
            parts, found = feed(StopMatcher(stops, include_stop), cutting)
            assert ("".join(parts), found) == (expected, stopped)
        assert oracle("".join(pieces), stops, include_stop) == (expected, stopped)


def test_text_is_held_back_only_while_it_could_begin_a_stop_string() -> None:
    shown, stopped = feed(StopMatcher(["DEFGHIJ", "FX"]), ["ab", "cD", "EF", "G", "X", "F", "Y"])
    assert shown == ["ab", "c", "", "", "DEFGX", "", "FY", ""] and not stopped


def test_included_stop_strings_hold_nothing_back() -> None:
    shown, stopped = feed(StopMatcher(["DEFGHIJ"], True), ["abD", "EFG", "HIJK"])
    assert shown == ["abD", "EFG", "HIJ"] and stopped


def test_what_is_held_back_is_shown_at_the_end_once() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.push("xab") == ("x", False)
    assert matcher.flush() == "ab" and matcher.flush() == ""
    assert matcher.push("c") == ("c", False)


def test_after_a_stop_nothing_more_is_shown() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("xabyy") == ("x", True)
    assert matcher.push("z") == ("", True) and matcher.push("ab") == ("", True)
    assert matcher.flush() == "" and matcher.stopped


def test_matchers_of_the_same_stops_share_no_state() -> None:
    one, two = StopMatcher(["ab"]), StopMatcher(["ab"])
    assert one.push("a") == ("", False)
    assert two.push("b") == ("b", False)
    assert one.push("b") == ("", True) and not two.stopped


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopMatcher(["a", ""])


TINY = st.text("ab😀", max_size=24)
STOPS = st.lists(st.text("ab😀", min_size=1, max_size=5), max_size=4)


@settings(deadline=None)
@given(TINY, STOPS, BORDERS, st.booleans())
@example("aaaab", ["aaab", "aab"], [1, 2, 3], False)
@example("abab", ["bab", "abab", "ab"], [2], True)
def test_any_cutting_shows_what_the_rule_says(
    text: str, stops: list[str], borders: list[int], include_stop: bool
) -> None:
    at = [0, *sorted(b % (len(text) + 1) for b in borders), len(text)]
    pieces = [text[a:b] for a, b in pairwise(at)]
    shown, stopped = feed(StopMatcher(stops, include_stop), pieces)
    assert ("".join(shown), stopped) == oracle(text, stops, include_stop)


@settings(deadline=None)
@given(TINY, STOPS, st.integers(0, 24), st.booleans())
@example("ab", ["ab", "abb"], 2, False)
@example("abb", ["ab", "abb"], 2, False)
def test_a_stop_string_complete_while_not_armed_does_not_count(
    text: str, stops: list[str], first: int, include_stop: bool
) -> None:
    armed = [i >= first for i in range(len(text))]
    shown, stopped = feed(StopMatcher(stops, include_stop), list(text), armed)
    assert ("".join(shown), stopped) == oracle(text, stops, include_stop, first)


@settings(deadline=None)
@given(TINY, STOPS, st.integers(0, 24))
def test_exactly_the_text_that_a_stop_string_may_continue_is_held_back(text: str, stops: list[str], first: int) -> None:
    matcher, visible = StopMatcher(stops), ""
    for i, char in enumerate(text):
        delta, stopped = matcher.push(char, i >= first)
        if stopped:
            return
        visible += delta
        seen = text[: i + 1]
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        assert len(seen) - len(visible) == max((len(b) for b in beginnings if seen.endswith(b)), default=0)


class CountingList(list):
    """A list that counts the reads of single items."""

    reads = 0

    def __getitem__(self, key):
        self.reads += 1
        return list.__getitem__(self, key)


@pytest.mark.parametrize("stops", [["aaaaaaab"], ["a" * n + "b" for n in range(1, 40)]])
def test_each_character_is_looked_at_once_however_long_the_output_and_however_many_stops(stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    automaton = matcher._automaton = _Automaton(tuple(stops))
    automaton.fail = CountingList(automaton.fail)
    step, looks = automaton.step, 0

    def counting_step(state: int, char: str) -> int:
        nonlocal looks
        looks += 1
        return step(state, char)

    automaton.step = counting_step  # type: ignore[method-assign]
    for _ in range(500):
        for piece in ("aaaaaa", "ac"):
            assert not matcher.push(piece)[1]
    assert looks == 500 * 8
    assert automaton.fail.reads <= looks  # as many steps down as steps up, at most


# One request's output


def output_of(pieces: list[bytes | str], **kwargs: object) -> tuple[OutputText, list[int]]:
    """An OutputText whose token i stands for pieces[i], and its token ids."""
    data = [p.encode() if isinstance(p, str) else p for p in pieces]
    return OutputText(data.__getitem__, **kwargs), list(range(len(data)))  # type: ignore[arg-type]


def generate(output: OutputText, token_ids: list[int]) -> tuple[list[int], list[str], bool]:
    """The token ids kept, the deltas shown, and whether it stopped: what a scheduler does with one request."""
    kept, shown = [], []
    for token_id in token_ids:
        kept.append(token_id)
        delta, stopped = output.push(token_id)
        shown.append(delta)
        if stopped:
            break
    shown.append(output.flush())
    return kept, shown, output.stopped


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "included", "num_tokens"),
    [
        (["DEF", "G", "HI", "J", "K"], ("DEFGHIJ",), "", "DEFGHIJ", 4),
        (["brown", " fox", " jumps"], ("own fox",), "br", "brown fox", 2),
        (["Paris", " is"], ("Pari",), "", "Pari", 1),
        (["xabc", "d"], ("ab", "abc"), "x", "xab", 1),
        (["DEF", "G", "X"], ("DEFGHIJ",), "DEFGX", "DEFGX", 3),
        ([b"hi \xf0\x9f", b"\x98\x80", "!"], ("😀",), "hi ", "hi 😀", 2),
        ([b"a\xf0\x9f"], ("b",), "a\ufffd", "a\ufffd", 1),
    ],
)
def test_every_generated_token_counts_and_the_text_is_cut(
    pieces: list[bytes | str], stops: tuple[str, ...], text: str, included: str, num_tokens: int
) -> None:
    for include_stop, expected in ((False, text), (True, included)):
        output, token_ids = output_of(pieces, stops=stops, include_stop=include_stop)
        kept, shown, _ = generate(output, token_ids)
        assert "".join(shown) == output.text == expected
        assert len(kept) == output.num_tokens == num_tokens


@pytest.mark.parametrize(
    ("min_tokens", "text", "num_tokens"),
    [
        (0, "", 1),
        (1, "", 1),
        (2, "ab, ", 2),
        (3, "ab, ab.", 3),
        (4, "ab, ab.ab!", 5),
        (9, "ab, ab.ab!abx", 6),
    ],
)
def test_a_stop_string_before_min_tokens_is_plain_text(min_tokens: int, text: str, num_tokens: int) -> None:
    pieces: list[bytes | str] = ["ab", ", ab", ".ab", "!", "ab", "x"]
    output, token_ids = output_of(pieces, stops=("ab",), min_tokens=min_tokens)
    kept, shown, stopped = generate(output, token_ids)
    assert "".join(shown) == output.text == text
    assert len(kept) == num_tokens and stopped is (min_tokens < 9)


def test_a_stop_string_begun_before_min_tokens_and_completed_after_counts() -> None:
    output, token_ids = output_of(["xa", "b", "c", "d"], stops=("abcd",), min_tokens=4)
    assert generate(output, token_ids) == ([0, 1, 2, 3], ["x", "", "", "", ""], True)
    output, token_ids = output_of(["xa", "b", "c", "d"], stops=("abc",), min_tokens=4)
    assert generate(output, token_ids) == ([0, 1, 2, 3], ["x", "", "abc", "d", ""], False)


def test_the_cut_off_tail_gives_one_mark_after_what_was_held_back() -> None:
    output, token_ids = output_of([b"xab", b"\xe8\xaa"], stops=("abc",))
    assert generate(output, token_ids) == ([0, 1], ["x", "", "ab\ufffd"], False)


def test_a_stop_string_that_the_mark_completes_is_cut_too() -> None:
    output, token_ids = output_of([b"xa", b"\xe8\xaa"], stops=("a\ufffd",))
    assert generate(output, token_ids) == ([0, 1], ["x", "", ""], True)


def test_deltas_join_to_the_text_without_stop_strings() -> None:
    output, token_ids = output_of([b"\xc3", b"\xa9", "t", b"\xc3", b"\xa9"])
    assert generate(output, token_ids) == ([0, 1, 2, 3, 4], ["", "é", "t", "", "é", ""], False)
    assert output.text == "été"


@settings(deadline=None)
@given(HARD, BORDERS, st.lists(st.text("aé\ufffd😀", min_size=1, max_size=3), max_size=3), st.booleans())
def test_any_bytes_any_cutting_any_stops(data: bytes, borders: list[int], stops: list[str], include_stop: bool) -> None:
    output, token_ids = output_of([*cut(data, borders)], stops=tuple(stops), include_stop=include_stop)
    _, shown, stopped = generate(output, token_ids)
    assert "".join(shown) == output.text
    assert (output.text, stopped) == oracle(data.decode("utf-8", "replace"), stops, include_stop)
