"""Log probabilities of the prompt: exact, whatever cuts the prompt into pieces, and at no other request's cost."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from byhand import span
from fakes import EchoAfter, EchoHybrid, EchoLooped, EchoModel

from paged.draw import TokenLogprob, token_logprob
from paged.errors import InvalidRequest
from scheduler import Engine, SamplingParams, SchedulerConfig

SCORED = SamplingParams(max_tokens=4, prompt_logprobs=2)


def engine_of(model=None, **kwargs) -> Engine:
    kwargs.setdefault("num_pages", 64)
    kwargs.setdefault("max_num_seqs", 8)
    return Engine(model or EchoModel(), **kwargs)


def expected(model: EchoModel, prompt: list[int], num_top: int, **view) -> list[TokenLogprob | None]:
    """One entry a prompt token, from a computation without pages, chunks or caches."""
    rows = [token_logprob(model.oracle(prompt[:i], **view), prompt[i], num_top) for i in range(1, len(prompt))]
    return [None, *rows]


def run(engine: Engine, prompt: list[int], params: SamplingParams = SCORED, **options):
    [output] = engine.generate([prompt], params, **options)
    engine.check()
    assert output.finish_reason == "length", output.error
    return output


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 40])
@pytest.mark.parametrize("chunk", [512, 16, 7, 1])
def test_every_prompt_token_but_the_first_has_its_log_probability(length: int, chunk: int) -> None:
    engine = engine_of(max_num_batched_tokens=chunk, max_num_seqs=1)
    prompt = span(3, length)
    output = run(engine, prompt)
    assert output.prompt_logprobs == expected(engine.model, prompt, 2)
    assert output.token_ids == engine.model.greedy(prompt, 4)


def test_no_entry_without_being_asked_for() -> None:
    assert run(engine_of(), span(3, 20), SamplingParams(max_tokens=4)).prompt_logprobs is None


def test_zero_asks_for_the_tokens_own_alone() -> None:
    output = run(engine_of(), span(3, 5), SamplingParams(max_tokens=4, prompt_logprobs=0))
    assert [entry.top for entry in output.prompt_logprobs[1:]] == [()] * 4


@pytest.mark.parametrize("value", [-1, True, 1.5, "2"], ids=str)
def test_a_count_that_cannot_be_is_refused(value) -> None:
    with pytest.raises((ValueError, TypeError), match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=value)


def test_more_than_the_vocabulary_holds_is_refused_at_submit() -> None:
    with pytest.raises(InvalidRequest, match="prompt_logprobs must be at most the 97 tokens of the vocabulary, got 98"):
        engine_of().submit([1], SamplingParams(prompt_logprobs=98))


@pytest.mark.parametrize("chunk", [512, 24])
def test_neighbours_change_nothing_and_are_not_changed(chunk: int) -> None:
    engine = engine_of(max_num_batched_tokens=chunk)
    prompts = [span(5 * i, 30 + i) for i in range(5)]
    params = [
        SCORED,
        SamplingParams(max_tokens=9),
        SCORED,
        SamplingParams(max_tokens=3, temperature=1.0, seed=4),
        SCORED,
    ]
    outputs = engine.generate(prompts, params)
    for output, prompt, one in zip(outputs, prompts, params, strict=True):
        want = expected(engine.model, prompt, 2) if one is SCORED else None
        assert output.prompt_logprobs == want
        assert output.token_ids == engine_of().generate([prompt], one)[0].token_ids
    assert not engine.scheduler.extras._of


# The cache ----------------------------------------------------------------------------------------------------------


def test_the_prompt_is_read_from_no_cache_counts_nothing_there_and_is_cached_for_others() -> None:
    """Behaviour 39."""
    engine = engine_of()
    prompt = span(0, 40)
    run(engine, prompt, SamplingParams(max_tokens=4))
    before = (engine.cache.stats.num_queries, engine.cache.stats.query_tokens, engine.cache.stats.hit_tokens)
    for _ in range(2):
        output = run(engine, prompt)
        assert (output.num_cached_tokens, output.num_computed_tokens) == (0, 43)
        assert output.prompt_logprobs == expected(engine.model, prompt, 2)
    stats = engine.cache.stats
    assert (stats.num_queries, stats.query_tokens, stats.hit_tokens) == before
    other = span(50, 40)
    run(engine, other)
    assert engine.prefix_match_len(other) == 39
    assert run(engine, other, SamplingParams(max_tokens=4)).num_cached_tokens == 39


def test_a_request_of_the_same_step_is_not_followed_but_may_be() -> None:
    engine = engine_of()
    prompt = span(0, 40)
    plain = SamplingParams(max_tokens=4)
    outputs = engine.generate([prompt] * 3, [plain, SCORED, plain])
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 32]
    assert outputs[1].prompt_logprobs == expected(engine.model, prompt, 2)
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    engine.check()


def test_a_running_prefill_is_not_waited_for() -> None:
    engine = engine_of(max_num_batched_tokens=40, max_num_seqs=4)
    prompt = span(0, 90)
    outputs = engine.generate([prompt] * 2, [SamplingParams(max_tokens=4), SCORED])
    assert outputs[1].num_cached_tokens == 0
    assert outputs[1].prompt_logprobs == expected(engine.model, prompt, 2)


def test_a_prefix_handle_saves_nothing_of_what_is_scored() -> None:
    for kept in (20, 40):
        engine = engine_of()
        prompt = span(0, 40)
        handle = engine.build_prefix(prompt[:kept])
        output = run(engine, prompt, prefix=handle)
        assert (output.num_cached_tokens, output.num_computed_tokens) == (0, 43)
        assert output.prompt_logprobs == expected(engine.model, prompt, 2)
        assert output.token_ids == engine.model.greedy(prompt, 4)


@pytest.mark.parametrize("cache", [True, False])
def test_an_engine_without_a_cache_scores_as_well(cache: bool) -> None:
    engine = engine_of(prefix_cache=cache)
    assert run(engine, span(0, 40)).prompt_logprobs == expected(engine.model, span(0, 40), 2)


# Preemption ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [EchoModel, EchoHybrid], ids=["attention", "recurrent"])
@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("cache", [True, False])
def test_a_preempted_request_scores_each_token_once(model, steps: int, cache: bool) -> None:
    engine = engine_of(model(), max_num_batched_tokens=12, max_num_seqs=2, prefix_cache=cache)
    prompt = span(0, 50)
    name = engine.submit(prompt, SCORED)
    request = engine.scheduler.requests[name]
    events = []
    for _ in range(steps):
        events += engine.step()
    scored = len(request.scored)
    computed = int(engine.scheduler.state.computed[request.slot])
    assert scored == min(computed, 49)
    engine.scheduler.preempt(request)
    engine.check()
    events += engine.step()
    if cache:  # what has been scored is attached again
        assert request.num_reattached_tokens == computed
    while engine.has_work:
        events += engine.step()
        engine.check()
    output = events[-1].output
    assert output.prompt_logprobs == expected(engine.model, prompt, 2)
    assert output.token_ids == engine.model.greedy(prompt, 4)
    assert output.num_computed_tokens == 53 + (0 if cache else computed)


def test_a_pool_that_is_short_preempts_and_changes_no_entry() -> None:
    engine = engine_of(num_pages=9, max_num_batched_tokens=32, max_num_seqs=8)
    prompts = [span(7 * i, 40) for i in range(6)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=30, prompt_logprobs=1))
    assert sum(output.num_preemptions for output in outputs) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs == expected(engine.model, prompt, 1)
        assert output.token_ids == engine.model.greedy(prompt, 30)
    engine.check()


# Other models and views ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [EchoHybrid, EchoLooped, EchoAfter, lambda: EchoModel(windows=(0, 20))])
def test_a_recurrent_a_looped_and_a_windowed_model_are_scored_alike(make) -> None:
    engine = engine_of(make(), max_num_batched_tokens=24, max_num_seqs=2)
    for _ in range(2):
        output = run(engine, span(0, 50))
        assert output.prompt_logprobs == expected(engine.model, span(0, 50), 2)
        assert output.num_cached_tokens == 0


@pytest.mark.parametrize("loops", [1, 3])
def test_the_depth_of_the_request_counts(loops: int) -> None:
    engine = engine_of(EchoLooped())
    output = run(engine, span(0, 40), loops=loops)
    assert output.prompt_logprobs == expected(engine.model, span(0, 40), 2, loops=loops)


def test_a_cache_window_counts() -> None:
    engine = engine_of(max_num_batched_tokens=24, max_num_seqs=2)
    output = run(engine, span(0, 60), cache_window=10)
    assert output.prompt_logprobs == expected(engine.model, span(0, 60), 2, cache_window=10)


def test_each_of_n_outputs_has_the_same_entries() -> None:
    engine = engine_of()
    params = SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=1, prompt_logprobs=1)
    [output] = engine.generate([span(0, 40)], params)
    assert [sample.prompt_logprobs for sample in output.samples] == [expected(engine.model, span(0, 40), 1)] * 3


# Ends before the end ------------------------------------------------------------------------------------------------


def test_a_cancelled_request_has_the_entries_so_far() -> None:
    engine = engine_of(max_num_batched_tokens=16, max_num_seqs=1)
    stream = engine.stream(span(0, 50), SCORED)
    engine.step()
    stream.close()
    assert stream.output.prompt_logprobs == expected(engine.model, span(0, 50), 2)[:17]


@pytest.mark.parametrize("max_tokens", [1, 4])
@pytest.mark.parametrize("at", [5, 30, 39])
def test_a_row_of_the_prompt_without_logits_fails_its_request_alone(at: int, max_tokens: int) -> None:
    engine = engine_of(max_num_batched_tokens=64, max_num_seqs=2)
    forward, victim, good = engine.model.forward, span(50, 41), span(0, 20)

    def poisoned(batch, storage):
        logits = forward(batch, storage)
        logits[torch.from_numpy(batch.tokens[batch.logit_rows] == 50 + at)] = float("nan")
        return logits

    engine.model.forward = poisoned  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=1)
    outputs = engine.generate([victim, good], params)
    assert outputs[0].finish_reason == "error"
    assert f"BadLogits: the logits at position {at} of the prompt" in outputs[0].error
    assert outputs[1].prompt_logprobs == expected(engine.model, good, 1)
    assert outputs[1].token_ids == engine.model.greedy(good, max_tokens)
    assert engine.prefix_match_len(victim) == 0
    engine.check()
    assert engine.pool.num_live == 0 and not engine.has_work


def test_rows_that_fail_after_their_request_was_cancelled_touch_nobody() -> None:
    config = SchedulerConfig(plan_ahead=True, max_num_batched_tokens=16, max_num_seqs=2)
    engine, victim = engine_of(config=config), span(50, 41)
    forward = engine.model.forward

    def poisoned(batch, storage):
        logits = forward(batch, storage)
        logits[torch.from_numpy(batch.tokens[batch.logit_rows] == 70)] = float("nan")
        return logits

    engine.model.forward = poisoned  # type: ignore[method-assign]
    engine.submit(victim, SCORED, request_id="a")
    other = engine.submit(span(0, 20), SCORED)
    engine.step()  # the step of position 20 runs already
    assert engine.cancel("a")
    engine.submit(span(0, 30), SCORED, request_id="a")
    outputs = {}
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                outputs.setdefault(event.request_id, []).append(event.output)
        engine.check()
    cancelled, again = outputs["a"]
    assert cancelled.finish_reason == "cancelled" and len(cancelled.prompt_logprobs) == 17
    assert again.prompt_logprobs == expected(engine.model, span(0, 30), 2)
    assert outputs[other][0].prompt_logprobs == expected(engine.model, span(0, 20), 2)


def test_an_output_is_valid_json() -> None:
    engine = engine_of()
    params = SamplingParams(max_tokens=4, prompt_logprobs=3, logprobs=5, top_k=1, logit_bias={7: -1e9})
    output = run(engine, span(0, 20), params)
    read = json.loads(json.dumps(dataclasses.asdict(output), allow_nan=False))
    assert read["prompt_logprobs"][0] is None
    assert read["prompt_logprobs"][1]["token_id"] == 1 and len(read["prompt_logprobs"][1]["top"]) == 3
    assert len(read["logprobs"][0]["top"]) == 5


def test_rows_leave_the_model_in_the_order_of_the_plan() -> None:
    """Sampled rows first, then the scored ones of each request."""
    engine = engine_of()
    names = [engine.submit(span(i * 20, 4), SCORED if i != 1 else None) for i in range(3)]
    plan = engine.scheduler.schedule()
    assert plan.batch.logit_rows.tolist() == [3, 7, 11, 0, 1, 2, 8, 9, 10]
    assert [(rows.request.id, rows.first, rows.count) for rows in plan.scored] == [(names[0], 0, 3), (names[2], 0, 3)]
    assert len(np.unique(plan.batch.logit_rows)) == 9
    engine.scheduler.abort(plan, "enough")
