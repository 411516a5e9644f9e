"""n outputs for one prompt: each as if it were alone, on one copy of the prompt's pages."""

from __future__ import annotations

import gc
import weakref
from dataclasses import asdict

import numpy as np
import pytest
from byhand import span
from fakes import EchoHybrid, EchoModel
from grammars import model as speaking

from paged.errors import DuplicateRequest, InvalidRequest
from scheduler import Engine, Grammar, SamplingParams
from scheduler.model import Model

KINDS = {
    "attention": lambda: EchoModel(97),
    "windows": lambda: EchoModel(97, windows=(0, 9)),
    "hybrid": lambda: EchoHybrid(97),
}


def engine_of(model=None, **kwargs) -> Engine:
    kwargs.setdefault("num_pages", 128)
    kwargs.setdefault("max_num_seqs", 16)
    return Engine(model or EchoModel(97), **kwargs)


def prompt_of(length: int) -> list[int]:
    return [t % 97 for t in span(3, length)]


def seeded(n: int, **params) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 12, "n": n, **params})


# What each sample is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"prefix_cache": False}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 9, "max_num_seqs": 3}],
    ids=str,
)
def test_each_sample_is_what_its_own_parameters_give_alone(kind: str, settings: dict) -> None:
    prompt, params = prompt_of(40), seeded(5)
    alone = [engine_of(KINDS[kind]()).generate([prompt], params.sample(i))[0] for i in range(5)]
    engine = engine_of(KINDS[kind](), **settings)
    for _ in range(2):  # the second time over a warm cache
        [output] = engine.generate([prompt], params)
        assert [s.token_ids for s in output.samples] == [o.token_ids for o in alone]
        assert [s.finish_reason for s in output.samples] == ["length"] * 5
        engine.check()
    assert len({tuple(o.token_ids) for o in alone}) == 5
    assert engine.pool.num_live == 0


def test_the_first_sample_is_the_output_itself_and_that_of_n_1() -> None:
    engine = engine_of()
    [one] = engine.generate([prompt_of(30)], seeded(1))
    [output] = engine.generate([prompt_of(30)], seeded(3))
    assert output.samples[0] is output and output.samples[1:] == output.others
    assert output.token_ids == one.token_ids and one.samples == (one,) and one.others == ()
    assert all(s.samples == (s,) for s in output.others)
    assert asdict(output)["others"] == tuple(asdict(s) for s in output.others)


def test_samples_are_requests_of_their_own_that_explain_knows() -> None:
    engine = engine_of()
    [output] = engine.generate([prompt_of(30)], seeded(3))
    names = [s.request_id for s in output.samples]
    assert len(set(names)) == 3
    assert [engine.explain(name)["num_cached_tokens"] for name in names] == [0, 16, 16]
    assert [s.num_prompt_tokens for s in output.samples] == [30] * 3


def test_greedy_samples_are_equal() -> None:
    engine = engine_of()
    [output] = engine.generate([prompt_of(20)], SamplingParams(n=4, max_tokens=6))
    assert [s.token_ids for s in output.samples] == [engine.model.greedy(prompt_of(20), 6)] * 4


def test_samples_without_a_seed_differ() -> None:
    [output] = engine_of().generate([prompt_of(20)], seeded(6, seed=None))
    assert len({tuple(s.token_ids) for s in output.samples}) == 6


def test_prompts_of_a_batch_may_ask_for_different_numbers() -> None:
    engine = engine_of()
    prompts = [prompt_of(n) for n in (20, 33, 7)]
    params = [seeded(2), seeded(1, seed=9), seeded(3)]
    outputs = engine.generate(prompts, params)
    assert [len(o.samples) for o in outputs] == [2, 1, 3]
    for prompt, p, output in zip(prompts, params, outputs, strict=True):
        assert [s.num_prompt_tokens for s in output.samples] == [len(prompt)] * p.n
        assert output.token_ids == engine.generate([prompt], p.sample(0))[0].token_ids
    assert [len(o.samples) for o in engine.generate(prompts, seeded(2))] == [2] * 3


def test_samples_end_each_in_its_own_way() -> None:
    engine = engine_of(speaking())
    grammar = Grammar.regex("[ab]{2}|[c-z]{3,20}")
    [output] = engine.generate([[1, 2, 3]], seeded(8, grammar=grammar, max_tokens=6))
    assert {s.finish_reason for s in output.samples} == {"stop", "length"}
    for sample, i in zip(output.samples, range(8), strict=True):
        [alone] = engine.generate([[1, 2, 3]], seeded(8, grammar=grammar, max_tokens=6).sample(i))
        assert (sample.text, sample.finish_reason) == (alone.text, alone.finish_reason)


def test_a_failed_step_fails_the_samples_that_were_in_it() -> None:
    engine = engine_of()

    def broken(batch, storage):
        raise RuntimeError("no more of this")

    engine.model.forward = broken  # type: ignore[method-assign]
    [output] = engine.generate([prompt_of(20)], seeded(3))
    assert [s.finish_reason for s in output.samples] == ["error"] * 3
    engine.check()


# What the prompt costs -------------------------------------------------------------------------------------------


def computed(n: int, length: int, **settings) -> tuple[int, list[int]]:
    """(rows computed of the prompt by all samples, cached tokens of each) with a cold cache."""
    engine = engine_of(**settings)
    [output] = engine.generate([prompt_of(length)], seeded(n))
    engine.check()
    samples = output.samples
    rows = sum(s.num_computed_tokens for s in samples)
    assert rows == engine.stats()["computed_tokens"]
    return rows - n * 11, [s.num_cached_tokens for s in samples]  # each computes 11 of its 12 tokens


@pytest.mark.parametrize(
    ("length", "rest"),  # of the prompt, behind its last page that can be shared
    [(100, 4), (96, 16), (97, 1), (16, 16), (17, 1), (5, 5)],
)
def test_the_full_pages_of_the_prompt_are_computed_once(length: int, rest: int) -> None:
    assert computed(1, length) == (length, [0])
    assert computed(4, length) == (length + 3 * rest, [0] + [length - rest] * 3)


@pytest.mark.parametrize("budget", [16, 37, 100])
def test_samples_wait_for_a_prompt_that_takes_several_steps(budget: int) -> None:
    assert computed(4, 100, max_num_batched_tokens=budget) == (112, [0, 96, 96, 96])


def test_a_prompt_with_pages_of_one_token_shares_all_but_its_last() -> None:
    assert computed(4, 50, page_size=1, num_pages=400) == (53, [0, 49, 49, 49])


def test_a_recurrent_models_samples_start_from_the_state_behind_the_prompt() -> None:
    assert computed(4, 100, model=EchoHybrid(97)) == (103, [0, 99, 99, 99])


def test_a_warm_cache_serves_every_sample_but_its_last_token() -> None:
    engine = engine_of()
    engine.generate([prompt_of(100)], seeded(1))
    [output] = engine.generate([prompt_of(100)], seeded(4))
    assert [s.num_cached_tokens for s in output.samples] == [99] * 4


def test_without_the_prefix_cache_each_sample_computes_the_prompt() -> None:
    assert computed(4, 100, prefix_cache=False) == (400, [0] * 4)


def test_samples_share_the_pages_of_the_prompt_and_nothing_else() -> None:
    engine = engine_of()
    held: list[int] = []
    forward = engine.model.forward

    def watched(batch, storage):
        held.append(engine.pool.num_live)
        return forward(batch, storage)

    engine.model.forward = watched  # type: ignore[method-assign]
    engine.generate([prompt_of(100)], seeded(4, max_tokens=8))
    assert set(held) == {6 + 4}  # six full pages, and the last one of each


def test_samples_are_more_than_run_at_once_and_than_the_pool_holds() -> None:
    params = seeded(12, max_tokens=40)
    want = [s.token_ids for s in engine_of().generate([prompt_of(40)], params)[0].samples]
    for settings in ({"max_num_seqs": 3}, {"num_pages": 8}):
        engine = engine_of(**settings)
        [output] = engine.generate([prompt_of(40)], params)
        assert [s.token_ids for s in output.samples] == want
        engine.check()


# submit and stream -----------------------------------------------------------------------------------------------


def told(events) -> tuple[dict[int, list[int]], dict[int, str], list]:
    """The tokens and the reason to end that events tell of each sample, and the outputs among them."""
    tokens, reasons, outputs = {}, {}, []
    for event in events:
        assert event.index not in reasons
        tokens.setdefault(event.index, []).extend(event.token_ids)
        if event.finish_reason is not None:
            reasons[event.index] = event.finish_reason
        if event.finished:
            outputs.append(event.output)
    return tokens, reasons, outputs


def stepped(engine: Engine) -> list:
    """The events of all that was submitted, to the end."""
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check()
    return events


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", ["submit", "stream"])
def test_events_say_which_sample_they_are_about_and_the_last_one_carries_the_output(kind: str, verb: str) -> None:
    params = seeded(4)
    [want] = engine_of(KINDS[kind]()).generate([prompt_of(40)], params)
    engine = engine_of(KINDS[kind]())
    if verb == "submit":
        name = engine.submit(prompt_of(40), params)
        events = stepped(engine)
    else:
        stream = engine.stream(prompt_of(40), params)
        name, events = stream.request_id, list(stream)
        assert stream.output is events[-1].output
    tokens, reasons, outputs = told(events)
    assert {e.request_id for e in events} == {name}
    assert [tokens[i] for i in range(4)] == [s.token_ids for s in want.samples]
    assert reasons == dict.fromkeys(range(4), "length")
    assert [o is events[-1].output for o in outputs] == [True]
    assert [s.token_ids for s in outputs[0].samples] == [s.token_ids for s in want.samples]
    assert outputs[0].request_id == name
    engine.check()
    assert engine.pool.num_live == 0


def test_usage_comes_once_and_counts_all_samples() -> None:
    """Case B58: 60 prompt tokens, twice, 7 tokens, n = 1 and 2, by length and by an end id, streamed or not."""
    for n in (1, 2):
        for stop in (None, "end id"):
            engine = engine_of()
            params = seeded(n, max_tokens=7)
            if stop is not None:
                [free] = engine.generate([prompt_of(60)], seeded(n, max_tokens=7), namespace="elsewhere")
                ends = [s.token_ids[5] for s in free.samples]
                params = seeded(n, max_tokens=7, stop_token_ids=ends)
            for cached in (0, 59):
                events = list(engine.stream(prompt_of(60), params))
                [output] = [e.output for e in events if e.output is not None]
                first, *others = output.samples
                assert (first.num_prompt_tokens, first.num_cached_tokens) == (60, cached)
                assert [s.num_cached_tokens for s in others] == [max(cached, 48)] * (n - 1)
                completion = sum(len(s.token_ids) for s in output.samples)
                assert completion == sum(len(e.token_ids) for e in events)
                assert completion == 7 * n if stop is None else completion < 7 * n
                [again] = engine.generate([prompt_of(60)], params)
                assert [s.token_ids for s in again.samples] == [s.token_ids for s in output.samples]
                assert {s.finish_reason for s in again.samples} == {"length" if stop is None else "stop"}


def test_samples_of_one_step_share_the_full_pages_of_the_prompt() -> None:
    engine = engine_of()
    engine.submit(prompt_of(100), seeded(4), request_id="a")
    engine.step()
    tables = [
        engine.scheduler.state.pages(engine.scheduler.requests[name].slot)[0].tolist()
        for name in ("a", "a/1", "a/2", "a/3")
    ]
    assert len({tuple(table[:6]) for table in tables}) == 1
    assert len({table[6] for table in tables}) == 4


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_cancel_ends_all_samples_and_counts_each(steps: int) -> None:
    engine = engine_of(max_num_seqs=3)
    engine.submit(prompt_of(40), seeded(5), request_id="a")
    engine.submit(prompt_of(20), seeded(1), request_id="b")
    events = [event for _ in range(steps) for event in engine.step()]
    assert engine.cancel("a") and not engine.cancel("a")
    engine.check()
    events += stepped(engine)
    _, reasons, [output] = told(e for e in events if e.request_id == "a")
    assert reasons == dict.fromkeys(range(5), "cancelled")
    assert [s.finish_reason for s in output.samples] == ["cancelled"] * 5
    assert engine.stats()["num_cancelled"] == 5
    [b] = [e.output for e in events if e.request_id == "b" and e.finished]
    assert b.token_ids == engine_of().generate([prompt_of(20)], seeded(1))[0].token_ids
    assert engine.pool.num_live == 0


def test_samples_that_ended_before_the_cancel_keep_their_reason() -> None:
    engine = engine_of()
    [free] = engine.generate([prompt_of(20)], seeded(3), namespace="elsewhere")
    end = free.samples[0].token_ids[2]
    assert end not in free.samples[1].token_ids[:6] + free.samples[2].token_ids[:6]
    engine.submit(prompt_of(20), seeded(3, stop_token_ids=[end]), request_id="a")
    events = [event for _ in range(5) for event in engine.step()]
    assert told(events)[1] == {0: "stop"}
    assert engine.cancel("a")
    events += engine.step()
    assert told(events)[1] == {0: "stop", 1: "cancelled", 2: "cancelled"}
    assert events[-1].output.samples[0].token_ids == free.samples[0].token_ids[:2]


def test_the_output_comes_with_the_event_that_ends_the_last_sample_whichever_that_is() -> None:
    engine = engine_of()
    [free] = engine.generate([prompt_of(20)], seeded(3), namespace="elsewhere")
    end = free.samples[2].token_ids[4]
    assert end not in free.samples[0].token_ids[:6] + free.samples[1].token_ids[:6]
    events = list(engine.stream(prompt_of(20), seeded(3, stop_token_ids=[end])))
    order = [e.index for e in events if e.finish_reason is not None]
    assert order[0] == 2 and sorted(order) == [0, 1, 2]
    assert [e.finished for e in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].output.samples[2].token_ids == free.samples[2].token_ids[:4]


def test_an_id_is_taken_until_the_last_sample_has_ended() -> None:
    engine = engine_of()
    [free] = engine.generate([prompt_of(20)], seeded(2), namespace="elsewhere")
    ends = seeded(2, stop_token_ids=[free.samples[0].token_ids[2]])
    assert free.samples[0].token_ids[2] not in free.samples[1].token_ids
    engine.submit(prompt_of(20), ends, request_id="a")
    events = [event for _ in range(5) for event in engine.step()]
    assert told(events)[1] == {0: "stop"} and "a" not in engine.scheduler.requests
    for name in ("a", "a/1"):
        with pytest.raises(DuplicateRequest, match=f"'{name}' is still live"):
            engine.submit([1], request_id=name)
    stepped(engine)
    assert engine.submit([1], seeded(1), request_id="a") == "a"


def test_samples_whose_names_are_taken_are_refused_all_together() -> None:
    engine = engine_of()
    engine.submit([1, 2], seeded(1), request_id="a/2")
    told: list = []
    engine.subscribe(told.append)
    with pytest.raises(DuplicateRequest, match="'a/2' is still live"):
        engine.submit(prompt_of(20), seeded(4), request_id="a")
    engine.check()
    assert list(engine.scheduler.requests) == ["a/2"]
    assert told == [] and engine.stats()["num_finished"] == 0
    with pytest.raises(KeyError):
        engine.explain("a")
    events = stepped(engine)
    assert {e.request_id for e in events} == {"a/2"}
    assert engine.stats()["num_cancelled"] == 0


@pytest.mark.parametrize("how", ["close", "collect"])
def test_a_stream_of_samples_that_is_left_cancels_all(how: str) -> None:
    engine = engine_of()
    stream = engine.stream(prompt_of(40), seeded(3, max_tokens=50))
    for _ in range(4):
        next(stream)
    if how == "close":
        stream.close()
    del stream
    gc.collect()
    assert not engine.has_work and engine.pool.num_live == 0
    assert engine.stats()["num_cancelled"] == 3
    engine.check()


def test_a_bad_row_ends_its_sample_with_an_error_and_no_other() -> None:
    engine = engine_of()
    [want] = engine_of().generate([prompt_of(40)], seeded(3))
    forward, calls = engine.model.forward, []

    def poisoned(batch, storage):
        logits = forward(batch, storage)
        calls.append(len(logits))
        if len(calls) == 5:
            logits[1] = float("nan")
        return logits

    engine.model.forward = poisoned  # type: ignore[method-assign]
    *_, last = engine.stream(prompt_of(40), seeded(3))
    assert [s.finish_reason for s in last.output.samples] == ["length", "error", "length"]
    for i in (0, 2):
        assert last.output.samples[i].token_ids == want.samples[i].token_ids
    assert last.output.samples[1].token_ids == want.samples[1].token_ids[:4]


def test_a_call_that_has_ended_is_gone_without_the_garbage_collector() -> None:
    """What is given its events may hold it, and is let go with the last one."""
    engine = engine_of()
    samples = engine.prepare(prompt_of(20), seeded(3))
    held = []
    engine.start(samples, lambda event, samples=samples: held.append((event.index, samples.id)))
    dead = weakref.ref(samples)
    gc.collect()
    gc.disable()
    try:
        del samples
        while engine.has_work:
            engine.step()
        assert len(held) == 36 and dead() is None
    finally:
        gc.enable()


# Elsewhere -------------------------------------------------------------------------------------------------------


def test_a_request_id_for_several_prompts_is_refused_before_any_is_queued() -> None:
    engine = engine_of()
    with pytest.raises(InvalidRequest, match="request_id names one request, and this call has 2 prompts"):
        engine.generate([[1], [2]], seeded(2), request_id="mine")
    assert not engine.has_work
    [output] = engine.generate([[1]], seeded(3), request_id="mine")
    assert [s.request_id for s in output.samples] == ["mine", "mine/1", "mine/2"]


def test_samples_start_from_a_prefix_that_the_caller_keeps() -> None:
    engine = engine_of()
    prompt = prompt_of(50)
    [want] = engine_of().generate([prompt], seeded(3))
    for kept in (40, 50):  # of 50, the first token needs no step
        prefix = engine.build_prefix(prompt[:kept])
        [output] = engine.generate([prompt], seeded(3), prefix=prefix)
        assert [s.token_ids for s in output.samples] == [s.token_ids for s in want.samples]
        engine.check()


def test_the_token_level_api_gives_the_same_samples_with_and_without_stop_sequences() -> None:
    prompt, sampling = prompt_of(20), {"max_tokens": 10, "temperature": 1.0, "top_k": 0, "seed": 5, "n": 3}
    with Model(EchoModel(97), num_pages=64) as model:
        [want] = engine_of().generate([prompt], seeded(3, max_tokens=10))
        assert model.generate(prompt, **sampling) == [prompt + s.token_ids for s in want.samples]
        last = tuple(want.samples[2].token_ids[-2:])
        stopped = model.generate(prompt, stop_sequences=[last], **sampling)
        assert stopped[:2] == [prompt + s.token_ids for s in want.samples[:2]]
        assert stopped[2] == prompt + want.samples[2].token_ids[:-2]


def test_the_token_level_api_takes_a_grammar_but_not_for_beams() -> None:
    grammar = Grammar.regex("[a-c]{5}")
    with Model(speaking(), num_pages=64) as model:
        tokens = model.generate([1, 2, 3], grammar=grammar)
        assert model.generate([1, 2, 3], grammar=grammar, stop_sequences=[[1, 1]]) == tokens
        text = model.engine.model.tokenizer.decode(tokens[3:])
        assert len(text) == 5 and set(text) <= set("abc")
        with pytest.raises(ValueError, match="num_beams and grammar cannot be combined"):
            model.generate([1, 2, 3], grammar=grammar, num_beams=2)


def test_a_bad_prompt_names_its_place_among_the_prompts() -> None:
    engine = engine_of()
    with pytest.raises(InvalidRequest, match=r"prompt 1 of 2: .*got 97"):
        engine.generate([[1], [97]], seeded(4))
    assert not engine.has_work


def test_the_progress_bar_counts_every_sample(capsys) -> None:
    [output] = engine_of().generate([np.array([1, 2, 3])], seeded(5), progress=True)
    assert len(output.samples) == 5
    assert "5/5" in capsys.readouterr().err
