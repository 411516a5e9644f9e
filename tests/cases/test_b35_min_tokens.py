"""min_tokens with several end ids, ids of the request's own, stop strings and ignore_eos."""

from __future__ import annotations

import pytest
import torch
from fakes import ByteTokenizer, ScriptModel

from scheduler import Engine, SamplingParams

PIECES = [bytes([97 + i]) for i in range(12)]


class Wishes(ScriptModel):
    """Wants id 11 at every position, then 5, then 2, then 7."""

    def __init__(self) -> None:
        super().__init__([], vocab_size=12, eos=(2, 11))
        self.tokenizer = ByteTokenizer(PIECES)

    def forward(self, batch, storage):
        row = torch.zeros(12)
        row[[11, 5, 2, 7]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
        return row.repeat(len(batch.logit_rows), 1)


def run(**params):
    engine = Engine(Wishes(), num_pages=8, page_size=4)
    [output] = engine.generate([[3, 3]], SamplingParams(**params))
    engine.check()
    return output


@pytest.mark.parametrize("plain", [{"temperature": 0.0}, {"temperature": 1e-3, "seed": 1}], ids=str)
def test_none_of_the_end_ids_comes_among_the_first_three_tokens(plain: dict) -> None:
    output = run(max_tokens=6, min_tokens=3, stop_token_ids=[5], include_stop=True, **plain)
    assert output.token_ids == [7, 7, 7, 11]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("min_tokens", range(6))
def test_the_minimum_counts_tokens_that_are_shown(min_tokens: int) -> None:
    output = run(max_tokens=6, min_tokens=min_tokens, stop_token_ids=[5])
    assert output.token_ids == [7] * min_tokens and output.finish_reason == "stop"


def test_a_stop_string_is_heeded_from_the_minimum_on() -> None:
    """Piece 7 is "h": "hh" is complete with the second token, and again with each later one."""
    wish = {"logit_bias": {7: 9.0}}
    early = run(max_tokens=6, min_tokens=3, stop="hh", **wish)
    assert (early.text, len(early.token_ids), early.finish_reason) == ("h", 3, "stop")
    first = run(max_tokens=6, min_tokens=2, stop="hh", **wish)
    assert (first.text, len(first.token_ids)) == ("", 2)
    late = run(max_tokens=4, min_tokens=4, stop=["hhh", "x"], include_stop=True, **wish)
    assert (late.text, late.finish_reason) == ("hhhh", "stop")


def test_ignored_end_ids_end_nothing() -> None:
    output = run(max_tokens=6, ignore_eos=True)
    assert output.token_ids == [11] * 6 and output.finish_reason == "length"
    own = run(max_tokens=6, ignore_eos=True, stop_token_ids=[11], min_tokens=2)
    assert own.token_ids == [5, 5] and own.finish_reason == "stop"


def test_more_than_max_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens, got min_tokens 7 and max_tokens 6"):
        SamplingParams(max_tokens=6, min_tokens=7)
