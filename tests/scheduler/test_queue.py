"""WaitingQueue and the policies that order it; the limits of SchedulerConfig."""

from __future__ import annotations

import pytest
from byhand import ids, span

from paged.sampling import SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.policy import FCFS, get_policy
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
    class Longest:
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
    with pytest.raises(ValueError, match="must be one of fcfs, got 'sjf'"):
        get_policy("sjf")


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


def test_no_more_requests_run_than_can_decode_in_one_step() -> None:
    assert SchedulerConfig(max_num_seqs=100, max_num_batched_tokens=30).max_num_seqs == 30
    assert SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=30).max_num_seqs == 20
