"""Chunks: how much of a prompt one step computes, and whom that keeps waiting."""

from __future__ import annotations

import pytest
from byhand import span
from driver import Driver

from scheduler.chunking import NO_CAP, chunk_cap
from scheduler.config import SchedulerConfig


def driver(**config) -> Driver:
    return Driver(300, 16, **{"max_num_batched_tokens": 1024, **config})


def test_the_cap_is_ignored_for_a_prompt_that_is_alone() -> None:
    d = driver(max_chunk_tokens=400)
    d.submit("a", [1] * 800)
    d.step()
    assert d.plans == [{"a": 800}]


def test_with_a_second_one_beside_it_the_cap_holds() -> None:
    d = driver(max_chunk_tokens=400)
    d.submit("a", [1] * 800)
    d.submit("b", [2] * 10)
    d.step()
    assert d.plans == [{"a": 400, "b": 10}]
    d.run()
    d.expect_all_exact()


def test_an_adaptive_cap_is_no_less_than_an_equal_share() -> None:
    d = driver(max_chunk_tokens=100, adaptive_chunks=True)
    for i in range(2):
        d.submit(f"r{i}", [i] * 800)
    d.step()
    assert d.plans == [{"r0": 512, "r1": 512}]
    d.run()
    d.expect_all_exact()


def test_an_adaptive_cap_counts_only_those_for_whom_there_is_a_slot() -> None:
    d = driver(max_chunk_tokens=100, adaptive_chunks=True, max_num_seqs=2)
    for i in range(9):
        d.submit(f"r{i}", [i] * 800)
    d.step()
    assert d.plans == [{"r0": 512, "r1": 512}]


@pytest.mark.parametrize("chunk", [8, 32])
def test_beside_a_stream_exactly_the_cap_and_alone_the_whole_prompt(chunk: int) -> None:
    alone = driver(max_chunk_tokens=chunk)
    alone.submit("long", span(0, 90))
    alone.step()
    assert alone.plans == [{"long": 90}]
    d = driver(max_chunk_tokens=chunk)
    d.submit("stream", [5], 40)
    d.step()
    d.submit("long", span(0, 90))
    while "long" not in d.running() or d.computed("long") < 90 - chunk:
        d.step()
        assert d.plans[-1] == {"stream": 1, "long": chunk}
    d.run()
    d.expect_all_exact()


@pytest.mark.parametrize("chunk", [1, 3, 17, 64])
@pytest.mark.parametrize("adaptive", [True, False])
def test_the_size_of_chunks_changes_no_token(chunk: int, adaptive: bool) -> None:
    d = Driver(300, 4, max_chunk_tokens=chunk, adaptive_chunks=adaptive, max_num_batched_tokens=70)
    for i in range(4):
        d.submit(f"r{i}", [*span(0, 30), *span(40 + i, 11 * i)], 6)
    d.run()
    d.expect_all_exact()


@pytest.mark.parametrize(
    ("running", "prefills", "waiting", "free", "cap"),
    [(1, 1, 0, 3, NO_CAP), (0, 0, 1, 4, NO_CAP), (2, 1, 0, 2, 100), (1, 1, 1, 3, 100), (0, 0, 2, 4, 100)],
)
def test_alone_is_who_has_nobody_running_or_waiting(running: int, prefills: int, waiting: int, free: int, cap: int):
    config = SchedulerConfig(max_chunk_tokens=100, max_num_batched_tokens=1024)
    assert chunk_cap(config, running, prefills, waiting, free) == cap


@pytest.mark.parametrize(("prefills", "waiting", "free", "cap"), [(1, 0, 0, 1024), (2, 9, 0, 512), (1, 9, 3, 256)])
def test_the_share_is_of_those_that_prefill_or_may_start(prefills: int, waiting: int, free: int, cap: int) -> None:
    config = SchedulerConfig(max_chunk_tokens=100, max_num_batched_tokens=1024, adaptive_chunks=True)
    assert chunk_cap(config, 5, prefills, waiting, free) == cap


def test_without_a_cap_only_the_budget_bounds_a_chunk() -> None:
    assert chunk_cap(SchedulerConfig(), 5, 3, 2, 1) == NO_CAP
