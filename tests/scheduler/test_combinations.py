"""Whatever a generation starts from, and however it runs, its tokens are those of the same call alone and cold."""

from __future__ import annotations

import threading
from functools import lru_cache

import pytest
from grammars import tokenizer
from token_api import counting, opened, prompt_of, with_layers_after

from paged import Grammar, PrefixPool, load_model
from paged.sampling import sample_seed
from scheduler import Model

NEW = 12
PROMPT = prompt_of(53)
STARTS = (
    "nothing",
    "the cache",
    "a pool",
    "a pool's whole entry",
    "a handle",
    "a handle of its beginning",
    "a resumed handle",
)
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 11},
    "seeded, penalties": {"temperature": 0.9, "seed": 2**63 + 5, "top_p": 0.95, "repetition_penalty": 1.3},
}
WAYS = {
    "generate": {},
    "stream": {"stream": True},
    "n": {"n": 3},
    "beams": {"num_beams": 3},
    "two of three beams": {"num_beams": 3, "n": 2},
    "grammar": {"grammar": Grammar.regex("[ab]{4,9}c|[x-z]{3,20}")},
    "grammar, stream": {"grammar": Grammar.regex("[0-9]{2,7}"), "stream": True},
    "grammar, n": {"grammar": Grammar.regex("[a-f]{1,20}"), "n": 3},
    "drafts": {"draft_loops": 3},
    "drafts, stream": {"draft_loops": 1, "stream": True},
    "drafts, n": {"draft_loops": 2, "n": 3},
    "drafts, grammar": {"draft_loops": 2, "grammar": Grammar.regex("[ab]{4,9}c|[x-z]{3,20}")},
    "stop ids": {"stop_sequences": "ids"},
    "stop ids, n": {"stop_sequences": "ids", "n": 2},
    "stop ids, drafts": {"stop_sequences": "ids", "draft_loops": 2},
    "stop ids, stream": {"stop_sequences": "ids", "stream": True},
    "a window": {"cache_window": 20},
    "a window, drafts": {"cache_window": 20, "draft_loops": 2},
    "a window, beams": {"cache_window": 20, "num_beams": 2},
    "other loops": {"loops": 5},
}


@lru_cache
def speaking(kind: str):
    """A looped model whose tokens have text, so that it can keep to a grammar."""
    model = load_model("tiny:looped", max_seq_len=128, device="cpu") if kind == "tiny" else with_layers_after()
    model.tokenizer = tokenizer()  # type: ignore[assignment]
    return model


def stops_of(plain: tuple[int, ...]) -> list[list[int]]:
    """Sequences of ids of which one ends `plain` early, one would later, and one never begins."""
    return [list(plain[9:11]), list(plain[6:8]), [plain[3], plain[3], plain[3]]]


@lru_cache
def arguments(kind: str, way: str, sampling: str) -> dict:
    args = {"max_tokens": NEW, **SAMPLING[sampling], **WAYS[way]}
    if args.get("stop_sequences") == "ids":
        args["stop_sequences"] = stops_of(plain(kind, sampling))
    return args


@lru_cache
def plain(kind: str, sampling: str) -> tuple[int, ...]:
    with Model(speaking(kind), num_pages=400, prefix_cache=False) as alone:
        return tuple(alone.generate(PROMPT, max_tokens=NEW, **SAMPLING[sampling])[len(PROMPT) :])


@lru_cache
def expected(kind: str, way: str, sampling: str) -> list:
    """What the call gives alone, without a cache, as plain decoding or beam search."""
    args = dict(arguments(kind, way, sampling))
    args.pop("stream", None), args.pop("draft_loops", None)
    count = args.pop("n", 1)
    outs = []
    if args.get("num_beams"):
        with Model(speaking(kind), num_pages=400, prefix_cache=False) as alone:
            outs = alone.generate(PROMPT, n=count, **args)
            return outs if count > 1 else [outs]
    for i in range(count):
        if "seed" in args:
            args["seed"] = sample_seed(SAMPLING[sampling]["seed"], i)
        with Model(speaking(kind), num_pages=400, prefix_cache=False) as alone:
            outs.append(alone.generate(PROMPT, **args))
    return outs


def call(api: Model, start: str, args: dict) -> list:
    """The whole streams that a call gives, from that start."""
    args = dict(args)
    depth = {"loops": args.get("loops"), "cache_window": args.get("cache_window", 0)}
    loops = api.engine.model.view(*depth.values()).loops
    stream, pool, source = args.pop("stream", False), PrefixPool(), PROMPT
    if start == "the cache":
        api.generate(PROMPT, max_tokens=1, **depth)
    elif start.startswith("a pool"):
        api.register_prefix(pool, PROMPT[:40], **depth)
        if start != "a pool":
            api.register_prefix(pool, PROMPT, **depth)
    elif start == "a handle":
        source = api.build_prefix_cache(PROMPT, **depth)
    elif start == "a resumed handle":
        source = api.build_resume_handle(PROMPT, loops - 3, cache_window=depth["cache_window"])
        if stream:
            source = api.resume(source, loops)
    elif start == "a handle of its beginning":
        pool.register(api.build_prefix_cache(PROMPT[:17], **depth))
    if stream:
        return [[*PROMPT, *api.generate_stream(source, pool=pool if pool.size() else None, **args)]]
    if pool.size():
        out = api.generate_with_pool(pool, PROMPT, **args)
        assert api.stats.pool_hits == 1 and api.stats.pool_fallbacks == 0
    elif start == "a handle":
        out = api.generate_from_prefix_cache(source, **args)
    elif start == "a resumed handle":
        args.pop("loops", None), args.pop("cache_window", None)
        out = api.resume_generate(source, loops, **args)
    else:
        out = api.generate(PROMPT, **args)
    return out if args.get("n", 1) > 1 else [out]


@pytest.mark.parametrize("kind", ["tiny", "layers after"])
@pytest.mark.parametrize(
    ("start", "cache"), [*((start, True) for start in STARTS), *((s, False) for s in STARTS if s != "the cache")]
)
def test_no_start_and_no_way_changes_a_token(kind: str, start: str, cache: bool) -> None:
    for way in WAYS:
        if kind == "layers after" and WAYS[way].get("loops"):
            continue  # its default is 4
        for sampling in SAMPLING if kind == "tiny" else ["seeded"]:
            if "num_beams" in WAYS[way] and sampling != "greedy":
                continue  # it draws nothing
            with opened(speaking(kind), num_pages=900, prefix_cache=cache) as api:
                got = call(api, start, arguments(kind, way, sampling))
                assert got == expected(kind, way, sampling), f"{way}, {sampling}"


def test_the_grid_is_not_empty_of_differences() -> None:
    """Ways and settings that change tokens do, and stop sequences end outputs early."""
    wholes = {sampling: plain("tiny", sampling) for sampling in SAMPLING}
    assert len(set(wholes.values())) == 3 and {len(tokens) for tokens in wholes.values()} == {NEW}
    for sampling in SAMPLING:
        assert len(expected("tiny", "stop ids", sampling)[0]) == len(PROMPT) + 6
        [guided] = expected("tiny", "grammar", sampling)
        assert guided[len(PROMPT) :] != list(wholes[sampling])
        [window] = expected("tiny", "a window", sampling)
        assert window[len(PROMPT) :] != list(wholes[sampling])
    assert len({tuple(out) for out in expected("tiny", "n", "seeded")}) == 3
    assert len({tuple(out) for out in expected("tiny", "drafts, n", "seeded")}) == 3
    assert expected("tiny", "beams", "greedy")[0][len(PROMPT) :] != list(wholes["greedy"])


def test_all_of_them_at_once_on_one_model_each_give_what_they_give_alone() -> None:
    """Threads with requests, beams and drafts, from every start, over one engine."""
    with opened(speaking("tiny"), num_pages=3000) as api:
        prefix, resume = api.build_prefix_cache(PROMPT), api.build_resume_handle(PROMPT, 4)
        pool = PrefixPool()
        api.register_prefix(pool, PROMPT[:40])
        names = [w for w in WAYS if not {"stream", "cache_window", "loops"} & set(WAYS[w])]
        got: dict = {}

        def work(way: str, start: int) -> None:
            args = dict(arguments("tiny", way, "seeded"))
            if start == 0:
                out = api.generate(PROMPT, **args)
            elif start == 1:
                out = api.generate_from_prefix_cache(prefix, **args)
            elif start == 2:
                out = api.generate_with_pool(pool, PROMPT, **args)
            else:
                out = api.resume_generate(resume, 8, **args)
            got[way] = out if args.get("n", 1) > 1 else [out]

        for way in names:
            expected("tiny", way, "seeded")
        threads = [threading.Thread(target=work, args=(way, i % 4)) for i, way in enumerate(names)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {way: expected("tiny", way, "seeded") for way in names}


# Threads share steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["prompts", "one handle"])
def test_calls_of_threads_run_as_one_batch(start: str) -> None:
    """Four threads with 20 tokens each: alone that is 80 forwards."""
    prompts = [prompt_of(30, seed=i) for i in range(4)]
    with opened(num_pages=1500, prefix_cache=False) as api:
        prefix = api.build_prefix_cache(prompts[0])
        more = [{"max_tokens": 20, "temperature": 1.0, "seed": i} for i in range(4)]
        alone = [api.generate(prompts[i if start == "prompts" else 0], **more[i]) for i in range(4)]
        got: list = [None] * 4
        ready = threading.Barrier(4)

        def work(i: int) -> None:
            ready.wait()
            if start == "prompts":
                got[i] = api.generate(prompts[i], **more[i])
            else:
                got[i] = api.generate_from_prefix_cache(prefix, **more[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        with counting(api.engine.model) as counted:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert got == alone
        assert counted.rows == 4 * 19 + (4 * 30 if start == "prompts" else 0)
        assert counted.forwards < 60  # about 22; nothing here waits for a clock, so the bound is wide


def test_drafts_and_beams_take_turns_with_requests_step_by_step() -> None:
    """Neither waits for the whole of the other: a request gets tokens while a search runs."""
    with opened(num_pages=1500, prefix_cache=False) as api:
        tokens = api.generate_stream(PROMPT[:20], max_tokens=40)
        drafted = api.generate_stream(PROMPT, max_tokens=40, draft_loops=2)
        pairs = [(next(tokens), next(drafted)) for _ in range(40)]
        assert [a for a, _ in pairs] == api.generate(PROMPT[:20], max_tokens=40)[20:]
        assert [b for _, b in pairs] == api.generate(PROMPT, max_tokens=40)[len(PROMPT) :]
        tokens.close(), drafted.close()  # type: ignore[attr-defined]
