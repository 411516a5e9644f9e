"""Engine.admit: what would become of a request, told without touching anything."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from byhand import span
from fakes import EchoHybrid, EchoLooped, EchoModel

from paged.errors import Closed, DuplicateRequest, QueueFull
from paged.sampling import SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.policy import POLICIES
from scheduler.quota import Quota


def engine(num_pages: int = 64, model: EchoModel | None = None, **config) -> Engine:
    config = SchedulerConfig(**{"watermark": 0.0, "max_num_seqs": 4, "max_num_batched_tokens": 64, **config})
    return Engine(model or EchoModel(), page_size=4, num_pages=num_pages, config=config)


def greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0.0)


def drain(e: Engine) -> list[str]:
    """Steps until nothing is left; the names of all that ended, in order."""
    ended = []
    while e.has_work:
        ended += [event.request_id for event in e.step() if event.output is not None]
        e.check()
    return ended


def snapshot(e: Engine) -> tuple:
    """Everything that an admission could touch."""
    index = e.cache.index
    queue = e.cache.queue
    return (
        e.pool.refs.tolist(),
        e.pool.held.tolist(),
        index.tick,
        dataclasses.astuple(e.cache.stats) if dataclasses.is_dataclass(e.cache.stats) else vars(e.cache.stats),
        [getattr(e.scheduler.stats, name) for name in e.scheduler.stats.__slots__],
        len(e.scheduler.waiting),
        e.scheduler._arrivals,
        len(e.scheduler.limits),
        {name: repr(value) for name, value in vars(queue).items() if isinstance(value, (int, float, list))},
    )


# Nothing is touched -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_thousand_questions_leave_everything_as_it_was(policy: str) -> None:
    with engine(policy=policy, reserve="expected", quota=Quota(max_running=3)) as e:
        e.generate([span(0, 30)], greedy(4))
        for i in range(6):
            e.submit([i] * 9, greedy(20))
        e.step()
        before = snapshot(e)
        for i in range(1000):
            told = e.admit(span(0, 30), greedy(8), priority=1, timeout_s=4.0, deadline_s=1.0)
            assert told.accepted and told.num_matched_tokens == e.prefix_match_len(span(0, 30)) == 29, i
        assert snapshot(e) == before
        e.check()
        assert e.submit([5], greedy(1)) == "request-7"  # no id was used up
        drain(e)


def test_the_order_of_eviction_is_not_changed() -> None:
    def left(questions: int) -> list[int]:
        with engine(16) as e:
            for i in range(3):
                e.generate([[i] * 16], greedy(1))
            for _ in range(questions):
                e.admit([0] * 16)
            e.generate([span(3, 36)], greedy(1))  # nine pages: the oldest have to go
            return [e.prefix_match_len([i] * 16) for i in range(3)]

    assert left(100) == left(0)
    assert left(0)[0] < left(0)[2]


@pytest.mark.parametrize("model", [EchoModel, EchoHybrid, EchoLooped])
def test_it_matches_what_submit_then_attaches(model) -> None:
    with engine(200, model()) as e:
        e.generate([span(0, 30)], greedy(4))
        for prompt in (span(0, 30), span(0, 17), [*span(0, 22), 90], span(50, 9)):
            told = e.admit(prompt, greedy(2))
            out = e.generate([prompt], greedy(2))[0]
            assert told.num_matched_tokens == out.num_cached_tokens
            assert told.num_prompt_tokens == len(prompt)
        if e.scheduler.checkpointer is not None:
            assert not e.scheduler.checkpointer._outlooks


def test_a_prefix_handle_counts_as_matched() -> None:
    with engine(200) as e:
        prefix = e.build_prefix(span(0, 20))
        e.cache.release()
        assert e.admit([*span(0, 20), 5]).num_matched_tokens == 0
        assert e.admit([*span(0, 20), 5], prefix=prefix).num_matched_tokens == 20


@pytest.mark.parametrize("model", [EchoModel, EchoHybrid])
def test_a_prefix_handle_of_the_whole_prompt_counts_as_matched_to_its_last_token(model) -> None:
    with engine(200, model()) as e:
        prefix = e.build_prefix(span(0, 20))
        told = e.admit(span(0, 20), greedy(4), prefix=prefix)
        out = e.generate([span(0, 20)], greedy(4), prefix=prefix)[0]
        assert told.num_matched_tokens == out.num_cached_tokens == 20
        assert (told.num_prompt_tokens, told.pages_needed) == (20, 1)


# Pages and waiting ------------------------------------------------------------------------------------------------


def test_an_idle_engine_starts_it_at_once() -> None:
    with engine() as e:
        told = e.admit(span(0, 10), greedy(8))
        assert (told.pages_needed, told.pages_available, told.num_ahead) == (3, 64, 0)
        assert (told.wait_steps, told.wait_s, told.reason) == (0, 0.0, "")


def test_pages_of_a_hit_that_nobody_uses_are_needed_and_those_in_use_are_not() -> None:
    with engine() as e:
        e.generate([span(0, 16)], greedy(1))
        assert e.admit([*span(0, 16), 5], greedy(1)).pages_needed == 5
        e.submit([*span(0, 16), 6], greedy(20))
        e.step()
        assert e.admit([*span(0, 16), 5], greedy(1)).pages_needed == 1


@pytest.mark.parametrize(("reserve", "needs"), [("prompt", 3), ("max_tokens", 8)])
def test_what_is_reserved_is_needed_and_what_others_reserve_is_not_available(reserve: str, needs: int) -> None:
    with engine(40, reserve=reserve) as e:
        e.submit([1] * 8, greedy(12))  # two pages, then five
        e.step()
        told = e.admit([2] * 12, greedy(20))
        assert told.pages_needed == needs
        assert told.pages_available == 40 - (2 if reserve == "prompt" else 5)
        drain(e)


def started_before(e: Engine, request_id: str) -> int:
    """How many of those that wait now start before the one that was submitted last."""
    others = {request.id for request in e.scheduler.waiting} - {request_id}
    before: set[str] = set()
    while e.scheduler.requests[request_id].slot < 0:
        e.step()
        before |= {name for name in others if name not in e.scheduler.requests or e.scheduler.requests[name].slot >= 0}
    return len(before)


def test_the_flood_of_another_tenant_is_not_ahead_of_who_gets_its_share() -> None:
    with engine(policy="fair_share", max_num_seqs=1) as e:
        for i in range(30):
            e.submit([i] * 8, greedy(8), namespace="flood")
        for _ in range(20):
            e.step()
        told = e.admit([40] * 8, greedy(8), namespace="other")
        assert told.num_ahead <= 1
        assert told.wait_steps is not None and told.wait_steps <= 16
        assert e.admit([40] * 8, greedy(8), namespace="flood").num_ahead == len(e.scheduler.waiting)
        assert started_before(e, e.submit([40] * 8, greedy(8), namespace="other")) <= told.num_ahead
        for _ in range(2):  # its own go before it, and about as many of the flood
            e.submit([41] * 8, greedy(8), namespace="other")
        told = e.admit([40] * 8, greedy(8), namespace="other")
        assert 4 <= told.num_ahead <= 5
        late = e.submit([40] * 8, greedy(8), namespace="other")
        assert abs(started_before(e, late) - told.num_ahead) <= 1
        drain(e)


@pytest.mark.parametrize("waiting", [30, 140])
def test_the_longest_prefix_is_ahead_of_all_that_match_less_but_in_a_long_queue(waiting: int) -> None:
    with engine(200, policy="longest_prefix", max_num_seqs=1) as e:
        e.generate([span(0, 30)], greedy(1))
        for i in range(waiting):
            e.submit([i % 97] * 8, greedy(2))
        told = e.admit(span(0, 30), greedy(2))
        late = e.submit(span(0, 30), greedy(2))
        assert told.num_ahead == (0 if waiting == 30 else 140)
        if waiting == 30:
            assert started_before(e, late) == 0
        drain(e)


def test_a_full_running_set_is_waited_for() -> None:
    with engine(max_num_seqs=2) as e:
        e.submit([1] * 4, greedy(10))
        e.submit([2] * 4, greedy(30))
        e.step()
        told = e.admit([3] * 4, greedy(4))
        assert (told.num_ahead, told.wait_steps) == (0, 10)
        late = e.submit([3] * 4, greedy(4))
        after = 0
        while e.scheduler.requests[late].slot < 0:
            e.step()
            after += 1
        assert after == told.wait_steps
        drain(e)


def test_those_ahead_are_waited_for_too() -> None:
    with engine(max_num_seqs=1) as e:
        waits = []
        for i in range(4):
            waits.append(e.admit([i] * 4, greedy(10)).wait_steps)
            e.submit([i] * 4, greedy(10))
            if i == 0:
                e.step()
        assert waits == [0, 10, 20, 30]
        drain(e)


def test_an_urgent_request_has_fewer_ahead() -> None:
    with engine(max_num_seqs=1, policy="priority") as e:
        for i in range(4):
            e.submit([i] * 4, greedy(10), priority=2)
        e.step()
        assert e.admit([9], priority=2).num_ahead == 3
        assert e.admit([9], priority=1).num_ahead == 0
        drain(e)


def test_short_pages_are_waited_for_until_enough_have_ended() -> None:
    with engine(20) as e:
        e.submit([1] * 20, greedy(6))
        e.submit([2] * 20, greedy(12))
        e.step()
        first, both = e.admit([3] * 50, greedy(1)), e.admit([3] * 70, greedy(1))
        assert first.wait_steps <= 6 < both.wait_steps <= 12
        drain(e)


def test_a_namespace_at_its_quota_waits_and_others_do_not() -> None:
    with engine(quotas={"a": Quota(max_running=1)}) as e:
        e.submit([1] * 4, greedy(9), namespace="a")
        e.step()
        assert e.admit([2], namespace="a").wait_steps > 0
        assert e.admit([2], namespace="b").wait_steps == 0
        drain(e)


def test_seconds_follow_the_pace_of_the_steps() -> None:
    with engine(max_num_seqs=1) as e:
        now = [0.0]
        e.scheduler.pace.clock = lambda: now[0]
        real = e.model.forward

        def forward(batch, storage):
            now[0] += 0.5
            return real(batch, storage)

        e.model.forward = forward
        assert e.admit([1]).wait_s == 0.0
        e.submit([1] * 4, greedy(10))
        e.step()
        told = e.admit([2] * 4, greedy(10))
        assert told.wait_s == pytest.approx(0.5 * told.wait_steps)
        drain(e)


# Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "reason"),
    [
        ([1] * 300, {}, "the prompt has 300 tokens and the whole pool holds 256"),
        ([], {}, "the prompt is empty"),
        ([1000], {}, "token ids must be between 0 and 96, got 1000"),
        ([1], {"timeout_s": -1.0}, "timeout_s must be 0 or more seconds"),
        ([1], {"loops": 3}, "does not loop"),
        ([1], {"request_id": "there"}, "a request with id 'there' is still live"),
        ([1] * 40, {"namespace": "small"}, "the quota of namespace 'small' holds 16"),
    ],
)
def test_what_submit_would_refuse_is_told_as_a_reason(prompt, options: dict, reason: str) -> None:
    with engine(quotas={"small": Quota(max_pages=4)}) as e:
        e.submit([1], greedy(3), request_id="there")
        told = e.admit(prompt, greedy(4), **options)
        assert reason in told.reason and not told.accepted
        assert told.wait_steps is None
        with pytest.raises(ValueError) as refused:
            e.submit(prompt, greedy(4), **options)
        assert str(refused.value) == told.reason
        assert drain(e) == ["there"]


def test_a_full_queue_is_a_reason_and_the_rest_is_told_all_the_same() -> None:
    with engine(max_num_seqs=1, max_queue_requests=2) as e:
        for i in range(2):
            assert e.admit([i] * 8).accepted
            e.submit([i] * 8, greedy(3))
        told = e.admit([3] * 8)
        assert told.reason == "2 requests wait, 1 more came, and max_queue_requests is 2; submit again later"
        assert (told.num_prompt_tokens, told.pages_needed, told.wait_steps) == (8, 2, None)
        drain(e)


def test_what_no_request_could_be_is_raised_as_by_submit() -> None:
    e = engine()
    with pytest.raises(TypeError, match="params must be SamplingParams"):
        e.admit([1], {"max_tokens": 3})
    with pytest.raises(TypeError, match="a request takes"):
        e.admit([1], colour="red")
    e.close()
    with pytest.raises(Closed):
        e.admit([1])


def test_several_outputs_are_told_of_the_first() -> None:
    with engine(max_queue_requests=3) as e:
        assert e.admit([1] * 8, SamplingParams(n=3)).pages_needed == 2
        assert not e.admit([1] * 8, SamplingParams(n=4)).reason  # an empty queue takes any one call
        e.submit([2] * 8)
        assert not e.admit([1] * 8, SamplingParams(n=2)).reason
        assert "max_queue_requests is 3" in e.admit([1] * 8, SamplingParams(n=3)).reason


# Limits of the queue ----------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_with_both_numbers_and_takes_more_when_it_is_not() -> None:
    with engine(max_num_seqs=1, max_queue_requests=2) as e:
        for i in range(2):
            e.submit([i] * 4, greedy(3))
        with pytest.raises(QueueFull, match="2 requests wait, 1 more came, and max_queue_requests is 2"):
            e.submit([9] * 4, greedy(3))
        e.step()  # one starts
        e.submit([9] * 4, greedy(3))
        with pytest.raises(QueueFull) as caught, e.stream([9] * 4, greedy(3)):
            pass
        assert isinstance(caught.value, RuntimeError) and not isinstance(caught.value, ValueError)
        assert len(drain(e)) == 3


def test_a_limit_on_waiting_tokens_counts_prompts_and_an_empty_queue_takes_any() -> None:
    with engine(max_num_seqs=1, max_queue_tokens=20) as e:
        e.submit([1] * 50, greedy(3))
        with pytest.raises(QueueFull, match="50 tokens wait, 1 more came, and max_queue_tokens is 20"):
            e.submit([1], greedy(3))
        e.step()
        e.submit([2] * 12, greedy(3))
        e.submit([3] * 8, greedy(3))
        with pytest.raises(QueueFull, match="20 tokens wait, 1 more came"):
            e.submit([4], greedy(3))
        assert len(drain(e)) == 3


def test_a_preempted_request_comes_back_to_a_full_queue() -> None:
    with engine(max_num_seqs=1, max_queue_requests=1) as e:
        first = e.submit([1] * 4, greedy(6))
        e.step()
        e.submit([2] * 4, greedy(3))
        e.scheduler.preempt(e.scheduler.requests[first])
        assert len(e.scheduler.waiting) == 2
        assert len(drain(e)) == 2


def test_a_batch_is_queued_whole_whatever_the_limits_of_the_queue() -> None:
    with engine(max_num_seqs=2, max_queue_requests=2, max_queue_tokens=9) as e:
        outputs = e.generate([[i] * 4 for i in range(8)], greedy(3))
        assert [out.token_ids for out in outputs] == [e.model.greedy([i] * 4, 3) for i in range(8)]


@pytest.mark.parametrize("field", ["max_queue_requests", "max_queue_tokens"])
def test_a_limit_below_zero_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be 0 or more, got -1"):
        SchedulerConfig(**{field: -1})


def test_a_policy_is_changed_while_the_engine_runs() -> None:
    with engine(max_num_seqs=1) as e:
        for i in range(3):
            e.submit([i] * 4, greedy(3), request_id=f"r{i}", priority=-i)
        e.step()
        e.set_policy("priority")
        e.step()
        assert e.explain("r2")["state"] == "running"
        assert drain(e) == ["r2", "r1", "r0"]
        with pytest.raises(ValueError, match="the policy must be one of"):
            e.set_policy("best")
    assert np.all(e.pool.refs == 0)


def test_a_prompt_that_is_scored_is_forecast_to_attach_nothing_as_it_will() -> None:
    with engine() as e:
        prompt = span(0, 33)
        e.generate([prompt], SamplingParams(max_tokens=2))
        assert e.admit(prompt, SamplingParams(max_tokens=2)).num_matched_tokens == 32
        forecast = e.admit(prompt, SamplingParams(max_tokens=2, prompt_logprobs=0))
        pages = -(-33 // e.pool.page_size)
        assert (forecast.num_matched_tokens, forecast.pages_needed) == (0, pages)
        [output] = e.generate([prompt], SamplingParams(max_tokens=2, prompt_logprobs=0))
        assert output.num_cached_tokens == 0


def test_by_longest_prefix_a_prompt_that_is_scored_does_not_go_by_what_it_will_not_attach() -> None:
    with engine(policy="longest_prefix", max_num_seqs=1) as e:
        e.generate([span(0, 33)], SamplingParams(max_tokens=2))
        e.submit(span(60, 9), SamplingParams(max_tokens=4), request_id="running")
        e.step()
        e.submit(span(40, 9), SamplingParams(max_tokens=2), request_id="first")
        e.submit(span(0, 33), SamplingParams(max_tokens=2, prompt_logprobs=0), request_id="scored")
        ended = []
        while e.has_work:
            ended += [event.request_id for event in e.step() if event.finished]
        assert ended == ["running", "first", "scored"]


def refusal(e: Engine, params: SamplingParams, request_id: str) -> str:
    """Why submit refuses; what admit says has to be the same."""
    told = e.admit([1, 2], params, request_id=request_id)
    with pytest.raises((DuplicateRequest, QueueFull)) as refused:
        e.submit([1, 2], params, request_id=request_id)
    assert told.reason == str(refused.value)
    return told.reason


def test_the_ids_of_all_samples_have_to_be_new() -> None:
    with engine() as e:
        e.submit([1, 2], greedy(8), request_id="a/1")
        assert "'a/1' is still live" in refusal(e, SamplingParams(max_tokens=8, n=2), "a")
        assert e.admit([1, 2], greedy(8), request_id="a").accepted
        drain(e)


def test_the_id_of_a_call_is_taken_until_its_last_sample_has_ended() -> None:
    with engine() as e:
        e.submit([1, 2], SamplingParams(max_tokens=8, n=2), request_id="a")
        e.delivery.end(e.delivery.live["a"], "length")
        assert "a" not in e.scheduler.requests
        assert "'a' is still live" in refusal(e, greedy(8), "a")
        drain(e)


def test_of_two_reasons_it_tells_the_one_that_submit_finds_first() -> None:
    with engine(max_queue_requests=1) as e:
        e.submit([1, 2], greedy(8), request_id="a")
        assert "max_queue_requests" in refusal(e, greedy(8), "a")
        drain(e)
