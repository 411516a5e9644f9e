"""Characters that are split over tokens: a stream shows whole ones, and joined it is what all bytes spell."""

from __future__ import annotations

import pytest
from fakes import ByteTokenizer, ScriptModel

from scheduler import Engine, SamplingParams

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7".encode()
CASES = {
    "emoji": [b"\xf0\x9f", b"\x98\x80"],
    "kanji": [b"\xe8", b"\xaa", b"\x9e"],
    "accent": [b"\xc3", b"\xa9"],
    "combining": [b"e", "\u0301".encode(), b"!"],
    "family and flag": [FAMILY[i : i + 3] for i in range(0, len(FAMILY), 3)],
    "cut off": [b"ok", b"\xf0\x9f"],
    "lone byte": [b"a", b"\x80", b"b"],
}


def run(pieces: list[bytes], **params):
    model = ScriptModel(list(range(1, len(pieces) + 1)))
    model.tokenizer = ByteTokenizer([b"", *pieces])
    events = list(Engine(model, num_pages=16).stream(ScriptModel.prompt(3), SamplingParams(max_tokens=40, **params)))
    return [event.text for event in events], events[-1].output


@pytest.mark.parametrize("name", CASES)
def test_the_joined_stream_is_the_decoded_bytes(name: str) -> None:
    texts, output = run(CASES[name])
    want = b"".join(CASES[name]).decode("utf-8", "replace")
    assert "".join(texts) == output.text == want
    held = b""
    for piece, text in zip(CASES[name], texts, strict=False):  # nothing of a character before all of it is there
        held += piece
        assert held.decode("utf-8", "ignore").startswith(text) or "\ufffd" in want
        held = held[len(text.encode()) :] if "\ufffd" not in text else b""


def test_one_mark_stands_for_the_cut_off_tail_and_comes_last() -> None:
    texts, output = run(CASES["cut off"])
    assert output.text == "ok\ufffd" and texts[-1].endswith("\ufffd")


def test_a_stop_string_with_an_emoji_cuts_before_it() -> None:
    pieces = [b"a", b"\xf0\x9f", b"\x98\x80", b"b"]
    texts, output = run(pieces, stop="\U0001f600")
    assert "".join(texts) == output.text == "a" and len(output.token_ids) == 3
