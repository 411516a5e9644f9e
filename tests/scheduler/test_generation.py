"""Generation: how one call runs: what it asks for, what it starts from, what it leaves in the cache."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import EchoHybrid, EchoModel
from grammars import model as speaking
from token_api import counting, live_pages, opened, prompt_of, tiny

from paged import (
    Closed,
    ContextTooLong,
    GeometryMismatch,
    Grammar,
    InvalidRequest,
    OutOfPages,
    RequestFailed,
    SamplingParams,
)
from scheduler import Engine, Model
from scheduler.events import Finished
from scheduler.generation import Call, fit, memory, run, stream


@pytest.fixture
def api():
    with opened() as made:
        yield made


def call(n: int = 6, loops: int | None = None, window: int = 0, params: dict | None = None, **more) -> Call:
    return Call(SamplingParams(max_tokens=n, **(params or {})), loops, window, **more)


WAYS = {
    "request": {},
    "stops": {"token_stops": ((511, 511),)},
    "beams": {"num_beams": 3},
    "drafts": {"draft_loops": 2},
}


def tokens(prompt: list[int]) -> np.ndarray:
    return np.array(prompt, np.int32)


# Calls ------------------------------------------------------------------------------------------------------------


def test_a_sample_of_a_call_differs_from_it_in_its_parameters_alone() -> None:
    whole = call(params={"n": 3, "seed": 4, "temperature": 1.0}, draft_loops=2, token_stops=((1, 2),))
    one = whole.sample(2)
    assert one.params == whole.params.sample(2) and one.params.n == 1 and one.params.seed != 4
    assert (one.loops, one.cache_window, one.token_stops, one.draft_loops) == (None, 0, ((1, 2),), 2)
    with pytest.raises(IndexError):
        whole.sample(3)


# Where it starts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_prefix_that_the_prompt_does_not_start_with_is_refused(api: Model, way: str) -> None:
    prefix = api.build_prefix_cache(prompt_of(20))
    with counting(api.engine.model) as work, pytest.raises(InvalidRequest, match="does not start with the 20 tokens"):
        run(api.engine, tokens(prompt_of(30, seed=9)), prefix, call(**WAYS[way]))
    with pytest.raises(InvalidRequest, match="does not start with the 20 tokens"):
        run(api.engine, tokens(prompt_of(19)), prefix, call(**WAYS[way]))
    assert work.forwards == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_prefix_of_another_engine_or_of_older_weights_is_refused(api: Model, way: str) -> None:
    with opened() as other:
        prefix = other.build_prefix_cache(prompt_of(20))
        with pytest.raises(GeometryMismatch, match="another engine"):
            run(api.engine, tokens(prompt_of(20)), prefix, call(**WAYS[way]))
    prefix = api.build_prefix_cache(prompt_of(20))
    fingerprint = api.engine.pool.fingerprint
    try:
        api.engine.pool.fingerprint = "changed"
        with pytest.raises(GeometryMismatch, match="weights of the model have changed"):
            run(api.engine, tokens(prompt_of(20)), prefix, call(**WAYS[way]))
    finally:
        api.engine.pool.fingerprint = fingerprint


@pytest.mark.parametrize("way", WAYS)
def test_what_is_cached_of_a_prompt_is_not_computed_again(way: str) -> None:
    prompt = prompt_of(60)
    with opened() as api:
        api.generate(prompt[:48], max_tokens=1)
        with counting(api.engine.model) as work:
            got = run(api.engine, tokens(prompt), None, call(1, **WAYS[way]))
        assert work.rows == 12
    with opened(prefix_cache=False) as cold:
        assert run(cold.engine, tokens(prompt), None, call(1, **WAYS[way])) == got


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_is_cached_by_whichever_way_computed_it(way: str) -> None:
    prompt = prompt_of(60)
    with opened() as api:
        run(api.engine, tokens(prompt), None, call(2, **WAYS[way]))
        assert api.engine.prefix_match_len([*prompt_of(60)[:50], 1, 2, 3]) in (48, 50)  # full pages, of some more


@pytest.mark.parametrize("way", ["beams", "drafts"])
def test_a_page_that_finds_no_room_for_its_copy_is_computed_again(way: str) -> None:
    """The prompt leaves the cache within a page, and every page of the pool is cached."""
    if way == "beams":
        model, columns, more = EchoModel(97), 5, {"num_beams": 2}
    else:
        model, columns, more = tiny(), 4, {"draft_loops": 3}
    with opened(model, num_pages=columns * model.view().num_groups, page_size=16) as api:
        donor = [t % 97 for t in prompt_of(16 * columns)]
        prefix = api.build_prefix_cache([*donor[:-1], 5])
        del prefix
        assert live_pages(api) == 0 and api.engine.pool.num_free == 0
        prompt = donor[:40]
        out = run(api.engine, tokens(prompt), None, call(3, **more))
    with opened(model, num_pages=800, prefix_cache=False) as cold:
        assert out == run(cold.engine, tokens(prompt), None, call(3, **more))


def test_recurrent_models_search_beams_from_checkpoints_and_handles() -> None:
    prompt = [t % 97 for t in prompt_of(40)]
    with opened(EchoHybrid(97), num_pages=80) as api:
        want = run(api.engine, tokens(prompt), None, call(num_beams=3))
        api.generate(prompt[:20], max_tokens=1)
        assert run(api.engine, tokens(prompt), None, call(num_beams=3)) == want
        prefix = api.build_prefix_cache(prompt)
        assert run(api.engine, tokens(prompt), prefix, call(num_beams=3)) == want
        assert run(api.engine, tokens(prompt), api.build_prefix_cache(prompt[:30]), call(num_beams=3)) == want


def test_an_end_that_is_all_a_grammar_leaves_ends_a_call_from_a_handle_too(api: Model) -> None:
    with opened(speaking(), num_pages=30) as spoken:
        prefix = spoken.build_prefix_cache([1, 2, 3])
        params = {"grammar": Grammar.regex(""), "min_tokens": 3}
        with counting(spoken.engine.model) as work:
            assert run(spoken.engine, tokens([1, 2, 3]), prefix, call(params=params)) == [[]]
        assert work.forwards == 0


def test_kept_logits_that_no_token_can_be_drawn_from_cost_a_row_and_fail_nobody(api: Model) -> None:
    prefix = api.build_prefix_cache(prompt_of(20))
    want = api.generate_from_prefix_cache(prefix, max_tokens=5)[20:]
    prefix._session.logits = prefix.logits * float("nan")
    params = SamplingParams(max_tokens=5)
    names = [api.engine.submit(prompt_of(20), params, prefix=prefix) for _ in range(2)]
    outputs = {}
    while api.engine.has_work:
        outputs.update({e.request_id: e.output.token_ids for e in api.engine.step() if e.output is not None})
    assert outputs == dict.fromkeys(names, want)
    api.engine.check()


# What does not fit ------------------------------------------------------------------------------------------------


def test_what_exceeds_model_or_pool_is_refused_with_both_numbers() -> None:
    with opened(num_pages=9 * 4) as api:
        fit(api.engine, tokens(prompt_of(60)), call(4))
        with pytest.raises(OutOfPages, match="make 65, and the whole pool holds 64 at this depth"):
            fit(api.engine, tokens(prompt_of(60)), call(5))
        fit(api.engine, tokens(prompt_of(60)), call(90, loops=1))
        with pytest.raises(ContextTooLong, match="make 260, and max_seq_len is 256"):
            fit(api.engine, tokens(prompt_of(60)), call(200))


def test_out_of_memory_names_what_the_pool_said() -> None:
    with pytest.raises(OutOfPages, match=r"^out of memory: 3 pages; free a handle") as error, memory():
        raise OutOfPages("3 pages")
    assert isinstance(error.value.__cause__, OutOfPages)


@pytest.mark.parametrize("way", WAYS)
def test_pages_that_handles_hold_make_a_call_fail_alone_and_leave_nothing(way: str) -> None:
    with opened(num_pages=9 * 5) as api:
        held = api.build_prefix_cache(prompt_of(30))
        before = live_pages(api)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(api.engine, tokens(prompt_of(50, seed=3)), None, call(14, **WAYS[way]))
        assert live_pages(api) == before and not api.engine.has_work
        api.engine.check()
        assert len(run(api.engine, tokens(prompt_of(20, seed=3)), None, call(4, loops=4, **WAYS[way]))[0]) == 4
        del held


@pytest.mark.parametrize("way", WAYS)
def test_an_error_of_the_model_is_the_calls_alone(way: str, monkeypatch) -> None:
    with opened() as api:
        model = api.engine.model

        def broken(*args):
            raise ArithmeticError("no more of this")

        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", broken)
            with pytest.raises((RequestFailed, ArithmeticError), match="no more of this"):
                run(api.engine, tokens(prompt_of(20)), None, call(**WAYS[way]))
        assert live_pages(api) == 0
        api.engine.check()
        assert len(run(api.engine, tokens(prompt_of(20)), None, call(**WAYS[way]))[0]) == 6


# Streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["request", "stops", "drafts"])
def test_a_closed_engine_ends_a_stream_with_closed(way: str) -> None:
    api = Model(tiny(), num_pages=800)
    source = stream(api.engine, tokens(prompt_of(20)), None, call(40, **WAYS[way]))
    next(source)
    api.close()
    with pytest.raises(Closed):
        list(source)
    assert live_pages(api) == 0
    with pytest.raises(Closed):
        next(stream(api.engine, tokens(prompt_of(20)), None, call(40, **WAYS[way])))


def test_tokens_that_may_begin_a_stop_sequence_are_held_until_they_do_not() -> None:
    with opened(EchoModel(97), num_pages=30) as api:
        plain = run(api.engine, tokens([1, 2, 3]), None, call(10))[0]
        stops = ((plain[2], plain[3], 96), (plain[6], plain[7]))
        assert plain[4] != 96
        source = stream(api.engine, tokens([1, 2, 3]), None, call(10, token_stops=stops))
        assert list(source) == plain[:6]
        assert live_pages(api) == 0 and not api.engine.has_work  # the request ended with the stop


def test_an_end_at_a_stop_sequence_is_no_cancellation() -> None:
    with opened(EchoModel(97), num_pages=30) as api:
        told = []
        api.engine.subscribe(told.append)
        plain = run(api.engine, tokens([1, 2, 3]), None, call(10))[0]
        assert run(api.engine, tokens([1, 2, 3]), None, call(10, token_stops=((plain[2], plain[3]),)))[0] == plain[:2]
        assert api.engine.stats()["num_cancelled"] == 0
        assert [event.reason for event in told if isinstance(event, Finished)] == ["length", "stop"]
        source = stream(api.engine, tokens([1, 2, 3]), None, call(10, token_stops=((96, 96),)))
        next(source)
        source.close()  # its reader has gone
        assert api.engine.stats()["num_cancelled"] == 1


def test_a_request_ended_by_somebody_else_is_not_taken_for_a_short_answer() -> None:
    engine = Engine(EchoModel(97), num_pages=30)
    source = stream(engine, tokens([1, 2, 3]), None, call(10))
    next(source)
    assert engine.cancel(next(iter(engine.scheduler.requests)))
    with pytest.raises(RequestFailed, match="cancelled before its end"):
        list(source)
