"""Seed 001, the page on TinyLoop's PrefixCache: a test for each of its sentences that promises something, and each row
of its error table.

The seed's names, and ours: Model.build_prefix_cache and Model.generate_from_prefix_cache are methods of scheduler.Model
and make and take a paged.PrefixHandle, since paged.PrefixCache is the page-granular cache.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict

import numpy as np
import pytest
from token_api import counting, live_pages, opened, prompt_of, tiny

from paged import Closed, LoopsMismatch, OutOfPages, PrefixHandle, page_hash
from scheduler import Model


@pytest.fixture
def api():
    with opened(prefix_cache=False) as made:  # what is not computed again is so because of the handle
        yield made


def defaults_of(verb) -> dict:
    return {p.name: p.default for p in inspect.signature(verb).parameters.values() if p.default is not p.empty}


# What it is for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 10])
def test_requests_on_one_prefix_compute_it_once_together(api: Model, requests: int) -> None:
    """N requests save N - 1 prefills, at every iteration of the loop block."""
    prompt, new = prompt_of(50), 6
    with counting(api.engine.model) as shared:
        prefix = api.build_prefix_cache(prompt, loops=8)
        outs = [api.generate_from_prefix_cache(prefix, max_tokens=new, loops=8) for _ in range(requests)]
    with counting(api.engine.model) as alone:
        want = [api.generate(prompt, max_tokens=new, loops=8) for _ in range(requests)]
    assert outs == want
    assert shared.rows == 50 + requests * (new - 1)
    assert alone.rows - shared.rows == (requests - 1) * 50
    assert alone.iterations - shared.iterations == (requests - 1) * 50 * 8


def test_a_handle_serves_call_after_call_each_with_its_own_settings(api: Model) -> None:
    prompt = prompt_of(37)
    prefix = api.build_prefix_cache(prompt)
    settings = [
        {"max_tokens": 3},
        {"max_tokens": 20, "temperature": 1.0, "seed": 3},
        {"max_tokens": 9, "temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 2**63},
        {"max_tokens": 9, "repetition_penalty": 1.3},
        {"max_tokens": 9, "temperature": 1.0, "seed": 1, "stop_sequences": [[5], [7, 8]]},
        {"max_tokens": 3},
    ]
    for one in settings:
        assert api.generate_from_prefix_cache(prefix, **one) == api.generate(prompt, **one), one
    prefix.check()


def test_calls_of_several_threads_share_one_handle_without_a_race(api: Model) -> None:
    prompt = prompt_of(37)
    prefix = api.build_prefix_cache(prompt)
    want = [api.generate(prompt, max_tokens=12, temperature=1.0, seed=i) for i in range(8)]
    got: list[list[int] | None] = [None] * 8

    def work(i: int) -> None:
        got[i] = api.generate_from_prefix_cache(prefix, max_tokens=12, temperature=1.0, seed=i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == want
    prefix.check()


# build_prefix_cache -----------------------------------------------------------------------------------------------


def test_building_prefills_the_whole_prompt_and_decodes_nothing(api: Model) -> None:
    with counting(api.engine.model) as work:
        prefix = api.build_prefix_cache(np.array(prompt_of(50), np.int32), loops=6)
    assert work.calls == [(50, 0, 6)]
    assert type(prefix) is PrefixHandle and (prefix.num_tokens, prefix.loops, prefix.cache_window) == (50, 6, 0)


def test_every_iteration_has_its_own_rows_for_every_position(api: Model) -> None:
    """A cache layer for what runs before the block, and one for each iteration, all filled up to the end."""
    prefix = api.build_prefix_cache(prompt_of(50), loops=8)
    used = prefix.page_table[: 1 + 8]
    assert used.shape == (9, 4) and (used >= 0).all() and len(set(used.ravel().tolist())) == 36
    storage = api.engine.pool.storage
    assert storage is not None
    rows = storage.pages[used.ravel().tolist()].unflatten(0, (9, 4))  # [groups, columns, layers, 2, heads, 16, dim]
    rows = rows.movedim(5, 2).flatten(1, 2)[:, :50].flatten(2)
    assert rows.isfinite().all() and (rows != 0).any(dim=2).all()
    assert all((rows[i] != rows[j]).any() for i in range(9) for j in range(i))


def test_the_depth_is_the_models_where_none_is_given_and_the_window_none(api: Model) -> None:
    assert defaults_of(Model.build_prefix_cache)["cache_window"] == 0
    prefix = api.build_prefix_cache(prompt_of(5))
    assert prefix.loops == api.config()["default_loops"] == 8
    assert api.generate_from_prefix_cache(prefix, max_tokens=2, loops=8)[:5] == prompt_of(5)


def test_the_callers_array_may_change_afterwards(api: Model) -> None:
    prompt = np.array(prompt_of(20), np.int32)
    prefix = api.build_prefix_cache(prompt)
    prompt[:] = 1
    assert api.generate_from_prefix_cache(prefix, max_tokens=4) == api.generate(prompt_of(20), max_tokens=4)


@pytest.mark.parametrize("window", [1, 16, 20, 100])
def test_a_window_keeps_the_last_positions_alone(api: Model, window: int) -> None:
    prompt = prompt_of(70)
    prefix = api.build_prefix_cache(prompt, cache_window=window)
    kept = prefix.page_table[:9]
    first = max(0, 70 - window + 1) // 16
    assert (kept[:, :first] < 0).all() and (kept[:, first:] >= 0).all()
    assert live_pages(api) == 9 * (5 - first)
    got = api.generate_from_prefix_cache(prefix, max_tokens=8, cache_window=window)
    assert got == api.generate(prompt, max_tokens=8, cache_window=window)
    assert (got == api.generate(prompt, max_tokens=8)) == (window == 100)  # what is before it is gone


@pytest.mark.parametrize(("kv_dtype", "value_bytes"), [("fp32", 4), ("fp16", 2), ("bf16", 2)])
@pytest.mark.parametrize("loops", [1, 4, 8])
def test_its_bytes_are_positions_times_width_times_layers_of_the_cache_times_two(kv_dtype, value_bytes, loops) -> None:
    """K and V, in as many cache layers as layers before the block and iterations; half of it in a smaller type."""
    with opened(kv_dtype=kv_dtype) as api:
        width = 2 * 16  # KV heads times head size
        prefix = api.build_prefix_cache(prompt_of(64), loops=loops)
        assert prefix.num_bytes == 64 * width * (1 + loops) * 2 * value_bytes


def test_a_handle_goes_when_nothing_refers_to_it_and_has_nothing_to_close(api: Model) -> None:
    prefix = api.build_prefix_cache(prompt_of(33), loops=4)
    assert not hasattr(prefix, "close")
    assert live_pages(api) == 3 * 5
    other = prefix
    del prefix
    assert live_pages(api) == 3 * 5
    other = api.build_prefix_cache(prompt_of(10), loops=1)  # overwritten
    assert live_pages(api) == 2
    del other
    assert live_pages(api) == 0


def test_a_dictionary_of_handles_with_an_order_of_use_is_a_cache_of_ones_own(api: Model) -> None:
    handles: OrderedDict[object, PrefixHandle] = OrderedDict()
    built = []

    def prefix_for(tokens: list[int]) -> PrefixHandle:
        key = page_hash(b"", np.array(tokens, "<i4").tobytes())
        if key not in handles:
            built.append(len(tokens))
            handles[key] = api.build_prefix_cache(tokens, loops=2)
        handles.move_to_end(key)
        while len(handles) > 2:
            handles.popitem(last=False)
        return handles[key]

    prefixes = [prompt_of(20 + i, seed=i) for i in range(3)]
    for i in (0, 1, 0, 2, 0, 1):
        out = api.generate_from_prefix_cache(prefix_for(prefixes[i]), max_tokens=3, loops=2)
        assert out == api.generate(prefixes[i], max_tokens=3, loops=2)
    assert built == [20, 21, 22, 21]
    assert live_pages(api) == 2 * 3 * 2  # what was evicted gave its pages back


# generate_from_prefix_cache ---------------------------------------------------------------------------------------


def test_the_first_new_token_needs_no_forward(api: Model) -> None:
    prefix = api.build_prefix_cache(prompt_of(33))
    with counting(api.engine.model) as work:
        out = api.generate_from_prefix_cache(prefix, max_tokens=1)
    assert work.forwards == 0
    with counting(api.engine.model) as work:
        assert api.generate_from_prefix_cache(prefix, max_tokens=5)[:34] == out
    assert work.calls == [(1, 0, 8)] * 4
    assert out == api.generate(prompt_of(33), max_tokens=1)


def test_arguments_have_the_names_the_order_and_the_defaults_of_the_seed() -> None:
    """loops is None, the model's default; stop_sequences is an empty tuple, which nobody can append to."""
    assert defaults_of(Model.generate_from_prefix_cache) == {
        "max_tokens": 32,
        "loops": None,
        "temperature": 0.0,
        "top_k": 50,
        "top_p": 1.0,
        "cache_window": 0,
        "repetition_penalty": 1.0,
        "stop_sequences": (),
    }
    names = list(inspect.signature(Model.generate_from_prefix_cache).parameters)
    assert names[1:] == ["prefix", *defaults_of(Model.generate_from_prefix_cache), "more"]
    assert defaults_of(Model.generate) == defaults_of(Model.generate_from_prefix_cache)
    assert list(inspect.signature(Model.build_prefix_cache).parameters)[1:4] == ["prompt", "loops", "cache_window"]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48])
def test_the_result_is_the_whole_stream_prefix_first(api: Model, length: int) -> None:
    prefix = api.build_prefix_cache(prompt_of(length), loops=2)
    out = api.generate_from_prefix_cache(prefix, max_tokens=7, loops=2)
    assert out[:length] == prompt_of(length) and len(out) == length + 7


@pytest.mark.parametrize("loops", [1, 7, 9, 16])
def test_another_depth_is_refused_before_anything_runs(api: Model, loops: int) -> None:
    prefix = api.build_prefix_cache(prompt_of(20), loops=8)
    with counting(api.engine.model) as work, pytest.raises(LoopsMismatch, match="8 loops, the call asks for"):
        api.generate_from_prefix_cache(prefix, max_tokens=3, loops=loops)
    assert work.forwards == 0
    with pytest.raises(LoopsMismatch):
        api.generate_stream(prefix, max_tokens=3, loops=loops)  # at once, not with the first token


def test_the_handle_stays_as_it_was_whatever_is_decoded_from_it(api: Model) -> None:
    """Calls write into pages of their own: full ones are shared, the partial one is copied before the first write."""
    prefix = api.build_prefix_cache(prompt_of(37), loops=4)
    storage = api.engine.pool.storage
    assert storage is not None
    ids, before, logits = prefix.page_ids, storage.pages[prefix.page_ids].clone(), prefix.logits.clone()
    for seed in range(4):
        api.generate_from_prefix_cache(prefix, max_tokens=20, loops=4, temperature=1.0, seed=seed)
    assert prefix.page_ids.tolist() == ids.tolist() and (prefix.logits == logits).all()
    after = storage.pages[ids]
    assert ((after == before) | (after.isnan() & before.isnan())).all()
    prefix.check()


def test_what_a_call_took_for_itself_goes_back_with_it(api: Model) -> None:
    prefix = api.build_prefix_cache(prompt_of(37), loops=4)
    held = live_pages(api)
    tokens = api.generate_stream(prefix, max_tokens=30, loops=4)
    next(tokens)
    next(tokens)
    assert live_pages(api) == held + 5  # of three columns the last is a copy, one page in each group
    tokens.close()
    assert live_pages(api) == held


# With the other parts ---------------------------------------------------------------------------------------------


def test_a_handle_for_each_depth_and_a_warm_start_serve_several_depths(api: Model) -> None:
    prompt = prompt_of(30)
    by_depth = {depth: api.build_prefix_cache(prompt, loops=depth) for depth in (4, 8, 16)}
    for depth, prefix in by_depth.items():
        want = api.generate(prompt, max_tokens=5, loops=depth)
        assert api.generate_from_prefix_cache(prefix, max_tokens=5, loops=depth) == want
    resumed = api.build_resume_handle(prompt, 4)
    for depth in (8, 16):
        deeper = api.resume(resumed, depth)  # what the seed leaves for later: a warm start that many requests share
        for _ in range(2):
            got = api.generate_from_prefix_cache(deeper, max_tokens=5, loops=depth)
            assert got == api.generate(prompt, max_tokens=5, loops=depth)


@pytest.mark.parametrize("draft_loops", [1, 4, 7])
def test_drafting_goes_together_with_a_handle(api: Model, draft_loops: int) -> None:
    prefix = api.build_prefix_cache(prompt_of(30))
    want = api.generate(prompt_of(30), max_tokens=12)
    assert api.generate_from_prefix_cache(prefix, max_tokens=12, draft_loops=draft_loops) == want


@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16"])
def test_a_handle_has_the_kv_mode_that_generate_uses(kv_dtype: str) -> None:
    with opened(kv_dtype=kv_dtype) as api:
        prefix = api.build_prefix_cache(prompt_of(33))
        assert api.generate_from_prefix_cache(prefix, max_tokens=8) == api.generate(prompt_of(33), max_tokens=8)


@pytest.mark.slow
def test_a_looped_smollm2_continues_a_prefix_as_it_continues_the_whole_text() -> None:
    from paged import LoadError, load_model

    try:
        model = load_model("smollm2", max_seq_len=256, device="cpu", loop_layers=(14, 16), loops=2, max_loops=4)
    except LoadError as error:
        pytest.skip(f"the default model is not here: {error}")
    assert model.tokenizer is not None
    text = model.tokenizer.encode("The lighthouse on Gull Rock was built in").tolist()
    with opened(model, num_pages=200, prefix_cache=False) as api:
        for loops in (1, 3):
            prefix = api.build_prefix_cache(text, loops=loops)
            for more in ({}, {"temperature": 0.8, "seed": 5}):
                want = api.generate(text, max_tokens=8, loops=loops, **more)
                assert api.generate_from_prefix_cache(prefix, max_tokens=8, loops=loops, **more) == want


# Its errors -------------------------------------------------------------------------------------------------------


def test_a_closed_model_says_so_in_both_calls() -> None:
    api = Model(tiny(), num_pages=200)
    prefix = api.build_prefix_cache(prompt_of(5))
    api.close()
    with pytest.raises(RuntimeError, match="Model is closed; cannot call build_prefix_cache") as error:
        api.build_prefix_cache(prompt_of(5))
    assert isinstance(error.value, Closed)
    with pytest.raises(Closed, match="cannot call generate_from_prefix_cache"):
        api.generate_from_prefix_cache(prefix)


def test_a_depth_mismatch_names_both_depths() -> None:
    with opened() as api:
        prefix = api.build_prefix_cache(prompt_of(5), loops=4)
        with pytest.raises(RuntimeError, match=r"loops mismatch: .* built at 4 loops, the call asks for 8"):
            api.generate_from_prefix_cache(prefix)  # no depth is the model's default, as everywhere


def test_a_window_mismatch_names_both_windows(api: Model) -> None:
    prefix = api.build_prefix_cache(prompt_of(5), cache_window=20)
    with pytest.raises(RuntimeError, match=r"cache_window mismatch: .* built with 20, the call asks for 0"):
        api.generate_from_prefix_cache(prefix)


def test_a_prefix_that_finds_no_page_is_out_of_memory_and_what_helps_is_what_the_seed_says() -> None:
    with opened(num_pages=40) as api:
        with pytest.raises(RuntimeError, match="out of memory") as error:
            api.build_prefix_cache(prompt_of(100))
        assert isinstance(error.value, OutOfPages) and live_pages(api) == 0
        assert api.build_prefix_cache(prompt_of(60)).num_tokens == 60
        assert api.build_prefix_cache(prompt_of(100), loops=2).num_tokens == 100
        capped = [api.build_prefix_cache(prompt_of(100, seed), loops=2, cache_window=16) for seed in range(4)]
        assert live_pages(api) == 4 * 6  # four of them whole would be 84 pages
        del capped
    with opened(num_pages=40, kv_dtype="fp16") as half, opened(num_pages=40) as whole:
        assert half.engine.pool.storage.page_bytes * 2 == whole.engine.pool.storage.page_bytes


def test_a_prefix_longer_than_the_model_is_refused(api: Model) -> None:
    assert api.build_prefix_cache(prompt_of(256), loops=1).num_tokens == 256
    with pytest.raises(RuntimeError, match="257 tokens, and max_seq_len is 256"):
        api.build_prefix_cache(prompt_of(257), loops=1)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"loops": 0}, "loops"),
        ({"loops": -1}, "loops"),
        ({"loops": 33}, "32, got 33"),
        ({"cache_window": -1}, "cache_window must be 0"),
    ],
)
def test_a_depth_below_1_or_a_window_below_0_is_a_value_error(api: Model, arguments: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        api.build_prefix_cache(prompt_of(5), **arguments)


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_no_token_at_all_is_a_value_error(api: Model, max_tokens: int) -> None:
    prefix = api.build_prefix_cache(prompt_of(5))
    with pytest.raises(ValueError, match="max_tokens"):
        api.generate_from_prefix_cache(prefix, max_tokens=max_tokens)


def test_what_is_no_handle_and_a_handle_of_another_engine_are_refused(api: Model) -> None:
    with pytest.raises(TypeError, match="prefix must be a PrefixHandle, got list"):
        api.generate_from_prefix_cache(prompt_of(5))  # type: ignore[arg-type]
    with opened() as other:
        prefix = other.build_prefix_cache(prompt_of(5))
        for more in ({}, {"num_beams": 2}, {"draft_loops": 2}):
            with pytest.raises(RuntimeError, match="built by another engine"):
                api.generate_from_prefix_cache(prefix, **more)
        with pytest.raises(RuntimeError, match="built by another engine"):
            api.generate_stream(prefix)
