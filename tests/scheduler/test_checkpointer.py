"""Recurrent models in the scheduler: where a prefill stops, what it leaves there, and who waits for it."""

from __future__ import annotations

import pytest
from byhand import expect_check_fails, span
from driver import Driver
from fakes import EchoHybrid

from scheduler.request import PrefillStops
from scheduler.slots import NO_STOP

P = 4
OPENING = span(0, 12)


def driver(num_pages: int = 80, **options) -> Driver:
    return Driver(num_pages, P, model=EchoHybrid(97), **options)


def kept(d: Driver) -> list[tuple[int, bool]]:
    """(tokens, opening) of every checkpoint, in order of use."""
    return [(c.num_tokens, c.opening) for c in d.cache.checkpoints]


def cached(d: Driver, name: str) -> int:
    return d.requests[name].num_cached_tokens


# Where it stops ---------------------------------------------------------------------------------------------------


def test_a_prompt_leaves_a_checkpoint_one_token_short_and_one_where_it_ended() -> None:
    d = driver()
    d.solo("a", span(0, 10), 6)
    assert kept(d) == [(9, False), (15, False)]
    assert d.plans[0] == {"a": 9} and d.plans[1] == {"a": 1}
    d.expect_all_exact()


def test_the_same_prompt_again_computes_one_token() -> None:
    d = driver()
    d.solo("a", span(0, 10), 2)
    d.solo("b", span(0, 10), 2)
    assert cached(d, "b") == 9
    d.expect_all_exact()


def test_the_next_turn_attaches_the_whole_last_one() -> None:
    d = driver()
    answer = d.solo("a", span(0, 10), 6)
    turn = [*span(0, 10), *answer, *span(60, 5)]
    d.solo("b", turn, 4)
    assert cached(d, "b") == 15  # the last token of the answer was never computed
    d.expect_all_exact()


def test_a_short_answer_leaves_no_checkpoint_of_its_own() -> None:
    d = driver()
    d.solo("a", span(0, 10), 3)
    assert kept(d) == [(9, False)]
    d.solo("b", span(0, 10), 6)
    assert kept(d) == [(9, False), (15, False)]


def test_all_four_marks_are_stops_and_the_first_two_are_openings() -> None:
    d = driver()
    d.submit("a", span(0, 40), 2, stops=PrefillStops(8, 16, 25, 36))
    d.run()
    assert kept(d) == [(8, True), (16, True), (25, False), (36, False), (41, False)]
    assert [p["a"] for p in d.plans] == [8, 8, 9, 11, 4, 1]
    d.expect_all_exact()


def test_stops_lie_a_page_past_the_hit_and_a_page_below_the_next() -> None:
    d = driver()
    d.submit("a", span(0, 40), 1, stops=PrefillStops(3, 16, 19, 36))
    d.run()
    assert kept(d) == [(19, False), (36, False), (40, False)]  # 3 is within the first page, 16 within a page of 19
    d.submit("b", [*span(0, 20), *span(70, 20)], 1, stops=PrefillStops(0, 21, 22, 30))
    d.run()
    assert cached(d, "b") == 19
    assert (30, False) in kept(d) and (22, False) not in kept(d)
    d.expect_all_exact()


def test_a_new_conversation_on_a_marked_opening_attaches_it_at_once() -> None:
    d = driver()
    for name, tail in (("a", span(30, 9)), ("b", span(50, 9)), ("c", span(70, 9))):
        d.submit(name, [*OPENING, *tail], 2, stops=PrefillStops(opening=12))
        d.run()
    assert [cached(d, n) for n in "abc"] == [0, 12, 12]
    d.expect_all_exact()


def test_without_marks_the_second_conversation_leaves_the_opening_for_the_third() -> None:
    d = driver()
    for name, tail in (("a", span(30, 9)), ("b", span(50, 9)), ("c", span(70, 9))):
        d.solo(name, [*OPENING, *tail], 2)
    assert [cached(d, n) for n in "abc"] == [0, 0, 12]
    assert (12, True) in kept(d)
    d.expect_all_exact()


def test_conversations_that_run_together_part_at_a_checkpoint_too() -> None:
    d = driver(max_num_batched_tokens=8)
    for name, tail in (("a", span(30, 9)), ("b", span(50, 9)), ("c", span(70, 9))):
        d.submit(name, [*OPENING, *tail], 2)
    d.run()
    assert [cached(d, n) for n in "abc"] == [0, 0, 12]  # c waited for b, which reached the place where they part
    d.expect_all_exact()


def test_chunks_end_at_the_stops() -> None:
    d = driver(max_num_batched_tokens=5)
    d.submit("a", span(0, 20), 1, stops=PrefillStops(opening=8, messages_end=16))
    d.run()
    assert [p["a"] for p in d.plans] == [5, 3, 5, 3, 4]


def test_what_a_stop_leaves_of_the_budget_goes_to_the_next_request() -> None:
    d = driver(max_num_batched_tokens=20)
    d.submit("a", span(0, 30), 1, stops=PrefillStops(opening=8))
    d.submit("b", span(50, 12), 1)
    d.step()
    assert d.plans[0] == {"a": 8, "b": 11}


# Who waits --------------------------------------------------------------------------------------------------------


def test_a_sibling_waits_for_the_state_and_does_not_read_it_early() -> None:
    d = driver()
    d.submit("a", [*OPENING, *span(30, 9)], 3, stops=PrefillStops(opening=12))
    d.submit("b", [*OPENING, *span(50, 9)], 3, stops=PrefillStops(opening=12))
    d.step()
    assert (d.running(), d.waiting()) == (["a"], ["b"])
    d.step()
    assert d.running() == ["a", "b"]
    d.run()
    assert cached(d, "b") == 12
    d.expect_all_exact()


def test_twins_compute_their_prompt_once() -> None:
    d = driver()
    d.submit("a", span(0, 30), 3)
    d.submit("b", span(0, 30), 3)
    d.run()
    assert (cached(d, "a"), cached(d, "b")) == (0, 29)
    d.expect_all_exact()


def test_a_sibling_stops_waiting_when_the_first_one_is_cancelled() -> None:
    d = driver(max_num_batched_tokens=4)
    for name in "ab":
        d.submit(name, span(0, 30), 3)
    d.step()
    assert d.waiting() == ["b"]
    d.cancel("a")
    d.run()
    d.expect_all_exact()
    assert not d.scheduler.checkpointer._pending


def test_nobody_waits_where_nothing_is_kept() -> None:
    d = driver(max_states=0)
    for name in "ab":
        d.submit(name, span(0, 30), 3)
    d.step()
    assert d.running() == ["a", "b"]
    d.run()
    d.expect_all_exact()
    assert d.cache.held_pages == 0


# Leaving the slot -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_a_preempted_request_resumes_from_its_own_checkpoint(steps: int) -> None:
    d = driver(max_num_batched_tokens=4)
    d.submit("a", span(0, 14), 9)
    for _ in range(steps):
        d.step()
    computed = d.computed("a")
    d.preempt("a")
    d.run()
    assert d.requests["a"].num_reattached_tokens == computed
    assert d.requests["a"].num_computed_tokens == 14 + 9 - 1
    d.expect_all_exact()


def test_requests_that_crowd_each_other_out_still_give_their_own_tokens() -> None:
    d = driver(12)
    for i in range(5):
        d.submit(f"r{i}", [i, *span(40, 9)], 24)
    d.run()
    assert d.scheduler.stats.num_preemptions > 0
    d.expect_all_exact()
    d.cache.release()
    assert d.pool.num_free == 12


def test_a_cancelled_request_leaves_what_it_computed() -> None:
    d = driver(max_num_batched_tokens=4)
    d.submit("a", span(0, 30), 3)
    for _ in range(3):
        d.step()
    d.cancel("a")
    d.solo("b", span(0, 30), 3)
    assert cached(d, "b") == 12
    d.expect_all_exact()


def test_a_step_that_failed_leaves_nothing() -> None:
    d = driver()
    d.submit("a", span(0, 30), 3)
    d.step()
    before = kept(d)
    plan = d.scheduler.schedule()
    slot = int(plan.slots[0])
    d.scheduler.states.positions[slot] = -1  # as a forward that failed leaves it
    d.scheduler.abort(plan, "the device is gone")
    assert kept(d) == before
    d.requests.pop("a")
    d.solo("b", span(0, 30), 3)
    d.expect_all_exact()


def test_rows_of_before_a_reset_are_kept_no_more() -> None:
    d = driver()
    d.submit("a", span(0, 10), 12)
    d.step()
    d.cache.release()
    d.run()
    assert kept(d) == []
    d.solo("b", span(0, 10), 2)
    assert cached(d, "b") == 0
    d.expect_all_exact()


def test_namespaces_share_no_state() -> None:
    d = driver()
    d.solo("a", span(0, 12), 2, namespace="x")
    d.solo("b", span(0, 12), 2, namespace="y")
    d.solo("c", span(0, 12), 2, namespace="x")
    assert [cached(d, n) for n in "abc"] == [0, 0, 11]


def test_openings_outlive_a_stream_of_conversations() -> None:
    d = driver(200, max_states=3)
    d.submit("first", [*OPENING, *span(30, 5)], 1, stops=PrefillStops(opening=12))
    d.run()
    for i in range(6):
        d.submit(f"r{i}", [*OPENING, *span(20 + 9 * i, 8)], 9, stops=PrefillStops(opening=12))
        d.run()
        assert cached(d, f"r{i}") == 12
    assert len(kept(d)) == 3
    d.expect_all_exact()


def test_hits_and_queries_are_counted_once_a_request() -> None:
    d = driver()
    d.solo("a", span(0, 10), 2)
    d.submit("b", span(0, 10), 9)
    d.step()
    d.step()
    d.preempt("b")
    d.run()
    stats = d.cache.stats
    assert (stats.num_queries, stats.query_tokens, stats.hit_tokens) == (2, 20, 9)


def test_a_waiting_request_is_looked_up_once_until_something_changes() -> None:
    d = driver(24, max_num_seqs=2)
    d.submit("a", span(0, 30), 40)
    d.submit("b", span(40, 30), 20)
    d.step()
    calls = []
    real = d.cache.checkpoints.find
    d.cache.checkpoints.find = lambda *args: calls.append(1) or real(*args)
    assert d.waiting() == [] or len(d.waiting()) == 1
    for _ in range(5):
        d.step()
    assert len(calls) <= 3


def test_check_notices_a_stop_that_was_passed_and_a_state_elsewhere() -> None:
    d = driver(max_num_batched_tokens=4)
    d.submit("a", span(0, 30), 3)
    d.step()
    slot = d.requests["a"].slot
    d.scheduler.state.stop[slot] = 2
    expect_check_fails(d.scheduler, "passed its stop")
    d.scheduler.state.stop[slot] = NO_STOP
    d.scheduler.states.positions[slot] = 3
    expect_check_fails(d.scheduler, "its state is at 3")


def test_a_request_that_leaves_the_queue_is_forgotten() -> None:
    d = driver(max_num_seqs=1)
    d.submit("a", span(0, 9), 9)
    d.step()
    d.submit("b", span(0, 9), 9)
    d.step()
    d.cancel("b")
    d.run()
    assert not d.scheduler.checkpointer._outlooks and not d.scheduler.checkpointer._running
    d.expect_all_exact()
