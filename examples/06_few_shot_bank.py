"""A bank of few-shot templates: the deepest one that a prompt starts with is used, however deep the caller goes.

The templates nest: one example, three, five. They share their pages, so the bank takes little more memory than its
longest template. A template that is the whole prompt needs no forward for its first token. The scores of the
candidate answers come from beam search over the same pages, and a grammar keeps an answer to one of the labels.

python examples/06_few_shot_bank.py
"""

from __future__ import annotations

from paged import Grammar, PrefixPool
from scheduler import Model

# A template ends where a token surely ends, in front of white space: "\n\n" at the end of a text is another token than
# in front of a word.
TASK = "Say whether a review is good or bad."
SHOTS = [
    "\n\nReview: The soup was cold and the waiter was rude.\nVerdict: bad",
    "\n\nReview: A lovely room, and the best breakfast of the trip.\nVerdict: good",
    "\n\nReview: We waited two hours for one small pizza.\nVerdict: bad",
    "\n\nReview: Clean, quiet, and close to the station.\nVerdict: good",
    "\n\nReview: The bed was broken and nobody cared.\nVerdict: bad",
]
REVIEWS = [
    "The staff remembered our names, and the cake was wonderful.",
    "The shower never worked and it smelled of smoke.",
]


def main() -> None:
    with Model("smollm2", max_seq_len=1024, num_pages=512) as model:
        bank = PrefixPool(capacity=8, eviction="lru")
        for count in (0, 1, 3, 5):
            model.register_prefix(bank, model.encode(TASK + "".join(SHOTS[:count])))
        print(
            f"{bank.size()} templates of {bank.total_cached_tokens()} tokens in all, "
            f"{bank.unique_cached_tokens()} of them are kept"
        )
        assert bank.unique_cached_tokens() < bank.total_cached_tokens()

        for review in REVIEWS:
            tokens = model.encode(TASK + "".join(SHOTS) + f"\n\nReview: {review}\nVerdict:")
            entry = bank.match(tokens)
            assert entry is not None
            verdict = model.generate_with_pool(
                bank, tokens, max_tokens=4, temperature=0.0, grammar=Grammar.regex(" (good|bad)")
            )
            print(f"{review} ->{model.decode(verdict[len(tokens) :])} (from a template of {entry.num_tokens} tokens)")
            best = model.generate_with_pool(bank, tokens, max_tokens=2, num_beams=3, n=3)
            print("  beams:", [model.decode(beam[len(tokens) :]) for beam in best])

        whole = bank.entries()[0]
        steps = model.engine.stats()["num_steps"]
        [*_, first] = model.generate_from_prefix_cache(whole.handle, max_tokens=1)
        print(f"a prompt that is a template: first token {model.decode([first])!r}, no forward")
        assert model.engine.stats()["num_steps"] == steps


if __name__ == "__main__":
    main()
