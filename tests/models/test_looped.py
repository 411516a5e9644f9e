"""LoopedModel against plain models with its layers written out, and its rows at every depth against themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from feeder import Feeder, random_tokens
from looping import CASES, LENGTH, at_depth, config_of, looped, unrolled

from paged.models.base import ForwardBatch
from paged.models.config import LoopConfig, ModelConfig
from paged.models.llama import LlamaModel
from paged.models.looped import LoopedModel
from paged.models.registry import load_model
from paged.models.tiny import TINY_LLAMA, TINY_LOOPED, random_tensors, tiny_hf_settings
from paged.session import Session


@pytest.fixture(scope="module", params=CASES)
def case(request) -> LoopedModel:
    return looped(config_of(request.param))


@pytest.fixture(scope="module")
def tiny() -> LoopedModel:
    model = load_model("tiny:looped")
    assert isinstance(model, LoopedModel)
    return model


# Values


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_every_depth_is_the_plain_model_with_the_block_written_out(case, depth):
    tokens = random_tokens(LENGTH, case.vocab_size)
    want = Feeder(unrolled(case.config, depth)).feed("a", tokens)
    assert want.std() > 0.5
    for chunk in (0, 7, 1) if depth == 2 else (0, 20):
        assert torch.equal(at_depth(case, tokens, depth, chunk), want), f"chunks of {chunk}"


def test_one_loop_is_the_model_that_has_never_heard_of_loops(case):
    plain = LlamaModel(replace(case.config, loop=None), random_tensors(case.config, seed=3).__getitem__)
    tokens = random_tokens(LENGTH, case.vocab_size)
    assert torch.equal(at_depth(case, tokens, 1), Feeder(plain).feed("a", tokens))


def test_depths_differ(case):
    tokens = random_tokens(LENGTH, case.vocab_size)
    logits = [at_depth(case, tokens, depth)[-1] for depth in range(1, 9)]
    assert all((mine - other).abs().max() > 0.01 for i, mine in enumerate(logits) for other in logits[:i])


def test_the_tiny_models_loop_turns_tiny_llama_into_a_deeper_one(tiny):
    tokens = random_tokens(30, 512)
    assert torch.equal(at_depth(tiny, tokens, 1), Feeder(load_model("tiny:llama")).feed("a", tokens))
    assert (tiny.loop_layers, tiny.default_loops, tiny.max_loops) == ((1, 2), 8, 32)
    assert (tiny.before_group, tiny.after_group, tiny.first_group) == (0, None, 1)
    assert tiny.spec.num_groups == 33 and tiny.spec.layers == 1 and tiny.name == "tiny:looped"


def test_a_batch_without_depths_runs_the_default(case):
    tokens = random_tokens(20, case.vocab_size)
    assert torch.equal(Feeder(case, num_pages=2048).feed("a", tokens), at_depth(case, tokens, case.default_loops))


# Page groups


def test_a_group_for_what_runs_before_one_for_what_runs_after_and_one_for_each_iteration():
    def groups(case: str) -> tuple:
        model = looped(config_of(case))
        return model.before_group, model.after_group, model.first_group, model.spec.layers, model.spec.num_groups

    assert groups("layers before") == (0, None, 1, 2, 9)
    assert groups("layers after") == (None, 0, 1, 2, 9)
    assert groups("layers before and after") == (0, 1, 2, 1, 10)
    assert groups("all layers") == (None, None, 0, 3, 8)


def test_a_group_keeps_what_the_widest_window_of_its_layers_sees():
    assert looped(config_of("one window")).spec.windows == (8,) * 10
    assert looped(config_of("mixed windows")).spec.windows == (0, 9, *[0] * 8)  # full attention is the widest
    assert looped(config_of("windows in the loop alone")).spec.windows == (0, *[9] * 8)


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_groups_beyond_the_depth_are_neither_read_nor_written(case, depth):
    """They name pages of NaN, or pages that are not there, and the logits are the same."""
    tokens = random_tokens(LENGTH, case.vocab_size)
    want = at_depth(case, tokens, depth)
    used = case.first_group + depth
    for beyond in ("pages", -1, 10**6):
        feeder = Feeder(case, 16, num_pages=64)
        feeder.depths["a"] = depth
        batch = feeder.batch({"a": tokens})
        written = set(batch.page_tables[:used].ravel().tolist())
        batch.page_tables[used:] = sorted(set(range(64)) - written)[:3] if beyond == "pages" else beyond
        assert torch.equal(case.forward(batch, feeder.storage), want)
        changed = feeder.storage.pages.flatten(1).isfinite().any(1).nonzero().flatten()
        assert set(changed.tolist()) == written


def test_a_deeper_sequence_shares_the_pages_of_its_first_iterations(tiny):
    """Iteration i depends on those before it alone: what depth 16 computed, depth 8 continues."""
    tokens = random_tokens(60, 512)
    want = at_depth(tiny, tokens, 8)
    feeder = Feeder(tiny, num_pages=512)
    feeder.depths["a"] = 16
    feeder.step({"a": tokens[:32]})
    deep = feeder.tables.pop("a")
    feeder.tables["b"] = [row if group < 9 else [] for group, row in enumerate(deep)]
    feeder.lengths["b"], feeder.depths["b"] = 32, 8
    assert torch.equal(feeder.step({"b": tokens[32:]})["b"], want[32:])


# Rows: promise 1


def mixed(model: LoopedModel, tokens: list[int], depth: int, chunk: int, seed: int = 2) -> torch.Tensor:
    """The rows of a sequence among others of every depth, which start, run and stop around it."""
    feeder, rng, pieces = Feeder(model, 16, num_pages=4096, seed=5), np.random.default_rng(seed), []
    feeder.depths["a"] = depth
    for start in range(0, len(tokens), chunk):
        names = [f"{i} at {int(rng.integers(1, model.max_loops + 1))}" for i in range(5)]
        feeder.depths |= {name: int(name.split()[-1]) for name in names}
        rows = {name: random_tokens(int(rng.integers(1, 30)), model.vocab_size, i) for i, name in enumerate(names)}
        rows = dict(list(rows.items())[:2]) | {"a": tokens[start : start + chunk]} | rows
        pieces.append(feeder.step(rows)["a"])
        for name in [name for name, length in feeder.lengths.items() if length > 100 and name != "a"]:
            feeder.drop(name)
    return torch.cat(pieces)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["tiny", "layers before and after", "mixed windows", "odd sizes, biases"])
def test_a_row_has_the_same_bits_at_its_depth_whatever_the_depth_of_its_neighbours(name, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = looped(replace(TINY_LOOPED, loop=LoopConfig((1, 2), 3, 8)) if name == "tiny" else config_of(name))
        tokens = random_tokens(100, model.vocab_size)
        for depth in (1, 4, 8) if threads == 1 else (4,):  # threads of small steps mostly wait for each other
            want = at_depth(model, tokens, depth)
            assert want.isfinite().all()
            assert torch.equal(at_depth(model, tokens, depth, 33, page_size=4), want)
            for chunk in (100, 13) if threads == 1 else (30,):
                assert torch.equal(mixed(model, tokens, depth, chunk), want), f"depth {depth}, chunks of {chunk}"
    finally:
        torch.set_num_threads(before)


def test_sequences_of_every_depth_decode_together_as_they_do_alone(tiny):
    prompts = {f"{depth}": random_tokens(5 + depth, 512, depth) for depth in (7, 1, 3, 2, 7 + 8, 4)}
    feeder = Feeder(tiny, 16, num_pages=512)
    feeder.depths = {name: int(name) for name in prompts}
    rows, tokens, logits = prompts, {name: list(prompt) for name, prompt in prompts.items()}, {n: [] for n in prompts}
    for _ in range(6):
        last = feeder.step(rows, wanted="last")
        rows = {name: [int(row.argmax())] for name, row in last.items()}
        for name, row in last.items():
            logits[name].append(row)
            tokens[name] += rows[name]
    for name, prompt in prompts.items():
        want = at_depth(tiny, tokens[name][:-1], int(name))[len(prompt) - 1 :]
        assert torch.equal(torch.cat(logits[name]), want), f"depth {name}"


def test_the_reference_backend_gives_the_same_bits_at_mixed_depths(monkeypatch):
    monkeypatch.setenv("PAGED_BACKEND", "reference")
    model = looped(config_of("layers before and after"))
    tokens = random_tokens(40, model.vocab_size)
    assert torch.equal(mixed(model, tokens, 4, 11), at_depth(model, tokens, 4))


def test_a_padding_sequence_has_a_depth_and_changes_nothing(tiny):
    tokens = random_tokens(20, 512)
    feeder = Feeder(tiny, num_pages=512)
    feeder.depths["a"] = 4
    batch = feeder.batch({"a": tokens})
    columns = batch.page_tables.shape[2]
    padded = ForwardBatch(
        tokens=np.append(batch.tokens, 0).astype(np.int32),
        q_indptr=np.array([0, 20, 21], np.int32),
        kv_lens=np.array([20, 0], np.int32),
        page_tables=np.concatenate([batch.page_tables, np.full((33, 1, columns), -1, np.int32)], axis=1),
        logit_rows=batch.logit_rows,
        loops=np.array([4, 1], np.int32),
    )
    assert torch.equal(tiny.forward(padded, feeder.storage), at_depth(tiny, tokens, 4))


def test_a_step_without_rows_gives_no_logits(tiny):
    nothing = np.zeros(0, np.int32)
    batch = ForwardBatch(nothing, np.zeros(1, np.int32), nothing, np.zeros((33, 0, 1), np.int32), nothing)
    storage = Feeder(tiny).storage
    for loops in (None, nothing):
        batch.loops = loops
        assert tiny.forward(batch, storage).shape == (0, 512)
        logits, residual = tiny.run_loops(batch, storage)
        assert logits.shape == (0, 512) and residual.shape == (0, 64)


# Errors


@pytest.mark.parametrize("bad", [0, -1, 33, 1000])
def test_a_depth_that_the_model_cannot_run_is_refused_with_both_numbers(tiny, bad):
    feeder = Feeder(tiny)
    feeder.depths = {"a": 2, "b": 3}
    batch = feeder.batch({"a": [1, 2], "b": [3]})
    batch.loops = np.array([2, bad], np.int32)
    for run in (tiny.forward, tiny.run_loops):
        with pytest.raises(ValueError, match=rf"between 1 and this model's 32, got {bad}"):
            run(batch, feeder.storage)
    assert feeder.storage.pages.isnan().all()


def test_depths_of_another_number_of_sequences_are_refused(tiny):
    feeder = Feeder(tiny)
    batch = feeder.batch({"a": [1, 2], "b": [3]})
    batch.loops = np.array([4], np.int32)
    with pytest.raises(ValueError, match=r"each of 2 sequences, got shape \(1,\)"):
        tiny.forward(batch, feeder.storage)


def test_each_kind_of_model_wants_its_own_config():
    with pytest.raises(ValueError, match="needs a config with loop layers, got one of the family llama"):
        LoopedModel(TINY_LLAMA, random_tensors(TINY_LLAMA).__getitem__)
    with pytest.raises(ValueError, match=r"layers \(1, 2\) of this config loop"):
        LlamaModel(TINY_LOOPED, random_tensors(TINY_LOOPED).__getitem__)


# What it shares with plain models


def test_a_session_runs_the_default_depth(tiny):
    tokens = random_tokens(40, 512)
    session = Session(tiny, tiny.create_kv_pool(num_pages=200))
    want = at_depth(tiny, tokens, 8)
    assert torch.equal(session.eval(tokens[:30]), want[29]) and torch.equal(session.eval(tokens[30:]), want[-1])
    session.table.check()


def test_a_session_gives_back_what_the_widest_window_of_a_group_has_left_behind():
    model = looped(config_of("windows in the loop alone", max_loops=3))
    tokens = random_tokens(60, model.vocab_size)
    pool = model.create_kv_pool(num_pages=100, page_size=4)
    session = Session(model, pool)
    rows = [session.eval([token]) for token in tokens]
    assert torch.equal(torch.stack(rows), at_depth(model, tokens, 3))
    held = [int((row >= 0).sum()) for row in session.table.rows]
    assert held == [15, 2, 2, 2]  # the next row sees positions 52 to 60
    session.table.check()


def test_a_pool_of_no_given_size_holds_four_sequences_at_the_default_depth():
    model = load_model("tiny:looped", max_seq_len=100)
    assert model.create_kv_pool(page_size=16).num_pages == 4 * 9 * 7
    assert model.create_kv_pool(num_pages=5).num_pages == 5
    assert model.create_kv_pool(page_size=16, num_bytes=10 * 16 * 2 * 2 * 16 * 4).num_pages == 10
    with pytest.raises(ValueError, match="page_size must be at least 1 token, got 0"):
        model.create_kv_pool(page_size=0)


def test_updated_weights_give_what_a_fresh_model_with_them_gives():
    config = config_of("layers before and after")
    model, new = looped(config), random_tensors(config, seed=9)
    fresh = LoopedModel(config, new.__getitem__)
    tokens = random_tokens(20, model.vocab_size)
    assert not torch.equal(at_depth(model, tokens, 3), at_depth(fresh, tokens, 3))
    model.update_weights(new)
    assert model.fingerprint == fresh.fingerprint
    assert torch.equal(at_depth(model, tokens, 3), at_depth(fresh, tokens, 3))


def test_a_fingerprint_tells_which_layers_loop():
    config = ModelConfig.from_hf(tiny_hf_settings())
    tensors = random_tensors(config)
    models = [LlamaModel(config, tensors.__getitem__).fingerprint]
    for change in [((0, 3),), ((1, 3),), ((1, 2),), ((1, 2), 2), ((1, 2), 8, 9)]:
        models.append(LoopedModel(config.with_loop(*change), tensors.__getitem__).fingerprint)
    assert len(set(models)) == 6
    assert LoopedModel(config.with_loop((1, 2)), tensors.__getitem__).fingerprint == models[3]


def test_its_extra_info_says_what_loops(tiny):
    info = tiny.extra_info()
    assert (info["loop_layers"], info["default_loops"], info["max_loops"]) == ((1, 2), 8, 32)
    assert info["num_layers"] == 2 and info["num_parameters"] == load_model("tiny:llama").extra_info()["num_parameters"]
