"""What was handed to the model for one step is not written by the planning of the next."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fakes import EchoHybrid, EchoModel

from scheduler import Engine, SamplingParams, SchedulerConfig


class Holding(EchoModel):
    """Keeps the arrays of each step, as a device would that reads them later, and copies to compare them with."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.held: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = []

    def forward(self, batch, storage):
        arrays = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        arrays = {name: value for name, value in arrays.items() if isinstance(value, np.ndarray)}
        self.held.append((arrays, {name: value.copy() for name, value in arrays.items()}))
        return super().forward(batch, storage)


class HoldingHybrid(Holding, EchoHybrid):
    pass


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("model_of", [Holding, HoldingHybrid])
@pytest.mark.parametrize(("page_size", "chunk"), [(16, 64), (16, 10), (5, 7), (1, 3)])
def test_the_arrays_of_a_step_stay_as_they_were(model_of, page_size: int, chunk: int, ahead: bool) -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=chunk, plan_ahead=ahead)
    model = model_of()
    engine = Engine(model, num_pages=-(-220 // page_size), page_size=page_size, config=config)
    prompts = [np.random.default_rng(i).integers(0, 97, 20 + 9 * i).tolist() for i in range(6)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=20))
    assert [o.token_ids for o in outputs] == [model.greedy(p, 20) for p in prompts]
    assert len(model.held) > 30
    names = set()
    for arrays, copies in model.held:
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, copies[name], err_msg=name)
            names.add(name)
    assert {"tokens", "q_indptr", "kv_lens"} <= names and any("table" in name for name in names)
    engine.check()


@pytest.mark.parametrize("ahead", [False, True])
def test_no_two_steps_share_an_array(ahead: bool) -> None:
    model = Holding()
    engine = Engine(model, num_pages=60, config=SchedulerConfig(max_num_seqs=4, plan_ahead=ahead))
    engine.generate([[1, 2, 3], [4] * 30], SamplingParams(max_tokens=10))
    for (first, _), (second, _) in zip(model.held, model.held[1:], strict=False):
        for name, array in first.items():
            assert not np.shares_memory(array, second[name]), name
