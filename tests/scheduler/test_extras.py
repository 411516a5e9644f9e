"""StepExtras: what a plan holds for requests that ask for more than their next token."""

from __future__ import annotations

import numpy as np
from byhand import span
from fakes import EchoModel

from scheduler import Engine, MediaSpan, SamplingParams, SchedulerConfig

SCORED = SamplingParams(max_tokens=3, prompt_logprobs=0)


def engine_of(budget: int = 512) -> Engine:
    return Engine(
        EchoModel(), num_pages=64, config=SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=min(8, budget))
    )


def media(start: int, num_tokens: int) -> MediaSpan:
    return MediaSpan(start, np.full((num_tokens, 2), 3.0))


def plans(engine: Engine) -> list:
    """Every plan of a run to the end."""
    seen, schedule = [], engine.scheduler.schedule

    def note():
        plan = schedule()
        if plan is not None:
            seen.append(plan)
        return plan

    engine.scheduler.schedule = note  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
        engine.check()
    return seen


def rows_of(plan) -> list[tuple[int, int]]:
    return [(row, len(values)) for row, values in plan.batch.media]


def test_rows_of_media_and_of_scores_follow_the_chunks() -> None:
    engine = engine_of(10)
    engine.submit(span(0, 24), SCORED, media=[media(4, 8), media(12, 1), media(20, 4)])
    first, second, third, *rest = plans(engine)
    assert [rows_of(plan) for plan in (first, second, third)] == [[(4, 6)], [(0, 2), (2, 1)], [(0, 4)]]
    assert first.batch.tokens.tolist() == [0, 1, 2, 3, -5, *[-6] * 5]
    assert second.batch.tokens[:3].tolist() == [-6, -6, -7]
    assert [(r.first, r.count) for plan in (first, second, third) for r in plan.scored] == [(0, 10), (10, 10), (20, 3)]
    assert third.batch.logit_rows.tolist() == [3, 0, 1, 2]  # the sampled row first
    assert not any(plan.batch.media or plan.scored for plan in rest)
    assert np.array_equal(first.batch.media[0][1], np.full((6, 2), 3.0))


def test_rows_are_those_of_the_request_among_others() -> None:
    engine = engine_of()
    engine.submit(span(0, 5), SamplingParams(max_tokens=3))
    engine.submit(span(10, 6), SamplingParams(max_tokens=3), media=[media(1, 2)])
    engine.submit(span(20, 4), SCORED)
    plan = plans(engine)[0]
    assert rows_of(plan) == [(6, 2)]
    assert plan.batch.logit_rows.tolist() == [4, 10, 14, 11, 12, 13]
    assert len(plan.sample_slots) == 3


def test_nothing_is_kept_once_prompts_are_computed_or_requests_are_gone() -> None:
    engine = engine_of(10)
    engine.submit(span(0, 24), SCORED, request_id="a")
    engine.step()
    assert list(engine.scheduler.extras._of.values()) == [engine.scheduler.requests["a"]]
    engine.cancel("a")
    assert not engine.scheduler.extras._of
    engine.submit(span(0, 9), SamplingParams(max_tokens=9, prompt_logprobs=0))
    for _ in range(3):
        engine.step()
    assert engine.has_work and not engine.scheduler.extras._of
