"""Runner: one step: what the scheduler plans goes through the model and the sampler, and comes back as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paged.errors import BadLogits, ProcessorFailed
from paged.kv.pages import Int64
from paged.kv.storage import PageStorage
from paged.models.base import LanguageModel
from paged.sampler import Sampled, Sampler, TokenHistory, sample_one
from scheduler.delivery import Delivery
from scheduler.live import Live
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.scoring import score_prompts
from scheduler.step import StepPlan, StepResult

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
        self._refused: dict[int, str] = {}  # slots whose parameters the sampler did not take, and why
        self._launched: tuple[StepPlan, torch.Tensor | Exception] | None = None  # handed to the device before its turn

    def advance(self) -> bool:
        """One step of the scheduler, the model and the sampler; False if nothing could run, ended or gave way.

        With `plan_ahead`, step k + 1 is decided while the device computes step k, and handed to the device before the
        texts of step k are made; what comes out is the same.
        """
        scheduler = self.scheduler
        stats = scheduler.stats
        moved = stats.num_finished + stats.num_preemptions
        step = self._launched or self._launch()
        self._launched = None
        if step is None:
            return stats.num_finished + stats.num_preemptions > moved
        plan, logits = step
        try:
            if isinstance(logits, Exception):
                raise logits
            if scheduler.plans_ahead:
                scheduler.look_ahead()
                self._report_failed()
            unscored = score_prompts(plan, logits) if plan.scored else {}
            sampled, bad = self._draw(logits[: len(plan.sample_slots)], plan)
            result = scheduler.commit(plan, sampled.tokens)
        except BaseException as error:
            self._abort(plan, error)
            return True
        for request, why in unscored.items():
            self.delivery.fail(request, why)
        try:
            if scheduler.plans_ahead:
                self._launched = self._launch()
        finally:
            self.delivery.deliver(result, sampled, bad)
        return True

    def _launch(self) -> tuple[StepPlan, torch.Tensor | Exception] | None:
        """Plan the next step and hand it to the model; its device may go on with it after this returns. Where that
        fails, the error comes back, and is to be raised in the step's turn: what the one before it ends has ended."""
        plan = self.scheduler.schedule()
        self._report_failed()
        if plan is None:
            return None
        try:
            self.delivery.planned(plan)
            for request in plan.admitted:
                self._assign(request)
            return plan, self.model.forward(plan.batch, self.storage)
        except Exception as error:
            return plan, error
        except BaseException as error:
            self._abort(plan, error)
            return None

    def _assign(self, request: Request) -> None:
        """Tell the sampler how to draw for a request that was admitted. Where it cannot, its first row is refused."""
        self._refused.pop(request.slot, None)
        try:
            self.sampler.assign(request.slot, request.params, request.seed, request.end_ids, request.matcher)
        except Exception as error:
            self._refused[request.slot] = f"{type(error).__name__}: {error}"

    def _report_failed(self) -> None:
        """Requests that ended while a step was decided."""
        while self.scheduler.failed:
            self.delivery.ended(self.scheduler.failed.pop())

    def _abort(self, plan: StepPlan, error: BaseException) -> None:
        """End the requests of a step that failed; an interrupt is for the caller, and the engine can be used again."""
        for request in self.scheduler.abort(plan, f"{type(error).__name__}: {error}"):
            self.delivery.ended(request)
        self._report_failed()
        if not isinstance(error, Exception):
            raise error

    def settle(self) -> None:
        """Give up a step that was handed to the device before its turn: its requests end with "error" unless they have
        ended already. For an engine that closes."""
        if self._launched is not None:
            (plan, logits), self._launched = self._launched, None
            if not isinstance(logits, Exception):
                logits.cpu()  # the device writes into the pages until then
                self.scheduler.stats.computed_tokens += plan.num_rows  # as the requests that it was for were told
            self._abort(plan, RuntimeError("the engine was closed"))

    def _draw(self, logits: torch.Tensor, plan: StepPlan) -> tuple[Sampled, dict[int, str]]:
        """The step's tokens, and for each row that holds no usable logits what is wrong with it.

        Such a row fails alone. What its step wrote is not published, so that nobody attaches rows that hold NaN; where
        a logits processor failed, the rows are sound.
        """
        slots, positions = plan.sample_slots, plan.positions
        rows, bad = np.arange(len(slots)), dict[int, str]()
        if self._refused:
            bad = {row: self._refused[slot] for row, slot in enumerate(slots.tolist()) if slot in self._refused}
            rows = np.delete(rows, list(bad))
        while len(rows):
            usable = logits[rows] if bad else logits
            try:
                drawn = self.sampler.sample(usable, slots[rows], positions[rows], self._history, positions[rows])
                return (_spread(drawn, rows, len(slots)) if bad else drawn), bad
            except BadLogits as error:
                for i in error.rows:
                    bad[int(rows[i])] = error.reason(i)
                    cursor = self.scheduler.request_at(int(slots[rows[i]])).cursor
                    if cursor is not None and not isinstance(error, ProcessorFailed):
                        cursor.closed = True
                rows = np.delete(rows, list(error.rows))
        return Sampled(np.zeros(len(slots), np.int32), None), bad

    def first_token(self, request: Request) -> int | None:
        """The first token of a request whose whole prompt is a prefix with logits; None for any other one."""
        prefix, params = request.prefix, request.params
        if prefix is None or not self.has_first(request):
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

    @staticmethod
    def has_first(request: Request) -> bool:
        """Whether a request gets its first token without a step."""
        prefix = request.prefix
        if prefix is None or prefix.num_tokens < request.num_prompt or not prefix.begins(request.view):
            return False
        # Where its probabilities are asked for, rows are computed again, so that there is one place that reports them.
        return request.params.logprobs is None and not request.scores

    def deliver_first(self, live: Live, token: int) -> None:
        """Hand out a token that no step computed, and end the request if it ends with it."""
        request = live.request
        self.scheduler.stats.generated_tokens += 1
        ended = token in request.end_ids and (request.params.min_tokens < 1 or request.matcher is not None)
        if ended or len(request.known) >= request.limit:  # it never gets a slot, where these are counted
            request.num_cached_tokens = request.num_prompt
            self.scheduler.stats.prompt_tokens += request.num_prompt
            self.scheduler.stats.cached_tokens += request.num_prompt
            self.scheduler.finish(request, "stop" if ended else "length")
        result = StepResult([request], np.array([token], np.int32))
        self.delivery.deliver(result, Sampled(result.tokens, None), {})


def _spread(drawn: Sampled, rows: Int64, num_rows: int) -> Sampled:
    """What was drawn for some rows of a step, as what was drawn for all: token 0 for the others."""
    tokens = np.zeros(num_rows, np.int32)
    tokens[rows] = drawn.tokens
    if drawn.logprobs is None:
        return Sampled(tokens, None)
    at = dict(zip(rows.tolist(), drawn.logprobs, strict=True))
    return Sampled(tokens, [at.get(row) for row in range(num_rows)])
