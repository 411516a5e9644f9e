"""What a reader has not taken is one event, and the loop is called once for all that came."""

from __future__ import annotations

import asyncio
import threading

import pytest
from gated import join, run

from scheduler.mailbox import LoopPort, Mailbox
from scheduler.output import Event, RequestOutput


def output() -> RequestOutput:
    return RequestOutput("r", [], "", "length", 1, 0, 1, 0)


class CountedLoop:
    """Takes calls from other threads and makes none of them until it is told to."""

    def __init__(self) -> None:
        self.calls: list = []

    def call_soon_threadsafe(self, function) -> None:
        self.calls.append(function)

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


def box_of(loop=None) -> Mailbox:
    return Mailbox(LoopPort(loop or CountedLoop()))  # type: ignore[arg-type]


def test_events_that_nobody_takes_become_one() -> None:
    box = box_of()
    for i in range(100):
        assert box.put(Event("r", [i], "x"))
        assert len(box._events) == 1
    last = output()
    box.put(Event("r", [100], "y", last, finish_reason="length"))
    event = box.take()
    assert event == Event("r", list(range(101)), "x" * 100 + "y", last, finish_reason="length")
    assert box.take() is None


def test_an_event_that_was_taken_does_not_change_any_more() -> None:
    box = box_of()
    box.put(Event("r", [1], "a"))
    first = box.take()
    box.put(Event("r", [2], "b"))
    assert (first, box.take()) == (Event("r", [1], "a"), Event("r", [2], "b"))


def test_samples_are_kept_apart_and_the_very_last_event_comes_last() -> None:
    box, last = box_of(), output()
    for i in range(5):
        for index in (0, 1, 2):
            box.put(Event("r", [10 * index + i], index=index))
    box.put(Event("r", [], index=1, finish_reason="stop"))
    box.put(Event("r", [], index=0, finish_reason="stop", output=last))
    assert len(box._events) == 3
    taken = [box.take() for _ in range(3)]
    assert [e.index for e in taken] == [2, 1, 0]
    assert [e.token_ids for e in taken] == [[20, 21, 22, 23, 24], [10, 11, 12, 13, 14], [0, 1, 2, 3, 4]]
    assert [e.finished for e in taken] == [False, False, True]


def test_a_reader_of_the_last_event_alone_gets_nothing_else() -> None:
    box = box_of()
    assert box.put_last(Event("r", [1])) and not box._events
    box.put_last(Event("r", [2], output=output()))
    assert box.take().token_ids == [2]


def test_a_failure_takes_the_place_of_everything() -> None:
    box = box_of()
    box.put(Event("r", [1]))
    box.fail(KeyError("why"))
    with pytest.raises(KeyError, match="why"):
        box.take()


def test_the_loop_is_called_once_a_step_and_only_for_readers_that_wait() -> None:
    loop = CountedLoop()
    port = LoopPort(loop)  # type: ignore[arg-type]
    boxes = [Mailbox(port) for _ in range(10)]
    for box in boxes[:7]:
        assert box.take() is None
    rung: list[Mailbox] = []
    Mailbox.ring, ring = lambda box: rung.append(box), Mailbox.ring  # type: ignore[method-assign]
    try:
        for _ in range(3):  # three steps before the loop has its turn
            for box in boxes:
                box.put(Event("r", [1]))
        assert len(loop.calls) == 1
        loop.turn()
        assert rung == boxes[:7]
        for box in boxes:
            box.put(Event("r", [1]))
        assert not loop.calls  # nobody has found its box empty since
        assert [box.take().token_ids for box in boxes] == [[1, 1, 1, 1]] * 10
        assert boxes[0].take() is None
        boxes[0].put(Event("r", [2]))
        assert len(loop.calls) == 1
    finally:
        Mailbox.ring = ring  # type: ignore[method-assign]


def test_a_loop_that_was_closed_is_told_to_the_one_who_puts() -> None:
    loop = asyncio.new_event_loop()
    box = box_of(loop)
    loop.close()
    assert box.put(Event("r", [1]))  # nobody waits: nobody is missed yet
    box.take()
    assert box.take() is None
    assert not box.put(Event("r", [2]))


def test_a_second_task_that_waits_for_one_box_is_refused() -> None:
    async def main() -> None:
        box = box_of(asyncio.get_running_loop())
        first = asyncio.create_task(box.wait())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task reads this stream already"):
            await box.wait()
        box.ring()
        await first
        box.ring()  # nobody waits

    run(main())


def test_no_event_is_lost_between_a_thread_that_puts_and_a_task_that_takes() -> None:
    count = 3000

    async def main() -> list[list[int]]:
        port = LoopPort(asyncio.get_running_loop())
        boxes = [Mailbox(port) for _ in range(4)]

        def put() -> None:
            for i in range(count):
                for box in boxes:
                    box.put(Event("r", [i]))

        async def read(box: Mailbox) -> list[int]:
            tokens: list[int] = []
            while len(tokens) < count:
                while (event := box.take()) is None:
                    await box.wait()
                tokens += event.token_ids
            return tokens

        work = asyncio.to_thread(join, [threading.Thread(target=put)])
        *results, _ = await asyncio.gather(*map(read, boxes), work)
        return results

    assert run(main()) == [list(range(count))] * 4
