"""Runner: one step: what the scheduler plans goes through the model and the sampler, and comes back as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paged.errors import BadLogits
from paged.kv.storage import PageStorage
from paged.models.base import LanguageModel
from paged.sampler import Sampled, Sampler, TokenHistory, sample_one
from paged.sampling import SamplingParams
from scheduler.delivery import Delivery
from scheduler.live import Live
from scheduler.request import Request
from scheduler.scheduler import Scheduler, StepResult
from scheduler.step import StepPlan

if TYPE_CHECKING:
    import torch


class Runner:
    """Runs steps. The caller holds the engine's lock.

    What fails, fails alone where it can: a row without usable logits, a request whose pages could not be copied, a
    text that could not be decoded. Where the model or the sampler fails, every request of the step ends with "error".
    """

    def __init__(
        self,
        model: LanguageModel,
        storage: PageStorage,
        scheduler: Scheduler,
        sampler: Sampler,
        delivery: Delivery,
    ) -> None:
        self.model = model
        self.storage = storage
        self.scheduler = scheduler
        self.sampler = sampler
        self.delivery = delivery
        state = scheduler.state
        self._history = TokenHistory(state.tokens, state.prompt_len, state.known)

    def advance(self) -> bool:
        """One step of the scheduler, the model and the sampler; False if nothing could run."""
        scheduler, delivery = self.scheduler, self.delivery
        plan = scheduler.schedule()
        failed = bool(scheduler.failed)
        while scheduler.failed:
            delivery.ended(scheduler.failed.pop())
        if plan is None:
            return failed
        try:
            for request in plan.admitted:
                self.sampler.assign(request.slot, request.params, request.seed, request.end_ids, request.matcher)
            logits = self.model.forward(plan.batch, self.storage)
            sampled, bad = self._draw(logits, plan)
        except BaseException as error:
            for request in scheduler.abort(plan, f"{type(error).__name__}: {error}"):
                delivery.ended(request)
            if not isinstance(error, Exception):  # an interrupt is for the caller; the engine can be used again
                raise
            return True
        delivery.deliver(scheduler.commit(plan, sampled.tokens), sampled, bad)
        return True

    def _draw(self, logits: torch.Tensor, plan: StepPlan) -> tuple[Sampled, dict[int, str]]:
        """The step's tokens, and for each row that holds no usable logits what is wrong with it.

        Such a row fails alone. What its step wrote is not published, so that nobody attaches rows that hold NaN.
        """
        args = (plan.sample_slots, plan.positions, self._history)
        try:
            return self.sampler.sample(logits, *args), {}
        except BadLogits as error:
            rows = list(error.rows)
            for slot in plan.sample_slots[rows].tolist():
                cursor = self.scheduler.request_at(slot).cursor
                if cursor is not None:
                    cursor.closed = True
                self.sampler.assign(slot, SamplingParams(), 0)  # zeros will do then, whatever bias or grammar it has
            usable = logits.clone()
            usable[rows] = 0.0
            sampled, more = self._draw(usable, plan)
            return sampled, {**dict.fromkeys(rows, f"BadLogits: {error}"), **more}

    def first_token(self, request: Request) -> int | None:
        """The first token of a request whose whole prompt is a prefix with logits; None for any other one."""
        prefix, params = request.prefix, request.params
        if prefix is None or prefix.num_tokens < request.num_prompt or not prefix.begins(request.view):
            return None
        if params.logprobs is not None:  # one row is computed again, so that there is one place that reports them
            return None
        try:
            return sample_one(
                prefix.logits,
                params,
                request.seed,
                request.num_prompt,
                request.prompt,
                [],
                request.end_ids,
                request.matcher,
            )
        except BadLogits:
            return None  # the step that computes the row again fails this request alone

    def deliver_first(self, live: Live, token: int) -> None:
        """Hand out a token that no step computed, and end the request if it ends with it."""
        request = live.request
        self.scheduler.stats.generated_tokens += 1
        ended = token in request.end_ids and (request.params.min_tokens < 1 or request.matcher is not None)
        if ended or len(request.known) >= request.limit:
            self.scheduler.finish(request, "stop" if ended else "length")
        result = StepResult([request], np.array([token], np.int32))
        self.delivery.deliver(result, Sampled(result.tokens, None), {})
