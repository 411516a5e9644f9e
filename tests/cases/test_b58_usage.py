"""Usage numbers agree with each other, with the cache's own, and come once."""

from __future__ import annotations

import pytest
from fakes import ByteTokenizer, ScriptModel

from scheduler import Engine, SamplingParams

SCRIPT = [1, 2, 3, 1, 2, 1, 2, 3, 1, 2]


def engine_of() -> Engine:
    model = ScriptModel(SCRIPT, max_seq_len=256)
    model.tokenizer = ByteTokenizer([b"", b"a", b"b", b"c", b"d"])
    return Engine(model, num_pages=32, page_size=16)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("params", [{"max_tokens": 7}, {"max_tokens": 20, "stop": "abab"}], ids=["length", "stop"])
def test_a_prompt_of_60_sent_twice(stream: bool, params: dict) -> None:
    """The second time 59 of 60 are cached: the engine matches to the token, and computes one for its logits."""
    engine, prompt = engine_of(), ScriptModel.prompt(60)
    for sent, cached in enumerate((0, 59), 1):
        settings = SamplingParams(**params)
        if stream:
            events = list(engine.stream(prompt, settings))
            assert [event.output is not None for event in events] == [False] * (len(events) - 1) + [True]
            output = events[-1].output
        else:
            [output] = engine.generate([prompt], settings)
        assert output.finish_reason == ("stop" if "stop" in params else "length")
        assert (output.num_prompt_tokens, output.num_cached_tokens, len(output.token_ids)) == (60, cached, 7)
        assert output.num_cached_tokens + output.num_computed_tokens == 60 + 7 - 1  # the last one is never computed
        stats, record = engine.stats(), engine.explain(output.request_id)
        assert (stats["prompt_tokens"], stats["generated_tokens"]) == (60 * sent, 7 * sent)
        assert (stats["query_tokens"], stats["hit_tokens"], stats["cached_tokens"]) == (
            60 * sent,
            *[59 * (sent - 1)] * 2,
        )
        assert (record["num_prompt_tokens"], record["num_cached_tokens"]) == (60, cached)
        assert stats["free_pages"] == 32 - engine.cache.held_pages and stats["live_pages"] == 0
        chains = engine.cache.chains()
        assert sum(chain.num_pages for chain in chains) == engine.cache.held_pages
        assert sum(chain.num_hits for chain in chains) == sent - 1
    engine.check()


def test_two_outputs_of_one_prompt_count_apart() -> None:
    engine, prompt = engine_of(), ScriptModel.prompt(60)
    [output] = engine.generate([prompt], SamplingParams(max_tokens=7, n=2))
    assert [len(sample.token_ids) for sample in output.samples] == [7, 7]
    assert [(s.num_prompt_tokens, s.num_cached_tokens) for s in output.samples] == [(60, 0), (60, 48)]
    stats = engine.stats()
    assert (stats["prompt_tokens"], stats["cached_tokens"], stats["generated_tokens"]) == (120, 48, 14)
    assert sum(s.num_computed_tokens for s in output.samples) == stats["computed_tokens"] == 60 + 12 + 2 * 6


def test_a_turn_that_goes_on_attaches_the_last_one_whole_and_answers_as_cold() -> None:
    """Prompt, an answer that a stop string ended, what closes it, and sixteen tokens more."""
    engine, prompt = engine_of(), ScriptModel.prompt(60)
    [first] = engine.generate([prompt], SamplingParams(max_tokens=20, stop="ab"))
    turn = [*prompt, *first.token_ids, 4, *[3] * 16]
    turn[0] = 60  # the script goes on behind the first prompt
    [warm] = engine.generate([turn], SamplingParams(max_tokens=5))
    [cold] = engine_of().generate([turn], SamplingParams(max_tokens=5))
    assert warm.num_cached_tokens == 60 + len(first.token_ids) - 1
    assert (warm.token_ids, warm.text) == (cold.token_ids, cold.text)
