"""Case B22: weights that change in place, and the call that makes the cache forget what they computed."""

from __future__ import annotations

import pytest

from paged import GeometryMismatch, Session, load_model
from scheduler import Engine, SamplingParams, SchedulerConfig

PROMPT = [(7 * i) % 500 + 3 for i in range(50)]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def change(model) -> None:
    """Scale the embedding of every second id."""
    weights = model.tensor("model.embed_tokens.weight").clone()
    weights[::2] *= 0.25
    model.update_weights({"model.embed_tokens.weight": weights})


def test_after_the_reset_the_output_is_that_of_a_fresh_engine_with_the_new_weights() -> None:
    engine = Engine("tiny:llama", num_pages=64)
    old = engine.generate([PROMPT], PARAMS)[0].token_ids
    change(engine.model)
    engine.reset_prefix_cache()
    engine.reset_prefix_cache()
    assert engine.prefix_match_len(PROMPT) == 0
    assert engine.pool.num_free == engine.pool.num_pages
    new = engine.generate([PROMPT], PARAMS)[0]
    fresh_model = load_model("tiny:llama")
    change(fresh_model)
    fresh = Engine(fresh_model, num_pages=64).generate([PROMPT], PARAMS)[0]
    assert new.token_ids == fresh.token_ids != old
    assert new.num_cached_tokens == 0
    engine.check()


def test_new_weights_have_a_new_fingerprint_and_old_pools_refuse_them() -> None:
    model = load_model("tiny:llama")
    pool, before = model.create_kv_pool(8), model.fingerprint
    change(model)
    assert model.fingerprint != before
    with pytest.raises(GeometryMismatch, match="another model"):
        Session(model, pool)


def test_a_reset_while_a_request_runs_lets_it_finish_and_caches_nothing_of_it() -> None:
    engine = Engine("tiny:llama", num_pages=64)
    name = engine.submit(PROMPT, PARAMS)
    for _ in range(3):
        engine.step()
    engine.reset_prefix_cache()
    while engine.has_work:
        events = engine.step()
        engine.check()
    assert events[-1].request_id == name and len(events[-1].output.token_ids) == 8
    assert engine.prefix_match_len(PROMPT) == 0
    assert engine.pool.num_free == engine.pool.num_pages


@pytest.mark.parametrize("resumed", [False, True], ids=["waits", "resumes"])
def test_who_waits_with_a_prefix_of_the_old_weights_computes_it_again(resumed: bool) -> None:
    """Else it would start from the old rows, and what it computes behind them would be cached for everybody."""
    engine = Engine("tiny:llama", num_pages=64, config=SchedulerConfig(max_num_seqs=1))
    prefix = engine.build_prefix(PROMPT[:32])
    if not resumed:
        engine.submit([5, 6, 7], PARAMS)
        engine.step()
    name = engine.submit(PROMPT, PARAMS, prefix=prefix)
    if resumed:
        engine.step()
        engine.scheduler.preempt(engine.scheduler.requests[name])
    change(engine.model)
    engine.reset_prefix_cache()
    outputs = {}
    while engine.has_work:
        outputs |= {event.request_id: event.output for event in engine.step()}
        engine.check()
    fresh_model = load_model("tiny:llama")
    change(fresh_model)
    fresh = Engine(fresh_model, num_pages=64).generate([PROMPT], PARAMS)[0]
    if not resumed:  # else its first token is of the old weights
        assert (outputs[name].token_ids, outputs[name].num_cached_tokens) == (fresh.token_ids, 0)
    later = engine.generate([PROMPT], PARAMS)[0]
    assert later.token_ids == fresh.token_ids and later.num_cached_tokens == 49


@pytest.mark.parametrize("reset", [False, True])
def test_without_the_reset_old_rows_would_show(reset: bool) -> None:
    """The reset is what makes the difference: without it the prompt's pages of the old weights are attached."""
    engine = Engine("tiny:llama", num_pages=64)
    engine.generate([PROMPT], PARAMS)
    change(engine.model)
    if reset:
        engine.reset_prefix_cache()
    assert engine.prefix_match_len(PROMPT) == (0 if reset else 49)
