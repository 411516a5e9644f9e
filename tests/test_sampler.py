"""Sampler: whole rows against an oracle in plain Python, and rows that never feel their neighbours."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from paged.draw import token_logprob, uniforms
from paged.errors import BadLogits, CheckFailed, InvalidRequest
from paged.sampler import Sampled, Sampler, TokenHistory, sample_one
from paged.sampling import SamplingParams

INF, NAN = math.inf, math.nan


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def history_of(*sequences: tuple[Sequence[int], Sequence[int]]) -> TokenHistory:
    """One slot for each (prompt, output)."""
    known = int32(*(len(p) + len(o) for p, o in sequences))
    tokens = np.full((len(sequences), max(int(known.max()), 1) + 3), -1, np.int32)  # -1: must never be read
    for slot, (prompt, output) in enumerate(sequences):
        tokens[slot, : known[slot]] = [*prompt, *output]
    return TokenHistory(tokens, int32(*(len(p) for p, _ in sequences)), known)


def one(
    row: Sequence[float],
    params: SamplingParams,
    seed: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    end_ids: Iterable[int] = (),
) -> int:
    """The token of a single row through `sample_one`, at the position that follows the known tokens."""
    logits = torch.tensor(row, dtype=torch.float32)
    return sample_one(logits, params, seed, len(prompt) + len(output), prompt, output, end_ids)


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


# Seeds and neighbours

V = 50
TABLE = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (V, V)).astype(np.float32))


class Batch:
    """Decodes several requests of a toy model whose next logits depend on the last token only."""

    def __init__(self, num_slots: int = 16) -> None:
        self.sampler = Sampler(num_slots, V)
        self.history = TokenHistory(np.zeros((num_slots, 200), np.int32), *np.zeros((2, num_slots), np.int32))
        self.live: list[int] = []

    def add(self, slot: int, params: SamplingParams, seed: int, prompt: Sequence[int] = (1, 2, 3)) -> None:
        self.sampler.assign(slot, params, seed)
        self.history.tokens[slot, : len(prompt)] = prompt
        self.history.prompt_lens[slot] = self.history.known[slot] = len(prompt)
        self.live.append(slot)

    def step(self) -> None:
        slots = int32(*self.live)
        known = self.history.known[slots]
        logits = TABLE[torch.from_numpy(self.history.tokens[slots, known - 1].astype(np.int64))]
        self.history.tokens[slots, known] = self.sampler.sample(logits, slots, known, self.history).tokens
        self.history.known[slots] += 1
        self.sampler.check()

    def output(self, slot: int) -> list[int]:
        return self.history.tokens[slot, self.history.prompt_lens[slot] : self.history.known[slot]].tolist()


SEEDED = SamplingParams(temperature=0.8, seed=42)


def alone() -> list[int]:
    batch = Batch()
    batch.add(0, SEEDED, 42)
    for _ in range(16):
        batch.step()
    return batch.output(0)


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    assert alone() == alone()
    batch = Batch()
    for slot in range(10):
        batch.add(slot, SEEDED, slot)
    for _ in range(16):
        batch.step()
    assert len({tuple(batch.output(slot)) for slot in range(10)}) == 10


@pytest.mark.parametrize(
    "company", ["one unseeded", "five seeded", "reversed", "after others", "joined half way", "seeded globally"]
)
def test_a_seeded_request_gives_the_same_tokens_in_any_company(company: str) -> None:
    batch = Batch()
    if company == "after others":
        for i in range(100):
            batch.add(3, SamplingParams(temperature=1.0), i)
            batch.step()
            batch.sampler.clear(3)
            batch.live.clear()
    if company == "reversed":
        for i in range(5):
            batch.add(10 - i, SamplingParams(temperature=1.5, top_p=0.9), i)
    batch.add(3, SEEDED, 42)
    if company == "one unseeded":
        batch.add(0, SamplingParams(temperature=0.8), 987654321)
    if company == "five seeded":
        for i in range(5):
            batch.add(4 + i, SamplingParams(temperature=0.8, top_k=i), 42)
    for step in range(16):
        if company == "joined half way" and step == 8:
            for i in range(5):
                batch.add(4 + i, SamplingParams(temperature=0.1 * i, presence_penalty=i), 42 + i)
        if company == "seeded globally":
            torch.manual_seed(0)
            np.random.seed(0)
            random.seed(0)
        batch.step()
    assert batch.output(3) == alone()


def test_global_random_state_is_neither_read_nor_changed() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    alone()
    one([0.0] * 5, SamplingParams(temperature=1.0, top_p=0.5, top_k=3, min_p=0.1))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()
    assert torch.equal(before[0], after[0]) and before[1] == after[1]
    assert before[2][0] == after[2][0] and np.array_equal(before[2][1], after[2][1]) and before[2][2:] == after[2][2:]


def test_a_draw_depends_on_the_position_and_not_on_how_often_it_is_made() -> None:
    sampler = Sampler(1, V)
    sampler.assign(0, SEEDED, 42)
    history = history_of(([1], []))
    at = {p: int(sampler.sample(TABLE[:1], int32(0), int32(p), history).tokens[0]) for p in (5, 0, 9, 5, 0)}
    for position, token in at.items():
        assert sample_one(TABLE[0], SEEDED, 42, position, [1], []) == token
    assert len({sample_one(TABLE[0], SEEDED, 42, p, [], []) for p in range(50)}) > 5


def mixed_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 5, 40, vocab_size]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.3]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.2]),
        logit_bias=rng.choice([None, None, {3: 2.5, 7: -1.0}]),
        logprobs=rng.choice([None, None, 0, 4]),
        min_tokens=rng.choice([0, 0, 6]),
    )


@pytest.mark.parametrize("vocab_size", [11, 1000])
def test_each_row_is_the_same_alone_and_among_fifty_mixed_neighbours(vocab_size: int) -> None:
    rng, num = random.Random(vocab_size), 51
    params = [mixed_params(rng, vocab_size) for _ in range(num)]
    lengths = [(rng.randrange(1, 20), rng.randrange(0, 12)) for _ in range(num)]
    texts = [
        ([rng.randrange(vocab_size) for _ in range(p)], [rng.randrange(vocab_size) for _ in range(o)])
        for p, o in lengths
    ]
    logits = torch.from_numpy(np.random.default_rng(9).normal(0, 3, (num, vocab_size)).astype(np.float32))
    sampler = Sampler(num, vocab_size)
    for slot in range(num):
        sampler.assign(slot, params[slot], 1000 + slot, (2, 4))
    history, positions = history_of(*texts), int32(*(p + o for p, o in lengths))
    order = list(range(num))
    for _ in range(3):
        rng.shuffle(order)
        slots = int32(*order)
        together = sampler.sample(logits[order], slots, positions[slots], history)
        assert together.logprobs is not None
        for r, slot in enumerate(order):
            single = sampler.sample(logits[slot : slot + 1], int32(slot), positions[slot : slot + 1], history)
            assert single.tokens[0] == together.tokens[r]
            assert (None if single.logprobs is None else single.logprobs[0]) == together.logprobs[r]
            again = sample_one(logits[slot], params[slot], 1000 + slot, int(positions[slot]), *texts[slot], (2, 4))
            assert again == together.tokens[r]


# The whole pipeline against an oracle that shares nothing with it


def kept_weights(
    row: list[float], p: SamplingParams, prompt: list[int], output: list[int], ends: list[int]
) -> tuple[dict[int, float], float]:
    """The weights that the draw is made from, by id in ascending order, and how near a threshold came to deciding
    otherwise. Plain loops over Python floats, in the documented order."""
    x = [float(v) for v in row]
    margin = INF
    for i, bias in (p.logit_bias or {}).items():
        x[i] += bias
    for i in set(prompt + output):
        x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
    for i, count in Counter(output).items():
        x[i] -= p.presence_penalty + p.frequency_penalty * count
    if len(output) < p.min_tokens and any(v > -INF for i, v in enumerate(x) if i not in ends):
        for i in ends:
            x[i] = -INF
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.temperature < 1e-6:
        return {order[0]: 1.0}, margin
    if p.top_k > 0:
        order = order[: p.top_k]
    weight = {i: math.exp((x[i] - x[order[0]]) / p.temperature) for i in order}
    if p.top_p < 1.0:
        total, mass, kept = math.fsum(weight.values()), 0.0, []
        for i in order:
            if kept and mass >= p.top_p * total:
                break
            kept.append(i)
            mass += weight[i]
            margin = min(margin, abs(mass / total - p.top_p))
        order = kept
    if p.min_p > 0.0:
        margin = min(margin, *(abs(weight[i] - p.min_p) if weight[i] != 1.0 else INF for i in order), INF)
        order = [i for i in order if weight[i] >= p.min_p]
    return {i: weight[i] for i in sorted(order)}, margin


def oracle(
    row: list[float], p: SamplingParams, u: float, prompt: list[int], output: list[int], ends: list[int]
) -> tuple[int, float]:
    """The token, and how near a threshold came to deciding otherwise."""
    weight, margin = kept_weights(row, p, prompt, output, ends)
    total, mass, token = math.fsum(weight.values()), 0.0, -1
    for i, w in weight.items():
        mass += w
        margin = min(margin, abs(mass / total - u)) if len(weight) > 1 else margin
        if token < 0 and mass / total > u:
            token = i
    return token, margin


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.integers(1, 24))
    ids = st.integers(0, size - 1)
    value = st.integers(-40, 40).map(lambda i: i / 4) | st.just(-INF)
    max_k = size + 2
    return {
        "row": draw(st.lists(value, min_size=size, max_size=size).filter(lambda v: max(v) > -INF)),
        "prompt": draw(st.lists(ids, max_size=6)),
        "output": draw(st.lists(ids, max_size=6)),
        "ends": draw(st.lists(ids, max_size=3)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "params": SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.25, 1.0, 1.0, 3.0, 1e4])),
            top_k=draw(st.just(0) | st.integers(-1, max_k)),
            top_p=draw(st.just(1.0) | st.floats(0, 1)),
            min_p=draw(st.just(0.0) | st.floats(0, 1)),
            repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.5, 2.0])),
            presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5, -1.0])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.25, -0.5])),
            min_tokens=draw(st.sampled_from([0, 0, 3, 9])),
            logit_bias=draw(st.none() | st.dictionaries(ids, st.sampled_from([-2.0, 0.5, 5.0]), max_size=3)),
        ),
    }


@settings(deadline=None, max_examples=150)
@given(st.lists(rows(), min_size=1, max_size=5))
@example(
    [{"row": [1.0, 1.0], "prompt": [], "output": [0], "ends": [0], "seed": 1, "params": SamplingParams(min_tokens=3)}]
)
def test_any_row_agrees_with_plain_loops_over_python_floats(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        case["position"] = len(case["prompt"]) + len(case["output"])
        u = float(uniforms(np.array([case["seed"]], np.uint64), int32(case["position"]))[0])
        ends = sorted({*case["ends"], *case["params"].stop_token_ids})
        case["token"], margin = oracle(case["row"], case["params"], u, case["prompt"], case["output"], ends)
        assume(margin > 1e-9)
    # Rows of one width go through one call; others alone.
    for size in {len(case["row"]) for case in cases}:
        same = [case for case in cases if len(case["row"]) == size]
        sampler = Sampler(len(same), size)
        for slot, case in enumerate(same):
            sampler.assign(slot, case["params"], case["seed"], case["ends"])
        sampled = sampler.sample(
            torch.tensor([case["row"] for case in same]),
            np.arange(len(same), dtype=np.int32),
            int32(*(case["position"] for case in same)),
            history_of(*((case["prompt"], case["output"]) for case in same)),
        )
        assert sampled.tokens.tolist() == [case["token"] for case in same]


# Distributions

LOGITS = [1.0, 0.0, -1.0, 2.0, 2.0, -INF, 0.5, -4.0]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 2.0},
        {"temperature": 0.3},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_tokens_are_drawn_with_their_probabilities(params: dict[str, float], vary: str) -> None:
    p, n = SamplingParams(**{"temperature": 1.0, **params}), 5000  # type: ignore[arg-type]
    num_slots = n if vary == "seed" else 1
    sampler = Sampler(num_slots, len(LOGITS))
    for slot in range(num_slots):
        sampler.assign(slot, p, 11 + slot)
    slots = np.arange(n, dtype=np.int32) % num_slots
    positions = np.arange(n, dtype=np.int32) // num_slots
    history = TokenHistory(np.zeros((num_slots, 1), np.int32), *np.zeros((2, num_slots), np.int32))
    tokens = sampler.sample(torch.tensor([LOGITS] * n), slots, positions, history).tokens
    weight, _ = kept_weights(LOGITS, p, [], [], [])
    assert set(tokens.tolist()) <= weight.keys()
    expected = {i: n * w / math.fsum(weight.values()) for i, w in weight.items()}
    common = [i for i in expected if expected[i] >= 5]
    counts = np.array([*((tokens == i).sum() for i in common), (~np.isin(tokens, common)).sum()])
    wanted = np.array([*(expected[i] for i in common), max(1.0, sum(expected[i] for i in expected if i not in common))])
    # 7 degrees of freedom at most; chance 1e-4 for one set of fixed seeds, so it holds always or never.
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 30


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
    assert plain.logprob == pytest.approx(float(expected), abs=1e-12)
    assert len(full.top) == 5 and full.top[0] == (full.token_id, full.logprob)
    json.dumps([dataclasses.asdict(full)], allow_nan=False)
    assert sampler.sample(logits[:1], int32(0), int32(1), history).logprobs is None
