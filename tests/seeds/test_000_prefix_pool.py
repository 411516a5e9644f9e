"""Seed 000, "Prefix pool": a test for each of its sentences that promises something, and each row of its error table.

The seed's names, and ours: tinyloop_py.Model is scheduler.Model, tinyloop_py.PrefixPool is paged.PrefixPool. What
design.md settles otherwise is said at the test: a pool may be shared by threads, a failed registration returns 0 only
where there is no room, and the failure that a hit falls back from is counted.
"""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import threading

import numpy as np
import pytest
from token_api import VOCAB, counting, live_pages, opened, prompt_of, tiny

from paged import Closed, OutOfPages, PrefixPool, load_model
from scheduler import Model


@pytest.fixture
def api():
    with opened() as made:
        yield made


def defaults_of(verb) -> dict:
    return {p.name: p.default for p in inspect.signature(verb).parameters.values() if p.default is not p.empty}


# What it is for ---------------------------------------------------------------------------------------------------


def test_one_pool_serves_every_tenant_and_each_request_is_answered_as_without_it(api: Model) -> None:
    """The quick start: tenants register at start-up, then whole conversations are handed in."""
    tenants = [prompt_of(20 + 7 * i, seed=10 + i) for i in range(4)]
    pool = PrefixPool(capacity=16)
    assert [api.register_prefix(pool, np.array(t, np.int32), loops=8) for t in tenants] == [len(t) for t in tenants]
    for i, tenant in enumerate(tenants):
        conversation = [*tenant, *prompt_of(9, seed=50 + i)]
        answer = api.generate_with_pool(pool, conversation, max_tokens=6, loops=8, temperature=0.0, top_k=50)
        assert answer == cold(conversation, max_tokens=6, loops=8)
    assert api.stats.pool_hits == 4 and api.stats.pool_misses == 0


def cold(prompt: list[int], **more) -> list[int]:
    """What a fresh model without any cache gives."""
    with Model(tiny(), num_pages=600, prefix_cache=False) as alone:
        return alone.generate(prompt, **more)


def test_the_longest_of_the_templates_is_picked_without_any_bookkeeping() -> None:
    """Few-shot templates, each the opening of the next; the deepest that opens the prompt is used."""
    whole = prompt_of(60)
    with opened(prefix_cache=False) as api:
        pool = PrefixPool(capacity=8)
        for length in (40, 10, 50, 25):
            api.register_prefix(pool, whole[:length], loops=8)
        for prompt, used in ((whole[:45], 40), (whole, 50), (whole[:26], 25), (whole[:12] + [1] * 20, 10)):
            with counting(api.engine.model) as work:
                api.generate_with_pool(pool, prompt, max_tokens=1, loops=8)
            assert work.rows == len(prompt) - used


def test_what_no_prefix_opens_is_generated_as_if_there_were_no_pool(api: Model) -> None:
    pool, prompt = PrefixPool(), prompt_of(30)
    api.register_prefix(pool, prompt_of(12, seed=7), loops=8)
    for seed in (None, 3):
        sampling = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
        assert api.generate_with_pool(pool, prompt, max_tokens=5, **sampling) == api.generate(
            prompt, max_tokens=5, **sampling
        )
    assert api.stats.pool_misses == 2


def test_callers_get_counts_and_tokens_and_never_a_handle(api: Model) -> None:
    pool = PrefixPool()
    assert type(api.register_prefix(pool, prompt_of(9))) is int
    tokens = api.generate_with_pool(pool, prompt_of(12), max_tokens=2)
    assert type(tokens) is list and {type(token) for token in tokens} == {int}


# The pool ---------------------------------------------------------------------------------------------------------


def test_a_pool_has_room_for_16_unless_it_is_told_otherwise_and_for_one_at_least() -> None:
    assert defaults_of(PrefixPool)["capacity"] == PrefixPool().capacity == 16
    assert PrefixPool(capacity=0).capacity == 1


def test_making_a_pool_takes_no_page_and_registering_does(api: Model) -> None:
    before = live_pages(api)
    pool = PrefixPool(capacity=64)
    assert live_pages(api) == before == 0 and pool.total_cached_tokens() == 0
    api.register_prefix(pool, prompt_of(20), loops=8)
    assert live_pages(api) == 2 * 9  # two columns in the group before the block and in each of eight iterations


def test_size_grows_with_each_new_prefix_and_falls_by_what_an_overflow_evicts(api: Model) -> None:
    pool, sizes = PrefixPool(capacity=3), []
    for i in range(5):
        api.register_prefix(pool, prompt_of(10 + i, seed=i), loops=2)
        sizes.append(pool.size())
        pool.check()
    assert sizes == [1, 2, 3, 3, 3] and pool.num_evicted == 2


def test_total_cached_tokens_is_the_sum_of_the_registered_lengths(api: Model) -> None:
    pool = PrefixPool()
    for length in (5, 17, 33):
        api.register_prefix(pool, prompt_of(40)[:length], loops=2)
    assert pool.total_cached_tokens() == 55
    # They open each other: full pages are kept once, a last, partial one by each; in 3 page groups.
    assert pool.unique_cached_tokens() == (33 + 5 + 1) * 3


def test_when_the_pool_goes_its_pages_go_back(api: Model) -> None:
    pool = PrefixPool()
    for seed in range(3):
        api.register_prefix(pool, prompt_of(30, seed=seed), loops=8)
    assert live_pages(api) > 0
    del pool
    assert live_pages(api) == 0


def test_a_pool_may_go_while_a_stream_that_started_from_it_still_runs(api: Model) -> None:
    prompt = prompt_of(30)
    pool = PrefixPool()
    api.register_prefix(pool, prompt[:20])
    tokens = api.generate_stream(prompt, max_tokens=8, pool=pool)
    first = next(tokens)
    pool.clear()
    del pool
    gc.collect()
    assert [*prompt, first, *tokens] == cold(prompt, max_tokens=8)


def test_threads_may_share_a_pool_without_a_lock_of_their_own(api: Model) -> None:
    """The seed asks for a lock; design.md promises that there is none to take."""
    pool, opening = PrefixPool(capacity=3, eviction="lru"), prompt_of(20)
    prompts = [[*opening, *prompt_of(4 + i, seed=i)] for i in range(6)]
    want = [cold(prompt, max_tokens=6) for prompt in prompts]
    got: list[list[int] | None] = [None] * 6

    def work(i: int) -> None:
        api.register_prefix(pool, prompts[i][: 18 + i])
        got[i] = api.generate_with_pool(pool, prompts[i], max_tokens=6, temperature=0.0)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == want
    pool.check()


# register_prefix --------------------------------------------------------------------------------------------------


def test_the_key_is_tokens_depth_and_window_together(api: Model) -> None:
    pool, prompt = PrefixPool(), prompt_of(20)
    for loops, window in ((8, 0), (4, 0), (8, 12), (4, 12)):
        assert api.register_prefix(pool, prompt, loops=loops, cache_window=window) == 20
    api.register_prefix(pool, prompt[:-1], loops=8)
    assert pool.size() == 5
    assert {(e.num_tokens, e.loops, e.cache_window) for e in pool.entries()} == {
        (20, 8, 0),
        (20, 4, 0),
        (20, 8, 12),
        (20, 4, 12),
        (19, 8, 0),
    }


def test_registering_a_key_again_computes_nothing_and_returns_the_same(api: Model) -> None:
    pool, prompt = PrefixPool(capacity=2), prompt_of(20)
    assert api.register_prefix(pool, prompt, loops=4) == 20
    [entry] = pool.entries()
    with counting(api.engine.model) as work:
        assert api.register_prefix(pool, np.array(prompt, np.int32), loops=4) == 20
    assert work.forwards == 0 and pool.entries() == [entry]
    api.register_prefix(pool, prompt_of(30, seed=2), loops=4)
    api.register_prefix(pool, prompt, loops=4)  # under "shortest" a touch does not save it
    api.register_prefix(pool, prompt_of(25, seed=3), loops=4)
    assert sorted(e.num_tokens for e in pool.entries()) == [25, 30]


def test_the_defaults_are_the_models_depth_and_no_window(api: Model) -> None:
    pool = PrefixPool()
    api.register_prefix(pool, prompt_of(9))
    assert [(e.loops, e.cache_window) for e in pool.entries()] == [(8, 0)]
    assert api.config()["default_loops"] == 8


def test_the_callers_array_may_be_reused_at_once(api: Model) -> None:
    pool, prompt = PrefixPool(), np.array(prompt_of(20), np.int32)
    api.register_prefix(pool, prompt)
    prompt[:] = 3
    assert pool.match_len(prompt_of(30)) == 0  # at depth 0, which no looped model has
    assert pool.match_len(prompt_of(20), loops=8) == 20
    del prompt
    assert api.generate_with_pool(pool, prompt_of(20), max_tokens=4, temperature=0.0) == cold(
        prompt_of(20), max_tokens=4
    )


@pytest.mark.parametrize("length", [1, 15, 16, 17, 256])
def test_a_prefix_of_any_length_up_to_the_models_matches_whole(api: Model, length: int) -> None:
    pool, prompt = PrefixPool(), prompt_of(length)
    assert api.register_prefix(pool, prompt, loops=2) == length
    assert pool.match_len([*prompt, 1], loops=2) == length


def test_a_window_bounds_what_a_registered_prefix_keeps(api: Model) -> None:
    full, capped = PrefixPool(), PrefixPool()
    api.register_prefix(full, prompt_of(100), loops=2)
    pages = live_pages(api)
    full.clear()
    api.register_prefix(capped, prompt_of(100), loops=2, cache_window=16)
    assert pages == 3 * 7 and live_pages(api) <= 3 * 2
    assert capped.size() == 1 and capped.total_cached_tokens() == 100


def test_the_shortest_prefix_goes_when_there_is_no_room_and_never_the_newcomer(api: Model) -> None:
    pool = PrefixPool(capacity=2)
    for length, seed in ((5, 1), (10, 2), (7, 3)):
        api.register_prefix(pool, prompt_of(length, seed), loops=2)
    assert [e.num_tokens for e in pool.entries()] == [10, 7] and pool.total_cached_tokens() == 17
    api.register_prefix(pool, prompt_of(2, 4), loops=2)
    assert [e.num_tokens for e in pool.entries()] == [10, 2]


# Matching ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [{"loops": 4}, {"loops": 16}, {"cache_window": 24}, {"loops": 4, "cache_window": 24}])
def test_another_depth_or_window_is_a_miss_and_the_output_that_of_generate(api: Model, call: dict) -> None:
    pool, prompt = PrefixPool(), prompt_of(40)
    api.register_prefix(pool, prompt[:30], loops=8)
    out = api.generate_with_pool(pool, prompt, max_tokens=5, temperature=0.0, **call)
    assert out == cold(prompt, max_tokens=5, **call)
    assert (api.stats.pool_hits, api.stats.pool_misses) == (0, 1)
    assert out != cold(prompt, max_tokens=5)  # the depth, or the window, is felt


def test_each_depth_finds_its_own_entry(api: Model) -> None:
    pool, prompt = PrefixPool(), prompt_of(40)
    for loops, length in ((4, 20), (8, 30)):
        api.register_prefix(pool, prompt[:length], loops=loops)
    for loops in (4, 8):
        assert api.generate_with_pool(pool, prompt, max_tokens=5, loops=loops, temperature=0.0) == cold(
            prompt, max_tokens=5, loops=loops
        )
    assert api.stats.pool_hits == 2


def test_ids_are_compared_and_nothing_else_is(api: Model) -> None:
    prompt = prompt_of(100)
    pool = PrefixPool()
    api.register_prefix(pool, prompt, loops=2)
    assert pool.match_len([*prompt, *prompt], loops=2) == 100
    for at in (0, 50, 99):
        other = [*prompt, *prompt]
        other[at] = (other[at] + 1) % VOCAB
        assert pool.match_len(other, loops=2) == 0
    assert pool.match_len(prompt[:99], loops=2) == 0  # an entry longer than the prompt opens nothing


def test_of_several_that_match_the_longest_is_first_in_order(api: Model) -> None:
    pool, prompt = PrefixPool(), prompt_of(50)
    for length in (20, 40, 10, 30):
        api.register_prefix(pool, prompt[:length], loops=2)
    assert [e.num_tokens for e in pool.entries()] == [40, 30, 20, 10]
    entry = pool.match(prompt, loops=2)
    assert entry is not None and entry.num_tokens == 40


# generate_with_pool -----------------------------------------------------------------------------------------------


def test_the_arguments_have_the_names_and_the_defaults_of_the_seed() -> None:
    """loops is None, the model's default: 8 in the seeds' model and in ours (design.md, section 7)."""
    have = defaults_of(Model.generate_with_pool)
    assert have == {"max_tokens": 128, "loops": None, "temperature": 1.0, "top_k": 50, "cache_window": 0}
    assert defaults_of(Model.register_prefix) == {"loops": None, "cache_window": 0}
    assert list(inspect.signature(Model.generate_with_pool).parameters)[1:3] == ["pool", "prompt"]
    assert list(inspect.signature(Model.register_prefix).parameters)[1:3] == ["pool", "tokens"]


@pytest.mark.parametrize("matched", [0, 12, 30])
def test_the_result_is_the_prompt_and_up_to_max_tokens_more(api: Model, matched: int) -> None:
    pool, prompt = PrefixPool(), prompt_of(30)
    if matched:
        api.register_prefix(pool, prompt[:matched])
    out = api.generate_with_pool(pool, np.array(prompt, np.int32), max_tokens=7)
    assert out[:30] == prompt and len(out) == 37


def test_an_empty_pool_is_no_pool(api: Model) -> None:
    prompt = prompt_of(30)
    assert api.generate_with_pool(PrefixPool(), prompt, max_tokens=6, temperature=0.0) == api.generate(
        prompt, max_tokens=6
    )


def test_a_prompt_that_is_a_registered_prefix_needs_no_forward_for_its_first_token() -> None:
    prompt = prompt_of(30)
    with opened(prefix_cache=False) as api:
        pool = PrefixPool()
        api.register_prefix(pool, prompt)
        with counting(api.engine.model) as work:
            one = api.generate_with_pool(pool, prompt, max_tokens=1, temperature=0.0)
        assert work.forwards == 0
        with counting(api.engine.model) as work:
            assert api.generate_with_pool(pool, prompt, max_tokens=6, temperature=0.0)[:31] == one
        assert (work.forwards, work.rows) == (5, 5)
        assert one == cold(prompt, max_tokens=1)


@pytest.mark.parametrize("suffix", [1, 5, 40])
def test_a_prompt_that_goes_on_computes_its_suffix_alone(suffix: int) -> None:
    prompt = prompt_of(30 + suffix)
    with opened(prefix_cache=False) as api:
        pool = PrefixPool()
        api.register_prefix(pool, prompt[:30])
        with counting(api.engine.model) as work:
            out = api.generate_with_pool(pool, prompt, max_tokens=6, temperature=0.0)
        assert work.rows == suffix + 5
        assert out == cold(prompt, max_tokens=6)


def test_what_a_call_decodes_never_reaches_the_registered_prefix(api: Model) -> None:
    """Each call works behind the prefix, in pages of its own; the last, partial page too is copied first."""
    prompt = prompt_of(30)
    pool = PrefixPool()
    api.register_prefix(pool, prompt[:20])
    [entry] = pool.entries()
    storage = api.engine.pool.storage
    assert storage is not None
    before = storage.pages[entry.handle.page_ids].clone()
    for seed in range(3):
        api.generate_with_pool(pool, [*prompt[:20], *prompt_of(4, seed)], max_tokens=6)
    assert (storage.pages[entry.handle.page_ids] == before).logical_or(before.isnan()).all()
    assert api.generate_with_pool(pool, prompt, max_tokens=6, temperature=0.0) == cold(prompt, max_tokens=6)


def test_a_hit_that_fails_falls_back_to_the_whole_prompt_and_is_counted(api: Model, monkeypatch) -> None:
    prompt = prompt_of(30)
    pool = PrefixPool()
    api.register_prefix(pool, prompt[:20])
    [entry] = pool.entries()
    generate, failed = api.engine.generate, []

    def no_room_for_a_prefix(prompts, params=None, **options):
        if options.get("prefix") is not None:
            failed.append(options["prefix"])
            raise OutOfPages("no page for a copy")
        return generate(prompts, params, **options)

    monkeypatch.setattr(api.engine, "generate", no_room_for_a_prefix)
    assert api.generate_with_pool(pool, prompt, max_tokens=6, temperature=0.0) == cold(prompt, max_tokens=6)
    assert failed == [entry.handle] and api.stats.pool_fallbacks == 1


def test_a_prefix_of_weights_that_have_changed_is_not_used_and_is_built_anew_when_it_is_registered_again() -> None:
    model = load_model("tiny:looped", max_seq_len=128, device="cpu")
    prompt = prompt_of(30)
    with opened(model) as api:
        pool = PrefixPool()
        api.register_prefix(pool, prompt[:20])
        before = api.generate_with_pool(pool, prompt, max_tokens=8, temperature=0.0)
        model.fingerprint = "other weights"
        api.engine.reset_prefix_cache()
        assert api.generate_with_pool(pool, prompt, max_tokens=8, temperature=0.0) == before
        assert (api.stats.pool_hits, api.stats.pool_fallbacks) == (2, 1)
        assert [*prompt, *api.generate_stream(prompt, max_tokens=8, pool=pool)] == before
        [stale] = pool.entries()
        assert api.register_prefix(pool, prompt[:20]) == 20
        [fresh] = pool.entries()
        assert fresh.handle is not stale.handle
        assert api.generate_with_pool(pool, prompt, max_tokens=8, temperature=0.0) == before
        assert (api.stats.pool_hits, api.stats.pool_fallbacks) == (4, 2)


# Composability ----------------------------------------------------------------------------------------------------


def test_a_window_on_both_sides_is_a_hit_and_on_one_a_miss(api: Model) -> None:
    pool, prompt = PrefixPool(), prompt_of(60)
    api.register_prefix(pool, prompt[:50], cache_window=20)
    for window, hits in ((20, 1), (0, 1), (21, 1)):
        assert api.generate_with_pool(pool, prompt, max_tokens=5, temperature=0.0, cache_window=window) == cold(
            prompt, max_tokens=5, cache_window=window
        )
        assert api.stats.pool_hits == hits


@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16"])
def test_all_entries_of_a_pool_have_the_models_kv_mode(kv_dtype: str) -> None:
    """A registered prefix gives what the same model computes without it, in whatever its pages hold."""
    prompt = prompt_of(50)
    with opened(kv_dtype=kv_dtype, prefix_cache=False) as api:
        pool = PrefixPool()
        api.register_prefix(pool, prompt[:33])
        assert api.config()["kv_dtype"] == kv_dtype
        [entry] = pool.entries()
        assert entry.num_bytes == len(entry.handle.page_ids) * 2 * 2 * 16 * 16 * 2  # K and V, heads, rows, values
        want = api.generate(prompt, max_tokens=6)
        assert api.generate_with_pool(pool, prompt, max_tokens=6, temperature=0.0) == want


def test_streams_beams_drafts_and_deeper_prefixes_start_from_the_pool_too(api: Model) -> None:
    """What the seed leaves for later."""
    pool, prompt = PrefixPool(), prompt_of(40)
    api.register_prefix(pool, prompt[:33])
    plain = cold(prompt, max_tokens=8)
    assert [*prompt, *api.generate_stream(prompt, max_tokens=8, pool=pool)] == plain
    assert api.generate_with_pool(pool, prompt, max_tokens=8, temperature=0.0, draft_loops=2) == plain
    assert api.generate_with_pool(pool, prompt, max_tokens=8, num_beams=3) == cold(prompt, max_tokens=8, num_beams=3)
    deeper = api.resume(api.build_resume_handle(prompt[:33], 4), 8)
    warm = PrefixPool()
    assert warm.register(deeper) == 33
    assert api.generate_with_pool(warm, prompt, max_tokens=8, temperature=0.0) == plain
    assert (api.stats.pool_hits, api.stats.pool_fallbacks) == (4, 0)


def test_the_plain_model_has_pools_too() -> None:
    with opened(tiny("tiny:llama")) as api:
        pool, prompt = PrefixPool(), prompt_of(40)
        assert api.register_prefix(pool, prompt[:30]) == 30
        out = api.generate_with_pool(pool, prompt, max_tokens=6, temperature=0.0)
        assert out == api.generate(prompt, max_tokens=6) and api.stats.pool_hits == 1


@pytest.mark.slow
def test_smollm2_answers_from_its_registered_system_prompt_as_without_it(smollm2) -> None:
    system = smollm2.tokenizer.encode("You answer in one short sentence. Be polite, and never invent facts.\n").tolist()
    question = smollm2.tokenizer.encode("What is the capital of France?\n").tolist()
    with opened(smollm2, num_pages=64, prefix_cache=False) as api:
        pool = PrefixPool()
        assert api.register_prefix(pool, system) == len(system)
        want = api.generate([*system, *question], max_tokens=12)
        with counting(smollm2) as work:
            got = api.generate_with_pool(pool, [*system, *question], max_tokens=12, temperature=0.0)
        assert got == want and work.rows <= len(question) + 11
        sampled = {"max_tokens": 12, "temperature": 0.9, "seed": 4}
        assert api.generate_with_pool(pool, [*system, *question], **sampled) == api.generate(
            [*system, *question], **sampled
        )


# Numbers that a dashboard reads -----------------------------------------------------------------------------------


def test_the_pools_numbers_are_plain_and_follow_what_happens(api: Model) -> None:
    pool = PrefixPool(capacity=2)
    seen = []
    for length, seed in ((10, 1), (20, 2), (30, 3)):
        api.register_prefix(pool, prompt_of(length, seed), loops=2)
        seen.append(f"entries: {pool.size()}  total cached tokens: {pool.total_cached_tokens()}")
    assert seen == [
        "entries: 1  total cached tokens: 10",
        "entries: 2  total cached tokens: 30",
        "entries: 2  total cached tokens: 50",
    ]


# Its table of errors ----------------------------------------------------------------------------------------------


def test_registering_with_a_closed_model_says_so() -> None:
    api = Model(tiny(), num_pages=100)
    api.close()
    with pytest.raises(RuntimeError, match=r"Model is closed; cannot call register_prefix") as error:
        api.register_prefix(PrefixPool(), prompt_of(5))
    assert isinstance(error.value, Closed)
    with pytest.raises(RuntimeError, match="cannot call generate_with_pool"):
        api.generate_with_pool(PrefixPool(), prompt_of(5))


def test_a_prefix_that_finds_no_page_is_not_registered_and_takes_none() -> None:
    """0 where there is no room, as the seed says of a build that failed; nothing of it stays."""
    with opened(num_pages=40) as api:
        pool = PrefixPool()
        assert api.register_prefix(pool, prompt_of(32)) == 32  # 2 columns of 9 groups
        before = live_pages(api)
        assert api.register_prefix(pool, prompt_of(100, seed=2)) == 0
        assert (pool.size(), live_pages(api)) == (1, before)
        assert api.register_prefix(pool, prompt_of(100, seed=2), loops=1) == 100  # shallower ones fit
        del pool


def test_running_out_of_memory_is_a_runtime_error_that_says_so() -> None:
    with opened(num_pages=30) as api:
        held = api.build_prefix_cache(prompt_of(32))
        with pytest.raises(RuntimeError, match="out of memory"):
            api.build_prefix_cache(prompt_of(60, seed=2))
        pool = PrefixPool()
        with pytest.raises(RuntimeError, match=r"out of memory: 44 prompt tokens and max_tokens 5 make 49, and .* 48"):
            api.generate_with_pool(pool, prompt_of(44, seed=2), max_tokens=5)
        with pytest.raises(RuntimeError, match="out of memory: its pages are held by handles"):
            api.generate_with_pool(pool, prompt_of(40, seed=2), max_tokens=4)
        del held
        assert len(api.generate_with_pool(pool, prompt_of(32, seed=2), max_tokens=4)) == 36


@pytest.mark.parametrize(
    ("tokens", "error", "match"),
    [
        ([], ValueError, "empty"),
        (np.zeros((2, 3), np.int32), ValueError, "one dimension"),
        ([VOCAB], ValueError, "between 0 and 511"),
        ([0.5], TypeError, "whole numbers"),
        (prompt_of(257), ValueError, "257 tokens, and max_seq_len is 256"),
        (prompt_of(257), RuntimeError, "257 tokens, and max_seq_len is 256"),
    ],
)
def test_a_prefix_that_is_none_is_refused(api: Model, tokens, error, match: str) -> None:
    """The seed returns 0; design.md: what was wrong is said, 0 is for a pool without room."""
    pool = PrefixPool()
    with pytest.raises(error, match=match):
        api.register_prefix(pool, tokens)
    assert pool.size() == 0


@pytest.mark.parametrize("not_a_pool", [None, [], "pool"])
def test_what_is_no_pool_is_refused(api: Model, not_a_pool) -> None:
    for verb in (api.register_prefix, api.generate_with_pool):
        with pytest.raises(TypeError, match="pool must be a PrefixPool, got"):
            verb(not_a_pool, prompt_of(5))


@pytest.mark.parametrize(("loops", "window", "match"), [(0, 0, "loops"), (33, 0, "33"), (8, -1, "cache_window")])
def test_a_depth_or_window_that_cannot_be_is_refused(api: Model, loops: int, window: int, match: str) -> None:
    for verb in (api.register_prefix, api.generate_with_pool):
        with pytest.raises(ValueError, match=match):
            verb(PrefixPool(), prompt_of(5), loops=loops, cache_window=window)


def test_a_mismatch_costs_the_whole_prefill_and_can_be_seen() -> None:
    prompt = prompt_of(40)
    with opened(prefix_cache=False) as api:
        pool = PrefixPool()
        api.register_prefix(pool, prompt[:30], loops=8)
        with counting(api.engine.model) as work:
            api.generate_with_pool(pool, prompt, max_tokens=1, loops=4)
        assert (work.rows, api.stats.pool_misses) == (40, 1)
        with counting(api.engine.model) as work:
            api.generate_with_pool(pool, prompt, max_tokens=1, loops=8)
        assert (work.rows, api.stats.pool_hits) == (10, 1)


def test_an_entry_that_went_was_the_shortest_and_a_larger_pool_or_another_order_keeps_it(api: Model) -> None:
    prefixes = [prompt_of(length, seed=length) for length in (8, 12, 20)]
    small, large, ordered = PrefixPool(capacity=2), PrefixPool(capacity=3), PrefixPool(capacity=2)
    for pool, order in ((small, (0, 1, 2)), (large, (0, 1, 2)), (ordered, (2, 1, 0))):
        for i in order:
            api.register_prefix(pool, prefixes[i], loops=2)
    assert [small.match_len(p, loops=2) for p in prefixes] == [0, 12, 20]
    assert [large.match_len(p, loops=2) for p in prefixes] == [8, 12, 20]
    assert [ordered.match_len(p, loops=2) for p in prefixes] == [8, 0, 20]  # the longest stood early evictions


@pytest.mark.parametrize("matched", [0, 20, 250])
def test_prompt_and_max_tokens_beyond_the_models_length_are_refused_whatever_matches(api: Model, matched: int) -> None:
    pool, prompt = PrefixPool(), prompt_of(250)
    if matched:
        api.register_prefix(pool, prompt[:matched], loops=1)
    with pytest.raises(RuntimeError, match="250 prompt tokens and max_tokens 7 make 257, and max_seq_len is 256"):
        api.generate_with_pool(pool, prompt, max_tokens=7, loops=1)
    assert len(api.generate_with_pool(pool, prompt, max_tokens=6, loops=1)) == 256


def test_a_pool_needs_no_torch_until_something_is_registered() -> None:
    code = "import sys, paged; paged.PrefixPool(3); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
