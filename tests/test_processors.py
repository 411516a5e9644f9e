"""Logits processors: where they stand among the other parameters, what they see, and what counts as a failure."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import EchoModel
from sampling_oracle import history_of, int32

from paged import BadLogits, InvalidRequest, ProcessorFailed, SamplingParams, Session
from paged.processors import process
from paged.sampler import Sampler, sample_one

LOGITS = torch.tensor([1.0, 4.0, 2.0, 3.0])


def ban(*ids: int):
    def banned(tokens, logits) -> None:
        logits[list(ids)] = -np.inf

    return banned


def draw(*processors, prompt=(0,), output=(), logits=LOGITS, **params) -> int:
    return sample_one(logits, SamplingParams(logits_processors=processors, **params), 7, 1, prompt, output)


def test_a_processor_changes_the_row_in_place_or_returns_another() -> None:
    assert draw() == 1
    assert draw(ban(1)) == 3
    assert draw(lambda tokens, logits: -logits) == 0
    assert draw(lambda tokens, logits: [0, 0, 9, 0]) == 2
    assert draw(lambda tokens, logits: torch.tensor([0.0, 0.0, 0.0, 1.0])) == 3


def test_several_come_one_after_the_other() -> None:
    assert draw(ban(1), lambda tokens, logits: 3 * logits, ban(3)) == 2
    assert draw(lambda tokens, logits: -logits, ban(0)) == 2


def test_it_sees_prompt_and_output_and_the_row_after_bias_and_penalties() -> None:
    seen = []

    def look(tokens, logits) -> None:
        seen.append((tokens.tolist(), tokens.dtype, logits.tolist(), logits.dtype))

    draw(look, prompt=(3, 2), output=(1, 1), logit_bias={0: 0.5}, presence_penalty=1.0, repetition_penalty=2.0)
    assert seen == [([3, 2, 1, 1], np.int32, [1.5, 1.0, 1.0, 1.5], np.float32)]


def test_what_it_gets_are_copies() -> None:
    def spoil(tokens, logits) -> None:
        tokens[:] = 9
        logits[:] = 5.0

    sampler = Sampler(2, 4)
    for slot, processors in enumerate(([spoil, spoil], [])):
        sampler.assign(slot, SamplingParams(logits_processors=processors), 0)
    logits, history = torch.stack([LOGITS, LOGITS]), history_of(([1, 2], [3]), ([1, 2], [3]))
    sampled = sampler.sample(logits, int32(0, 1), int32(3, 3), history)
    assert sampled.tokens.tolist() == [0, 1]  # all alike: the lowest id
    assert torch.equal(logits, torch.stack([LOGITS, LOGITS]))
    assert history.tokens[:, :3].tolist() == [[1, 2, 3]] * 2
    sampler.check()


def test_temperature_and_the_filters_come_after_it() -> None:
    for seed in range(20):
        params = SamplingParams(temperature=5.0, top_k=2, logits_processors=[ban(1)])
        assert sample_one(LOGITS, params, seed, 1, [0], []) in (2, 3)


def test_min_tokens_masks_end_ids_after_it() -> None:
    params = SamplingParams(min_tokens=1, logits_processors=[lambda tokens, logits: [0, 0, 9, 8]])
    assert sample_one(LOGITS, params, 0, 1, [0], [], end_ids=[2]) == 3


def test_log_probabilities_are_the_models_own() -> None:
    sampler = Sampler(1, 4)
    sampler.assign(0, SamplingParams(logits_processors=[ban(1)], logprobs=1), 0)
    sampled = sampler.sample(LOGITS[None], int32(0), int32(1), history_of(([0], [])))
    assert sampled.logprobs[0].token_id == 3 and sampled.logprobs[0].top[0][0] == 1


def test_equal_processors_make_equal_parameters_that_hash() -> None:
    one = ban(1)
    assert SamplingParams(logits_processors=[one]) == SamplingParams(logits_processors=(one,))
    assert SamplingParams(logits_processors=[one]) != SamplingParams(logits_processors=[ban(1)])
    assert hash(SamplingParams(logits_processors=[{}.get])) == hash(SamplingParams())


# Failures -----------------------------------------------------------------------------------------------------------


def raises(tokens, logits):
    raise KeyError("lost")


class Biased:
    def __call__(self, tokens, logits):
        return logits[:2]


FAILURES = [
    (raises, r"the logits processor raises failed: KeyError: 'lost'"),
    (Biased(), r"the logits processor Biased failed: it must give 4 numbers, got shape \(2,\) of float32"),
    (lambda tokens, logits: np.zeros((4, 1)), r"got shape \(4, 1\)"),
    (lambda tokens, logits: ["a", "b", "c", "d"], r"must give 4 numbers, got shape \(4,\) of <U1"),
    (lambda tokens, logits: np.zeros(4, np.complex64), "of complex64"),
    (lambda tokens, logits: 3.0, r"got shape \(\)"),
    (lambda tokens, logits: np.array([0, np.nan, 0, 0]), "NaN"),
    (lambda tokens, logits: np.array([0, np.inf, 0, 0]), "NaN or \\+inf"),
    (lambda tokens, logits: np.full(4, -np.inf), "only -inf"),
    (lambda tokens, logits: logits.__setitem__(0, np.nan), "NaN"),
]


@pytest.mark.parametrize(("processor", "message"), FAILURES)
def test_a_failure_names_the_processor_and_what_it_did(processor, message: str) -> None:
    with pytest.raises(ProcessorFailed, match=message):
        process([ban(0), processor, ban(1)], int32(1), LOGITS.double().numpy())
    with pytest.raises(BadLogits, match=message):
        draw(processor)


def test_failed_rows_are_named_each_with_its_reason_and_the_others_can_be_drawn() -> None:
    sampler = Sampler(4, 4)
    for slot, processors in enumerate(([], [raises], [ban(1)], [Biased()])):
        sampler.assign(slot, SamplingParams(logits_processors=processors), 0)
    history = history_of(*[([0], [])] * 4)
    logits = LOGITS.repeat(4, 1)
    with pytest.raises(ProcessorFailed, match="raises") as caught:
        sampler.sample(logits, int32(0, 1, 2, 3), int32(1, 1, 1, 1), history)
    assert caught.value.rows == (1, 3)
    assert caught.value.reason(1).startswith("ProcessorFailed: the logits processor raises")
    assert caught.value.reason(3).startswith("ProcessorFailed: the logits processor Biased")
    assert sampler.sample(logits[:2], int32(0, 2), int32(1, 1), history).tokens.tolist() == [1, 3]


def test_an_interrupt_is_no_failure_of_the_row() -> None:
    def interrupt(tokens, logits):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw(interrupt)


# By hand ------------------------------------------------------------------------------------------------------------


def test_a_session_samples_through_them() -> None:
    model = EchoModel()
    session = Session(model, model.create_kv_pool(num_pages=8))
    session.eval([1, 2, 3])
    best = session.sample()
    seen = []
    params = SamplingParams(logits_processors=[lambda tokens, logits: seen.append(tokens.tolist()), ban(best)])
    assert session.sample(params) == int(np.argsort(-model.oracle([1, 2, 3]), kind="stable")[1])
    assert seen == [[1, 2, 3]]
    with pytest.raises(ProcessorFailed, match="raises"):
        session.sample(SamplingParams(logits_processors=[raises]))


def test_ids_outside_the_vocabulary_are_refused_as_ever() -> None:
    with pytest.raises(InvalidRequest):
        draw(ban(1), logit_bias={9: 1.0})
