"""`paged demo`: a few chat requests over one system prompt, with and without the prefix cache."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

from paged.models.base import LanguageModel
from paged.sampling import SamplingParams
from scheduler.engine import Engine
from scheduler.output import RequestOutput

SYSTEM = """You are the help desk of the Harbour Museum, a small museum of ships and sailors in an old customs house.
The museum is open from Tuesday to Sunday, from ten in the morning to six in the evening, and on Thursdays until nine.
It is closed on Mondays, on the first of January and on the twenty-fifth of December. A ticket costs nine euros; for
students, pensioners and groups of ten or more it costs six, and for children under twelve it is free. The ground
floor shows fishing boats and nets, the first floor shows maps, compasses and sextants, and the second floor shows a
steam engine that runs every day at noon and at four. The library in the attic may be visited by appointment. The
cafe serves coffee, soup and cake until five. Guided tours in English start at eleven and at three and last one hour;
they meet at the anchor in the entrance hall. Bags larger than a backpack must be left in the lockers, which take a
one euro coin and give it back. Photographs are welcome without a flash. Dogs must stay outside, except guide dogs.
There is a lift to every floor and a wheelchair at the desk. The tram stop Old Harbour is two minutes away on foot.
Answer visitors in one or two short, friendly sentences, and only with what is written here."""

QUESTIONS = (
    "When are you open on Thursdays?",
    "How much is a ticket for a student?",
    "Where do the guided tours meet?",
    "Can I bring my dog?",
)


@dataclass
class Run:
    """One pass over the questions."""

    outputs: list[RequestOutput]
    wall_s: float
    first_token_s: float  # mean time to the first token of a request


def _ask(engine: Engine, prompts: list[Any], params: SamplingParams, show: bool) -> Run:
    outputs: list[RequestOutput] = []
    first: list[float] = []
    begin = time.perf_counter()
    for question, prompt in zip(QUESTIONS, prompts, strict=True):
        if show:
            print(f"\n> {question}")
        start = time.perf_counter()
        with engine.stream(prompt, params) as stream:
            for i, event in enumerate(stream):
                if i == 0:
                    first.append(time.perf_counter() - start)
                if show:
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
        assert stream.output is not None
        outputs.append(stream.output)
        if show:
            print(f"\n  cached {stream.output.num_cached_tokens} of {stream.output.num_prompt_tokens} prompt tokens")
    return Run(outputs, time.perf_counter() - begin, sum(first) / len(first))


def _figures(run: Run) -> dict[str, Any]:
    generated = sum(len(o.token_ids) for o in run.outputs)
    return {
        "wall_s": round(run.wall_s, 3),
        "tokens_per_s": round(generated / run.wall_s, 2),
        "first_token_s": round(run.first_token_s, 3),
        "prompt_tokens": sum(o.num_prompt_tokens for o in run.outputs),
        "cached_tokens": sum(o.num_cached_tokens for o in run.outputs),
        "generated_tokens": generated,
    }


def demo(model: LanguageModel, max_tokens: int = 48) -> dict[str, Any]:
    """Run the questions with the prefix cache (streamed to stdout) and without it, and print both side by side."""
    if model.chat is None or model.tokenizer is None:
        raise ValueError(f"the demo needs a chat model, and {model.name or 'this model'} has no chat template")
    prompts = [
        model.chat.encode(
            model.tokenizer, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        )
        for question in QUESTIONS
    ]
    params = SamplingParams(max_tokens=max_tokens)
    with Engine(model) as engine:
        engine.generate([prompts[0][:8]], SamplingParams(max_tokens=2))  # first use of the weights is slow
        engine.reset_prefix_cache()
        warm = _ask(engine, prompts, params, show=True)
    print("\nthe same questions without the prefix cache ...", flush=True)
    with Engine(model, prefix_cache=False) as engine:
        cold = _ask(engine, prompts, params, show=False)
    same = [o.token_ids for o in warm.outputs] == [o.token_ids for o in cold.outputs]
    on, off = _figures(warm), _figures(cold)
    print(f"\n{'prefix cache':22} {'on':>10} {'off':>10}")
    for label, name, unit in (
        ("wall time", "wall_s", "s"),
        ("time to first token", "first_token_s", "s"),
        ("tokens a second", "tokens_per_s", ""),
        ("prompt tokens", "prompt_tokens", ""),
        ("of them cached", "cached_tokens", ""),
    ):
        print(f"{label:22} {on[name]:>10} {off[name]:>10} {unit}")
    saved = on["cached_tokens"] / on["prompt_tokens"]
    print(f"prefill saved: {saved:.0%}; the same tokens with and without the cache: {'yes' if same else 'NO'}")
    return {"on": on, "off": off, "prefill_saved": round(saved, 4), "same_tokens": same}
