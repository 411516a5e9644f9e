"""n outputs for one prompt: each as if it were alone, on one copy of the prompt's pages."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from byhand import span
from fakes import EchoHybrid, EchoModel
from grammars import model as speaking

from paged.errors import InvalidRequest
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


# Elsewhere -------------------------------------------------------------------------------------------------------


def test_submit_and_stream_refuse_more_than_one_and_say_what_to_do() -> None:
    engine = engine_of()
    for call in (engine.submit, engine.stream):
        with pytest.raises(InvalidRequest, match=r"n must be 1 here, got 3: call generate, or submit params.sample"):
            call([1, 2], seeded(3))
    assert not engine.has_work
    names = [engine.submit([1, 2], seeded(3).sample(i)) for i in range(3)]  # what it says works
    ended = {}
    while engine.has_work:
        ended.update({e.request_id: e.output for e in engine.step() if e.output})
    [output] = engine.generate([[1, 2]], seeded(3))
    assert [ended[name].token_ids for name in names] == [s.token_ids for s in output.samples]


@pytest.mark.parametrize(("prompts", "n"), [([[1, 2]], 2), ([[1], [2]], 1)])
def test_a_request_id_for_several_requests_is_refused_before_any_is_queued(prompts: list, n: int) -> None:
    engine = engine_of()
    with pytest.raises(InvalidRequest, match="request_id names one request"):
        engine.generate(prompts, seeded(n), request_id="mine")
    assert not engine.has_work
    [output] = engine.generate(prompts[:1], seeded(1), request_id="mine")
    assert output.request_id == "mine"


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
