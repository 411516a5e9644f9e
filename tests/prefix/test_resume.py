"""ResumeHandle: a prefix of a looped model that goes on at any greater depth, and stays as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from looping import config_of, looped

from paged import load_model
from paged.errors import GeometryMismatch, LoopsMismatch, OutOfPages
from paged.prefix.resume import ResumeHandle
from paged.session import Session

TOKENS = (np.arange(35) * 7 % 90).astype(np.int32)
MODELS = {
    "all layers loop": lambda: load_model("tiny:looped"),
    "layers after": lambda: looped(config_of("layers before and after")),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


def build(model, pool, loops: int = 3, tokens=TOKENS, cache_window: int = 0, max_loops: int = 8) -> ResumeHandle:
    session = Session(model, pool, loops, cache_window)
    try:
        return ResumeHandle.build(session, tokens, max_loops)
    finally:
        session.release()


@pytest.mark.parametrize("cache_window", [0, 5])
@pytest.mark.parametrize("loops", [3, 4, 8])
def test_resuming_gives_the_bits_of_a_run_at_that_depth(model, loops: int, cache_window: int) -> None:
    pool = model.create_kv_pool(300, 8)
    handle = build(model, pool, cache_window=cache_window)
    resumed, fresh = handle.resume(loops), Session(model, pool, loops, cache_window)
    assert torch.equal(resumed.logits, fresh.eval(TOKENS))
    assert resumed.view is fresh.view
    for token in (5, 6):
        assert torch.equal(resumed.eval([token]), fresh.eval([token]))
    resumed.check()
    handle.check()
    pool.check()


def test_the_handle_stays_as_it_was(model) -> None:
    pool = model.create_kv_pool(300, 8)
    handle = build(model, pool)
    logits, residual, pages = handle.logits.clone(), handle.residual.clone(), handle.page_ids.tolist()
    rows = pool.storage.pages[pages].numpy().tobytes()
    for loops in (8, 5, 3, 8):
        session = handle.resume(loops)
        session.eval([1, 2, 3])
    assert torch.equal(handle.logits, logits) and torch.equal(handle.residual, residual)
    assert handle.page_ids.tolist() == pages and pool.storage.pages[pages].numpy().tobytes() == rows
    assert handle.loops == 3 and handle.num_tokens == 35


def test_only_the_new_iterations_take_pages() -> None:
    model = load_model("tiny:looped")
    pool = model.create_kv_pool(300, 8)
    handle = build(model, pool)
    assert 300 - pool.num_free == (1 + 3) * 5
    first, second = handle.resume(5), handle.resume(4)
    assert 300 - pool.num_free == (1 + 3) * 5 + (2 + 1) * 5
    assert np.array_equal(first.table.rows[:4], handle.page_table[:4])
    first.release()
    second.release()
    assert 300 - pool.num_free == (1 + 3) * 5


def test_the_layers_after_the_block_take_pages_of_their_own() -> None:
    model = MODELS["layers after"]()
    pool = model.create_kv_pool(300, 8)
    handle = build(model, pool)
    used = 300 - pool.num_free
    session = handle.resume(4)
    assert 300 - pool.num_free - used == (1 + 1) * 5
    kept = np.setdiff1d(handle.view.groups, model.after_group)
    assert np.array_equal(session.table.rows[kept], handle.page_table[kept])
    assert not set(session.table.rows[model.after_group]) & set(handle.page_table[model.after_group])


def test_without_room_nothing_is_taken(model) -> None:
    pool = model.create_kv_pool(27, 8)
    handle = build(model, pool)
    free, refs = pool.num_free, pool.refs.copy()
    with pytest.raises(OutOfPages) as caught:
        handle.resume(8)
    assert pool.num_free == free
    assert np.array_equal(pool.refs, refs), caught  # while the error, and with it its frames, is still there
    handle.resume(3)
    handle.check()


def test_bytes_are_those_of_pages_and_residual(model) -> None:
    pool = model.create_kv_pool(300, 8)
    handle = build(model, pool)
    assert handle.num_bytes == len(handle.page_ids) * pool.storage.page_bytes + 35 * 4 * model.residual_size


@pytest.mark.parametrize("loops", [2, 9])
def test_a_depth_outside_its_own_is_refused(model, loops: int) -> None:
    handle = build(model, model.create_kv_pool(300, 8))
    with pytest.raises(LoopsMismatch, match=f"built at 3 loops with max_loops 8, .* resumed at 3 to 8, got {loops}"):
        handle.resume(loops)


def test_what_cannot_be_a_handle_is_refused(model) -> None:
    pool = model.create_kv_pool(300, 8)
    session = Session(model, pool, 3)
    residual = session.eval_residual(TOKENS)
    with pytest.raises(ValueError, match="max_loops must be at most 64, got 65"):
        ResumeHandle(session, [residual], 65)
    with pytest.raises(TypeError, match="max_loops must be an integer, got None"):
        ResumeHandle(session, [residual], None)
    with pytest.raises(ValueError, match="needs 1 <= loops <= max_loops, got 3 loops and max_loops 2"):
        ResumeHandle(session, [residual], 2)
    with pytest.raises(ValueError, match="the residual of 35 tokens is needed, got one of 34"):
        ResumeHandle(session, [residual[:30], residual[:4]])
    plain = load_model("tiny:llama")
    with pytest.raises(ValueError, match="does not loop"):
        ResumeHandle.build(Session(plain, plain.create_kv_pool(20, 8)), TOKENS)


def test_other_weights_are_noticed() -> None:
    model = load_model("tiny:looped")
    pool = model.create_kv_pool(300, 8)
    handle = build(model, pool)
    pool.fingerprint = "another"
    with pytest.raises(GeometryMismatch, match="the weights of the model have changed"):
        handle.resume(4)
