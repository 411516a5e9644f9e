"""Sampler: degenerate parameters, penalties and their scope, min_tokens, bad logits, and the interface."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from sampling_oracle import INF, history_of, int32, one

from paged.draw import token_logprob
from paged.errors import BadLogits, CheckFailed, InvalidRequest
from paged.sampler import Sampled, Sampler, TokenHistory, sample_one
from paged.sampling import SamplingParams

NAN = float("nan")

# Greedy and degenerate cases

TIE = [0.5, 2.0, -1.0, 2.0, 1.0]
LONE = [-INF, -INF, -7.0, -INF, -INF]
ONE_HOT = [-1e30, -1e30, 0.0, -1e30, -1e30]
FLAT = [0.0] * 5


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1e-8},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1e4, "top_k": 1},
        {"temperature": 1.0, "top_p": 0},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1e4, "top_p": 1e-9},
        {"top_k": 3, "top_p": 0.5, "min_p": 0.5},
        {"presence_penalty": 0.0, "logit_bias": {}},
        {"min_tokens": 3},
    ],
)
def test_degenerate_parameters_give_the_arg_max_and_the_lowest_id_on_ties(params: dict[str, Any]) -> None:
    p = SamplingParams(**params)
    for row, best in ((TIE, 1), (LONE, 2), (ONE_HOT, 2), (FLAT, 0)):
        assert {one(row, p, seed) for seed in range(20)} == {best}


@pytest.mark.parametrize("top_k", [1, 0, -1, 2, 4, 5, 6, 2**30])
@pytest.mark.parametrize("top_p", [0.0, 1e-9, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-5, 1.0, 1e4])
def test_every_draw_lies_in_the_vocabulary_and_has_a_finite_logit(top_k: int, top_p: float, temperature: float) -> None:
    p = SamplingParams(top_k=top_k, top_p=top_p, temperature=temperature)
    for seed in range(5):
        assert one(LONE, p, seed) == 2 == one(ONE_HOT, p, seed)
        assert one([-INF, 1.0, -INF, 1.0, 0.0], p, seed) in (1, 3, 4)
        assert one(FLAT, p, seed) in range(5)
        assert one([3.0], p, seed) == 0


def test_a_tie_of_a_hundred_thousand_goes_to_the_lowest_id() -> None:
    row = torch.zeros(100_000)
    row[777:] = 1.0
    for params in (SamplingParams(), SamplingParams(temperature=1, top_k=1), SamplingParams(temperature=1, top_p=0)):
        assert sample_one(row, params, 5, 0, [], []) == 777


# Penalties and their scope


def test_penalties_follow_the_documented_arithmetic() -> None:
    row, p = [2.0, -1.0, 0.5, 1.0], {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    # [1.0, -3.0, 0.5, -0.25]: an id wins once a bias (which comes first) closes the gap to id 0, not a hair before.
    assert one(row, SamplingParams(**p), prompt=[0], output=[1, 1, 3]) == 0
    for i, bias in ((1, 5.0), (2, 0.5), (3, 2.5)):
        for extra, winner in ((-1e-9, 0), (1e-9, i)):
            biased = SamplingParams(**p, logit_bias={i: bias + extra})
            assert one(row, biased, prompt=[0], output=[1, 1, 3]) == winner
    # The prompt's token counts for repetition only; as output it would feel all three.
    assert one([2.0, 0.9], SamplingParams(presence_penalty=1.5), prompt=[0]) == 0
    assert one([2.0, 0.9], SamplingParams(presence_penalty=1.5), output=[0]) == 1
    assert one([2.0, 1.1], SamplingParams(repetition_penalty=2.0), prompt=[0]) == 1


def test_penalties_touch_neither_the_neighbour_nor_the_logits_nor_the_history() -> None:
    row = [2.0, -1.0, 0.5, 1.0]
    sampler = Sampler(2, 4)
    sampler.assign(0, SamplingParams(repetition_penalty=9.0, logit_bias={0: -1.0}, logprobs=0), 0)
    sampler.assign(1, SamplingParams(logprobs=0), 0)
    logits = torch.tensor([row, row])
    history = history_of(([0], [1, 1, 3]), ([0], [1, 1, 3]))
    before = logits.clone(), history.tokens.copy(), history.known.copy(), history.prompt_lens.copy()
    sampled = sampler.sample(logits, int32(0, 1), int32(4, 4), history)
    assert sampled.tokens.tolist() == [2, 0] and sampled.tokens.dtype == np.int32
    assert torch.equal(logits, before[0]) and np.array_equal(history.tokens, before[1])
    assert np.array_equal(history.known, before[2]) and np.array_equal(history.prompt_lens, before[3])
    # Log probabilities are the model's own, whatever the penalties.
    assert sampled.logprobs is not None
    assert sampled.logprobs[0] == token_logprob(np.array(row, np.float32), 2, 0)
    assert sampled.logprobs[1] == token_logprob(np.array(row, np.float32), 0, 0)


# min_tokens


def generate_scripted(params: SamplingParams, eos: tuple[int, ...], row: list[float], limit: int) -> list[int]:
    """Greedy decoding of constant logits until an end id is drawn, as a scheduler would run it."""
    output: list[int] = []
    while len(output) < limit:
        token = one(row, params, prompt=[0, 0], output=output, end_ids=eos)
        output.append(token)
        if token in params.end_ids(eos) and len(output) > params.min_tokens:
            break
    return output


def test_no_end_id_is_drawn_before_min_tokens() -> None:
    row = [0.0] * 12
    row[11], row[5], row[2], row[7] = 9.0, 8.0, 7.0, 6.0
    p = SamplingParams(max_tokens=6, min_tokens=3, stop_token_ids=[5])
    assert generate_scripted(p, (2, 11), row, 6) == [7, 7, 7, 11]
    # Without the model's end ids, or with them ignored, only the request's own are masked.
    assert generate_scripted(p, (), row, 6) == [11] * 6
    ignoring = SamplingParams(max_tokens=6, min_tokens=3, stop_token_ids=[5], ignore_eos=True)
    assert generate_scripted(ignoring, (2, 11), row, 6) == [11] * 6
    assert generate_scripted(SamplingParams(ignore_eos=True), (2, 11), row, 6) == [11] * 6
    assert generate_scripted(SamplingParams(), (2, 11), row, 6) == [11]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampled_rows_draw_no_end_id_before_min_tokens_either(temperature: float) -> None:
    p = SamplingParams(temperature=temperature, min_tokens=2, stop_token_ids=[0])
    row = [20.0, 20.0, 0.0, 0.0]
    for seed in range(50):
        assert one(row, p, seed, [3, 3, 3], [], (1,)) in (2, 3)
        assert one(row, p, seed, [3], [3], (1,)) in (2, 3)
        assert one(row, p, seed, [3], [3, 3], (1,)) in (0, 1)


def test_min_tokens_gives_way_where_an_end_id_is_all_that_can_be_drawn() -> None:
    for temperature in (0.0, 1.0):
        p = SamplingParams(temperature=temperature, min_tokens=2)
        assert one([-INF, 1.0, -INF], p, end_ids=(1,)) == 1


def test_end_ids_outside_the_vocabulary_and_a_huge_min_tokens_do_no_harm() -> None:
    p = SamplingParams(max_tokens=None, min_tokens=10**12)
    assert one([0.0, 5.0, 1.0], p, end_ids=(1, 3, -1, 10**9)) == 2


# Bad logits


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"logit_bias": {0: 1.0}}]
)
def test_bad_logits_name_the_row_and_draw_nothing(bad: float, params: dict[str, Any]) -> None:
    sampler = Sampler(4, 3)
    for slot in range(4):
        sampler.assign(slot, SamplingParams(**params), 0)
    logits = torch.tensor([[0.0, 1.0, 0.0], [0.0, bad, 9.0], [1.0, 0.0, 0.0], [5.0, 0.0, bad]])
    history = history_of(*[([0], [])] * 4)
    with pytest.raises(BadLogits) as caught:
        sampler.sample(logits, int32(3, 2, 1, 0), int32(7, 8, 9, 10), history)
    assert caught.value.rows == (1, 3)
    assert str(caught.value).startswith("the logits of row 1 (and 1 more rows), slot 2, position 8, must be finite")
    # The others can still be drawn.
    good = sampler.sample(logits[[0, 2]], int32(3, 1), int32(7, 9), history)
    assert all(0 <= t < 3 for t in good.tokens.tolist())


@pytest.mark.parametrize("row", [[-INF, -INF], [NAN, -INF], [-INF, NAN], [NAN, NAN], [INF, NAN]])
def test_a_row_without_a_token_to_draw_is_refused(row: list[float]) -> None:
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        with pytest.raises(BadLogits, match="row 0, slot 0, position 0"):
            one(row, params)


def test_penalties_that_overflow_are_refused_not_drawn_from() -> None:
    with pytest.raises(BadLogits) as caught:
        one([1e38, 1.0], SamplingParams(repetition_penalty=1e-300), prompt=[0])
    assert caught.value.rows == (0,)
    assert one([1e38, 1.0], SamplingParams(repetition_penalty=1e300), prompt=[0]) == 1


# The interface


def test_a_greedy_step_makes_the_same_number_of_calls_for_any_number_of_rows() -> None:
    def calls(num: int, params: SamplingParams) -> int:
        sampler = Sampler(num, 64)
        for slot in range(num):
            sampler.assign(slot, params, slot, (1,))
        history = TokenHistory(np.ones((num, 4), np.int32), np.ones(num, np.int32), np.full(num, 4, np.int32))
        logits, slots = torch.randn(num, 64, generator=torch.Generator().manual_seed(0)), np.arange(num, dtype=np.int32)
        seen = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            sampler.sample(logits, slots, slots, history)
        finally:
            sys.setprofile(None)
        return seen

    assert calls(1, SamplingParams()) == calls(2, SamplingParams()) == calls(500, SamplingParams()) < 60
    past_the_minimum = SamplingParams(min_tokens=3, top_p=0.5, stop_token_ids=[3])
    assert calls(500, past_the_minimum) == calls(1, past_the_minimum)
    assert calls(500, SamplingParams(temperature=1.0)) > 500  # the count does see work by row


def test_a_step_without_rows_gives_no_tokens() -> None:
    sampler = Sampler(1, 8)
    sampled = sampler.sample(torch.zeros(0, 8), int32(), int32(), history_of(([0], [])))
    assert sampled == Sampled(sampled.tokens, None) and sampled.tokens.shape == (0,)
    assert sampled.tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("shape", "num_slots", "num_positions"),
    [((2, 7), 2, 2), ((8,), 1, 1), ((2, 8), 1, 2), ((2, 8), 2, 1), ((1, 8), 2, 2)],
)
def test_shapes_that_do_not_agree_are_refused(shape: tuple[int, ...], num_slots: int, num_positions: int) -> None:
    sampler = Sampler(2, 8)
    sampler.assign(0, SamplingParams(), 0)
    with pytest.raises(ValueError, match="logits must be"):
        sampler.sample(
            torch.zeros(shape), np.zeros(num_slots, np.int32), np.zeros(num_positions, np.int32), history_of(([0], []))
        )


def test_logits_of_any_float_type_layout_and_with_a_gradient_are_read() -> None:
    base = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    sampler = Sampler(3, 40)
    for slot in range(3):
        sampler.assign(slot, SamplingParams(temperature=float(slot)), slot)
    history = history_of(*[([0], [])] * 3)

    def draw(logits: torch.Tensor) -> list[int]:
        return sampler.sample(logits, int32(0, 1, 2), int32(1, 1, 1), history).tokens.tolist()

    expected = draw(base.float())
    assert draw(base) == draw(base.double()) == draw(base.float().requires_grad_()) == expected
    assert draw(base.float().t().contiguous().t()) == draw(torch.cat([base, base], 1).float()[:, :40]) == expected


def test_a_slot_without_parameters_is_refused() -> None:
    sampler = Sampler(3, 4)
    sampler.assign(0, SamplingParams(), 0)
    sampler.assign(1, SamplingParams(temperature=1.0, min_tokens=3, logprobs=2, logit_bias={2: 5.0}), 7, (1,))
    for _ in range(2):
        sampler.clear(1)
        sampler.check()
    for slot in (1, 2):
        with pytest.raises(ValueError, match=f"slot {slot} has no sampling parameters"):
            sampler.sample(torch.zeros(2, 4), int32(0, slot), int32(0, 0), history_of(*[([0], [])] * 3))


def test_a_slot_forgets_what_was_assigned_before() -> None:
    sampler = Sampler(1, 4)
    history = history_of(([0], [1]))
    sampler.assign(0, SamplingParams(temperature=1.0, min_tokens=3, logprobs=2, logit_bias={2: 50.0}), 5, (0,))
    sampler.assign(0, SamplingParams(), 6)
    sampler.check()
    sampled = sampler.sample(torch.tensor([[3.0, 0.0, 0.0, 0.0]]), int32(0), int32(2), history)
    assert sampled == Sampled(sampled.tokens, None) and sampled.tokens.tolist() == [0]


@pytest.mark.parametrize(
    "params", [{"logit_bias": {4: 5.0}}, {"stop_token_ids": [10**9]}, {"logprobs": 10**6}, {"logprobs": 5}]
)
def test_ids_outside_the_vocabulary_are_refused_and_change_no_slot(params: dict[str, Any]) -> None:
    sampler = Sampler(2, 4)
    sampler.assign(0, SamplingParams(), 0)
    with pytest.raises(InvalidRequest, match=next(iter(params))):
        sampler.assign(1, SamplingParams(**params), 0)
    with pytest.raises(InvalidRequest):
        sampler.assign(0, SamplingParams(**params), 0)
    sampler.check()
    history = history_of(*[([0], [])] * 2)
    assert sampler.sample(torch.tensor([[0.0, 0.0, 1.0, 0.0]]), int32(0), int32(1), history).tokens.tolist() == [2]
    with pytest.raises(ValueError, match="slot 1"):
        sampler.sample(torch.zeros(1, 4), int32(1), int32(1), history)


@pytest.mark.parametrize("array", ["_assigned", "_special", "_min_tokens", "_logprobs"])
def test_check_finds_an_array_that_disagrees_with_the_parameters(array: str) -> None:
    sampler = Sampler(2, 4)
    sampler.assign(0, SamplingParams(seed=3), 3)
    sampler.check()
    values = getattr(sampler, array)
    values[0] = not values[0] if values.dtype == np.bool_ else values[0] + 1
    with pytest.raises(CheckFailed):
        sampler.check()


def test_log_probabilities_come_only_where_they_are_asked_for() -> None:
    sampler = Sampler(3, 6)
    for slot, wanted in enumerate((None, 0, 5)):
        sampler.assign(slot, SamplingParams(logprobs=wanted, temperature=1.0, top_k=1), 0)
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.normal(0, 3, (3, 6)).astype(np.float32))
    logits[2, :3] = -INF
    history = history_of(*[([0], [])] * 3)
    sampled = sampler.sample(logits, int32(0, 1, 2), int32(1, 1, 1), history)
    assert sampled.logprobs is not None and sampled.logprobs[0] is None
    plain, full = sampled.logprobs[1], sampled.logprobs[2]
    assert plain is not None and full is not None
    assert plain.top == () and plain.token_id == sampled.tokens[1]
    expected = torch.log_softmax(logits[1].double(), 0)[plain.token_id]
    assert plain.logprob == pytest.approx(float(expected), abs=1e-6)
    assert len(full.top) == 5 and full.top[0] == (full.token_id, full.logprob)
    json.dumps([dataclasses.asdict(full)], allow_nan=False)
    assert sampler.sample(logits[:1], int32(0), int32(1), history).logprobs is None
