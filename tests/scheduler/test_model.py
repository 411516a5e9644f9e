"""scheduler.Model: its verbs, its arguments and their errors, what it counts, and what it leaves behind.

What the seeds promise of it is in tests/seeds; that no start and no way changes a token is in test_combinations.
"""

from __future__ import annotations

import gc
import inspect
import threading
import time

import numpy as np
import pytest
import torch
from fakes import EchoHybrid, EchoModel, ScriptModel
from grammars import model as speaking
from grammars import text_of
from token_api import counting, live_pages, opened, prompt_of, tiny, with_layers_after

from paged import Closed, Grammar, LoopsMismatch, PrefixCache, PrefixPool, Session, load_model
from scheduler import Model, SamplingParams


@pytest.fixture
def api():
    with opened() as made:
        yield made


# What it is -------------------------------------------------------------------------------------------------------


def test_config_says_what_the_model_is(api: Model) -> None:
    config = api.config()
    assert {name: config[name] for name in ("name", "vocab_size", "max_seq_len", "default_loops", "max_loops")} == {
        "name": "tiny:looped",
        "vocab_size": 512,
        "max_seq_len": 256,
        "default_loops": 8,
        "max_loops": 32,
    }
    assert (config["kv_dtype"], config["page_size"], config["eos_token_ids"]) == ("fp32", 16, [])


def test_a_source_is_loaded_and_cut_to_max_seq_len() -> None:
    assert inspect.signature(Model.__init__).parameters["max_seq_len"].default == 2048
    with Model("tiny:looped", max_seq_len=99, num_pages=100, device="cpu") as api:
        assert api.config()["max_seq_len"] == 99
    with Model("tiny:llama", num_pages=10, page_size=4, device="cpu") as api:
        assert api.config()["max_seq_len"] == 2048 and api.config()["page_size"] == 4
        assert api.config()["default_loops"] is None or api.config()["default_loops"] == 0


def test_what_is_not_a_verb_of_it_is_its_engines(api: Model) -> None:
    prompt = prompt_of(40)
    api.generate(prompt, max_tokens=2)
    assert api.engine.prefix_match_len(prompt) == 39
    assert api.engine.stats()["num_finished"] == 1


@pytest.mark.parametrize(
    "container", [list, tuple, np.array, lambda p: np.array(p, np.int64)], ids=["list", "tuple", "int32", "int64"]
)
def test_a_prompt_is_any_sequence_of_ints(api: Model, container) -> None:
    out = api.generate(container(prompt_of(9)), max_tokens=3)
    assert out[:9] == prompt_of(9) and {type(token) for token in out} == {int}


def test_models_that_do_not_loop_take_no_depth() -> None:
    for model in (EchoModel(97), EchoHybrid(97)):
        prompt = [t % 97 for t in prompt_of(21)]
        with opened(model, num_pages=100) as api:
            want = prompt + model.greedy(prompt, 6)
            assert api.generate(prompt, max_tokens=6) == want
            prefix = api.build_prefix_cache(prompt)
            assert api.generate_from_prefix_cache(prefix, max_tokens=6) == want
            pool = PrefixPool()
            assert api.register_prefix(pool, prompt[:15]) == 15
            assert api.generate_with_pool(pool, prompt, max_tokens=6, temperature=0.0) == want
            assert api.generate(prompt, max_tokens=6, num_beams=1) == want
            assert len(api.generate(prompt, max_tokens=6, num_beams=3)) == 27
            with pytest.raises(ValueError, match="does not loop"):
                api.generate(prompt, max_tokens=6, loops=2)
            with pytest.raises(ValueError, match="draft_loops"):
                api.generate(prompt, max_tokens=6, draft_loops=1)
            assert api.stats.pool_fallbacks == 0


# Streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"draft_loops": 2}, {"stop_sequences": [[511, 511]]}], ids=str)
def test_a_stream_gives_each_token_as_it_comes_and_computes_no_further(api: Model, more: dict) -> None:
    want = api.generate(prompt_of(20), max_tokens=30)[20:]
    with counting(api.engine.model) as work:
        tokens = api.generate_stream(prompt_of(20), max_tokens=30, **more)
        assert work.forwards == 0
        got = [next(tokens)]
        first = work.rows
        got += [next(tokens), next(tokens)]
    assert first <= 20 and work.rows - first <= 10  # three tokens, or a round of drafts at two depths
    got += tokens
    assert got == want


@pytest.mark.parametrize("more", [{}, {"draft_loops": 2}, {"stop_sequences": [[511, 511]]}], ids=str)
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closing_a_stream_or_letting_it_go_gives_its_pages_back(api: Model, more: dict, taken: int) -> None:
    for close in (True, False):
        tokens = api.generate_stream(prompt_of(20), max_tokens=30, **more)
        for _ in range(taken):
            next(tokens)
        if close:
            tokens.close()  # type: ignore[attr-defined]
        del tokens
        assert live_pages(api) == 0 and not api.engine.has_work
        api.engine.check()


def test_a_stream_that_cannot_be_says_so_at_once(api: Model) -> None:
    prefix = api.build_prefix_cache(prompt_of(20), loops=4)
    for error, call in {
        "loops mismatch": lambda: api.generate_stream(prefix),
        "max_seq_len is 256": lambda: api.generate_stream(prompt_of(250), max_tokens=7),
        "one continuation": lambda: api.generate_stream(prompt_of(5), n=2),
        "one continuation: num_beams": lambda: api.generate_stream(prompt_of(5), num_beams=2),
        "max_tokens": lambda: api.generate_stream(prompt_of(5), max_tokens=0),
        "draft_loops must be at least 1 and below the 8 loops": lambda: api.generate_stream(
            prompt_of(5), draft_loops=8
        ),
    }.items():
        with pytest.raises((ValueError, LoopsMismatch), match=error):
            call()
    with pytest.raises(TypeError, match="a handle or a pool, got both"):
        api.generate_stream(prefix, loops=4, pool=PrefixPool())
    with pytest.raises(TypeError, match="pool must be a PrefixPool, got list"):
        api.generate_stream(prompt_of(5), pool=[])  # type: ignore[arg-type]


# Ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"num_beams": 1}, {"stop_sequences": [[63, 63]]}], ids=str)
def test_an_end_id_of_the_model_ends_a_call_and_is_left_out(more: dict) -> None:
    with opened(ScriptModel([5, 6, 7, 0, 9]), num_pages=20) as api:
        prompt = ScriptModel.prompt(4)
        assert api.generate(prompt, max_tokens=20, **more)[4:] == [5, 6, 7]
        assert list(api.generate_stream(prompt, max_tokens=20)) == [5, 6, 7]
        assert api.generate(prompt, max_tokens=2, **more)[4:] == [5, 6]
        assert api.generate(prompt, max_tokens=5, ignore_eos=True)[4:] == [5, 6, 7, 0, 9]


def test_an_end_id_ends_drafts_and_beams_and_prefixes_alike(api: Model) -> None:
    prompt = prompt_of(20)
    plain = api.generate(prompt, max_tokens=20)[20:]
    at = next(i for i in range(5, 20) if plain[i] not in plain[:i])
    more = {"max_tokens": 20, "stop_token_ids": [plain[at]]}
    want = [*prompt, *plain[:at]]
    prefix = api.build_prefix_cache(prompt)
    assert api.generate(prompt, **more) == want
    assert api.generate(prompt, draft_loops=3, **more) == want
    assert api.generate_from_prefix_cache(prefix, **more) == want
    assert api.generate_from_prefix_cache(prefix, draft_loops=7, **more) == want
    for beam in api.generate(prompt, num_beams=4, n=4, **more):
        assert plain[at] not in beam[20:]


def test_an_end_id_that_is_the_first_token_ends_a_call_that_needs_no_forward(api: Model) -> None:
    prefix = api.build_prefix_cache(prompt_of(20))
    [first] = api.generate_from_prefix_cache(prefix, max_tokens=1)[20:]
    with counting(api.engine.model) as work:
        assert api.generate_from_prefix_cache(prefix, stop_token_ids=[first]) == prompt_of(20)
        assert api.generate_from_prefix_cache(prefix, stop_sequences=[[first]]) == prompt_of(20)
        assert api.generate_from_prefix_cache(prefix, stop_token_ids=[first], draft_loops=2) == prompt_of(20)
    assert work.forwards == 0
    held = api.generate_from_prefix_cache(prefix, max_tokens=9, stop_token_ids=[first], min_tokens=3)
    assert held == api.generate(prompt_of(20), max_tokens=9, stop_token_ids=[first], min_tokens=3)
    assert len(held) >= 23


def test_an_end_id_that_is_all_that_can_be_drawn_is_a_token_before_min_tokens() -> None:
    model = load_model("tiny:looped", max_seq_len=64, device="cpu")
    forward, run_loops = model.forward, model.run_loops

    def only_7(logits):
        logits = torch.full(logits.shape, -torch.inf)
        logits[:, 7] = 1.0
        return logits

    def looped(*args):
        logits, residual = run_loops(*args)
        return only_7(logits), residual

    model.forward, model.run_loops = lambda *args: only_7(forward(*args)), looped
    more = {"max_tokens": 9, "stop_token_ids": [7], "min_tokens": 4}
    with opened(model, num_pages=400) as api:
        assert api.generate([1, 2], **more) == [1, 2, 7, 7, 7, 7]
        assert api.generate([1, 2], draft_loops=2, **more) == [1, 2, 7, 7, 7, 7]
        prefix = api.build_prefix_cache([1, 2])
        assert api.generate_from_prefix_cache(prefix, **more) == [1, 2, 7, 7, 7, 7]


def test_stop_sequences_may_be_text_and_ids_together() -> None:
    """Where text ends a call the tokens that hold it stay, since text may end within a token; ids are left out."""
    with opened(speaking(), num_pages=60) as api:
        prompt, more = list(b"abc"), {"max_tokens": 30, "grammar": Grammar.regex("[a-z]{40}")}
        plain = api.generate(prompt, **more)[3:]
        text = text_of(plain[10:13]).decode()
        end = next(n for n in range(30) if text in text_of(plain[:n]).decode())
        want = [*prompt, *plain[:end]]
        assert api.generate(prompt, stop_sequences=[text], **more) == want
        assert api.generate(prompt, stop_sequences=text, **more) == want  # one string is a list of one
        first = next(n for n in range(30) if plain[n : n + 2] == plain[4:6])
        assert first < end
        got = api.generate(prompt, stop_sequences=[text, plain[4:6]], **more)
        assert got == [*prompt, *plain[:first]]


def test_without_max_tokens_the_models_length_is_the_end() -> None:
    with opened(num_pages=2000) as api:
        prompt = prompt_of(230)
        want = api.generate(prompt, max_tokens=None, loops=2)
        assert len(want) == 256
        assert api.generate(prompt, max_tokens=None, loops=2, draft_loops=1) == want
        assert len(api.generate(prompt, max_tokens=None, loops=2, num_beams=2)) == 256
    with opened(num_pages=3 * 4) as api:  # or the pool's
        want = api.generate(prompt_of(50), max_tokens=None, loops=2)
        assert len(want) == 64
        assert api.generate(prompt_of(50), max_tokens=None, loops=2, draft_loops=1) == want


# Several continuations --------------------------------------------------------------------------------------------


def test_n_continuations_compute_the_prompt_once() -> None:
    prompt = prompt_of(48)
    for more in ({}, {"draft_loops": 3}, {"stop_sequences": [[511, 511]]}):
        with opened() as api, counting(api.engine.model) as work:
            outs = api.generate(prompt, n=4, max_tokens=1, temperature=1.0, seed=3, **more)
            assert len({tuple(out) for out in outs}) > 1
            assert work.rows <= 48 + 3 * 16  # what is no full page short of the end is computed again


def test_the_best_beams_come_first_and_one_of_them_is_that_of_n_1(api: Model) -> None:
    beams = api.generate(prompt_of(20), max_tokens=6, num_beams=4, n=4)
    assert len({tuple(beam) for beam in beams}) == 4
    assert beams[0] == api.generate(prompt_of(20), max_tokens=6, num_beams=4)
    assert beams[:2] == api.generate(prompt_of(20), max_tokens=6, num_beams=4, n=2)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"num_beams": 0}, "num_beams must be at least 1"),
        ({"draft_loops": -1}, "draft_loops at least 0"),
        ({"num_beams": 2, "draft_loops": 2}, "cannot be combined"),
        ({"num_beams": 2, "n": 3}, "num_beams >= n, got n 3 and 2 beams"),
        ({"num_beams": 2, "stop_sequences": ["x"]}, "as token ids, not as strings"),
        ({"draft_loops": 2, "stop_sequences": ["x"]}, "as token ids, not as strings"),
        ({"stop_sequences": [[1], []]}, "at least one token id"),
        ({"stop_sequences": [[1, 512]]}, "stop_sequences must hold token ids from 0 to 511, got 512"),
        ({"stop_sequences": [[-1], "x"]}, "from 0 to 511, got -1"),
        ({"draft_loops": 8}, "below the 8 loops"),
        ({"loops": 2, "draft_loops": 2}, "below the 2 loops"),
        ({"temperature": -1.0}, "temperature"),
        ({"loops": 0}, "loops"),
        ({"cache_window": -1}, "cache_window"),
        ({"n": 0}, "SamplingParams.n"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_runs(api: Model, more: dict, match: str) -> None:
    with counting(api.engine.model) as work, pytest.raises(ValueError, match=match):
        api.generate(prompt_of(5), **more)
    assert work.forwards == 0 and live_pages(api) == 0


def test_grammars_and_beams_do_not_go_together() -> None:
    with opened(speaking(), num_pages=20) as api, pytest.raises(ValueError, match="num_beams and grammar"):
        api.generate([1, 2], grammar=Grammar.regex("a"), num_beams=2)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"best_of": 3}, "best_of"),
        ({"top_k": "many"}, "top_k must be an integer"),
        ({"num_beams": 2.5}, "num_beams must be an integer, got 2.5"),
        ({"num_beams": None}, "num_beams must be an integer, got None"),
        ({"draft_loops": "1"}, "draft_loops must be an integer, got '1'"),
        ({"stop_sequences": None}, "stop_sequences must be a string, or a sequence of .*, got None"),
        ({"stop_sequences": b"ab"}, "stop_sequences must be a string, or a sequence of .*, got b'ab'"),
        ({"stop_sequences": [5, 6]}, "stop_sequences must be a string, or a sequence of .*, got 5 in it"),
        ({"stop_sequences": [[1], [0.5]]}, r"stop_sequences must be .*, got \[0.5\] in it"),
    ],
)
def test_arguments_of_another_kind_are_type_errors(api: Model, more: dict, match: str) -> None:
    with counting(api.engine.model) as work, pytest.raises(TypeError, match=match):
        api.generate(prompt_of(5), **more)
    assert work.forwards == 0


def test_depths_of_another_kind_are_type_errors_that_name_the_argument(api: Model) -> None:
    for arguments, match in (
        (("4",), "L_used must be an integer, got '4'"),
        ((None,), "L_used must be an integer, got None"),
        ((4, None), "max_loops must be an integer, got None"),
        ((4, 8.5), "max_loops must be an integer, got 8.5"),
    ):
        with pytest.raises(TypeError, match=match):
            api.build_resume_handle(prompt_of(5), *arguments)
    handle = api.build_resume_handle(prompt_of(5), 4)
    for depth in (None, 6.0):
        with pytest.raises(TypeError, match=f"new_L must be an integer, got {depth}"):
            api.resume_generate(handle, depth)


# Prefixes and depths ----------------------------------------------------------------------------------------------


def test_a_handle_that_shares_depths_serves_the_smaller_ones() -> None:
    prompt = prompt_of(37)
    with opened(prefix_cache=False) as api:
        prefix = api.build_prefix_cache(prompt, loops=8, share_depths=True)
        for loops in (8, 5, 1):
            for more in ({}, {"num_beams": 2}, {"draft_loops": 1} if loops > 1 else {}):
                want = api.generate(prompt, max_tokens=6, loops=loops, **more)
                with counting(api.engine.model) as work:
                    assert api.generate_from_prefix_cache(prefix, max_tokens=6, loops=loops, **more) == want
                assert more or work.rows == 5 + (loops < 8)  # the last token again, at the smaller depth
        with pytest.raises(LoopsMismatch):
            api.generate_from_prefix_cache(prefix, loops=9)
    with opened(with_layers_after()) as api, pytest.raises(ValueError, match="layers follow the block"):
        api.build_prefix_cache(prompt, share_depths=True)


def test_a_pool_that_shares_depths_serves_the_smaller_ones() -> None:
    prompt = prompt_of(37)
    with opened(prefix_cache=False) as api:
        pool = PrefixPool(share_depths=True)
        api.register_prefix(pool, prompt[:30], loops=8)
        for loops, hits in ((8, 1), (3, 2), (9, 2)):
            want = api.generate(prompt, max_tokens=5, loops=loops)
            assert api.generate_with_pool(pool, prompt, max_tokens=5, loops=loops, temperature=0.0) == want
            assert api.stats.pool_hits == hits
        assert api.stats.pool_fallbacks == 0


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("length", [31, 32, 33, 47, 48])
def test_a_window_that_left_the_page_before_the_last_token_costs_the_prompt_and_no_error(length: int, cache) -> None:
    """Log probabilities, and a smaller depth, need the row of the last token once more: it sees one position further
    back than the handle keeps."""
    prompt = prompt_of(length)
    with opened(prefix_cache=cache) as api:
        prefix = api.engine.build_prefix(prompt, loops=4, cache_window=16, share_depths=True)
        for loops in (4, 2):
            api.engine.reset_prefix_cache()
            params = SamplingParams(max_tokens=4, logprobs=1)
            [got] = api.engine.generate([prompt], params, loops=loops, cache_window=16, prefix=prefix)
            [want] = api.engine.generate([prompt], params, loops=loops, cache_window=16)
            assert (got.error, got.token_ids, got.logprobs) == ("", want.token_ids, want.logprobs)


def test_a_prefix_is_cached_for_requests_too_and_is_built_from_what_is_cached(api: Model) -> None:
    prompt = prompt_of(48)
    prefix = api.build_prefix_cache(prompt[:33])
    with counting(api.engine.model) as work:
        api.generate(prompt, max_tokens=1)
    assert work.rows == 15
    with counting(api.engine.model) as work:
        longer = api.build_prefix_cache(prompt)
    assert work.rows == 1 and longer.num_tokens == 48
    assert set(prefix.page_ids.tolist()) & set(longer.page_ids.tolist())


def test_what_beams_and_drafts_computed_of_a_prompt_is_cached_too() -> None:
    for more in ({"num_beams": 2}, {"draft_loops": 2}):
        with opened() as api:
            api.generate(prompt_of(40), max_tokens=2, **more)
            with counting(api.engine.model) as work:
                api.generate(prompt_of(40), max_tokens=1)
            assert work.rows == 8  # its full pages


def test_one_page_is_held_once_though_two_depths_use_it() -> None:
    """Where layers follow the loop block a resumed session has pages of another depth's chain."""
    model, prompt = with_layers_after(), prompt_of(40)
    pool = model.create_kv_pool(400)
    cache, session = PrefixCache(pool, partial=True), Session(model, pool, 2)
    residual = session.eval_residual(prompt)
    assert cache.insert(session, prompt) == 3 * 3  # behind the block, and two iterations
    session.deepen(5, residual)
    cache.insert(session, prompt)
    cache.check()
    pool.check()
    other = Session(model, pool, 5)
    other.eval(prompt[cache.attach(other, prompt) :])
    assert (other.logits == session.logits).all()
    session.release()
    other.release()
    cache.release()
    assert pool.num_live == pool.num_cached_only == 0


# Threads and the end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"stop_sequences": [[511, 511]]}, {"draft_loops": 2}], ids=str)
def test_closing_ends_calls_that_run_in_other_threads(more: dict) -> None:
    api, failed = Model(tiny(), num_pages=1500), []
    started = threading.Event()

    def work() -> None:
        try:
            for _ in api.generate_stream(prompt_of(20), max_tokens=200, **more):
                started.set()
                time.sleep(0.001)
        except Closed as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(30)
    api.close()
    thread.join(30)
    assert not thread.is_alive() and len(failed) == 1
    gc.collect()
    assert api.engine.pool.num_live == 0


def test_every_verb_of_a_closed_model_names_itself() -> None:
    api = Model(tiny(), num_pages=200)
    prefix, handle, pool = api.build_prefix_cache([1, 2]), api.build_resume_handle([1, 2], 2), PrefixPool()
    api.register_prefix(pool, [1, 2])
    api.close()
    api.close()
    for verb, args in {
        "config": (),
        "generate": ([1],),
        "generate_stream": ([1],),
        "build_prefix_cache": ([1],),
        "generate_from_prefix_cache": (prefix,),
        "register_prefix": (pool, [1]),
        "generate_with_pool": (pool, [1]),
        "build_resume_handle": ([1], 2),
        "resume_generate": (handle, 3),
        "resume": (handle, 3),
    }.items():
        with pytest.raises(Closed, match=f"scheduler.Model is closed; cannot call {verb}$"):
            getattr(api, verb)(*args)
    del prefix, handle, pool, args
    gc.collect()
    assert api.engine.pool.num_live == 0


def test_a_request_that_somebody_cancels_says_so(api: Model) -> None:
    tokens = api.generate_stream(prompt_of(20), max_tokens=30)
    next(tokens)
    [name] = api.engine.scheduler.requests
    assert api.engine.cancel(name)
    with pytest.raises(RuntimeError, match="cancelled before its end"):
        list(tokens)


def test_counts_of_threads_are_not_lost(api: Model) -> None:
    pool = PrefixPool()
    api.register_prefix(pool, prompt_of(20), loops=1)

    def work() -> None:
        for _ in range(10):
            api.generate_with_pool(pool, prompt_of(20), max_tokens=1, loops=1)
            api.generate_with_pool(pool, prompt_of(20), max_tokens=1, loops=2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (api.stats.pool_hits, api.stats.pool_misses, api.stats.pool_fallbacks) == (40, 40, 0)


def test_a_full_pool_without_pages_for_one_more_lets_the_next_victim_go_first() -> None:
    with opened(num_pages=2 * 9 * 3 + 5, prefix_cache=False) as api:
        pool = PrefixPool(capacity=3)
        for i, n in enumerate((31, 30, 32)):
            assert api.register_prefix(pool, [i] * n) == n
        assert api.register_prefix(pool, [7] * 32) == 32
        assert [entry.num_tokens for entry in pool.entries()] == [32, 32, 31]
        assert api.register_prefix(PrefixPool(capacity=4), [8] * 32) == 0  # nothing of its own could go
        assert pool.size() == 3


@pytest.mark.parametrize("way", [{}, {"num_beams": 2}, {"draft_loops": 1}], ids=["plain", "beams", "drafts"])
@pytest.mark.parametrize("window", [2, 4, 5])
def test_a_shared_depth_whose_window_left_a_page_is_computed_again(way: dict, window: int) -> None:
    prompt = prompt_of(13)
    with opened(page_size=3, num_pages=2000) as api:
        want = api.generate(prompt, max_tokens=5, loops=2, cache_window=window, **way)
        handle = api.build_prefix_cache(prompt, loops=4, cache_window=window, share_depths=True)
        got = api.generate_from_prefix_cache(handle, max_tokens=5, loops=2, cache_window=window, **way)
        assert got == want
