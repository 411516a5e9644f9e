"""WaitingQueue and the policies that order it; the limits of SchedulerConfig."""

from __future__ import annotations

import pytest
from byhand import expect_check_fails, ids, span
from driver import Driver

from paged.sampling import SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.lane import Lane
from scheduler.policy import FCFS, POLICIES, FairShare, Policy, get_policy
from scheduler.queue import WaitingQueue
from scheduler.request import Request


def request(arrival: int, num_tokens: int = 3) -> Request:
    made = Request(f"r{arrival}", ids(*span(0, num_tokens)), SamplingParams(), 0, (), 9, arrival=arrival)
    made.known = made.prompt
    return made


def test_requests_wait_in_order_of_submission_however_they_came_in() -> None:
    queue = WaitingQueue(FCFS())
    for arrival in (3, 0, 2, 1):
        queue.add(request(arrival))
    assert [r.arrival for r in queue] == [0, 1, 2, 3]
    assert len(queue) == 4


def test_a_preempted_request_takes_its_old_place() -> None:
    queue = WaitingQueue(FCFS())
    requests = [request(i) for i in range(4)]
    for one in requests:
        queue.add(one)
    queue.remove(requests[1])
    queue.add(requests[1])
    assert [r.arrival for r in queue] == [0, 1, 2, 3]


def test_removal_takes_that_request_and_no_equal_one() -> None:
    queue = WaitingQueue(FCFS())
    one, twin = request(5), request(5)
    queue.add(one)
    queue.add(twin)
    queue.remove(one)
    assert list(queue) == [twin]


def test_the_waiting_tokens_add_up() -> None:
    queue = WaitingQueue(FCFS())
    requests = [request(i, 10 * (i + 1)) for i in range(3)]
    for one in requests:
        queue.add(one)
    assert queue.num_tokens == 60
    queue.remove(requests[1])
    assert queue.num_tokens == 40


def test_removing_what_does_not_wait_is_an_error() -> None:
    queue = WaitingQueue(FCFS())
    with pytest.raises(ValueError):
        queue.remove(request(1))
    assert queue.num_tokens == 0


def test_another_policy_orders_as_it_likes() -> None:
    class Longest(Policy):
        name = "longest"

        def key(self, one: Request) -> tuple[float, ...]:
            return (-one.num_prompt, one.arrival)

    queue = WaitingQueue(Longest())
    for arrival, length in enumerate((3, 9, 9, 5)):
        queue.add(request(arrival, length))
    assert [r.arrival for r in queue] == [1, 2, 3, 0]


def test_policies_are_named_or_given() -> None:
    assert get_policy("fcfs").name == "fcfs"
    mine = FCFS()
    assert get_policy(mine) is mine
    with pytest.raises(ValueError, match=f"must be one of {', '.join(sorted(POLICIES))}, got 'sjf'"):
        get_policy("sjf")


# Lanes ------------------------------------------------------------------------------------------------------------


def of(namespace: str, arrival: int) -> Request:
    made = request(arrival)
    made.namespace = namespace
    return made


def lanes(*namespaces: str) -> tuple[WaitingQueue, list[Request]]:
    """A queue with a lane for each namespace, and its requests in order of arrival."""
    queue = WaitingQueue(FCFS(), by_namespace=True)
    requests = [of(namespace, arrival) for arrival, namespace in enumerate(namespaces)]
    for one in requests:
        queue.add(one)
        queue.check()
    return queue, requests


def walked(queue: WaitingQueue, *closed: str) -> list[int]:
    return [one.arrival for one in queue.in_order(set(closed))]


def test_lanes_are_merged_in_the_order_of_the_keys() -> None:
    queue, _ = lanes(*"aabcbacc")
    assert walked(queue) == list(range(8)) == [one.arrival for one in queue]


def test_closed_lanes_are_left_out() -> None:
    queue, _ = lanes(*"aabcbacc")
    assert walked(queue, "a") == [2, 3, 4, 6, 7]
    assert walked(queue, "a", "b", "c") == []


def test_one_lane_alone_may_be_closed_too_even_that_of_no_name() -> None:
    queue, _ = lanes("", "", "")
    assert walked(queue) == [0, 1, 2]
    assert walked(queue, "") == []


@pytest.mark.parametrize("namespaces", ["aaaaaa", "ababab", "abcabc", "aabbcc"])
def test_a_lane_may_be_closed_and_requests_taken_out_while_it_is_walked(namespaces: str) -> None:
    queue, requests = lanes(*namespaces)
    closed: set[str] = set()
    seen = []
    for one in queue.in_order(closed):
        seen.append(one.arrival)
        if one.arrival % 2 == 0:
            queue.remove(one)
            queue.check()
        if one.arrival == 3:
            closed.add(one.namespace)
    assert seen == [i for i in range(6) if i <= 3 or namespaces[i] != namespaces[3]]
    assert [one.arrival for one in queue] == [i for i in range(6) if i % 2 or i not in seen]
    assert requests[3] in list(queue)


def test_another_lane_than_that_of_the_request_at_hand_may_be_closed() -> None:
    queue, _ = lanes(*"abcabc")
    closed: set[str] = set()
    seen = []
    for one in queue.in_order(closed):
        seen.append(one.arrival)
        if one.arrival == 3:
            closed.add("c")
            closed.add("b")
    assert seen == [0, 1, 2, 3]


def test_hundreds_of_lanes_come_up_one_by_one() -> None:
    queue, _ = lanes(*(f"n{i % 150}" for i in range(600)))
    opened = []
    real = Lane.walk
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "walk", lambda self, closed: opened.append(self.name) or real(self, closed))
        first = [one.arrival for one, _ in zip(queue.in_order(set()), range(20), strict=False)]
        assert first == list(range(20))
        assert len(opened) <= 22
    assert walked(queue) == list(range(600))
    for one in queue.in_order(set()):  # each is taken out as it comes up
        queue.remove(one)
    assert not len(queue) and not queue.lanes and not queue.fronts and queue.num_tokens == 0


def test_a_request_that_does_not_wait_in_its_lane_is_an_error() -> None:
    queue, _ = lanes("a")
    with pytest.raises(ValueError, match="does not wait"):
        queue.remove(of("b", 0))
    queue.check()


def test_the_requests_before_one_are_counted_over_all_lanes() -> None:
    queue, requests = lanes(*"abcab")
    assert queue.num_before(of("z", 99)) == 5
    queue.remove(requests[2])
    assert queue.num_before(requests[2]) == 2


def test_another_policy_may_want_lanes_and_the_next_one_none() -> None:
    queue = WaitingQueue(FCFS())
    for arrival in range(6):
        queue.add(of("ab"[arrival % 2], arrival))
    assert list(queue.lanes) == [""]
    fair = FairShare()
    driver = Driver(8, 4)
    fair.bind(driver.scheduler.state, driver.scheduler.stats, driver.scheduler.placer)
    queue.set_policy(fair)
    queue.check()
    assert sorted(queue.lanes) == ["a", "b"] and queue.num_tokens == 18
    queue.set_policy(FCFS())
    assert list(queue.lanes) == [""] and [one.arrival for one in queue] == list(range(6))


def test_check_notices_a_front_that_is_stale_and_tokens_that_do_not_add_up() -> None:
    queue, requests = lanes(*"abab")
    queue.num_tokens += 1
    expect_check_fails(queue, "tokens do not add up")
    queue.num_tokens -= 1
    queue.lanes["a"].items.remove(requests[0])
    expect_check_fails(queue, "a front is stale|do not add up")


# Limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_num_seqs", 0, "max_num_seqs must be at least 1, got 0"),
        ("max_num_batched_tokens", 0, "max_num_batched_tokens must be at least 1, got 0"),
        ("max_chunk_tokens", -1, "max_chunk_tokens must be 0 or more, got -1"),
        ("max_bypass", -1, "max_bypass must be 0 or more, got -1"),
        ("lookahead", -1, "lookahead must be 0 or more, got -1"),
        ("watermark", 1.0, "watermark must be a share from 0.0 to below 1.0, got 1.0"),
        ("watermark", -0.1, "watermark must be a share"),
    ],
)
def test_limits_that_make_no_sense_are_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**{field: value})


@pytest.mark.parametrize("field", ["max_num_seqs", "num_drafts", "max_bypass", "max_queue_tokens"])
@pytest.mark.parametrize("value", [1.5, float("nan"), "8", None, True])
def test_limits_that_are_no_integers_are_refused(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{field} must be an integer, got"):
        SchedulerConfig(**{field: value})


def test_no_more_requests_run_than_can_decode_in_one_step() -> None:
    assert SchedulerConfig(max_num_seqs=100, max_num_batched_tokens=30).max_num_seqs == 30
    assert SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=30).max_num_seqs == 20
