"""The engine's verbs over models without weights: every output is checked against the model's own oracle."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from fakes import ByteTokenizer, EchoModel, ScriptModel

from paged import Closed, DuplicateRequest, InvalidRequest, PromptTooLong
from scheduler import Engine, SamplingParams


def engine_of(model=None, **kwargs) -> Engine:
    kwargs.setdefault("num_pages", 64)
    kwargs.setdefault("max_num_seqs", 16)
    return Engine(model or EchoModel(), **kwargs)


def prompts_of(n: int, seed: int = 0, shared: int = 20, vocab: int = 97) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    head = rng.integers(0, vocab, shared).tolist()
    return [head + rng.integers(0, vocab, int(k)).tolist() for k in rng.integers(1, 40, n)]


def drain(engine: Engine) -> dict[str, list]:
    events: dict[str, list] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        engine.check()
    return events


# generate -------------------------------------------------------------------------------------------------------


def test_a_batch_comes_back_in_input_order_with_the_models_own_tokens() -> None:
    engine = engine_of()
    prompts = prompts_of(12)
    outputs = engine.generate(prompts, [SamplingParams(max_tokens=1 + i) for i in range(12)])
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.token_ids == engine.model.greedy(prompt, 1 + i)
        assert output.finish_reason == "length"
        assert output.num_prompt_tokens == len(prompt)
    engine.check()
    assert engine.pool.num_live == 0


def test_the_same_batch_again_gives_the_same_outputs_in_the_same_order() -> None:
    engine = engine_of()
    prompts = prompts_of(5)
    params = [SamplingParams(max_tokens=n) for n in (9, 1, 5, 2, 7)]
    first = engine.generate(prompts, params)
    second = engine.generate(prompts, params)
    assert [o.token_ids for o in first] == [o.token_ids for o in second]
    assert all(o.num_cached_tokens == o.num_prompt_tokens - 1 for o in second)


@pytest.mark.parametrize("prompt", [[5, 6, 7], np.array([5, 6, 7]), np.array([5, 6, 7], np.int32), (5, 6, 7)])
def test_one_prompt_of_any_integer_container_is_a_batch_of_one(prompt) -> None:
    engine = engine_of()
    [output] = engine.generate(prompt, SamplingParams(max_tokens=4))
    assert output.token_ids == engine.model.greedy([5, 6, 7], 4)


def test_an_empty_batch_gives_an_empty_list() -> None:
    assert engine_of().generate([]) == []


@pytest.mark.parametrize("prompts", [None, 5, b"abc", bytearray(b"abc"), {3, 1, 2}, {"prompt": [1]}])
def test_what_is_no_batch_is_refused_by_its_type(prompts) -> None:
    """Bytes would be token ids, and a set has no order."""
    with pytest.raises(TypeError, match=f"a prompt or a sequence of prompts, got {type(prompts).__name__}"):
        engine_of().generate(prompts)


def test_no_rows_a_step_are_not_the_default() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens must be at least 1, got 0"):
        engine_of(max_num_batched_tokens=0)


def test_a_bad_prompt_names_its_place_and_nothing_of_its_batch_is_submitted() -> None:
    engine = engine_of()
    with pytest.raises(InvalidRequest, match=r"prompt 2 of 3: .*between 0 and 96, got 97"):
        engine.generate([[1], [2], [97]])
    assert not engine.has_work
    assert engine.scheduler.stats.num_admitted == 0


def test_params_must_be_one_or_one_for_each_prompt() -> None:
    with pytest.raises(ValueError, match="2 prompts need one SamplingParams or 2 of them, got 3"):
        engine_of().generate([[1], [2]], [SamplingParams()] * 3)


def test_a_progress_bar_does_not_change_the_outputs(capsys) -> None:
    engine = engine_of()
    prompts = prompts_of(3)
    quiet = engine.generate(prompts, SamplingParams(max_tokens=3))
    shown = engine.generate(prompts, SamplingParams(max_tokens=3), progress=True)
    assert [o.token_ids for o in quiet] == [o.token_ids for o in shown]
    assert "generate" in capsys.readouterr().err


def test_the_callers_prompt_buffer_may_change_after_submit() -> None:
    engine = engine_of()
    buffer = np.array([1, 2, 3], np.int32)
    name = engine.submit(buffer, SamplingParams(max_tokens=5))
    buffer[:] = 9
    events = drain(engine)
    assert events[name][-1].output.token_ids == engine.model.greedy([1, 2, 3], 5)


# promise 1 over settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix_cache": False},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"max_num_batched_tokens": 64},
        {"page_size": 1, "num_pages": 400},
        {"page_size": 5, "num_pages": 60},
        {"num_pages": 9},  # preempts
    ],
    ids=str,
)
def test_no_setting_changes_a_token_greedy_or_seeded(temperature: float, settings: dict) -> None:
    prompts = prompts_of(10)
    params = [SamplingParams(max_tokens=20, temperature=temperature, top_p=0.9, seed=i) for i in range(10)]
    want = [engine_of(max_num_seqs=1).generate([p], s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
    engine = engine_of(**settings)
    for _ in range(2):  # cold, then warm
        outputs = engine.generate(prompts, params)
        assert [o.token_ids for o in outputs] == want
        engine.check()
    if settings.get("num_pages") == 9:
        assert engine.stats()["num_preemptions"] > 0


def test_a_request_ignores_who_else_is_there_and_what_was_before() -> None:
    """Case B32: seeded output alone, beside others, after others, joined half way; global generators untouched."""
    probe, params = [3, 1, 4, 1, 5], SamplingParams(max_tokens=16, temperature=0.8, seed=42)
    [alone] = engine_of().generate([probe], params)
    hot = SamplingParams(max_tokens=9, temperature=1.5)
    engine = engine_of()
    engine.generate(prompts_of(30, seed=3), hot)
    states = (torch.get_rng_state(), np.random.get_state()[1].tolist())
    for neighbours in (0, 1, 5):
        for first in (True, False):
            names = []
            if first:
                names.append(engine.submit(probe, params))
            for p in prompts_of(neighbours, seed=neighbours + 1):
                engine.submit(p, hot)
            if not first:
                names.append(engine.submit(probe, params))
            engine.step()
            engine.submit([7, 7, 7], hot)  # joins half way
            torch.manual_seed(0)
            events = drain(engine)
            assert events[names[0]][-1].output.token_ids == alone.token_ids
    torch.set_rng_state(states[0])
    engine.generate(prompts_of(4), hot)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]


def test_requests_without_a_seed_differ_from_each_other() -> None:
    outputs = engine_of().generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=12, temperature=1.0))
    assert len({tuple(o.token_ids) for o in outputs}) == 4


# submit, step, cancel -------------------------------------------------------------------------------------------


def test_events_carry_each_token_once_and_end_with_the_output() -> None:
    engine = engine_of()
    prompts = prompts_of(6)
    names = [engine.submit(p, SamplingParams(max_tokens=7)) for p in prompts]
    events = drain(engine)
    for name, prompt in zip(names, prompts, strict=True):
        tokens = [t for e in events[name] for t in e.token_ids]
        output = events[name][-1].output
        assert tokens == output.token_ids == engine.model.greedy(prompt, 7)
        assert [e.finished for e in events[name]] == [False] * (len(events[name]) - 1) + [True]
    assert engine.step() == [] and not engine.has_work


def test_a_name_that_a_caller_chose_is_not_given_to_another_request() -> None:
    engine = Engine(EchoModel(), num_pages=32)
    first = engine.submit([1, 2])
    assert first == "request-0"
    engine.submit([1, 2], request_id="request-2")  # the second that has to be named
    assert [engine.submit([1, 2]) for _ in range(2)] == ["request-3", "request-4"]


def test_a_live_id_is_refused_and_may_be_used_again_after_its_end() -> None:
    engine = engine_of()
    engine.submit([1, 2], SamplingParams(max_tokens=3), request_id="a")
    with pytest.raises(DuplicateRequest, match="'a' is still live"):
        engine.submit([3, 4], request_id="a")
    assert drain(engine)["a"][-1].output.token_ids == engine.model.greedy([1, 2], 3)
    engine.submit([3, 4], SamplingParams(max_tokens=3), request_id="a")
    assert drain(engine)["a"][-1].output.token_ids == engine.model.greedy([3, 4], 3)


def test_a_request_id_must_be_a_string() -> None:
    with pytest.raises(TypeError, match="request_id must be a str, got int"):
        engine_of().submit([1], request_id=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancel_ends_a_request_once_and_leaves_its_neighbour_alone(steps: int) -> None:
    engine = engine_of(max_num_batched_tokens=16)
    neighbour = [9] * 30
    engine.submit([1] * 50, SamplingParams(max_tokens=30), request_id="gone")
    engine.submit(neighbour, SamplingParams(max_tokens=12), request_id="stays")
    for _ in range(steps):
        engine.step()
    assert engine.cancel("gone") is True
    assert engine.cancel("gone") is False
    engine.check()
    events = drain(engine)
    assert events["gone"][-1].output.finish_reason == "cancelled"
    assert len([e for e in events["gone"] if e.finished]) == 1
    assert events["stays"][-1].output.token_ids == engine.model.greedy(neighbour, 12)
    assert engine.cancel("never was") is False
    assert engine.pool.num_live == 0


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ([], InvalidRequest, "the prompt is empty"),
        ([-1], InvalidRequest, "between 0 and 96, got -1"),
        ([97], InvalidRequest, "between 0 and 96, got 97"),
        ([2**31], InvalidRequest, "must fit int32"),
        (np.array([1.0, 2.0]), TypeError, "whole numbers"),
        (np.array([[1, 2]]), InvalidRequest, "one dimension"),
        ("text", InvalidRequest, "no tokenizer"),
        (None, TypeError, "list of ints"),
    ],
    ids=str,
)
def test_bad_prompts_are_refused_alone_at_submit(prompt, error, match) -> None:
    """Case B41: the three good requests beside the bad one equal their solo runs."""
    engine = engine_of()
    good = prompts_of(3)
    names = [engine.submit(p, SamplingParams(max_tokens=6)) for p in good]
    engine.step()
    with pytest.raises(error, match=match):
        engine.submit(prompt)
    events = drain(engine)
    for name, p in zip(names, good, strict=True):
        assert events[name][-1].output.token_ids == engine.model.greedy(p, 6)


@pytest.mark.parametrize(
    "params", [{"logit_bias": {97: 5.0}}, {"stop_token_ids": [10**9]}, {"logprobs": 10**6}], ids=str
)
def test_parameters_outside_the_vocabulary_are_refused_at_submit(params: dict) -> None:
    engine = engine_of()
    with pytest.raises(ValueError, match=next(iter(params))):
        engine.submit([1], SamplingParams(**params))
    assert not engine.has_work


def test_params_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match="params must be SamplingParams, got dict"):
        engine_of().submit([1], {"max_tokens": 3})  # type: ignore[arg-type]


# lengths (B28, B43) ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "max_tokens", "generated"), [(63, 1, 1), (1, 63, 63), (60, 10, 4), (40, None, 24)])
def test_prompt_and_output_together_reach_the_limit_and_no_further(prompt, max_tokens, generated) -> None:
    engine = engine_of(EchoModel(max_seq_len=64))
    [output] = engine.generate([[5] * prompt], SamplingParams(max_tokens=max_tokens))
    assert output.finish_reason == "length"
    assert len(output.token_ids) == generated


def test_a_prompt_that_leaves_no_room_for_a_token_is_refused_with_both_numbers() -> None:
    with pytest.raises(PromptTooLong, match=r"64 tokens and max_seq_len is 64"):
        engine_of(EchoModel(max_seq_len=64)).submit([5] * 64)


def test_a_prompt_that_the_pool_can_never_hold_is_refused_and_those_behind_it_run() -> None:
    engine = engine_of(EchoModel(max_seq_len=2048), num_pages=49)
    for _ in range(5):
        with pytest.raises(PromptTooLong, match=r"1002 tokens and the whole pool holds 784 \(49 pages of 16\)"):
            engine.submit([1] * 1002)
        engine.submit([2] * 10, SamplingParams(max_tokens=4))
    long = engine.submit([3] * 700, SamplingParams(max_tokens=200))
    events = drain(engine)
    assert len(events) == 6
    assert events[long][-1].output.finish_reason == "length"
    assert len(events[long][-1].output.token_ids) == 84


# end ids, stop strings, text ------------------------------------------------------------------------------------


PIECES = [b"", b"DEF", b"G", b"HI", b"J", b"brown", b" fox", b" jumps", b"Paris", b"x", b"ab", b"c", b"X"]
PIECES += [b"\xf0\x9f", b"\x98\x80", b"\xe8", b"\xaa", b"\x9e"]


def script_engine(script: list[int], **kwargs) -> Engine:
    model = ScriptModel(script)
    model.tokenizer = ByteTokenizer(PIECES)  # type: ignore[assignment]
    return engine_of(model, **kwargs)


@pytest.mark.parametrize(
    ("script", "stop", "include", "text"),
    [
        ([1, 2, 3, 4, 9], "DEFGHIJ", False, ""),
        ([1, 2, 3, 4, 9], "DEFGHIJ", True, "DEFGHIJ"),
        ([5, 6, 7], "own fox", False, "br"),
        ([5, 6, 7], ["own fox"], True, "brown fox"),
        ([8, 9], "Pari", False, ""),
        ([9, 10, 11], ["ab", "abc"], False, "x"),
        ([1, 2, 12], "DEFGHIJ", False, "DEFGX"),
        ([9, 13, 14, 9], "\U0001f600", False, "x"),
    ],
)
def test_text_ends_where_a_stop_string_begins(script, stop, include, text) -> None:
    engine = script_engine(script)
    params = SamplingParams(max_tokens=20, stop=stop, include_stop=include)
    stream = engine.stream(ScriptModel.prompt(5), params)
    deltas = [event.text for event in stream]
    assert "".join(deltas) == stream.output.text == text
    assert stream.output.finish_reason == "stop"
    assert stream.output.token_ids == script[: len(stream.output.token_ids)]
    engine.check()
    assert engine.pool.num_live == 0


def test_streams_show_whole_characters_only() -> None:
    engine = script_engine([13, 14, 15, 16, 17, 13])
    texts = [event.text for event in engine.stream(ScriptModel.prompt(3), SamplingParams(max_tokens=6))]
    assert texts == ["", "\U0001f600", "", "", "\u8a9e", "\ufffd"]


def test_an_end_id_ends_the_request_and_is_not_shown() -> None:
    [output] = script_engine([1, 2, 0, 3]).generate([ScriptModel.prompt(4)])
    assert (output.token_ids, output.text, output.finish_reason) == ([1, 2], "DEFG", "stop")


def test_include_stop_shows_the_end_id_and_ignore_eos_goes_past_it() -> None:
    engine = script_engine([1, 2, 0, 3])
    [shown] = engine.generate([ScriptModel.prompt(4)], SamplingParams(include_stop=True))
    assert shown.token_ids == [1, 2, 0]
    [past] = engine.generate([ScriptModel.prompt(4)], SamplingParams(ignore_eos=True, max_tokens=6))
    assert past.token_ids == [1, 2, 0, 3, 0, 0] and past.finish_reason == "length"
    [own] = engine.generate([ScriptModel.prompt(4)], SamplingParams(stop_token_ids=[2]))
    assert own.token_ids == [1] and own.finish_reason == "stop"


def test_a_prompt_text_goes_through_the_tokenizer() -> None:
    engine = script_engine([1])
    assert engine.tokens_of("xJ").tolist() == [9, 4]


# streams and threads --------------------------------------------------------------------------------------------


def test_leaving_a_stream_cancels_its_request() -> None:
    engine = engine_of()
    for how in ("close", "with", "collect"):
        stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=50))
        next(stream)
        if how == "close":
            stream.close()
        elif how == "with":
            with stream:
                next(stream)
        del stream
        gc.collect()
        assert not engine.has_work, how
        assert engine.pool.num_live == 0
    engine.check()


def test_a_stream_that_ran_to_its_end_cancels_nothing() -> None:
    engine = engine_of()
    stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=5))
    assert len(list(stream)) == 5
    stream.close()
    assert stream.output.finish_reason == "length"
    assert [r["finish_reason"] for r in engine.delivery.recent] == ["length"]


def test_eight_threads_with_twenty_calls_each_get_their_solo_outputs() -> None:
    engine = engine_of(num_pages=40)
    params = SamplingParams(max_tokens=6)
    failures: list[object] = []
    held = engine.stream([8, 8, 8], SamplingParams(max_tokens=100))
    next(held)

    def work(seed: int) -> None:
        for prompt in prompts_of(20, seed=seed):
            [output] = engine.generate([prompt], params)
            if output.token_ids != engine.model.greedy(prompt, 6):
                failures.append((seed, prompt, output))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    rest = list(held)
    assert rest[-1].output.token_ids == engine.model.greedy([8, 8, 8], 100)
    engine.check()


def test_events_of_submitted_requests_wait_while_others_generate() -> None:
    engine = engine_of()
    name = engine.submit([4, 4], SamplingParams(max_tokens=3))
    engine.generate([[5, 5]], SamplingParams(max_tokens=9))
    events = engine.step()
    assert [t for e in events if e.request_id == name for t in e.token_ids] == engine.model.greedy([4, 4], 3)


# failures -------------------------------------------------------------------------------------------------------


def test_a_failing_forward_ends_its_batch_with_error_and_later_requests_run() -> None:
    engine = engine_of()
    forward = engine.model.forward
    prompts = prompts_of(3)

    def broken(batch, storage):
        raise RuntimeError("no more of this")

    engine.model.forward = broken  # type: ignore[method-assign]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=4))
    assert [o.finish_reason for o in outputs] == ["error"] * 3
    assert all("no more of this" in o.error for o in outputs)
    engine.model.forward = forward  # type: ignore[method-assign]
    engine.check()
    assert engine.pool.num_live == 0 and engine.cache.held_pages == 0  # a failed step publishes nothing
    outputs = engine.generate(prompts, SamplingParams(max_tokens=4))
    assert [o.token_ids for o in outputs] == [engine.model.greedy(p, 4) for p in prompts]


def test_a_tokenizer_that_fails_ends_only_the_request_that_it_was_called_for() -> None:
    engine = engine_of()

    class Fussy(ByteTokenizer):
        def token_bytes(self, token: int) -> bytes:
            if token == bad:
                raise KeyError(token)
            return b"."

    good, victim = [1, 2, 3], [4, 5, 6]
    bad = next(t for t in engine.model.greedy(victim, 8) if t not in engine.model.greedy(good, 8))
    engine.model.tokenizer = Fussy([])  # type: ignore[assignment]
    outputs = engine.generate([good, victim], SamplingParams(max_tokens=8))
    assert outputs[0].token_ids == engine.model.greedy(good, 8)
    assert outputs[1].finish_reason == "error" and "KeyError" in outputs[1].error
    engine.check()


def test_pages_held_by_sessions_end_a_request_with_an_error_instead_of_a_hang() -> None:
    engine = engine_of(num_pages=4)
    engine.pool.alloc(3)
    [output] = engine.generate([[1] * 40])
    assert output.finish_reason == "error" and "sessions outside" in output.error


def test_a_closed_engine_says_so_and_closing_twice_is_fine() -> None:
    engine = engine_of()
    engine.submit([1, 2, 3], request_id="live")
    engine.close()
    engine.close()
    assert engine.pool.num_free == engine.pool.num_pages
    for call in (engine.generate, engine.stream, engine.submit):
        with pytest.raises(Closed, match="closed"):
            call([1])
    assert [e.output.finish_reason for e in engine.step()] == ["cancelled"]


def test_a_closed_engine_neither_overwrites_a_saved_cache_nor_takes_one_in(tmp_path) -> None:
    engine, path = engine_of(), tmp_path / "warm.safetensors"
    engine.generate([list(range(64))])
    saved = engine.save_prefix_cache(path)
    engine.close()
    for call in (
        lambda: engine.save_prefix_cache(path),
        lambda: engine.load_prefix_cache(path),
        lambda: engine.prefix_match_len([1, 2]),
        lambda: engine.set_policy("priority"),
    ):
        with pytest.raises(Closed, match="closed"):
            call()
    assert engine.pool.num_free == engine.pool.num_pages
    assert engine_of().load_prefix_cache(path) == saved > 0


# admission control, stats, reset --------------------------------------------------------------------------------


def test_prefix_match_len_says_what_a_request_would_attach_and_changes_nothing() -> None:
    engine = engine_of()
    prompt = list(range(64))
    engine.generate([prompt], SamplingParams(max_tokens=1))
    before = (engine.stats(), engine.cache.index.last_use.copy().tolist(), engine.pool.refs.tolist())
    for n, want in ((64, 63), (65, 64), (16, 15), (17, 16), (1, 0)):
        query = (prompt + [1] * 20)[:n]
        assert engine.prefix_match_len(query) == want
    for _ in range(1000):
        engine.prefix_match_len(prompt)
    assert (engine.stats(), engine.cache.index.last_use.tolist(), engine.pool.refs.tolist()) == before
    assert engine.prefix_match_len(prompt, namespace="other") == 0
    assert engine_of(prefix_cache=False).prefix_match_len(prompt) == 0


def test_namespaces_never_share_pages() -> None:
    engine = engine_of()
    prompt = list(range(50))
    first = engine.generate([prompt], SamplingParams(max_tokens=2), namespace="a")[0]
    other = engine.generate([prompt], SamplingParams(max_tokens=2), namespace="b")[0]
    again = engine.generate([prompt], SamplingParams(max_tokens=2), namespace="a")[0]
    assert [o.num_cached_tokens for o in (first, other, again)] == [0, 0, 49]


def test_explain_says_where_the_tokens_of_a_request_came_from() -> None:
    engine = engine_of()
    engine.generate([list(range(40))], SamplingParams(max_tokens=4))
    name = engine.submit(list(range(40)), SamplingParams(max_tokens=4))
    engine.step()
    live = engine.explain(name)
    assert (live["state"], live["num_cached_tokens"], live["num_computed_tokens"]) == ("running", 39, 1)
    drain(engine)
    done = engine.explain(name)
    assert (done["state"], done["finish_reason"], done["num_computed_tokens"]) == ("finished", "length", 1 + 3)
    with pytest.raises(KeyError, match="nobody"):
        engine.explain("nobody")


def test_usage_numbers_agree_with_each_other() -> None:
    engine = engine_of()
    prompt = prompts_of(1, shared=59)[0][:60]
    for cached in (0, 59):
        [output] = engine.generate([prompt], SamplingParams(max_tokens=7))
        assert (output.num_prompt_tokens, output.num_cached_tokens, len(output.token_ids)) == (60, cached, 7)
        assert output.num_computed_tokens == 60 - cached + 6  # the last token is never computed
    stats = engine.stats()
    assert stats["cached_tokens"] == 59 and stats["prompt_tokens"] == 120 and stats["generated_tokens"] == 14


def test_resetting_the_cache_while_requests_run_changes_no_output() -> None:
    engine = engine_of()
    prompts = prompts_of(4)
    names = [engine.submit(p, SamplingParams(max_tokens=30)) for p in prompts]
    for _ in range(3):
        engine.step()
    engine.reset_prefix_cache()
    engine.reset_prefix_cache()
    engine.check()
    assert engine.prefix_match_len(prompts[0]) == 0
    events = drain(engine)
    for name, p in zip(names, prompts, strict=True):
        assert events[name][-1].output.token_ids == engine.model.greedy(p, 30)


def test_a_deleted_engine_leaves_nothing_behind_and_the_model_as_it_was() -> None:
    """Case B55."""
    model = EchoModel()
    before = dict(vars(model))
    dead = []
    for _ in range(10):
        engine = engine_of(model)
        engine.generate(prompts_of(2), SamplingParams(max_tokens=3))
        dead += [weakref.ref(engine), weakref.ref(engine.pool), weakref.ref(engine.cache)]
        del engine
        gc.collect()
    assert all(ref() is None for ref in dead)
    after = {k: v for k, v in vars(model).items() if k not in ("num_forwards", "num_rows")}
    assert after == {k: v for k, v in before.items() if k not in ("num_forwards", "num_rows")}


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_row_of_logits_without_a_usable_token_fails_alone_and_is_not_cached(poison: float) -> None:
    engine = engine_of()
    good, victim = [1] * 20, [4] * 40
    forward = engine.model.forward

    def poisoned(batch, storage):
        logits = forward(batch, storage)
        first = batch.tokens[batch.q_indptr[:-1]]
        seqs = np.searchsorted(batch.q_indptr, batch.logit_rows, side="right") - 1
        logits[torch.from_numpy((first[seqs] == 4) & (batch.kv_lens[seqs] == 40))] = poison
        return logits

    engine.model.forward = poisoned  # type: ignore[method-assign]
    outputs = engine.generate([good, victim, good], SamplingParams(max_tokens=8))
    assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
    assert "BadLogits" in outputs[1].error and outputs[1].token_ids == []
    assert outputs[0].token_ids == outputs[2].token_ids == engine.model.greedy(good, 8)
    assert engine.prefix_match_len(victim) == 0
    engine.check()
    assert engine.pool.num_live == 0
