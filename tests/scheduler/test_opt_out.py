"""Requests that opt out of the prefix cache: nothing of it comes to them, nothing of theirs goes to it."""

from __future__ import annotations

import pytest
from byhand import span
from fakes import EchoHybrid, EchoLooped, EchoModel

from scheduler import Engine, SamplingParams

PROMPT = span(0, 70)
PARAMS = SamplingParams(max_tokens=40)


def engine_of(model=None, **kwargs) -> Engine:
    kwargs.setdefault("num_pages", 64)
    kwargs.setdefault("max_num_seqs", 8)
    return Engine(model or EchoModel(), **kwargs)


MODELS = [EchoModel, EchoHybrid, EchoLooped, lambda: EchoModel(windows=(0, 20))]


@pytest.mark.parametrize("model", MODELS, ids=["plain", "recurrent", "looped", "windowed"])
@pytest.mark.parametrize("chunk", [512, 24])
def test_it_leaves_no_page_and_attaches_none(model, chunk: int) -> None:
    engine = engine_of(model(), max_num_batched_tokens=chunk)
    for _ in range(2):
        [output] = engine.generate([PROMPT], PARAMS, cache=False)
        assert (output.num_cached_tokens, output.num_computed_tokens) == (0, 109)
        assert output.token_ids == engine.model.greedy(PROMPT, 40)
        assert engine.cache.held_pages == 0 and engine.pool.num_free == engine.pool.num_pages
        assert engine.prefix_match_len(PROMPT) == 0
        engine.check()
    engine.generate([PROMPT], PARAMS)
    held = engine.cache.held_pages
    [output] = engine.generate([PROMPT], PARAMS, cache=False)
    assert output.num_cached_tokens == 0
    assert engine.cache.held_pages == held > 0
    engine.check()


def test_it_counts_neither_as_a_query_nor_as_a_hit() -> None:
    engine = engine_of()
    engine.generate([PROMPT], PARAMS)
    before = engine.cache.stats.num_queries, engine.cache.stats.query_tokens, engine.cache.stats.hit_tokens
    engine.generate([PROMPT], PARAMS, cache=False)
    after = engine.cache.stats.num_queries, engine.cache.stats.query_tokens, engine.cache.stats.hit_tokens
    assert before == after == (1, 70, 0)


@pytest.mark.parametrize("chunk", [512, 24])
@pytest.mark.parametrize("order", [(True, False, True), (False, True, True), (False, False, True)], ids=str)
def test_neighbours_with_the_same_prompt_share_nothing_with_it(order: tuple[bool, ...], chunk: int) -> None:
    engine = engine_of(max_num_batched_tokens=chunk)
    names = [engine.submit(PROMPT, PARAMS, cache=cache) for cache in order]
    outputs = {}
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                outputs[event.request_id] = event.output
        engine.check()
        for slot in engine.scheduler.state.running.tolist():
            if not engine.scheduler.request_at(slot).cache:
                pages = engine.scheduler.state.page_ids(slot)
                assert set(engine.pool.refs[pages].tolist()) == {1} and not engine.pool.held[pages].any()
    first = order.index(True)
    for i, (name, cache) in enumerate(zip(names, order, strict=True)):
        assert outputs[name].token_ids == engine.model.greedy(PROMPT, 40)
        assert (outputs[name].num_cached_tokens > 0) is (cache and i > first)


@pytest.mark.parametrize("model", MODELS, ids=["plain", "recurrent", "looped", "windowed"])
def test_a_preempted_one_computes_all_of_it_again(model) -> None:
    engine = engine_of(model(), max_num_batched_tokens=24)
    name = engine.submit(PROMPT, PARAMS, cache=False)
    other = engine.submit(span(20, 30), PARAMS)
    request = engine.scheduler.requests[name]
    for _ in range(6):
        engine.step()
    computed = int(engine.scheduler.state.computed[request.slot])
    held = engine.cache.held_pages
    engine.scheduler.preempt(request)
    engine.check()
    assert engine.cache.held_pages == held
    outputs = {}
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id] = event.output
        engine.check()
    assert outputs[name].token_ids == engine.model.greedy(PROMPT, 40)
    assert outputs[other].token_ids == engine.model.greedy(span(20, 30), 40)
    assert outputs[name].num_computed_tokens == 109 + computed and request.num_reattached_tokens == 0


def test_a_prefix_that_is_given_is_used() -> None:
    engine = engine_of()
    handle = engine.build_prefix(PROMPT[:40])
    engine.cache.release()
    [output] = engine.generate([PROMPT], PARAMS, cache=False, prefix=handle)
    assert output.num_cached_tokens == 40 and engine.cache.held_pages == 0
    assert output.token_ids == engine.model.greedy(PROMPT, 40)
    engine.check()


def test_its_prompt_can_be_scored() -> None:
    engine = engine_of()
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    with_cache, without = (engine.generate([PROMPT], params, cache=cache)[0] for cache in (True, False))
    assert with_cache.prompt_logprobs == without.prompt_logprobs


@pytest.mark.parametrize("value", [None, 1, "off"])
def test_anything_but_yes_or_no_is_refused(value) -> None:
    with pytest.raises(TypeError, match="cache must be True or False"):
        engine_of().submit(PROMPT, cache=value)
