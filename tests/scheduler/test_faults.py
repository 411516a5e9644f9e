"""A fault at any point of a step ends the requests concerned with "error", and nobody else notices."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from byhand import span
from fakes import ByteTokenizer, EchoHybrid, EchoLooped, EchoModel

from paged.kv.pages import PagePool
from paged.kv.state import StatePool
from paged.ops.cpu import CpuBackend
from paged.prefix.cache import PrefixCache
from paged.prefix.checkpoints import CheckpointStore
from paged.prefix.index import PrefixIndex
from paged.sampler import Sampler
from paged.text import OutputText
from scheduler import Engine, SamplingParams, SchedulerConfig
from scheduler.checkpointer import Checkpointer
from scheduler.live import Live
from scheduler.output import RequestOutput
from scheduler.placement import Placer
from scheduler.proposer import PromptLookup
from scheduler.scheduler import Scheduler
from scheduler.sharing import StepSharing
from scheduler.slots import Slots

# where, of what, and whether a step computed for others may end with it
POINTS: dict[str, tuple[object, str]] = {
    "allocation": (PagePool, "alloc"),
    "a page more for a decode": (Slots, "extend"),
    "placing": (Placer, "place"),
    "a slot": (Slots, "place"),
    "the look-up": (PrefixCache, "seek"),
    "attaching": (PrefixCache, "take"),
    "copying rows": (PrefixCache, "take_rows"),
    "the copy of a page": (CpuBackend, "copy_pages"),
    "looking for siblings": (StepSharing, "follow"),
    "the model": (EchoModel, "forward"),
    "the sampler": (Sampler, "sample"),
    "the sampler's parameters": (Sampler, "assign"),
    "publishing one page each": (PrefixIndex, "add_pages"),
    "publishing": (PrefixCache, "publish"),
    "publishing a tail": (PrefixCache, "publish_tail"),
    "giving pages back behind a window": (Slots, "leave"),
    "the commit": (Scheduler, "_publish"),
    "text": (OutputText, "push"),
    "the end of text": (OutputText, "flush"),
    "the callback of a token": (Live, "push"),
    "looking for a checkpoint": (Checkpointer, "find"),
    "leaving a checkpoint": (CheckpointStore, "insert"),
    "a snapshot": (StatePool, "snapshot"),
    "restoring a state": (StatePool, "restore"),
    "a checkpoint's stops": (Checkpointer, "begin"),
    "a stop": (Checkpointer, "reached"),
}
WHOLE_STEP = (
    "the model",
    "the sampler",
    "giving pages back behind a window",
    "the commit",
)  # these serve all requests at once
PROMPTS = [span(0, 21), span(0, 30), [*span(0, 16), *span(50, 9)], span(30, 7), [*span(0, 19), 40, 41, 42], span(0, 33)]
KINDS: dict[str, Callable[[], EchoModel]] = {
    "attention": EchoModel,
    "windows": lambda: EchoModel(windows=(0, 5)),
    "recurrent": EchoHybrid,
    "looped": lambda: EchoLooped(max_loops=3),
}


class Injected(RuntimeError):
    pass


def inject(patch: pytest.MonkeyPatch, owner: object, name: str, at: set[int]) -> list[int]:
    """Make the calls number `at` of a function fail before they do anything; returns where the calls are counted."""
    real, calls = getattr(owner, name), [0]

    def failing(*args, **kwargs):
        calls[0] += 1
        if calls[0] in at:
            raise Injected(f"call {calls[0]} of {name}")
        return real(*args, **kwargs)

    patch.setattr(owner, name, failing)
    return calls


def engine_of(kind: str, mode: str) -> Engine:
    model = KINDS[kind]()
    model.tokenizer = ByteTokenizer([bytes([65 + i % 26]) for i in range(97)])
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, watermark=0.0, plan_ahead=mode == "ahead")
    pages = 14 * model.spec.view().num_groups
    proposer = PromptLookup(2, 1) if mode == "drafts" else None
    return Engine(model, page_size=4, num_pages=pages, config=config, proposer=proposer)


def drain(engine: Engine) -> dict[str, RequestOutput]:
    """The outputs of two waves of requests, of which the second finds what the first has cached."""
    outputs: dict[str, RequestOutput] = {}
    for wave in range(2):
        for i, prompt in enumerate(PROMPTS):
            if i % 2 == wave:
                engine.submit(prompt, SamplingParams(max_tokens=4 + i), request_id=str(i))
        for _ in range(500):
            if not engine.has_work:
                break
            for event in engine.step():
                if event.output is not None:
                    assert event.request_id not in outputs, "a request ended twice"
                    outputs[event.request_id] = event.output
            engine.check()
    return outputs


@pytest.mark.parametrize("mode", ["plain", "ahead", "drafts"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", POINTS)
def test_a_fault_ends_the_requests_concerned_and_no_other(
    point: str, kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "recurrent" and mode == "drafts":
        pytest.skip("drafts need a model without recurrent state")
    owner, name = POINTS[point]
    reached = 0
    for at in ({1}, {2}, {5}, {3, 4}, {9, 10, 11}):
        with monkeypatch.context() as patch:
            engine = engine_of(kind, mode)
            calls = inject(patch, owner, name, at)
            outputs = drain(engine)
            assert sorted(outputs) == [str(i) for i in range(len(PROMPTS))], "a request never ended"
            reached += calls[0] >= min(at)
            failed = 0
            for i, prompt in enumerate(PROMPTS):
                output, right = outputs[str(i)], engine.model.greedy(prompt, 4 + i)
                if output.finish_reason == "error":
                    failed += 1
                    assert "Injected" in output.error
                    assert output.token_ids == right[: len(output.token_ids)]
                else:
                    assert (output.finish_reason, output.token_ids) == ("length", right)
            assert failed <= (4 if point in WHOLE_STEP else 1) * len(at)
            assert engine.pool.num_live == 0
        [after] = engine.generate([PROMPTS[1]], SamplingParams(max_tokens=6))
        assert after.token_ids == engine.model.greedy(PROMPTS[1], 6)
        engine.check()
        engine.close()
        assert engine.pool.num_free == engine.pool.num_pages
    if (kind, mode) == ("attention", "plain") and owner not in (CheckpointStore, StatePool, Checkpointer):
        assert reached or name == "leave", "the fault was never reached"
    if kind == "recurrent" and owner in (CheckpointStore, StatePool, Checkpointer):
        assert reached, "the fault was never reached"


def test_logits_of_one_row_that_are_unusable_end_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("attention", "plain")
    real = engine.model.forward

    def forward(batch, storage):
        logits = real(batch, storage)
        if engine.model.num_forwards == 6:
            logits[0] = np.nan
        return logits

    engine.model.forward = forward
    outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=8))
    assert [o.finish_reason for o in outputs].count("error") == 1
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        if output.finish_reason != "error":
            assert output.token_ids == engine.model.greedy(prompt, 8)


@pytest.mark.parametrize("name", ["forward", "sample"])
def test_an_interrupt_reaches_the_caller_and_the_engine_goes_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("attention", "ahead")
    owner = EchoModel if name == "forward" else Sampler
    real, calls = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, SamplingParams(max_tokens=8))
    monkeypatch.undo()
    engine.check()
    [output] = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=8))
    assert output.token_ids == engine.model.greedy(PROMPTS[0], 8)
    assert sys.exc_info() == (None, None, None)
