"""Three ways to use the engine: a batch, a stream, and a question before the request is accepted.

python examples/01_quickstart.py
"""

from __future__ import annotations

from scheduler import Engine, SamplingParams

SYSTEM = "You are a friendly ship's cook. You answer in one short sentence. " * 6


def main() -> None:
    engine = Engine("smollm2")
    model = engine.model
    assert model.chat is not None and model.tokenizer is not None

    def chat(question: str):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        return model.chat.encode(model.tokenizer, messages)

    # A batch: outputs come back in input order; the common system prompt is computed once.
    params = SamplingParams(max_tokens=24)
    outputs = engine.generate([chat("What is for dinner?"), chat("Is there cake?")], params)
    for output in outputs:
        print(f"{output.text!r}  (cached {output.num_cached_tokens} of {output.num_prompt_tokens})")

    # Admission control: how much of a prompt would be attached right now? Asking changes nothing.
    prompt = chat("May I have some tea?")
    print(f"the cache holds {engine.prefix_match_len(prompt)} of {len(prompt)} prompt tokens")

    # A stream: whole characters as they come; leaving the loop early would cancel the request.
    for event in engine.stream(prompt, params):
        print(event.text, end="", flush=True)
    print()

    # Sampling depends on (seed, position) only: the same seed gives the same text, whoever else is running.
    warm = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=7)
    first, second = engine.generate([prompt, prompt], warm)
    print(f"same seed, same text: {first.text == second.text}")
    engine.check()
    engine.close()


if __name__ == "__main__":
    main()
