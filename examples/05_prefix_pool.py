"""Many tenants, one model: a pool of system prompts, from which each request picks the longest that it starts with.

Each tenant's prompt is computed once, at startup. A request brings its whole conversation as token ids and names no
tenant: `generate_with_pool` finds the prefix by its tokens. Requests of several threads run as one batch. The pages of
a prefix are shared by all of its requests; nothing is copied but a partial last page.

python examples/05_prefix_pool.py
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from paged import PrefixPool
from scheduler import Model

TENANTS = {
    "bakery": "You answer for a bakery. Bread is baked at five and sold from seven; there is no bread on Sundays. "
    "Birthday cakes are ordered three days ahead. You are brief, warm, and you never promise what is not in this text.",
    "library": "You answer for a town library. Books are lent for four weeks and films for one. Late books cost ten "
    "cents a day. The reading room is open until ten. You are brief and exact, and you name the shelf where you can.",
    "ferry": "You answer for a ferry line. Boats leave on the hour from both banks, in fog they wait. Bicycles travel "
    "free, dogs need a ticket. You are brief, and where somebody may miss a boat you say so first.",
}
QUESTIONS = [
    ("bakery", "Can I have a cake tomorrow?"),
    ("ferry", "May my dog come along?"),
    ("library", "How long may I keep a film?"),
    ("bakery", "When is the bread ready?"),
]


def prompt(model: Model, tenant: str, question: str = "") -> list[int]:
    """A tenant's system text, and a question behind it, as the model's chat template writes them."""
    text = f"<|im_start|>system\n{TENANTS[tenant]}<|im_end|>\n"
    if question:
        text += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return model.encode(text)


def main() -> None:
    with Model("smollm2", max_seq_len=1024, num_pages=512) as model:
        pool = PrefixPool(capacity=64)
        for tenant in TENANTS:
            print(f"{tenant}: {model.register_prefix(pool, prompt(model, tenant))} tokens kept")
        print(f"entries {pool.size()}, tokens {pool.total_cached_tokens()}")

        def answer(tenant: str, question: str) -> list[int]:
            tokens = prompt(model, tenant, question)
            return model.generate_with_pool(pool, tokens, max_tokens=24, temperature=0.0)[len(tokens) :]

        before = model.engine.stats()["computed_tokens"]
        with ThreadPoolExecutor(len(QUESTIONS)) as threads:
            answers = list(threads.map(lambda pair: answer(*pair), QUESTIONS))
        for (tenant, question), tokens in zip(QUESTIONS, answers, strict=True):
            print(f"{tenant}: {question} {model.decode(tokens)!r}")
        asked = sum(len(prompt(model, *pair)) for pair in QUESTIONS)
        computed = model.engine.stats()["computed_tokens"] - before
        print(f"{asked} prompt tokens asked, {computed} rows computed for prompts and answers together")
        assert model.stats.pool_hits == len(QUESTIONS)
        assert computed < asked + sum(map(len, answers)) - pool.total_cached_tokens()

        tokens = prompt(model, *QUESTIONS[0])
        alone = model.generate(tokens, max_tokens=24, temperature=0.0)[len(tokens) :]
        print("the same tokens as without the pool:", alone == answers[0])
        assert alone == answers[0]


if __name__ == "__main__":
    main()
