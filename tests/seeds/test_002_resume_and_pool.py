"""Seed 002, TinyLoop's page on what is reused and how state goes on: a test for each of its sentences that promises
something, and each of its conditions of error.

The seed's names, and ours: the functions of its C++ API are methods of scheduler.Model; PrefixCache is
paged.PrefixHandle, ResumeHandle and PrefixPool have their names, `n_loops` and `config.loops` are `loops`, and
`free_...` is the end of the last reference. Where its process aborts, a Python exception is raised (design.md).
"""

from __future__ import annotations

import gc
import inspect
import threading

import numpy as np
import pytest
import torch
from grammars import model, text_of
from token_api import VOCAB, counting, live_pages, opened, prompt_of, tiny, with_layers_after

from paged import Closed, GeometryMismatch, Grammar, LoopsMismatch, OutOfPages, PrefixPool, ResumeHandle, load_model
from scheduler import Model


@pytest.fixture
def api():
    with opened(prefix_cache=False) as made:
        yield made


def defaults_of(verb) -> dict:
    return {p.name: p.default for p in inspect.signature(verb).parameters.values() if p.default is not p.empty}


def handles_of(api: Model) -> dict:
    return {
        "prefix": api.build_prefix_cache(prompt_of(37)),
        "resume": api.build_resume_handle(prompt_of(37), 4),
    }


# The three kinds --------------------------------------------------------------------------------------------------


def test_each_kind_reuses_along_its_own_axis() -> None:
    """One depth and many requests; many depths; many prefixes found by the prompt."""
    prompt = prompt_of(37)
    with opened(prefix_cache=False) as api:
        prefix = api.build_prefix_cache(prompt, loops=6)
        with counting(api.engine.model) as work:
            assert len({tuple(api.generate_from_prefix_cache(prefix, 1, 6, 1.0, seed=i)) for i in range(9)}) > 1
        assert work.forwards == 0
        handle = api.build_resume_handle(prompt, 2)
        for depth in (3, 6, 9):
            with counting(api.engine.model) as work:
                api.resume_generate(handle, depth, max_tokens=1)
            assert work.iterations == 37 * (depth - 2)
        pool = PrefixPool()
        for length in (10, 30):
            api.register_prefix(pool, prompt[:length], loops=6)
        for length, used in ((37, 30), (20, 10)):
            with counting(api.engine.model) as work:
                api.generate_with_pool(pool, prompt[:length], max_tokens=1, loops=6)
            assert work.rows == length - used


@pytest.mark.parametrize("kind", ["prefix", "resume"])
def test_a_handle_owns_pages_until_its_last_reference_ends(api: Model, kind: str) -> None:
    handles = handles_of(api)
    handle = handles.pop(kind)
    handles.clear()
    assert live_pages(api) == len(handle.page_ids) > 0
    del handle
    assert live_pages(api) == 0


def test_freeing_nothing_is_fine(api: Model) -> None:
    """`free_...(nullptr)`: an empty reference, an empty pool, a pool emptied twice."""
    handle = None
    del handle
    pool = PrefixPool()
    pool.clear()
    pool.clear()
    assert pool.size() == 0 and not pool.remove(1)


@pytest.mark.parametrize("kind", ["prefix", "resume"])
def test_a_handle_may_go_while_a_call_uses_it(api: Model, kind: str) -> None:
    """The seed forbids it; here the call keeps the pages."""
    handle = handles_of(api)[kind]
    loops = handle.loops
    want = api.generate(prompt_of(37), max_tokens=9, loops=loops)
    tokens = api.generate_stream(handle, max_tokens=9, loops=loops)
    first = next(tokens)
    del handle
    gc.collect()
    assert [*prompt_of(37), first, *tokens] == want


def test_calls_of_several_threads_need_no_lock_of_their_own(api: Model) -> None:
    """The seed asks for serialisation; design.md promises that calls of threads run together."""
    handles, prompt = handles_of(api), prompt_of(37)
    pool = PrefixPool()
    api.register_prefix(pool, prompt[:20])
    calls = {
        "generate": lambda: api.generate(prompt, max_tokens=9),
        "prefix": lambda: api.generate_from_prefix_cache(handles["prefix"], max_tokens=9),
        "resume": lambda: api.resume_generate(handles["resume"], 8, max_tokens=9),
        "pool": lambda: api.generate_with_pool(pool, prompt, max_tokens=9, temperature=0.0),
        "draft": lambda: api.generate(prompt, max_tokens=9, draft_loops=3),
        "register": lambda: api.register_prefix(pool, prompt[:25]),
    }
    got: dict = {}
    threads = [threading.Thread(target=lambda n=n, c=c: got.update({n: c()})) for n, c in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got.pop("register") == 25
    assert set(map(tuple, got.values())) == {tuple(api.generate(prompt, max_tokens=9))} and len(got) == 5


# PrefixCache ------------------------------------------------------------------------------------------------------


def test_a_prefix_has_the_size_of_its_tokens_and_what_follows_grows_behind_it(api: Model) -> None:
    prefix = api.build_prefix_cache(prompt_of(17), loops=2)
    assert (prefix.num_tokens, prefix.page_table.shape[1]) == (17, 2)
    assert len(api.generate_from_prefix_cache(prefix, max_tokens=60, loops=2)) == 77
    assert prefix.page_table.shape[1] == 2


def test_a_prefix_never_changes_and_a_longer_one_is_another(api: Model) -> None:
    prefix = api.build_prefix_cache(prompt_of(17), loops=2)
    with pytest.raises(ValueError, match="read-only"):
        prefix.tokens[0] = 1
    longer = api.build_prefix_cache([*prompt_of(17), 5], loops=2)
    assert (prefix.num_tokens, longer.num_tokens) == (17, 18)


@pytest.mark.parametrize("loops", [1, 8])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_continuing_a_prefix_is_generating_from_its_prompt(api: Model, length: int, loops: int) -> None:
    prompt = prompt_of(length)
    prefix = api.build_prefix_cache(prompt, loops=loops)
    for more in ({}, {"temperature": 1.0, "seed": 7}):
        assert api.generate_from_prefix_cache(prefix, max_tokens=6, loops=loops, **more) == api.generate(
            prompt, max_tokens=6, loops=loops, **more
        )


def test_one_system_prompt_serves_turns_with_stops_of_their_own(api: Model) -> None:
    """Its example: a prefix is built once, and each user's turn brings its stop sequences."""
    prompt = prompt_of(37)
    prefix = api.build_prefix_cache(prompt, 8)
    plain = api.generate_from_prefix_cache(prefix, max_tokens=20)[37:]
    for stops, want in (
        ([], plain),
        ([plain[4:6]], plain[:4]),
        ([[plain[9]], plain[6:8]], plain[:6]),
        ([[VOCAB - 1, VOCAB - 1]], plain),
    ):
        out = api.generate_from_prefix_cache(prefix, max_tokens=20, stop_sequences=stops)
        assert out == [*prompt, *want]


def test_a_grammar_is_about_what_is_generated_and_fits_every_prefix() -> None:
    """The seed aborts where the prefix does not fit the grammar; here the prefix is no part of the output."""
    with opened(model(), num_pages=60) as api:
        prefix = api.build_prefix_cache([1, 2, 3, 4, 5])
        out = api.generate_from_prefix_cache(prefix, max_tokens=12, grammar=Grammar.regex("[ab]{3}"))
        assert out == api.generate([1, 2, 3, 4, 5], max_tokens=12, grammar=Grammar.regex("[ab]{3}"))
        assert len(out) > 5 and set(text_of(out[5:])) <= set(b"ab")


# ResumeHandle -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "depth"), [(1, 2), (4, 8), (4, 4), (2, 32), (8, 16)])
def test_a_prefix_of_less_depth_is_brought_to_more_by_the_iterations_that_are_missing(api, start, depth) -> None:
    prompt = prompt_of(37)
    with counting(api.engine.model) as work:
        handle = api.build_resume_handle(prompt, start)
    assert (work.rows, work.iterations) == (37, 37 * start)
    with counting(api.engine.model) as work:
        out = api.resume_generate(handle, depth, max_tokens=6)
    assert work.iterations == 37 * (depth - start) + 5 * depth
    assert all(first in (0, start) for _, first, _ in work.calls)
    assert out == api.generate(prompt, max_tokens=6, loops=depth)


def test_resuming_costs_less_than_generating_and_pays_with_the_first_resume(api: Model) -> None:
    """Its figure is wall time of one machine; here the iterations: 4 of 8 over the prompt are saved each time."""
    prompt = prompt_of(100)
    with counting(api.engine.model) as whole:
        want = api.generate(prompt, max_tokens=4, loops=8)
    with counting(api.engine.model) as built:
        handle = api.build_resume_handle(prompt, 4)
    with counting(api.engine.model) as resumed:
        assert api.resume_generate(handle, 8, max_tokens=4) == want
    assert whole.iterations - resumed.iterations == 100 * 4
    assert built.iterations + resumed.iterations == whole.iterations  # one resume, and building has cost nothing


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 9}, {"repetition_penalty": 1.4}], ids=str)
@pytest.mark.parametrize("window", [0, 20])
def test_what_is_resumed_continues_as_if_it_had_been_computed_at_that_depth(api: Model, window: int, more) -> None:
    prompt = prompt_of(60)
    handle = api.build_resume_handle(prompt, 3, cache_window=window)
    for depth in (3, 5, 12):
        got = api.resume_generate(handle, depth, max_tokens=6, **more)
        assert got == api.generate(prompt, max_tokens=6, loops=depth, cache_window=window, **more)


def test_long_prefixes_are_resumed_in_chunks_and_give_the_same() -> None:
    with opened(tiny(max_seq_len=700), num_pages=3000, prefix_cache=False) as api:
        prompt = prompt_of(600)
        handle = api.build_resume_handle(prompt, 2)
        assert handle.residual.shape == (600, 64)
        assert api.resume_generate(handle, 3, max_tokens=3) == api.generate(prompt, max_tokens=3, loops=3)


def test_the_handle_is_not_changed_by_what_is_resumed_from_it(api: Model) -> None:
    handle = api.build_resume_handle(prompt_of(37), 4)
    storage = api.engine.pool.storage
    assert storage is not None
    ids, pages, residual = handle.page_ids, storage.pages[handle.page_ids].clone(), handle.residual.clone()
    outs = [api.resume_generate(handle, depth, max_tokens=5) for depth in (8, 6, 16, 8)]
    assert outs[0] == outs[3]
    assert (handle.loops, handle.page_ids.tolist()) == (4, ids.tolist())
    after = storage.pages[ids]
    assert ((after == pages) | (after.isnan() & pages.isnan())).all() and torch.equal(handle.residual, residual)
    handle.check()


def test_the_residual_is_kept_beside_the_pages_and_room_for_more_depth_is_taken_when_it_is_used(api: Model) -> None:
    """The seed takes the pages of all `max_loops` at once and leaves most of them zero."""
    handle = api.build_resume_handle(prompt_of(32), 4, max_loops=32)
    assert live_pages(api) == 2 * 5
    assert handle.num_bytes == 32 * 32 * 5 * 2 * 4 + 32 * 64 * 4  # rows, and the residual
    deeper = api.resume(handle, 12)
    assert live_pages(api) == 2 * 13  # five groups of each column are shared
    del deeper
    assert live_pages(api) == 2 * 5


def test_tokens_may_be_decoded_with_fewer_iterations_than_the_prefix_has(api: Model) -> None:
    """The depth of the prefix and that of each step are two arguments; the first token is that of the prefix."""
    prompt = prompt_of(37)
    handle = api.build_resume_handle(prompt, 2)
    out = api.resume_generate(handle, 8, max_tokens=6, loops=4)
    assert out[37] == api.generate(prompt, max_tokens=1, loops=8)[37]
    assert out[38:] == api.generate(out[:38], max_tokens=5, loops=4)[38:]
    with counting(api.engine.model) as work:
        api.resume_generate(handle, 8, max_tokens=6, loops=4)
    assert work.iterations == 37 * 6 + 5 * 4


def test_rows_behind_the_block_belong_to_one_depth_and_so_do_the_steps() -> None:
    with opened(with_layers_after(), prefix_cache=False) as api:
        prompt = prompt_of(30)
        handle = api.build_resume_handle(prompt, 2, max_loops=16)
        for depth in (2, 5, 16):
            want = api.generate(prompt, max_tokens=6, loops=depth)
            assert api.resume_generate(handle, depth, max_tokens=6) == want
        with pytest.raises(LoopsMismatch, match="built at 5 loops, the call asks for 3"):
            api.resume_generate(handle, 5, max_tokens=6, loops=3)


def test_what_was_resumed_once_serves_many_calls(api: Model) -> None:
    prompt = prompt_of(37)
    handle = api.build_resume_handle(prompt, 4)
    deeper = api.resume(handle, 8)
    del handle
    with counting(api.engine.model) as work:
        for seed in range(3):
            more = {"temperature": 1.0, "seed": seed}
            assert api.generate_from_prefix_cache(deeper, 1, 8, **more) == api.generate_from_prefix_cache(
                deeper, 1, 8, **more
            )
    assert work.forwards == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"L_used": 0}, "got L_used 0"),
        ({"L_used": 5, "max_loops": 4}, "L_used 5 and max_loops 4"),
        ({"L_used": 4, "max_loops": 65}, "max_loops 65"),
        ({"L_used": 33, "max_loops": 40}, "32, got 33"),
        ({"L_used": 4, "cache_window": -1}, "cache_window"),
    ],
)
def test_depths_that_cannot_be_are_refused(api: Model, arguments: dict, match: str) -> None:
    with counting(api.engine.model) as work, pytest.raises(ValueError, match=match):
        api.build_resume_handle(prompt_of(5), **arguments)
    assert work.forwards == 0


@pytest.mark.parametrize("depth", [1, 3, 13, 40])
def test_a_depth_outside_the_handles_range_is_refused_with_the_range(api: Model, depth: int) -> None:
    handle = api.build_resume_handle(prompt_of(5), 4, max_loops=12)
    with pytest.raises(RuntimeError, match=f"resumed at 4 to 12, got {depth}"):
        api.resume(handle, depth)
    with pytest.raises((LoopsMismatch, ValueError)):
        api.resume_generate(handle, depth, max_tokens=2)


def test_steps_deeper_than_the_prefix_are_refused(api: Model) -> None:
    handle = api.build_resume_handle(prompt_of(5), 4)
    with pytest.raises(LoopsMismatch, match="resumed at 6 loops, and tokens of 8 would need"):
        api.resume_generate(handle, 6, loops=8)


def test_a_resume_handle_defaults_to_room_for_32_iterations_and_no_window() -> None:
    assert defaults_of(Model.build_resume_handle) == {"max_loops": 32, "cache_window": 0}
    assert list(inspect.signature(Model.build_resume_handle).parameters)[1:3] == ["tokens", "L_used"]
    assert list(inspect.signature(Model.resume_generate).parameters)[1:3] == ["handle", "new_L"]


def test_without_room_for_more_depth_nothing_is_resumed_and_the_handle_still_is_there() -> None:
    with opened(num_pages=30, prefix_cache=False) as api:
        handle = api.build_resume_handle(prompt_of(32), 8)
        held = live_pages(api)
        with pytest.raises(OutOfPages, match="out of memory"):
            api.resume_generate(handle, 31, max_tokens=2)
        assert live_pages(api) == held
        assert api.resume_generate(handle, 9, max_tokens=2) == api.resume_generate(handle, 9, max_tokens=2)
        with pytest.raises(OutOfPages, match="out of memory"):
            api.build_resume_handle(prompt_of(250), 8)


# PrefixPool -------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_where_that_is_chosen(api: Model) -> None:
    """The C++ page's order; the Python page's (seed 000) is the default."""
    pool = PrefixPool(capacity=2, eviction="lru")
    prefixes = [prompt_of(10 + 5 * i, seed=i) for i in range(4)]
    for prefix in prefixes[:2]:
        api.register_prefix(pool, prefix, loops=2)
    api.generate_with_pool(pool, [*prefixes[0], 3], max_tokens=1, loops=2)  # a hit makes it the youngest
    api.register_prefix(pool, prefixes[2], loops=2)
    assert [pool.match_len(p, loops=2) for p in prefixes] == [10, 0, 20, 0]
    api.register_prefix(pool, prefixes[0], loops=2)  # so does registering again
    api.register_prefix(pool, prefixes[3], loops=2)
    assert [pool.match_len(p, loops=2) for p in prefixes] == [10, 0, 0, 25]


def test_each_entry_has_a_small_positive_id_by_which_it_can_be_followed_and_dropped(api: Model) -> None:
    """register_prefix returns the count (design.md, section 7); the ids are in `entries()`."""
    pool = PrefixPool()
    for seed in range(3):
        assert api.register_prefix(pool, prompt_of(10 + seed, seed), loops=2) == 10 + seed
    ids = {entry.num_tokens: entry.id for entry in pool.entries()}
    assert sorted(ids.values()) == [1, 2, 3]
    assert pool.remove(ids[11]) and not pool.remove(ids[11])
    assert [pool.match_len(prompt_of(10 + seed, seed), loops=2) for seed in range(3)] == [10, 0, 12]


@pytest.mark.parametrize("at", [0, 37, 99])
def test_200_tokens_on_a_registered_100_match_exactly_those_and_one_wrong_id_matches_nothing(api, at: int) -> None:
    pool, prompt = PrefixPool(), prompt_of(200)
    api.register_prefix(pool, prompt[:100], loops=2)
    assert pool.match_len(prompt, loops=2) == 100
    prompt[at] = (prompt[at] + 1) % VOCAB
    assert pool.match_len(prompt, loops=2) == 0


def test_prefixes_of_another_model_are_never_used(api: Model) -> None:
    """Mixing models in one pool is undefined in the seed; here such an entry is replaced, and a call computes."""
    prompt = prompt_of(30)
    other_model = load_model("tiny:looped", max_seq_len=128, device="cpu")
    with opened(other_model) as other:
        pool = PrefixPool()
        other.register_prefix(pool, prompt[:20])
        want = api.generate(prompt, max_tokens=5)
        assert api.generate_with_pool(pool, prompt, max_tokens=5, temperature=0.0) == want
        assert (api.stats.pool_hits, api.stats.pool_fallbacks) == (1, 1)
        assert api.register_prefix(pool, prompt[:20]) == 20 and pool.size() == 1
        assert api.generate_with_pool(pool, prompt, max_tokens=5, temperature=0.0) == want
        assert (api.stats.pool_hits, api.stats.pool_fallbacks) == (2, 1)


def test_a_miss_costs_what_generate_costs(api: Model) -> None:
    prompt, pool = prompt_of(30), PrefixPool()
    api.register_prefix(pool, prompt_of(20, seed=5))
    with counting(api.engine.model) as plain:
        want = api.generate(prompt, max_tokens=5)
    with counting(api.engine.model) as missed:
        assert api.generate_with_pool(pool, prompt, max_tokens=5, temperature=0.0) == want
    assert missed.calls == plain.calls


def test_what_is_saved_is_the_share_of_the_prompt_that_is_registered(api: Model) -> None:
    prompt = prompt_of(200)
    for share in (0, 50, 150, 200):
        pool = PrefixPool()
        if share:
            api.register_prefix(pool, prompt[:share])
        with counting(api.engine.model) as work:
            api.generate_with_pool(pool, prompt, max_tokens=1)
        assert work.rows == 200 - share


def test_a_pool_is_emptied_in_one_call(api: Model) -> None:
    pool = PrefixPool()
    for seed in range(3):
        api.register_prefix(pool, prompt_of(20, seed))
    pool.clear()
    assert pool.size() == 0 and live_pages(api) == 0


# What all three share ---------------------------------------------------------------------------------------------


def test_a_depth_that_was_not_computed_is_an_error_of_every_handle(api: Model) -> None:
    prefix = api.build_prefix_cache(prompt_of(20), loops=8)
    handle = api.build_resume_handle(prompt_of(20), 8, max_loops=12)
    for call in (
        lambda: api.generate_from_prefix_cache(prefix, loops=16),
        lambda: api.generate_from_prefix_cache(handle, loops=16),
        lambda: api.resume_generate(handle, 16),
    ):
        with pytest.raises(RuntimeError, match="loops mismatch"):
            call()
    pool = PrefixPool()
    api.register_prefix(pool, prompt_of(20), loops=8)
    assert len(api.generate_with_pool(pool, prompt_of(20), max_tokens=2, loops=16)) == 22
    assert api.stats.pool_misses == 1


def test_a_handle_knows_its_engine_and_another_refuses_it(api: Model) -> None:
    with opened() as other:
        handles = handles_of(other)
        for call in (
            lambda: api.generate_from_prefix_cache(handles["prefix"]),
            lambda: api.generate_stream(handles["prefix"]),
            lambda: api.resume_generate(handles["resume"], 8),
            lambda: api.resume(handles["resume"], 8),
        ):
            with counting(api.engine.model) as work, pytest.raises(GeometryMismatch, match="another engine"):
                call()
            assert work.forwards == 0
        handles.clear()


@pytest.mark.parametrize("kind", ["prefix", "resume", "pool"])
def test_more_tokens_than_the_model_holds_are_refused_before_anything_runs(api: Model, kind: str) -> None:
    prompt, pool = prompt_of(250), PrefixPool()
    api.register_prefix(pool, prompt, loops=1)
    prefix, handle = api.build_prefix_cache(prompt, loops=1), api.build_resume_handle(prompt, 1)
    call = {
        "prefix": lambda n: api.generate_from_prefix_cache(prefix, n, 1),
        "resume": lambda n: api.resume_generate(handle, 1, n),
        "pool": lambda n: api.generate_with_pool(pool, prompt, n, 1),
    }[kind]
    with counting(api.engine.model) as work, pytest.raises(RuntimeError, match="max_tokens 7 make 257"):
        call(7)
    assert work.forwards == 0
    assert len(call(6)) == 256


def test_a_resume_handle_is_a_prefix_at_its_own_depth(api: Model) -> None:
    handle = api.build_resume_handle(prompt_of(37), 4)
    assert type(handle) is ResumeHandle
    want = api.generate(prompt_of(37), max_tokens=5, loops=4)
    assert api.generate_from_prefix_cache(handle, max_tokens=5, loops=4) == want


def test_what_is_no_resume_handle_is_refused(api: Model) -> None:
    prefix = api.build_prefix_cache(prompt_of(5))
    for verb in (api.resume, api.resume_generate):
        with pytest.raises(TypeError, match="handle must be a ResumeHandle, got PrefixHandle"):
            verb(prefix, 8)


def test_a_closed_model_builds_and_resumes_nothing() -> None:
    api = Model(tiny(), num_pages=200)
    handle = api.build_resume_handle(prompt_of(5), 4)
    api.close()
    for verb, call in {
        "build_resume_handle": lambda: api.build_resume_handle(prompt_of(5), 4),
        "resume_generate": lambda: api.resume_generate(handle, 8),
        "resume": lambda: api.resume(handle, 8),
    }.items():
        with pytest.raises(Closed, match=f"cannot call {verb}$"):
            call()


def test_a_model_that_does_not_loop_has_nothing_to_resume() -> None:
    with opened(tiny("tiny:llama"), num_pages=100) as api, pytest.raises(ValueError, match="does not loop"):
        api.build_resume_handle(prompt_of(5), 2)


def test_paraphrases_share_nothing_only_equal_ids_do(api: Model) -> None:
    pool, prompt = PrefixPool(), prompt_of(20)
    api.register_prefix(pool, prompt, loops=2)
    assert pool.match_len([prompt[1], prompt[0], *prompt[2:]], loops=2) == 0  # the same words in another order
    assert pool.match_len([*prompt, 7], loops=2) == pool.match_len(np.array([*prompt, 8]), loops=2) == 20


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_seeded_sample_is_the_same_after_every_kind_of_reuse(api: Model, seed: int) -> None:
    """The seed lets it differ, since its generator starts elsewhere; here the draw is a function of the position."""
    prompt = prompt_of(37)
    more = {"max_tokens": 10, "temperature": 1.0, "seed": seed}
    want = api.generate(prompt, **more)
    pool = PrefixPool()
    api.register_prefix(pool, prompt[:21])
    assert api.generate_with_pool(pool, prompt, **more) == want
    assert api.generate_from_prefix_cache(api.build_prefix_cache(prompt), **more) == want
    assert api.resume_generate(api.build_resume_handle(prompt, 3), 8, **more) == want
