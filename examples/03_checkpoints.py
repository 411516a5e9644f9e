"""Models that carry state between tokens: what is cached of them, and where a prefill must stop to leave it.

Most layers of such a model keep a running state that only moves forward. Pages do not hold it, so the cache keeps
checkpoints: tokens, their pages, and the state after exactly these tokens. A prompt attaches a checkpoint only if it
begins with all of it. First by hand, then the same through an engine. The model has random weights and no tokenizer,
so prompts are token ids; a chat's marks come from ChatRenderer.render_marked.

python examples/03_checkpoints.py
"""

from __future__ import annotations

import numpy as np

from paged import PrefixCache, SamplingParams, Session, load_model
from paged.models.base import LanguageModel
from scheduler import Engine
from scheduler.request import PrefillStops

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
rng = np.random.default_rng(0)
join = np.concatenate


def text(num_tokens: int) -> np.ndarray:
    """That many tokens that nobody has said before."""
    return rng.integers(0, 512, num_tokens).astype(np.int32)


HEAD = text(32)  # what every prompt begins with
OPENING = join([HEAD, text(64)])  # with one system text behind it


def show(cache: PrefixCache) -> None:
    kept = sorted((c.num_tokens, "opening" if c.opening else "tail") for c in cache.checkpoints or ())
    print("  kept:", ", ".join(f"{kind} of {tokens} tokens" for tokens, kind in kept))


def turn(model: LanguageModel, cache: PrefixCache, prompt: np.ndarray) -> np.ndarray:
    """Attach, stop where a checkpoint helps others, evaluate the rest, answer; returns the history."""
    session = Session(model, cache.pool)
    matched = cache.attach(session, prompt)
    stop = cache.checkpoint_at(session, prompt, matched, len(OPENING))
    if stop:
        session.eval(prompt[matched:stop])
        cache.insert(session, prompt, opening=True)  # records where the session stands now
    session.eval(prompt[session.n_past :])
    while session.n_past < len(prompt) + 8:
        session.eval([session.sample(GREEDY)])
    cache.insert(session, session.tokens)  # the conversation's own: a tail
    print(f"  cached {matched} of {len(prompt)}, stopped at {stop}")
    history = session.tokens.copy()
    session.release()
    return history


def by_hand() -> None:
    model = load_model("tiny:hybrid")
    pool = model.create_kv_pool(num_pages=64, page_size=16)
    cache = PrefixCache(pool, max_states=16, max_state_bytes=1 << 30)
    print("a first conversation stops after its opening")
    history = turn(model, cache, join([OPENING, text(40)]))
    print("a second conversation on the same system text attaches the opening")
    turn(model, cache, join([OPENING, text(50)]))
    print("the next turn of the first conversation attaches its tail")
    turn(model, cache, join([history, text(30)]))
    show(cache)
    cache.release()
    print(f"  after release {pool.num_free} of {pool.num_pages} pages are free")


def by_engine() -> None:
    engine = Engine("tiny:hybrid", num_pages=256)
    prompt = join([OPENING, text(100)])
    stable, messages_end = len(prompt) - 40, len(prompt) - 10
    stops = PrefillStops(len(HEAD), len(OPENING), stable, messages_end)
    for name, tokens in (
        ("a request names up to four places to stop at", prompt),
        ("another system text shares the head", join([HEAD, text(90)])),
        ("another conversation shares the opening", join([OPENING, text(80)])),
        ("another last message shares what is stable", join([prompt[:stable], text(40)])),
        ("the next turn shares every message", join([prompt[:messages_end], text(40)])),
    ):
        engine.submit(tokens, GREEDY, stops=stops if tokens is prompt else None)
        outputs = []
        while engine.has_work:
            outputs += [event.output for event in engine.step() if event.output is not None]
        [cold] = Engine(engine.model, num_pages=32).generate(tokens, GREEDY)
        if outputs[0].token_ids != cold.token_ids:
            raise SystemExit(f"{name}: a cold engine says {cold.token_ids}, this one {outputs[0].token_ids}")
        print(f"{name}\n  cached {outputs[0].num_cached_tokens} of {len(tokens)}; a cold engine says the same tokens")
        if tokens is prompt and engine.cache is not None:
            show(engine.cache)


if __name__ == "__main__":
    by_hand()
    print()
    by_engine()
