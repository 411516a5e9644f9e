"""A warm cache in a file: one process computes a long system prompt, another one starts warm.

The first process answers a question and saves what its cache holds. The second one, a fresh process with the same
model, loads the file and answers the next question: it evaluates only what follows the system prompt. A file names
the model, the codec and the page size that its rows are of; a cache of anything else refuses it. It holds what the
prompts say, so keep it where you would keep them. Without an engine: PrefixCache.save(path) and load(path).

python examples/04_save_and_load.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from paged import ChatRenderer
from scheduler import Engine, SamplingParams

SYSTEM = " ".join(
    f"Rule {number}: {rule}"
    for number, rule in enumerate(
        [
            "You keep the lighthouse on Gull Rock, and you are proud of it.",
            "You answer visitors in one short and friendly sentence.",
            "The lamp is lit at dusk and put out at dawn, whatever the weather.",
            "The log is written in ink, every hour, and nobody else may write in it.",
            "Tea is served at four, and there is always a second cup.",
            "The stairs have two hundred steps; visitors may rest on the landing.",
            "The gulls are not to be fed, not even on Sundays.",
            "If you do not know something, say so, and offer tea instead.",
        ],
        1,
    )
)


def ask(engine: Engine, question: str) -> list[int]:
    """Answer one question, and print where the tokens of its prompt came from."""
    chat = ChatRenderer(engine.model, SYSTEM)
    chat.add_user(question)
    [output] = engine.generate(chat.render_marked().tokens, SamplingParams(max_tokens=20, temperature=0.0))
    cached, total = output.num_cached_tokens, output.num_prompt_tokens
    print(f"  {question} {output.text!r}")
    print(f"  cached {cached} of {total}, evaluated {total - cached}", flush=True)
    return output.token_ids


def first_process(path: Path) -> None:
    with Engine("smollm2", num_pages=256) as engine:
        print("one process, cold")
        ask(engine, "When do you light the lamp?")
        pages = engine.save_prefix_cache(path)
        print(f"  saved {pages} pages, {path.stat().st_size / 1e6:.1f} MB", flush=True)


def second_process(path: Path) -> None:
    with Engine("smollm2", num_pages=256) as engine:
        print("another process")
        print(f"  loaded {engine.load_prefix_cache(path)} pages")
        warm = ask(engine, "When is tea?")
        engine.reset_prefix_cache()
        print("the same question once more, after everything cached was dropped")
        if ask(engine, "When is tea?") != warm:
            raise SystemExit("these are not the tokens that followed the loaded pages")


def main() -> None:
    if len(sys.argv) > 1:
        second_process(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lighthouse.safetensors"
        first_process(path)
        done = subprocess.run([sys.executable, __file__, str(path)], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
