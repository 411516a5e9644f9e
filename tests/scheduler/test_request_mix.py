"""Requests of every kind together: each gives what it gives alone, whatever cuts, shares, drafts or plans ahead."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from fakes import EchoHybrid, EchoModel

from scheduler import Engine, MediaSpan, SamplingParams, SchedulerConfig

HEAD = np.random.default_rng(1).integers(0, 97, 30).tolist()


class Guesses:
    """Two tokens that greedy decoding would give where there is no media, then one that it hardly gives."""

    def propose(self, tokens, most):
        if int(tokens.min()) < 0:
            return [int(tokens[-1])] * most
        return [*EchoModel().greedy(tokens.tolist(), 2), 5][:most]


MODES = {
    "plain": {},
    "no cache": {"prefix_cache": False},
    "chunks": {"config": SchedulerConfig(max_num_batched_tokens=13, max_num_seqs=8)},
    "few rows": {"config": SchedulerConfig(max_chunk_tokens=5, max_num_seqs=3)},
    "short pool": {"num_pages": 14},
    "ahead": {"config": SchedulerConfig(plan_ahead=True, max_num_batched_tokens=40)},
    "ahead, short pool": {"config": SchedulerConfig(plan_ahead=True, max_num_batched_tokens=24), "num_pages": 14},
    "drafts": {"proposer": Guesses()},
    "drafts, short pool": {"proposer": Guesses(), "num_pages": 14, "page_size": 5},
}


def halve(tokens, logits) -> None:
    logits[int(tokens[-1]) % 2 :: 2] -= 4.0


def mix(n: int, seed: int) -> list[tuple[list[int], SamplingParams, dict]]:
    rng, requests = np.random.default_rng(seed), []
    for i in range(n):
        prompt = HEAD[: int(rng.integers(1, 31))] + rng.integers(0, 97, int(rng.integers(1, 12))).tolist()
        options: dict = {}
        if i % 3 == 0:
            first, last = sorted(rng.integers(0, len(prompt) + 1, 2).tolist())
            if first < last:
                values = [[token, float(rng.integers(2))] for token in prompt[first:last]]
                options["media"] = [MediaSpan(first, np.array(values))]
                prompt = prompt[:first] + [0] * (last - first) + prompt[last:]
        if i % 4 == 1:
            options["cache"] = False
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 20)),
            temperature=float(rng.choice([0.0, 0.8])),
            seed=i,
            top_p=0.95,
            logprobs=2 if i % 5 == 0 else None,
            prompt_logprobs=1 if i % 2 == 0 else None,
            repetition_penalty=1.1 if i % 7 == 0 else 1.0,
            logits_processors=[halve] if i % 3 == 1 else (),
        )
        requests.append((prompt, params, options))
    return requests


def result(output) -> tuple:
    return output.token_ids, output.finish_reason, output.logprobs, output.prompt_logprobs


def alone(model, request) -> tuple:
    prompt, params, options = request
    return result(Engine(model, num_pages=64).generate([prompt], params, **options)[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", [EchoModel, EchoHybrid], ids=["attention", "recurrent"])
def test_every_request_gives_what_it_gives_alone(model, mode: str) -> None:
    settings = {"num_pages": 64, **MODES[mode]}
    if model is EchoHybrid and ("proposer" in settings or settings["num_pages"] < 64):
        pytest.skip("recurrent models take no drafts, and a short pool is for pages")
    engine, requests = Engine(model(), **settings), mix(24, seed=5)
    want = [alone(model(), request) for request in requests]
    for _ in range(2):  # cold, then warm
        names, got = [], {}
        for i, (prompt, params, options) in enumerate(requests):
            names.append(engine.submit(prompt, params, **options))
            for event in engine.step() if i % 3 == 2 else ():
                got[event.request_id] = event.output
        while engine.has_work:
            for event in engine.step():
                got[event.request_id] = event.output
            engine.check()
        assert [result(got[name]) for name in names] == want
    assert engine.pool.num_live == 0 and not engine.scheduler.extras._of
    stats = engine.stats()
    assert stats["num_preemptions"] > 0 or "short pool" not in mode
    assert stats["drafted_tokens"] > stats["accepted_tokens"] > 0 or "drafts" not in mode


def test_the_mix_holds_what_it_should() -> None:
    requests = mix(24, seed=5)
    kinds = Counter()
    for _, params, options in requests:
        kinds.update(
            [*options, *(name for name in ("prompt_logprobs", "logprobs") if getattr(params, name) is not None)]
        )
    assert all(kinds[name] >= 4 for name in ("media", "cache", "prompt_logprobs", "logprobs"))


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_requests_cancelled_while_their_step_runs_score_nothing_more(plan_ahead: bool) -> None:
    config = SchedulerConfig(plan_ahead=plan_ahead, max_num_batched_tokens=16, max_num_seqs=2)
    engine = Engine(EchoModel(), num_pages=64, config=config)
    params = SamplingParams(max_tokens=3, prompt_logprobs=0)
    for again in range(3):
        engine.submit(HEAD, params, request_id="same")
        engine.submit(HEAD[5:], params, request_id=f"other {again}")
        engine.step()
        assert engine.cancel("same")
        engine.submit(HEAD[::-1], params, request_id="same")  # the name is free at once
        outputs = {}
        while engine.has_work:
            for event in engine.step():
                outputs.setdefault(event.request_id, []).append(event.output)
            engine.check()
        first, last = [output for output in outputs["same"] if output is not None]
        assert (first.finish_reason, last.finish_reason) == ("cancelled", "length")
        assert len(first.prompt_logprobs) <= 30 and len(last.prompt_logprobs) == 30
        assert last.token_ids == engine.model.greedy(HEAD[::-1], 3)
