"""Priority: who is urgent starts first and may push others out; nobody ping-pongs, nobody starves."""

from __future__ import annotations

import numpy as np
import pytest
from byhand import span
from driver import Driver
from fakes import EchoHybrid, EchoModel

from scheduler.policy import Priority


def driver(num_pages: int = 64, page_size: int = 4, ageing: int = 1000, **config) -> Driver:
    config = {"watermark": 0.0, **config}
    return Driver(num_pages, page_size, policy=Priority(ageing), **config)


# The order of the queue -------------------------------------------------------------------------------------------


def test_the_most_urgent_of_three_starts_first() -> None:
    d = driver(max_num_seqs=1)
    for name, priority in (("a", 3), ("b", 2), ("c", 0)):
        d.submit(name, span(0, 5), 3, priority=priority)
    assert d.run_in_order() == ["c", "b", "a"]
    d.expect_all_exact()


@pytest.mark.parametrize("priority", [-3, 0, 7])
def test_equals_start_in_order_of_submission(priority: int) -> None:
    d = driver(max_num_seqs=1)
    for name in "dacb":
        d.submit(name, span(0, 5), 3, priority=priority)
    assert d.run_in_order() == ["d", "a", "c", "b"]
    assert d.scheduler.stats.num_preemptions == 0


def test_a_negative_priority_is_more_urgent_than_none() -> None:
    d = driver(max_num_seqs=1)
    d.submit("plain", span(0, 5), 3)
    d.submit("urgent", span(0, 5), 3, priority=-1)
    assert d.run_in_order() == ["urgent", "plain"]


# Ageing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("late", "order"), [(19, ["newer", "old"]), (20, ["old", "newer"]), (21, ["old", "newer"])])
def test_two_levels_are_made_up_for_in_twice_the_ageing(late: int, order: list[str]) -> None:
    d = driver(ageing=10, max_num_seqs=1)
    d.submit("runs", [1], 40, priority=-100)
    d.step()
    d.submit("old", span(0, 5), 2, priority=2)
    for _ in range(late):
        d.step()
    d.submit("newer", span(0, 5), 2, priority=0)
    assert d.run_in_order() == order


def test_priority_10_finishes_despite_an_endless_stream_of_priority_0() -> None:
    d = driver(ageing=5, max_num_seqs=2)
    d.submit("low", span(0, 9), 20, priority=10)
    order = []
    for n in range(400):
        d.submit(f"s{n}", span(n % 50, 5), 3)  # one a step: more than two slots can serve
        order += [request.id for request in d.step().admitted]
        if d.requests["low"].finish_reason is not None:
            break
    assert d.requests["low"].finish_reason == "length"
    before = order[: len(order) - order[::-1].index("low") - 1]
    assert {f"s{n}" for n in range(10 * 5)} <= set(before)
    assert max(int(name[1:]) for name in before if name != "low") == 10 * 5 - 1  # then it is its turn
    assert len(d.waiting()) > 20  # the stream had not run dry


def test_without_ageing_it_would_starve() -> None:
    """The same stream, with an ageing that is longer than the stream."""
    d = driver(ageing=1000, max_num_seqs=2)
    d.submit("low", span(0, 9), 20, priority=10)
    for n in range(150):
        d.submit(f"s{n}", span(n % 50, 5), 3)
        d.step()
    assert d.requests["low"].finish_reason is None
    assert len(d.outputs["low"]) == 1  # of the step before the stream had filled the slots


def test_an_ageing_of_less_than_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="ageing must be at least 1 step a level, got 0"):
        Priority(0)


# Slots are short --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [EchoModel, EchoHybrid])
def test_an_urgent_request_starts_in_the_next_step_though_every_slot_is_taken(plan) -> None:
    d = driver(max_num_seqs=3, model=plan(windows=(0,)))
    for i in range(3):
        d.submit(f"r{i}", span(10 * i, 6), 30, priority=5)
    for _ in range(3):
        d.step()
    d.submit("urgent", span(60, 6), 4, priority=0)
    step = d.step()
    assert [r.id for r in step.preempted] == ["r2"]
    assert [r.id for r in step.admitted] == ["urgent"]
    assert d.running() == ["r0", "r1", "urgent"]
    assert d.waiting() == ["r2"]
    d.run()
    d.expect_all_exact()
    assert d.scheduler.stats.num_preemptions == 1


def test_equal_priority_pushes_nobody_out() -> None:
    d = driver(max_num_seqs=2)
    for i in range(6):
        d.submit(f"r{i}", span(10 * i, 6), 12, priority=4)
        d.step()
    d.run()
    d.expect_all_exact()
    assert d.scheduler.stats.num_preemptions == 0


def test_an_equal_that_was_passed_by_does_not_push_out_who_passed_it() -> None:
    d = driver(12, 4)
    d.submit("runs", [1] * 16, 3, priority=4)
    d.step()
    d.submit("large", [2] * 32, 4, priority=4)  # eight pages: seven are free
    d.submit("small", [3] * 16, 16, priority=4)
    assert [r.id for r in d.step().admitted] == ["small"]
    assert d.run_in_order() == ["large"]  # once the first has ended, eight could be had from `small`
    assert d.scheduler.stats.num_preemptions == 0
    d.expect_all_exact()


def test_who_was_pushed_out_does_not_push_back_and_resumes_when_there_is_room() -> None:
    d = driver(max_num_seqs=1)
    d.submit("low", span(0, 6), 30, priority=3)
    d.step()
    d.submit("high", span(50, 6), 10, priority=1)
    order = d.run_in_order()
    assert order == ["high", "low"]
    assert d.scheduler.stats.num_preemptions == 1
    d.expect_all_exact()


def test_an_aged_request_is_not_pushed_out_by_newer_ones() -> None:
    d = driver(ageing=4, max_num_seqs=1)
    d.submit("blocker", [1], 12, priority=-50)
    d.step()
    d.submit("old", span(0, 6), 20, priority=1)
    d.step_until(lambda: "old" in d.running())
    assert d.scheduler.stats.num_steps > 4
    d.submit("new", span(50, 6), 3, priority=0)
    d.step()
    assert d.running() == ["old"]
    assert d.run_in_order() == ["new"]
    assert d.scheduler.stats.num_preemptions == 0


def test_several_urgent_requests_start_in_one_step() -> None:
    d = driver(max_num_seqs=4)
    for i in range(4):
        d.submit(f"r{i}", span(10 * i, 6), 30, priority=i + 1)
    d.step()
    for i in range(3):
        d.submit(f"u{i}", span(50 + 10 * i, 6), 5, priority=1)
    step = d.step()
    assert [r.id for r in step.preempted] == ["r3", "r2", "r1"]  # the least urgent first; r0 is their equal
    assert [r.id for r in step.admitted] == ["u0", "u1", "u2"]
    d.run()
    d.expect_all_exact()


def test_of_the_running_ones_only_the_less_urgent_are_in_the_way() -> None:
    d = driver(max_num_seqs=2)
    d.submit("urgent", span(0, 6), 12, priority=0)
    d.submit("equal", span(10, 6), 12, priority=1)
    d.step()
    d.submit("w", span(20, 6), 4, priority=1)
    for _ in range(5):
        d.step()
    assert d.waiting() == ["w"]
    assert d.scheduler.stats.num_preemptions == 0
    d.run()
    d.expect_all_exact()


# Pages are short --------------------------------------------------------------------------------------------------


def test_an_urgent_request_takes_the_pages_of_the_least_urgent() -> None:
    d = driver(20, 4)
    d.submit("a", [1] * 30, 8, priority=1)
    d.submit("b", [2] * 30, 8, priority=2)
    d.step()
    d.submit("urgent", [3] * 20, 4, priority=0)
    step = d.step()
    assert [r.id for r in step.preempted] == ["b"]
    assert [r.id for r in step.admitted] == ["urgent"]
    d.run()
    d.expect_all_exact()


def test_nobody_goes_where_that_would_not_be_enough() -> None:
    d = driver(20, 4)
    d.submit("equal", [1] * 44, 8, priority=0)
    d.submit("low", [2] * 12, 8, priority=2)
    d.step()
    d.submit("urgent", [3] * 40, 4, priority=0)  # ten pages: five are free, `low` has three
    d.step()
    assert d.running() == ["equal", "low"]
    assert d.scheduler.stats.num_preemptions == 0
    d.run()
    d.expect_all_exact()


def test_pages_that_others_hold_too_are_not_counted_as_won() -> None:
    d = driver(20, 4)
    d.submit("equal", span(0, 40), 8, priority=0)
    d.step()
    d.submit("low", [*span(0, 40), 50, 51], 8, priority=2)  # ten shared pages and one of its own
    d.step()
    assert len(set(d.pages("low")) & set(d.pages("equal"))) == 10
    d.submit("urgent", [3] * 40, 4, priority=0)
    d.step()
    assert d.running() == ["equal", "low"]
    assert d.scheduler.stats.num_preemptions == 0
    d.run()
    d.expect_all_exact()


@pytest.mark.parametrize("model", [EchoModel, EchoHybrid])
@pytest.mark.parametrize(("extra", "goes"), [(18, []), (14, ["low"])])
def test_pages_that_the_urgent_one_attaches_itself_are_not_counted_as_won(model, extra: int, goes: list[str]) -> None:
    d = driver(12, 4, model=model())
    opening = span(0, 16)
    d.submit("low", [*opening, 50], 20, priority=5)  # five pages
    d.submit("equal", [60] * 12, 20, priority=0)  # three, and it stays
    d.step()
    d.step()
    d.submit("urgent", [*opening, *[70] * extra], 4, priority=0)  # four pages of `low`, and of 4 free ones 5 or 4
    step = d.step()
    assert [r.id for r in step.preempted] == goes
    assert ("urgent" in d.running()) == bool(goes)
    d.run()
    d.expect_all_exact()


def test_what_is_reserved_for_who_goes_is_won() -> None:
    d = driver(20, 4, reserve="max_tokens")
    d.submit("low", [1] * 8, 64, priority=5)  # two pages, and all others are reserved for it
    d.step()
    d.submit("urgent", [2] * 20, 20, priority=0)
    step = d.step()
    assert [r.id for r in step.preempted] == ["low"]
    assert [r.id for r in step.admitted] == ["urgent"]
    d.run()
    d.expect_all_exact()


def test_what_is_reserved_for_who_stays_is_not_won() -> None:
    d = driver(20, 4, reserve="max_tokens")
    d.submit("equal", [1] * 8, 40, priority=0)  # twelve pages when it ends
    d.submit("low", [2] * 8, 16, priority=5)  # six
    d.step()
    d.submit("urgent", [3] * 20, 20, priority=0)  # ten: eight are to be had without `low`
    d.step()
    assert d.running() == ["equal", "low"]
    d.run()
    d.expect_all_exact()
    assert not d.scheduler.stats.num_preemptions


def test_on_a_shortage_the_worst_priority_yields_then_the_latest() -> None:
    d = driver(24, 4)
    for name, priority in (("a", 0), ("b", 2), ("c", 2), ("d", 1)):
        d.submit(name, [ord(name) - 90] * 20, 30, priority=priority)
    yielded = []
    while len(yielded) < 3:
        yielded += [r.id for r in d.step().preempted]
    assert yielded[:3] == ["c", "b", "d"]
    d.run()
    d.expect_all_exact()


def test_the_first_submitted_yields_where_it_is_the_least_urgent_and_still_ends() -> None:
    d = driver(12, 4)
    d.submit("first", [1] * 14, 30, priority=3)
    d.submit("second", [2] * 14, 30, priority=0)
    yielded = []
    while d.scheduler.has_work:
        yielded += [r.id for r in d.step().preempted]
    assert set(yielded) == {"first"}
    d.expect_all_exact()


# Rows are short ---------------------------------------------------------------------------------------------------


def test_an_urgent_request_starts_beside_a_prefill_that_takes_every_row() -> None:
    d = driver(200, 4, max_num_batched_tokens=16, max_num_seqs=4)
    d.submit("long", [1] * 300, 2, priority=5)
    for _ in range(3):
        d.step()
    assert d.plans[-1] == {"long": 16}
    d.submit("urgent", [2] * 6, 8, priority=0)
    d.step()
    assert d.plans[-1] == {"urgent": 6, "long": 10}
    d.step()
    assert d.plans[-1]["urgent"] == 1
    d.run()
    d.expect_all_exact()
    assert d.scheduler.stats.computed_tokens <= 300 + 1 + 6 + 7 + 4  # less than a page was computed twice


@pytest.mark.parametrize(("chunk", "starts"), [(0, ["urgent"]), (4, ["urgent", "second"])])
def test_nobody_goes_for_rows_that_an_urgent_one_before_takes(chunk: int, starts: list[str]) -> None:
    d = driver(200, 4, max_num_batched_tokens=16, max_num_seqs=8, max_chunk_tokens=chunk)
    for i in range(3):
        d.submit(f"low{i}", [i + 1] * 4, 40, priority=5)
    d.step()
    d.submit("urgent", [60] * 50, 4, priority=0)
    d.submit("second", [70] * 4, 4, priority=0)
    step = d.step()
    assert [r.id for r in step.admitted] == starts
    assert not step.preempted
    d.run()
    d.expect_all_exact()


def test_rows_go_to_the_most_urgent_prefill_first() -> None:
    d = driver(200, 4, max_num_batched_tokens=16, max_num_seqs=4)
    d.submit("long", [1] * 100, 2, priority=5)
    d.step()
    d.submit("urgent", [2] * 40, 2, priority=0)
    for _ in range(2):
        d.step()
    assert all(plan == {"urgent": 16} for plan in d.plans[1:3])
    d.run()
    d.expect_all_exact()


def test_a_later_urgent_prefill_goes_before_an_earlier_one_that_is_not_pushed_out() -> None:
    d = driver(200, 4, max_num_batched_tokens=12, max_chunk_tokens=8, max_num_seqs=4)
    d.submit("low", [1] * 60, 2, priority=5)
    d.submit("stream", [3], 30, priority=0)
    d.step()
    d.submit("urgent", [2] * 40, 2, priority=0)
    d.step()
    assert d.plans[1] == {"stream": 1, "low": 8, "urgent": 3}
    d.step()
    assert d.plans[2] == {"stream": 1, "urgent": 8, "low": 3}
    d.run()
    d.expect_all_exact()
    assert d.scheduler.stats.num_preemptions == 0


# Storms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cache", [True, False])
def test_random_arrivals_of_all_priorities_end_and_keep_their_tokens(seed: int, cache: bool) -> None:
    rng = np.random.default_rng(seed)
    d = Driver(30, 4, cache, policy=Priority(ageing=60), max_num_seqs=4, max_num_batched_tokens=24, watermark=0.0)
    n = 0
    for _ in range(120):
        if n < 60 and rng.random() < 0.6:
            opening = span(0, int(rng.integers(0, 20)))
            d.submit(f"r{n}", [*opening, n % 97], int(rng.integers(1, 20)), priority=int(rng.integers(0, 4)))
            n += 1
        if d.scheduler.has_work:
            d.step()
    d.run(max_steps=1500)
    d.expect_all_exact()
    assert d.scheduler.stats.num_preemptions > 0
    assert d.pool.num_live == 0
