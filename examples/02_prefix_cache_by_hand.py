"""The prefix cache by hand, with no scheduler: where the prefill that is skipped goes.

Stream A evaluates a prompt and donates its pages. Stream B, whose prompt begins with the same system text, asks how
much of it is cached, attaches that, and evaluates only what is left. Once with whole pages, as the cache matches by
default, and once to the token.

python examples/02_prefix_cache_by_hand.py
"""

from __future__ import annotations

from paged import ChatRenderer, PrefixCache, SamplingParams, Session, load_model
from paged.models.base import LanguageModel

SYSTEM = (  # with what the template puts around it, 60 tokens
    "You keep the lighthouse on Gull Rock: the lamp, the log and the tea. You answer visitors in one short sentence, "
    "and never invent facts about the sea. If you do not know, say so, and offer the visitor a cup of tea instead."
)


def prompt_of(model: LanguageModel, question: str):
    chat = ChatRenderer(model, SYSTEM)
    chat.add_user(question)
    return chat.render_marked().tokens


def answer(session: Session, max_tokens: int = 16) -> list[int]:
    """The next tokens, one at a time, of a session whose prompt was evaluated."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        token = session.sample(SamplingParams(temperature=0.0))
        if token in session.model.eos_token_ids:
            break
        tokens.append(token)
        session.eval([token])
    return tokens


def walk(model: LanguageModel, partial: bool) -> None:
    pool = model.create_kv_pool(num_pages=64, page_size=16)
    cache = PrefixCache(pool, partial=partial)

    # Stream A evaluates its whole prompt, answers, donates all that it evaluated, and gives its pages back.
    a = Session(model, pool)
    a.eval(prompt_of(model, "How high is the lamp?"))
    answer(a)
    cache.insert(a, a.tokens, preview="How high is the lamp?")
    a.release()

    # Before B takes anything: asking attaches nothing and touches no entry.
    prompt = prompt_of(model, "Is there any tea left?")
    print(f"the cache holds {cache.match_len(prompt)} of B's leading tokens")

    # The matched pages join B's page table, and B evaluates the rest.
    b = Session(model, pool)
    matched = cache.attach(b, prompt)
    b.eval(prompt[matched:])
    print(f"cached {matched} of {len(prompt)}, evaluated {len(prompt) - matched}")

    # B must say what a stream says that evaluated everything itself, in a pool of its own.
    cold = Session(model, model.create_kv_pool(num_pages=8, page_size=16))
    cold.eval(prompt)
    warm_tokens, cold_tokens = answer(b), answer(cold)
    assert model.tokenizer is not None
    said, want = model.tokenizer.decode(warm_tokens), model.tokenizer.decode(cold_tokens)
    print(f"B says {said!r}, a cold stream {want!r}")
    if warm_tokens != cold_tokens:
        raise SystemExit("these are not the same tokens")
    b.release()

    # What the cache holds, and giving it back.
    for chain in cache.chains():
        print(f"chain {chain.id}: {chain.num_tokens} tokens, {chain.num_hits} hit(s), {chain.preview!r}")
    print(f"cache holds {cache.held_pages} page(s)")
    cache.release()
    print(f"after release {pool.num_free} of {pool.num_pages} pages are free")


def main() -> None:
    model = load_model("smollm2")
    for partial in (False, True):
        print(f"PrefixCache(pool, partial={partial})")
        walk(model, partial)
        print()


if __name__ == "__main__":
    main()
