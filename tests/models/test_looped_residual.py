"""Going on from a residual: what was computed at one depth becomes a greater one, bit for bit."""

from __future__ import annotations

import pytest
import torch
from feeder import Feeder, random_tokens
from looping import CASES, LENGTH, at_depth, config_of, looped

from paged.models.base import ForwardBatch
from paged.models.looped import LoopedModel
from paged.models.registry import load_model
from paged.models.step import Step


@pytest.fixture(scope="module", params=CASES)
def case(request) -> LoopedModel:
    return looped(config_of(request.param))


@pytest.fixture(scope="module")
def tiny() -> LoopedModel:
    model = load_model("tiny:looped")
    assert isinstance(model, LoopedModel)
    return model


def deepen(feeder: Feeder, name: str, depth: int) -> None:
    """Have the rows of a sequence computed again, at `depth`; the pages of its first iterations stay."""
    feeder.depths[name], feeder.lengths[name] = depth, 0


@pytest.mark.parametrize("start, depth", [(4, 8), (1, 2), (3, 7), (0, 5), (8, 8)])
def test_going_on_from_a_residual_gives_the_bits_of_a_run_from_scratch(case, start, depth):
    tokens = random_tokens(LENGTH, case.vocab_size)
    scratch, feeder = Feeder(case, num_pages=512, seed=1), Feeder(case, num_pages=512, seed=2)
    scratch.depths["a"], feeder.depths["a"] = depth, max(start, 1)
    want, want_residual = case.run_loops(scratch.batch({"a": tokens}), scratch.storage)
    first = feeder.batch({"a": tokens})
    residual = residual_after(case, first, feeder, start)
    given, before = residual.clone(), feeder.storage.pages.clone()
    deepen(feeder, "a", depth)
    batch = feeder.batch({"a": tokens})
    got, got_residual = case.run_loops(batch, feeder.storage, residual, start)
    assert torch.equal(got, want) and torch.equal(got_residual, want_residual) and torch.equal(residual, given)
    used = case.first_group + depth
    for group in range(used):
        mine, other = (f.storage.pages[f.tables["a"][group]] for f in (feeder, scratch))
        assert torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0)), f"group {group}"
    changed = (feeder.storage.pages != before).logical_and(~feeder.storage.pages.isnan()).flatten(1).any(1)
    written = {*range(case.first_group + start, used)} | ({case.after_group} if depth > start else set()) - {None}
    assert set(changed.nonzero().flatten().tolist()) <= set(batch.page_tables[sorted(written)].ravel().tolist())
    more = random_tokens(3, case.vocab_size, 8)
    assert torch.equal(feeder.step({"a": more})["a"], scratch.step({"a": more})["a"])


def residual_after(model: LoopedModel, batch: ForwardBatch, feeder: Feeder, loops: int) -> torch.Tensor:
    """The residual after `loops` iterations; that after none is what enters the block."""
    if loops:
        return model.run_loops(batch, feeder.storage)[1]
    model.forward(batch, feeder.storage)
    return model._before(batch, Step(model, batch, feeder.storage))[0]


def test_the_first_iterations_need_no_pages_to_go_on(tiny):
    """A handle built at depth 4 goes on to 8 reading nothing but its residual."""
    tokens = random_tokens(LENGTH, 512)
    feeder = Feeder(tiny, num_pages=512)
    feeder.depths["a"] = 4
    logits, residual = tiny.run_loops(feeder.batch({"a": tokens}), feeder.storage)
    assert torch.equal(logits, at_depth(tiny, tokens, 4))
    deepen(feeder, "a", 8)
    batch = feeder.batch({"a": tokens})
    batch.page_tables[:5] = -1
    got, _ = tiny.run_loops(batch, feeder.storage, residual, 4)
    assert torch.equal(got, at_depth(tiny, tokens, 8))


def test_going_on_in_chunks_and_to_several_depths_at_once(case):
    tokens = {name: random_tokens(LENGTH, case.vocab_size, i) for i, name in enumerate("abc")}
    depths = {"a": 6, "b": 2, "c": 8}
    feeder = Feeder(case, num_pages=1024)
    feeder.depths = dict.fromkeys("abc", 2)
    _, residual = case.run_loops(feeder.batch(tokens), feeder.storage)
    parts = dict(zip("abc", residual.split(LENGTH), strict=True))
    pieces = {name: [] for name in "abc"}
    for name, depth in depths.items():
        deepen(feeder, name, depth)
    for start in (0, 16, 32):
        rows = {name: tokens[name][start : start + 16] for name in "cab"}
        given = torch.cat([parts[name][start : start + 16] for name in rows])
        logits, _ = case.run_loops(feeder.batch(rows), feeder.storage, given, 2)
        for name, piece in zip(rows, logits.split(len(rows["a"])), strict=True):
            pieces[name].append(piece)
    for name, depth in depths.items():
        assert torch.equal(torch.cat(pieces[name]), at_depth(case, tokens[name], depth)), name


def test_a_residual_is_memory_of_its_own(case):
    tokens = random_tokens(10, case.vocab_size)
    feeder = Feeder(case)
    feeder.depths["a"] = 2
    logits, residual = case.run_loops(feeder.batch({"a": tokens}), feeder.storage)
    kept, kept_logits = residual.clone(), logits.clone()
    deepen(feeder, "a", 3)
    batch = feeder.batch({"a": tokens})
    _, again = case.run_loops(batch, feeder.storage, residual, 2)
    assert torch.equal(residual, kept) and torch.equal(logits, kept_logits) and not torch.equal(again, kept)


def test_a_residual_that_does_not_fit_is_refused_and_nothing_is_written(tiny):
    feeder = Feeder(tiny)
    feeder.depths = {"a": 4, "b": 6}
    batch = feeder.batch({"a": [1, 2], "b": [3]})
    good = torch.zeros(3, 64)
    for residual, start, message in [
        (None, 4, "the residual after 4 iterations is needed"),
        (torch.zeros(2, 64), 2, r"must have shape \(3, 64\), got \(2, 64\)"),
        (torch.zeros(3, 32), 2, r"must have shape \(3, 64\), got \(3, 32\)"),
        (good, 5, "after 0 to 4 loops, the least of its sequences, got 5"),
        (good, -1, "after 0 to 4 loops, the least of its sequences, got -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            tiny.run_loops(batch, feeder.storage, residual, start)
    assert feeder.storage.pages.isnan().all()
