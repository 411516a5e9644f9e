"""Think longer only where it pays: draft a prompt at a small depth, and bring it to a greater one when it is asked for.

A looped model runs one block of layers again and again; the number of iterations is its depth. A resume handle holds a
prompt at depth 2. Resuming it at 4 or 8 runs the missing iterations over the prompt and nothing else, takes pages for
those alone, and gives the tokens that the deeper model gives from nothing. Here the last layers of SmolLM2 loop, which
it was never trained for: the tokens mean little, the arithmetic is what is shown.

python examples/07_resume_deeper.py
"""

from __future__ import annotations

from paged import load_model
from scheduler import Model

TEXT = "The keeper of the lighthouse on Gull Rock wrote in the log every hour, and nobody else was allowed to. " * 4


def main() -> None:
    looped = load_model("smollm2", loop_layers=(26, 30), loops=2, max_loops=8)
    with Model(looped, max_seq_len=512, num_pages=2000) as model:
        tokens = model.encode(TEXT)
        handle = model.build_resume_handle(tokens, 2, max_loops=8)
        pool = model.engine.pool
        print(f"{handle.num_tokens} tokens at depth {handle.loops}: {len(handle.page_ids)} pages")
        for depth in (2, 4, 8):
            before = pool.num_live
            deeper = model.resume(handle, depth)
            more = pool.num_live - before
            out = model.generate_from_prefix_cache(deeper, max_tokens=8, loops=depth)
            whole = model.generate(tokens, max_tokens=8, loops=depth)
            print(f"depth {depth}: {more} pages more, {model.decode(out[len(tokens) :])!r}")
            print("  as from nothing:", out == whole)
            assert out == whole
            assert more == (depth - 2) * -(-len(tokens) // pool.page_size)
            del deeper
        print(f"the handle is as it was: depth {handle.loops}, {len(handle.page_ids)} pages")

        drafted = model.generate(tokens, max_tokens=8, loops=8, draft_loops=2)
        print("drafted at depth 2 and verified at 8, the same tokens:", drafted == out)
        assert drafted == out


if __name__ == "__main__":
    main()
