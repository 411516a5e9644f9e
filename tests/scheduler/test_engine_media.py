"""Requests with media: what is computed, what is cached by content, and where a match may end.

The first value of an embedding is the token that it stands for (see `fakes.embedded`), so that the model's own oracle
says what a prompt with media must give. Contents differ in the second value, which changes no output.
"""

from __future__ import annotations

import numpy as np
import pytest
from byhand import span
from fakes import EchoHybrid, EchoLooped, EchoModel, ScriptModel

from paged.errors import InvalidRequest
from paged.prefix.cache import PrefixCache
from scheduler import Engine, MediaSpan, SamplingParams

PARAMS = SamplingParams(max_tokens=8)
MODELS = [EchoModel, EchoHybrid, EchoLooped, lambda: EchoModel(windows=(0, 20))]
NAMES = ["plain", "recurrent", "looped", "windowed"]


def engine_of(model=None, **kwargs) -> Engine:
    kwargs.setdefault("num_pages", 96)
    kwargs.setdefault("max_num_seqs", 8)
    return Engine(model or EchoModel(), **kwargs)


def picture(start: int, tokens: list[int], content: int = 0, **options) -> MediaSpan:
    return MediaSpan(start, np.array([[token, content] for token in tokens], np.float32), **options)


def without(prompt: list[int], *spans: MediaSpan) -> list[int]:
    """The prompt as a caller gives it: nothing of meaning where there is media."""
    out = list(prompt)
    for one in spans:
        out[one.start : one.end] = [0] * one.num_tokens
    return out


def cut(prompt: list[int], start: int, end: int, content: int = 0) -> tuple[list[int], MediaSpan]:
    """The prompt with positions start to end - 1 as media."""
    one = picture(start, prompt[start:end], content)
    return without(prompt, one), one


def run(engine: Engine, prompt: list[int], start: int, end: int, content: int = 0, params=PARAMS, **options):
    given, one = cut(prompt, start, end, content)
    [output] = engine.generate([given], params, media=[one], **options)
    engine.check()
    if params is PARAMS:
        assert output.token_ids == engine.model.greedy(prompt, 8)
    return output


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
@pytest.mark.parametrize("chunk", [512, 16, 7])
@pytest.mark.parametrize(("start", "end"), [(0, 40), (0, 1), (39, 40), (5, 30), (15, 17), (16, 32)])
def test_media_with_the_embeddings_of_tokens_give_the_output_of_these_tokens(model, chunk, start, end) -> None:
    engine = engine_of(model(), max_num_batched_tokens=chunk, max_num_seqs=4)
    for _ in range(2):
        run(engine, span(3, 40), start, end)


def test_several_spans_and_several_requests_of_one_step() -> None:
    engine = engine_of(max_num_batched_tokens=20)
    prompts = [span(i, 30 + i) for i in range(4)]
    names = []
    for i, prompt in enumerate(prompts):
        spans = [picture(4, prompt[4:9], i), picture(9, prompt[9:10], i), picture(20, prompt[20:29])][:i]
        names.append(engine.submit(without(prompt, *spans), PARAMS, media=spans[::-1]))
    outputs = {}
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id] = event.output
        engine.check()
    assert [outputs[name].token_ids for name in names] == [engine.model.greedy(prompt, 8) for prompt in prompts]


# By content ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_the_same_again_hits_and_another_content_misses_from_the_span_on(model) -> None:
    """Behaviour 20."""
    engine, prompt = engine_of(model()), span(0, 60)
    assert run(engine, prompt, 20, 40).num_cached_tokens == 0
    assert run(engine, prompt, 20, 40).num_cached_tokens == 59
    other = run(engine, prompt, 20, 40, content=1)
    assert other.num_cached_tokens == (0 if isinstance(engine.model, EchoHybrid) else 20)
    assert run(engine, prompt, 20, 40, content=1).num_cached_tokens == 59
    [plain] = engine.generate([prompt], PARAMS)
    assert plain.num_cached_tokens <= 20 and plain.token_ids == engine.model.greedy(prompt, 8)
    engine.check()


def test_the_same_content_at_another_offset_misses() -> None:
    engine, prompt = engine_of(), span(0, 60)
    picture_tokens = prompt[20:40]
    run(engine, prompt, 20, 40)
    moved = prompt[:18] + picture_tokens + prompt[40:]
    assert run(engine, moved, 18, 38).num_cached_tokens == 18


def test_an_id_of_the_callers_decides_where_it_is_given() -> None:
    engine, prompt = engine_of(), span(0, 60)
    cached = []
    for content, content_id in ((1, "cat"), (2, "cat"), (2, "dog"), (2, b"cat"), (2, None)):
        one = picture(20, prompt[20:40], content, content_id=content_id)
        [output] = engine.generate([without(prompt, one)], PARAMS, media=[one])
        assert output.token_ids == engine.model.greedy(prompt, 8)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 59, 20, 20, 20]


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("start", range(12, 18))
def test_short_spans_on_any_place_of_a_page_are_never_taken_for_each_other(start: int, length: int) -> None:
    """Contents whose embeddings differ in the tokens, so that a page of another one would show in the output."""
    engine = engine_of(max_num_batched_tokens=64)
    for i in range(8):
        prompt = span(0, 40)
        prompt[start : start + length] = [60 + i] * length
        assert run(engine, prompt, start, start + length).num_cached_tokens <= start


def test_namespaces_are_apart() -> None:
    engine, prompt = engine_of(), span(0, 60)
    cached = [run(engine, prompt, 20, 40, namespace=name).num_cached_tokens for name in ("a", "b", "a")]
    assert cached == [0, 0, 59]


def test_the_placeholders_of_the_caller_mean_nothing() -> None:
    engine, prompt = engine_of(), span(0, 60)
    given, one = cut(prompt, 20, 40)
    outputs = []
    for filler in (0, 96, 7):
        given[20:40] = [filler] * 20
        outputs += engine.generate([given], PARAMS, media=[one])
    assert [output.num_cached_tokens for output in outputs] == [0, 59, 59]
    assert {tuple(output.token_ids) for output in outputs} == {tuple(engine.model.greedy(prompt, 8))}


def test_the_next_turn_attaches_the_whole_last_one() -> None:
    engine, prompt = engine_of(), span(0, 50)
    answer = run(engine, prompt, 10, 30).token_ids
    turn = prompt + answer + span(60, 20)
    assert run(engine, turn, 10, 30).num_cached_tokens == 57  # the last token of the answer was never computed
    one, two = picture(10, turn[10:30]), picture(62, turn[62:70])
    [output] = engine.generate([without(turn, one, two)], PARAMS, media=[one, two])
    assert output.num_cached_tokens == 62 and output.token_ids == engine.model.greedy(turn, 8)


# A match that would end inside a span -------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("end", range(18, 42, 3))
def test_a_match_inside_a_span_is_cut_back_to_its_start(end: int, partial: bool) -> None:
    """Prompts that end inside the span, or just behind it: a match stops one token short of the prompt."""
    engine = engine_of()
    if not partial:
        engine.cache.exact = False
    prompt = span(0, 60)
    _, whole = cut(prompt, 20, 40)
    run(engine, prompt, 20, 40)
    keyed = engine.media_ids.keyed(np.array(prompt, np.int32), [whole])
    reach = end - 1 if partial else (end - 1) // 16 * 16
    start = 20 if partial else 16
    want = start if 20 < reach < 40 else reach
    query = keyed[:end]
    assert engine.cache.match_len(query) == want
    cursor = engine.cache.cursor()
    assert engine.cache.seek(cursor, query) == want == cursor.depth * 16 + cursor.rows
    again = engine.cache.seek(cursor, keyed)  # the same cursor goes deeper where it may
    assert again == (59 if partial else 48)


def test_the_front_of_a_page_that_holds_the_start_of_a_span_is_copied() -> None:
    engine, prompt = engine_of(), span(0, 60)
    run(engine, prompt, 20, 40)
    page = prompt[:25]  # the span is cut off by the end of the prompt: another content
    given, one = cut(page, 20, 25)
    assert engine.prefix_match_len(given, media=[one]) == 20
    [output] = engine.generate([given], PARAMS, media=[one])
    assert output.num_cached_tokens == 20 and output.token_ids == engine.model.greedy(page, 8)
    engine.check()


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
@pytest.mark.parametrize("length", [35, 36, 52])
def test_a_prompt_that_ends_with_media_computes_all_of_the_span_again(model, length: int) -> None:
    engine, prompt = engine_of(model()), span(0, length)
    for _ in range(3):
        output = run(engine, prompt, 20, length)
        assert output.num_cached_tokens <= 20
    if not isinstance(engine.model, EchoHybrid):
        assert output.num_cached_tokens == 20
    assert engine.prefix_match_len(*cut(prompt, 20, length)[:1], media=[cut(prompt, 20, length)[1]]) <= 20


@pytest.mark.parametrize("length", [33, 48, 52])
def test_of_two_in_one_step_that_end_with_media_each_computes_its_span(length: int) -> None:
    engine, prompt = engine_of(), span(0, length)
    given, one = cut(prompt, 20, length)
    outputs = engine.generate([given] * 3, PARAMS, media=[one])
    assert [output.num_cached_tokens for output in outputs] == [0, 16, 16]
    assert {tuple(output.token_ids) for output in outputs} == {tuple(engine.model.greedy(prompt, 8))}
    engine.check()


def test_a_match_is_cut_back_over_several_spans_where_a_window_left_pages() -> None:
    engine = engine_of(EchoModel(windows=(0, 20)), num_pages=200)
    prompt = span(0, 90)
    for start, end in ((10, 30), (30, 70), (5, 85)):
        run(engine, prompt, start, end)
        for n in range(80, 90, 3):
            given, one = cut(prompt[:n], start, min(end, n))
            matched = engine.prefix_match_len(given, media=[one])
            assert not start < matched < end
            [output] = engine.generate([given], PARAMS, media=[one])
            assert output.num_cached_tokens == matched and output.token_ids == engine.model.greedy(prompt[:n], 8)
    engine.check()


def test_prefix_match_len_says_what_would_be_attached_and_remembers_nothing() -> None:
    engine, prompt = engine_of(), span(0, 60)
    given, one = cut(prompt, 20, 40)
    other = picture(20, prompt[20:40], 5)
    run(engine, prompt, 20, 40)
    known = dict(engine.media_ids._numbers)
    assert engine.prefix_match_len(given, media=[one]) == 59
    assert engine.prefix_match_len(given, media=[other]) == 20
    assert engine.prefix_match_len(given) <= 20
    assert engine.media_ids._numbers == known


# Within a step, and over preemption ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [512, 64, 24, 16])
@pytest.mark.parametrize("contents", [(0, 0, 0), (0, 1, 0), (1, 0, 1, 2)], ids=str)
@pytest.mark.parametrize(("start", "end"), [(20, 60), (16, 48), (5, 20)])
def test_requests_of_one_step_share_what_is_theirs_alone(chunk, contents, start, end) -> None:
    engine = engine_of(max_num_batched_tokens=chunk)
    prompt, names = span(0, 80), []
    for content in contents:
        given, one = cut(prompt, start, end, content)
        names.append(engine.submit(given, PARAMS, media=[one]))
    outputs = {}
    while engine.has_work:
        for event in engine.step():
            if event.output:
                outputs[event.request_id] = event.output
        engine.check()
    for i, name in enumerate(names):
        output = outputs[name]
        assert output.token_ids == engine.model.greedy(prompt, 8)
        assert not start < output.num_cached_tokens < end
        if contents[i] in contents[:i]:
            assert output.num_cached_tokens >= end, "what another request computes is computed again"
        else:
            assert output.num_cached_tokens <= start


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
@pytest.mark.parametrize("steps", range(1, 7))
def test_preemption_inside_a_span_resumes_at_its_start(model, steps: int) -> None:
    engine = engine_of(model(), max_num_batched_tokens=12, max_num_seqs=2)
    prompt = span(0, 60)
    given, one = cut(prompt, 20, 50)
    name = engine.submit(given, PARAMS, media=[one])
    request = engine.scheduler.requests[name]
    for _ in range(steps):
        engine.step()
    computed = int(engine.scheduler.state.computed[request.slot])
    engine.scheduler.preempt(request)
    engine.check()
    outputs = {}
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id] = event.output
        engine.check()
    inside = 20 < computed < 50
    if not isinstance(engine.model, EchoHybrid):
        assert request.num_reattached_tokens == (20 if inside else computed)
    else:
        assert not 20 < request.num_reattached_tokens < 50
    assert outputs[name].token_ids == engine.model.greedy(prompt, 8)
    assert request.media == ()  # whoever keeps the request keeps no embeddings


def test_a_short_pool_preempts_and_changes_no_token() -> None:
    engine = engine_of(num_pages=10, max_num_batched_tokens=32)
    prompts = [span(i, 40) for i in range(5)]
    names = []
    for i, prompt in enumerate(prompts):
        given, one = cut(prompt, 10, 30, i % 2)
        names.append(engine.submit(given, SamplingParams(max_tokens=30), media=[one]))
    outputs = {}
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id] = event.output
        engine.check()
    assert sum(outputs[name].num_preemptions for name in names) > 0
    assert [outputs[name].token_ids for name in names] == [engine.model.greedy(prompt, 30) for prompt in prompts]


# With the other options ---------------------------------------------------------------------------------------------


def test_prompt_logprobs_have_none_where_there_is_media() -> None:
    engine, prompt = engine_of(max_num_batched_tokens=16), span(0, 40)
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    got = run(engine, prompt, 10, 20, params=params).prompt_logprobs
    [want] = engine.generate([prompt], params)
    assert got == [None if 10 <= i < 20 else entry for i, entry in enumerate(want.prompt_logprobs)]


def test_penalties_cache_opt_out_and_processors_work_beside_media() -> None:
    engine, prompt = engine_of(), span(0, 40)
    seen = []
    params = SamplingParams(
        max_tokens=3, repetition_penalty=1.3, logits_processors=[lambda tokens, logits: seen.append(tokens)]
    )
    for cache in (True, False):
        run(engine, prompt, 10, 20, params=params, cache=cache)
    assert all((tokens[10:20] < 0).all() and (np.delete(tokens, range(10, 20)) >= 0).all() for tokens in seen)
    assert len(seen) == 6


def test_a_prefix_handle_serves_up_to_the_first_span() -> None:
    engine, prompt = engine_of(), span(0, 60)
    handle = engine.build_prefix(prompt[:20])
    engine.cache.release()
    assert run(engine, prompt, 20, 40, prefix=handle).num_cached_tokens == 20
    with pytest.raises(InvalidRequest, match="does not start with"):
        run(engine, prompt, 19, 40, prefix=handle)


# Refused at submit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "match"),
    [
        ([picture(50, [1] * 20)], "within the 60 tokens of the prompt, got positions 50 to 69"),
        ([picture(-1, [1] * 20)], "got positions -1 to 18"),
        ([picture(0, [1] * 20), picture(19, [1])], "must not overlap"),
        ([MediaSpan(0, np.zeros((3, 5)))], "must have 2 values a token, got 5"),
    ],
    ids=str,
)
def test_spans_that_do_not_fit_are_refused(spans, match: str) -> None:
    engine = engine_of()
    with pytest.raises(InvalidRequest, match=match):
        engine.submit(span(0, 60), PARAMS, media=spans)
    assert not engine.has_work


def test_a_model_that_takes_no_embeddings_says_so() -> None:
    engine = engine_of(ScriptModel([1, 2]))
    with pytest.raises(InvalidRequest, match="script takes token ids alone"):
        engine.submit(ScriptModel.prompt(4), PARAMS, media=[picture(1, [1])])
    with pytest.raises(TypeError, match="sequence of MediaSpan"):
        engine.submit(ScriptModel.prompt(4), PARAMS, media=np.zeros((1, 2)))


# Saved caches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [EchoModel, EchoHybrid])
def test_a_saved_cache_leaves_media_and_what_stands_on_it_out(model, tmp_path) -> None:
    """Their ids would name another content in another process."""
    engine, prompt = engine_of(model()), span(0, 60)
    run(engine, prompt, 20, 40)
    engine.generate([span(30, 60)], PARAMS)
    held = engine.cache.held_pages
    engine.save_prefix_cache(tmp_path / "cache")
    other = engine_of(model())
    given, one = cut(prompt, 20, 40)
    assert 0 < other.load_prefix_cache(tmp_path / "cache") < held
    assert other.prefix_match_len(span(30, 60)) == 59
    assert other.prefix_match_len(given, media=[one]) == (0 if model is EchoHybrid else 16)
    run(other, span(50, 47), 1, 40, content=3)  # takes the ids that the picture has in the first engine
    assert run(other, prompt, 20, 40).num_cached_tokens <= 16
    other.check()
    assert isinstance(other.cache, PrefixCache)
