"""Stop strings over the borders of tokens: what is shown, and that ids, log probabilities and usage have one length."""

from __future__ import annotations

import pytest
from fakes import ByteTokenizer, ScriptModel

from scheduler import Engine, SamplingParams

PIECES = [b"", b"DEF", b"G", b"HI", b"J", b"brown", b" fox", b" jumps", b"Paris", b"x", b"ab", b"c", b"X"]
CASES = [
    ([1, 2, 3, 4, 9], "DEFGHIJ", "", "DEFGHIJ", 4),
    ([5, 6, 7], "own fox", "br", "brown fox", 2),
    ([8, 9], "Pari", "", "Pari", 1),
    ([9, 10, 11], ["ab", "abc"], "x", "xab", 2),
    ([1, 2, 12], "DEFGHIJ", "DEFGX", "DEFGX", 3),
]


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(("script", "stop", "cut", "whole", "generated"), CASES)
def test_the_text_is_cut_and_every_generated_token_counts(
    script, stop, cut: str, whole: str, generated: int, include: bool, stream: bool, page_size: int
) -> None:
    model = ScriptModel(script)
    model.tokenizer = ByteTokenizer(PIECES)
    engine = Engine(model, num_pages=16, page_size=page_size)
    params = SamplingParams(max_tokens=20, stop=stop, include_stop=include, logprobs=1)
    prompt = ScriptModel.prompt(5)
    if stream:
        events = list(engine.stream(prompt, params))
        output = events[-1].output
        assert "".join(event.text for event in events) == output.text
        assert [token for event in events for token in event.token_ids] == output.token_ids
    else:
        [output] = engine.generate([prompt], params)
    ends_by_id = script == [1, 2, 12]  # the end id that ends it is shown where it is asked for
    ids = script[:generated] + ([0] if ends_by_id and include else [])
    assert (output.text, output.token_ids) == (whole if include else cut, ids)
    assert output.finish_reason == "stop" and len(output.logprobs) == len(ids)
    assert [entry.token_id for entry in output.logprobs] == ids
    engine.check()
