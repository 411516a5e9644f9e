"""What the engine reuses: exact matches, recurrent state, windows, saved caches. None of it changes a token."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import span
from fakes import EchoHybrid, EchoModel

from paged.errors import StateMismatch
from paged.ops.dispatch import get_backend
from scheduler import Engine, PrefillStops, SamplingParams

GREEDY = SamplingParams(max_tokens=8)
KINDS = {
    "attention": lambda: EchoModel(97),
    "windows": lambda: EchoModel(97, windows=(0, 9)),
    "hybrid": lambda: EchoHybrid(97),
    "hybrid with windows": lambda: EchoHybrid(97, windows=(9, 0)),
}


@pytest.fixture(params=KINDS)
def model(request) -> EchoModel:
    return KINDS[request.param]()


def engine_of(model, **kwargs) -> Engine:
    kwargs.setdefault("num_pages", 256)
    kwargs.setdefault("max_num_seqs", 8)
    return Engine(model, **kwargs)


def conversation(seed: int, opening: int = 40, turn: int = 25) -> list[int]:
    rng = np.random.default_rng(seed)
    return [t % 97 for t in span(0, opening)] + rng.integers(0, 97, turn).tolist()


def test_a_prompt_sent_again_is_cached_but_for_its_last_token(model) -> None:
    engine = engine_of(model)
    prompt = conversation(1)
    for cached in (0, 64):
        [output] = engine.generate([prompt], GREEDY)
        assert output.num_cached_tokens == cached
        assert output.token_ids == model.greedy(prompt, 8)
        engine.check()


def test_a_second_turn_is_cached_up_to_its_new_tokens(model) -> None:
    engine = engine_of(model)
    params = SamplingParams(max_tokens=20)
    prompt = conversation(1)
    [first] = engine.generate([prompt], params)
    turn = [*prompt, *first.token_ids, 5, 6, 7]
    assert engine.prefix_match_len(turn) == len(prompt) + 19
    [second] = engine.generate([turn], GREEDY)
    assert second.num_cached_tokens == len(prompt) + 19
    assert second.num_computed_tokens == 4 + 7
    assert second.token_ids == model.greedy(turn, 8)


def test_two_conversations_on_a_marked_opening(model) -> None:
    engine = engine_of(model)
    for seed, cached in ((1, 0), (2, 40)):
        prompt = conversation(seed)
        prompt[40] = seed  # they part exactly behind the opening
        name = engine.submit(prompt, GREEDY, stops=PrefillStops(opening=40))
        events = []
        while engine.has_work:
            events += engine.step()
            engine.check()
        assert events[-1].output.token_ids == model.greedy(prompt, 8)
        assert engine.explain(name)["num_cached_tokens"] == cached


@pytest.mark.parametrize("num_pages", [32, 256])
@pytest.mark.parametrize("budget", [7, 512])
@pytest.mark.parametrize("cache", [True, False])
def test_many_conversations_at_once_give_each_its_own_tokens(model, cache: bool, budget: int, num_pages: int) -> None:
    engine = engine_of(model, prefix_cache=cache, max_num_batched_tokens=budget, num_pages=num_pages, page_size=8)
    prompts = [conversation(seed % 5, turn=10 + 3 * seed) for seed in range(9)]
    for _ in range(2):
        for prompt, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            assert output.token_ids == model.greedy(prompt, 8)
        engine.check()
        assert engine.pool.num_live == 0


def test_the_numbers_of_a_recurrent_engine() -> None:
    engine = engine_of(EchoHybrid(97), max_states=3)
    engine.generate([conversation(s) for s in range(6)], GREEDY)
    stats = engine.stats()
    assert stats["num_checkpoints"] == 3
    assert stats["checkpoint_bytes"] == engine.cache.checkpoints.num_bytes > 0
    assert stats["checkpoint_inserts"] - stats["checkpoint_evictions"] == 3
    assert "num_checkpoints" not in engine_of(EchoModel(97)).stats()


def test_a_budget_in_bytes_is_held() -> None:
    engine = engine_of(EchoHybrid(97), max_state_bytes=6_000)
    for seed in range(6):
        engine.generate([conversation(seed)], GREEDY)
        assert engine.stats()["checkpoint_bytes"] <= 6_000
        engine.check()
    assert engine.stats()["checkpoint_evictions"] > 0


def test_a_state_without_memory_for_its_copy_is_counted_and_costs_no_token(monkeypatch) -> None:
    model = EchoHybrid(97)
    engine = engine_of(model)

    def full(_slot: int):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.scheduler.states, "snapshot", full)
    prompt = conversation(1)
    [output] = engine.generate([prompt], GREEDY)
    assert output.token_ids == model.greedy(prompt, 8)
    assert engine.stats()["checkpoints_refused"] >= 1
    assert engine.stats()["num_checkpoints"] == 0


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_copy_that_fails_ends_its_request_alone(kind: str, monkeypatch) -> None:
    model = KINDS[kind]()
    engine = engine_of(model)
    prompt, other = conversation(1, turn=26), [90, 91, 92]
    engine.generate([prompt], GREEDY)

    def broken(*_args) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(type(get_backend("cpu")), "copy_pages", broken)
        engine.submit(other, GREEDY, request_id="before")
        engine.submit([*prompt, 3, 4], GREEDY, request_id="bad")
        events = engine.step()
    while engine.has_work:
        events += engine.step()
        engine.check()
    outputs = {e.request_id: e.output for e in events if e.output is not None}
    assert outputs["bad"].finish_reason == "error" and "device is gone" in outputs["bad"].error
    assert outputs["before"].token_ids == model.greedy(other, 8)
    assert engine.pool.num_live == 0
    [again] = engine.generate([prompt], GREEDY)
    assert again.token_ids == model.greedy(prompt, 8)


def test_a_forward_that_fails_spoils_no_state_that_others_attach() -> None:
    model = EchoHybrid(97)
    engine = engine_of(model)
    prompt = conversation(1)
    engine.submit(prompt, GREEDY)
    engine.step()
    real = model.forward

    def broken(batch, storage):
        with batch.states.advance(batch.state_slots, batch.q_indptr, batch.kv_lens):
            raise RuntimeError("the device is gone")

    model.forward = broken  # type: ignore[method-assign]
    [event] = engine.step()
    assert event.output.finish_reason == "error"
    model.forward = real  # type: ignore[method-assign]
    [output] = engine.generate([prompt], GREEDY)
    assert output.token_ids == model.greedy(prompt, 8)
    engine.check()


def test_a_session_whose_forward_failed_says_so_until_it_is_released() -> None:
    from paged import Session

    model = EchoHybrid(97)
    pool = model.create_kv_pool(16, 4)
    session = Session(model, pool)
    session.eval([1, 2, 3])
    real = model.forward

    def broken(batch, storage):
        with batch.states.advance(batch.state_slots, batch.q_indptr, batch.kv_lens):
            raise RuntimeError("the device is gone")

    model.forward = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="device"):
        session.eval([4])
    model.forward = real  # type: ignore[method-assign]
    session.check()
    with pytest.raises(StateMismatch, match="no valid state since a forward failed"):
        session.eval([4])
    with pytest.raises(StateMismatch):
        session.fork()
    session.release()
    logits = session.eval([1, 2, 3, 4])
    assert np.array_equal(logits.numpy(), model.oracle([1, 2, 3, 4]))


def test_a_saved_cache_serves_a_new_engine(model, tmp_path) -> None:
    path, prompt = tmp_path / "cache.safetensors", conversation(1)
    with engine_of(model) as engine:
        engine.generate([prompt], GREEDY)
        assert engine.save_prefix_cache(path) == engine.cache.held_pages > 0
    with engine_of(model) as engine:
        assert engine.load_prefix_cache(path) > 0
        [output] = engine.generate([prompt], GREEDY)
        assert output.num_cached_tokens == 64
        assert output.token_ids == model.greedy(prompt, 8)
        engine.check()


def test_without_a_cache_there_is_nothing_to_save_or_load(tmp_path) -> None:
    engine = engine_of(EchoModel(97), prefix_cache=False)
    for call in (engine.save_prefix_cache, engine.load_prefix_cache):
        with pytest.raises(RuntimeError, match="prefix_cache=False"):
            call(tmp_path / "x")
