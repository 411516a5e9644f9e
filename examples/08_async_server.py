"""Serve many clients over TCP with asyncio: streams that share their steps, clients that hang up, a graceful end.

The protocol is one JSON object a line: a client sends a question and gets one line for each piece of text, the last one
with the numbers. The engine runs its steps in a thread of its own; the event loop never waits for one. A client that
hangs up cancels its request by closing the stream, and nobody else notices. Before the server ends it drains: what runs
is finished, what comes is refused.

python examples/08_async_server.py
"""

from __future__ import annotations

import asyncio
import json

from paged import Draining, InvalidRequest
from scheduler import AsyncEngine, SamplingParams

SYSTEM = "You answer in one short sentence. You never use more than twelve words, and you are kind."
QUESTIONS = ("Why is the sky blue?", "What is a tide?", "Who was Ada Lovelace?", "How do bees find home?")


def chat(engine: AsyncEngine, question: str):
    """The tokens of a conversation: every one begins with the same page of them."""
    model = engine.engine.model
    assert model.chat is not None and model.tokenizer is not None
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return model.chat.encode(model.tokenizer, messages)


async def serve(engine: AsyncEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One client: one request. Leaving the `async with` before the end cancels it."""

    async def tell(**fields: object) -> None:
        writer.write(json.dumps(fields).encode() + b"\n")
        await writer.drain()

    try:
        asked = json.loads(await reader.readline())
        params = SamplingParams(max_tokens=asked["max_tokens"], ignore_eos=asked["at_length"])
        async with engine.stream(chat(engine, asked["question"]), params) as stream:
            hung_up = asyncio.create_task(reader.read())  # comes back when the client closes its side
            async for event in stream:
                if hung_up.done():
                    return
                await tell(text=event.text)
        hung_up.cancel()
        output = stream.output
        assert output is not None
        await tell(
            done=output.finish_reason,
            prompt_tokens=output.num_prompt_tokens,
            cached_tokens=output.num_cached_tokens,
            completion_tokens=len(output.token_ids),
        )
    except InvalidRequest as error:
        await tell(error=str(error), status=400)
    except Draining as error:
        await tell(error=str(error), status=503)
    except ConnectionError:
        pass  # the client is gone, and its request with it
    finally:
        writer.close()


async def ask(
    port: int, question: str, max_tokens: int = 24, at_length: bool = False, lines: int | None = None
) -> list[dict[str, object]]:
    """A client; with `lines` one that hangs up after so many of them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(json.dumps({"question": question, "max_tokens": max_tokens, "at_length": at_length}).encode() + b"\n")
    got: list[dict[str, object]] = []
    while (lines is None or len(got) < lines) and (line := await reader.readline()):
        got.append(json.loads(line))
    writer.close()
    return got


async def main() -> None:
    engine = AsyncEngine("smollm2", max_seq_len=512, num_pages=1000)
    server = await asyncio.start_server(lambda reader, writer: serve(engine, reader, writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    answers = await asyncio.gather(*(ask(port, question) for question in QUESTIONS))
    for question, lines in zip(QUESTIONS, answers, strict=True):
        text, end = "".join(str(line["text"]) for line in lines[:-1]), lines[-1]
        print(f"{question} {text.strip()} ({end['cached_tokens']} of {end['prompt_tokens']} prompt tokens cached)")
    stats = await engine.stats()
    print(f"{stats['generated_tokens']} tokens in {stats['num_steps']} steps, {stats['peak_running']} requests at once")
    assert stats["peak_running"] >= 2 and stats["num_cancelled"] == 0

    await ask(port, QUESTIONS[0], max_tokens=300, at_length=True, lines=3)  # and hangs up
    while engine.has_work:
        await asyncio.sleep(0.01)
    print("a client hung up:", (await engine.stats())["num_cancelled"], "request cancelled")
    assert (await engine.stats())["num_cancelled"] == 1

    [refused] = await ask(port, "word " * 1000)
    print("a prompt that is too long:", refused)
    assert refused["status"] == 400

    last = asyncio.create_task(ask(port, QUESTIONS[1], max_tokens=40, at_length=True))
    while not engine.has_work:
        await asyncio.sleep(0.01)
    drained = asyncio.create_task(engine.drain())
    await asyncio.sleep(0)
    [late] = await ask(port, QUESTIONS[2])
    print("while it drains:", late)
    assert late["status"] == 503
    await drained
    assert (await last)[-1]["completion_tokens"] == 40
    server.close()
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
