"""Engine: a model, its pages, the prefix cache, the scheduler and the sampler, behind a few verbs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence, Sized
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from paged.errors import Closed
from paged.kv.pages import Int32
from paged.matcher import GrammarCompiler
from paged.media import MediaIds, MediaSpan
from paged.models.base import LanguageModel
from paged.models.registry import load_model
from paged.prefix.cache import PrefixCache
from paged.prefix.events import CacheEvent
from paged.prefix.handles import PrefixHandle
from paged.prefix.resume import ResumeHandle
from paged.sampler import Sampler
from paged.sampling import SamplingParams
from scheduler.capacity import default_num_pages, default_state_bytes
from scheduler.config import SchedulerConfig
from scheduler.delivery import Delivery
from scheduler.drafts import Drafter
from scheduler.events import RequestEvent
from scheduler.forecast import Forecast, dry_run
from scheduler.intake import Prompt, keyed_tokens, tokens_of
from scheduler.lock import FairLock
from scheduler.metrics import metrics_text
from scheduler.offline import run_batch
from scheduler.output import Event, RequestOutput
from scheduler.policy import Policy
from scheduler.prefixes import build_prefix, build_resume
from scheduler.proposer import Proposer, get_proposer
from scheduler.request import RequestOptions
from scheduler.runner import Runner
from scheduler.samples import Samples, Sink, make_samples
from scheduler.scheduler import Scheduler
from scheduler.stream import Stream

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Engine:
    """Serves many requests over one pool of KV pages.

    An Engine may be shared by threads: each call takes its lock, and a thread that waits for its own request runs
    steps for all. `generate` and `stream` drive the engine themselves; with `submit`, the caller calls `step` until
    `has_work` is False.

    Invariants (`check()`): those of the scheduler, the pool, the cache, the sampler and the delivery.
    """

    def __init__(
        self,
        source: str | LanguageModel,
        *,
        page_size: int = 16,
        num_pages: int | None = None,
        kv_dtype: str = "auto",
        max_seq_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        policy: str | Policy = "fcfs",
        eviction: str = "lru",
        proposer: str | Proposer | None = None,
        prefix_cache: bool = True,
        max_states: int = 256,
        max_state_bytes: int | None = None,
        device: str = "auto",
        config: SchedulerConfig | None = None,
    ) -> None:
        """`source` is what `load_model` takes: "smollm2", a .gguf file, a Hugging Face folder, or a model object.

        num_pages defaults to a quarter of the machine's memory (on a GPU, to most of what the weights leave free),
        at most what `max_num_seqs` sequences can use; on the CPU, unused pages cost address space only.
        Of a model with recurrent state at most `max_states` checkpoints are kept, within `max_state_bytes`, which
        defaults to a quarter of the machine's memory (on a GPU, a tenth of what the weights leave free).
        max_num_batched_tokens defaults to 512 on the CPU and 4096 on a GPU. `config` gives all limits at once
        instead of the arguments of the same names.
        `proposer` guesses next tokens, which a step verifies: "prompt_lookup", or an object (see Proposer); for a model
        without recurrent state.
        """
        self.model = load_model(source, max_seq_len=max_seq_len, device=device)
        on_gpu = self.model.device.type == "cuda"
        if max_num_batched_tokens is None:
            max_num_batched_tokens = 4096 if on_gpu else 512
        self.config = config or SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
            eviction=eviction,
            plan_ahead=on_gpu,
        )
        states = self.model.create_state_pool(self.config.max_num_seqs)
        if max_state_bytes is None:
            max_state_bytes = default_state_bytes(self.model)
        if num_pages is None:
            num_pages = default_num_pages(self.model, page_size, kv_dtype, self.config.max_num_seqs)
        self.pool = self.model.create_kv_pool(num_pages, page_size, kv_dtype)
        assert self.pool.storage is not None
        self._storage = self.pool.storage
        self.kv_dtype = self._storage.kv_dtype
        self.cache = None
        if prefix_cache:
            rule = self.config.eviction
            self.cache = PrefixCache(self.pool, 0, max_states, max_state_bytes, policy=rule, partial=True)
        self.scheduler = Scheduler(
            self.pool, self.model.max_seq_len, self.config, self.cache, self.model.spec.num_groups, states
        )
        self.sampler = Sampler(self.config.max_num_seqs, self.model.vocab_size)
        guesses = get_proposer(proposer)
        if guesses is not None:
            if states is not None:
                raise ValueError("a model with recurrent state cannot take back drafts: leave proposer out")
            state, quotas = self.scheduler.state, self.scheduler.quotas
            self.scheduler.drafter = Drafter(
                guesses, self.config.num_drafts, self.model.vocab_size, state, self.scheduler.stats, quotas
            )
        self.delivery = Delivery(self.scheduler, self.model)
        self.runner = Runner(self.model, self._storage, self.scheduler, self.sampler, self.delivery)
        self.media_ids = MediaIds()
        self._lock = FairLock()
        self.num_building = 0  # see scheduler.prefixes.building
        self._ids = itertools.count()
        self._closed = False

    # Verbs ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Run a batch to its end; returns the outputs in the order of the prompts. `progress` shows a bar.

        `params` is one for all or one for each, `options` (see RequestOptions) are for all. A prompt that cannot run
        raises before anything is submitted, and names its place in the batch. A request that fails alone ends with
        finish_reason "error". With n > 1 the `samples` of each output are n requests on the same pages of the prompt
        (see RequestOutput).
        """
        return run_batch(self, prompts, params, progress, options)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]) -> Stream:
        """Submit one request and iterate over its events as they come; closing the iterator cancels the request.

        With n > 1 each event says in `index` which sample it is about; the last one carries the output with all.
        """
        return Stream(self, self.prepare(prompt, params, **options))

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]) -> str:
        """Queue one request and return its id; its events come out of `step`.

        `options` are those of RequestOptions.
        InvalidRequest (a ValueError) or TypeError if it can never run, LoopsMismatch for a prefix of another depth or
        window, QueueFull where as much waits as may; nothing else is touched then. With n > 1 the id is that of all
        samples, see `stream` and Samples.
        """
        samples = self.prepare(prompt, params, **options)
        self.start(samples, self.delivery.events.append)
        return samples.id

    def step(self) -> list[Event]:
        """Run one step; returns the events of submitted requests since the last call, an empty list when idle.

        Where nothing can move, since handles hold the pages, who would be next ends with "error".
        """
        events: list[Event] = []
        try:
            with self._lock:
                if not self.advance():
                    self._end_stuck(None)
                events += self.delivery.events
                self.delivery.events.clear()
        except BaseException:  # such as an interrupt, which the end of the lock hands over
            self.delivery.events.extendleft(reversed(events))
            raise
        return events

    def cancel(self, request_id: str) -> bool:
        """End a request, with all its samples, now with finish_reason "cancelled"; False if it is not live (any more).

        Called from within a step, by something that the step calls, it takes effect at the step's end.
        """
        with self._lock:
            samples = self.delivery.calls.get(request_id)
            return samples is not None and self.cancel_call(samples)

    @property
    def has_work(self) -> bool:
        """Whether a request is live, or an event waits to be taken by `step`."""
        return bool(self.delivery.live) or bool(self.delivery.events)

    def prefix_match_len(
        self,
        prompt: Prompt,
        namespace: str = "",
        loops: int | None = None,
        cache_window: int = 0,
        media: Sequence[MediaSpan] = (),
    ) -> int:
        """How many leading tokens of `prompt` a request would attach right now. Takes nothing, touches no entry."""
        tokens, _ = keyed_tokens(self, prompt, media, new=False)
        with self._lock:
            self.require_open()
            if self.cache is None:
                return 0
            return self.cache.match_len(tokens, namespace, loops, cache_window)

    def admit(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Forecast:
        """What `submit` with the same arguments would come to: see Forecast. Takes nothing, touches nothing.

        What submit refuses is not raised here but told as `reason`; TypeError and Closed are raised. With n > 1 the
        forecast is that of the first output.
        """
        with self._lock:
            self.require_open()
            return dry_run(self, prompt, params, options)

    def set_policy(self, policy: str | Policy) -> None:
        """Order what waits by another policy from now on. ValueError for a name that there is not."""
        with self._lock:
            self.require_open()
            self.scheduler.set_policy(policy)

    def build_prefix(
        self,
        prompt: Prompt,
        *,
        namespace: str = "",
        loops: int | None = None,
        cache_window: int = 0,
        share_depths: bool = False,
    ) -> PrefixHandle:
        """Compute a prefix and keep it until the handle is gone; give it to `submit` and the like as `prefix`.

        What is cached of it is not computed again. OutOfPages if the pool has no room, PromptTooLong, ValueError for
        arguments that the model does not take, GeometryMismatch where the weights are changed meanwhile.
        """
        return build_prefix(self, self.tokens_of(prompt), namespace, loops, cache_window, share_depths)

    def build_resume(
        self,
        prompt: Prompt,
        loops: int,
        *,
        max_loops: int = 32,
        namespace: str = "",
        cache_window: int = 0,
    ) -> ResumeHandle:
        """Compute a prefix of a looped model at depth `loops`, so that it can go on at any depth up to `max_loops`."""
        return build_resume(self, self.tokens_of(prompt), namespace, loops, cache_window, max_loops)

    def save_prefix_cache(self, path: str | os.PathLike[str]) -> int:
        """Write what is cached to a file; returns the pages written. See PrefixCache.save."""
        with self._lock:
            self.require_open()
            if self.cache is None:
                raise RuntimeError("this engine was made with prefix_cache=False: there is nothing to save")
            return self.cache.save(path)

    def load_prefix_cache(self, path: str | os.PathLike[str]) -> int:
        """Take in what a file of the same model holds; returns the pages taken. See PrefixCache.load."""
        with self._lock:
            self.require_open()
            if self.cache is None:
                raise RuntimeError("this engine was made with prefix_cache=False: it has nowhere to load to")
            return self.cache.load(path)

    def reset_prefix_cache(self) -> None:
        """Forget every cached page at once; the call to make after weights were changed in place.

        Requests that run go on with the rows they have; what they compute from now on is not cached.
        """
        with self._lock:
            if self.cache is not None:
                self.cache.release()
            self.pool.fingerprint = self.model.fingerprint

    def subscribe(self, callback: Callable[[RequestEvent], object]) -> Callable[[], None]:
        """Tell `callback` of requests as they are Admitted, Preempted and Finished; returns what ends that.

        It is called between two steps, by whichever thread runs them, and may call the engine, to submit a request for
        example; it must not wait for another thread that does. What fails in it is counted and touches nobody.
        """
        with self._lock:
            return self.delivery.subscribers.add(callback)

    def subscribe_pages(self, callback: Callable[[CacheEvent], object]) -> Callable[[], None]:
        """Tell `callback` of cached pages as they are stored and removed; returns what ends that.

        It is called in the middle of a step and must not call the engine. See paged.prefix.events, whose PageMirror
        rebuilds the index from these events. RuntimeError with prefix_cache=False.
        """
        with self._lock:
            return self.delivery.subscribers.add_pages(callback)

    # Reading --------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, all plain numbers; see SchedulerStats and PrefixStats for what each one counts."""
        with self._lock:
            pool, scheduler = self.pool, self.scheduler
            numbers: dict[str, Any] = {
                "num_running": scheduler.state.num_running,
                "num_waiting": len(scheduler.waiting),
                "num_pages": pool.num_pages,
                "free_pages": pool.num_free,
                "live_pages": pool.num_live,
                "cached_only_pages": pool.num_cached_only,
                "usage": pool.usage,
            }
            if self.cache is not None and self.cache.checkpoints is not None:
                numbers["num_checkpoints"] = len(self.cache.checkpoints)
                numbers["checkpoint_bytes"] = self.cache.checkpoints.num_bytes
            for stats in (scheduler.stats, self.cache.stats if self.cache is not None else None):
                if stats is not None:
                    numbers.update({name: getattr(stats, name) for name in stats.__slots__})
            return numbers

    def metrics_text(self) -> str:
        """All counters, gauges and latencies as the text that Prometheus reads. Needs the extra `metrics`."""
        with self._lock:
            return metrics_text(self)

    def explain(self, request_id: str) -> dict[str, Any]:
        """Where a request's tokens and its time went: live requests, and the last 1000 that ended. KeyError for others.

        num_evicted_tokens were computed for it, given up by a preemption, and evicted before it resumed; stop_reason is
        the token, text or limit that ended it. Times are in seconds, None for what has not happened.
        """
        with self._lock:
            return self.delivery.explain(request_id)

    def check(self) -> None:
        """Assert the invariants of the class docstring."""
        with self._lock:
            self.scheduler.check()
            self.sampler.check()
            self.delivery.check()

    def close(self) -> None:
        """Cancel what is live and give the pages back. A second close does nothing.

        Later calls raise Closed, but for those that only read, `cancel`, and `step`, which hands out the last events.
        """
        with self._lock:
            for samples in list(self.delivery.calls.values()):
                self.delivery.cancel(samples)
            self._settle()
            if self.cache is not None:
                self.cache.release()
            self._closed = True

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # For generate, stream and servers -------------------------------------------------------------------------

    def tokens_of(self, prompt: Prompt) -> Int32:
        """A prompt's token ids, checked against the vocabulary. InvalidRequest or TypeError says what is wrong."""
        return tokens_of(self.model, prompt)

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Samples:
        """A request, or n for n samples, that was checked in every way but is not queued yet."""
        self.require_open()
        name = next(name for i in self._ids if (name := f"request-{i}") not in self.delivery.calls)
        return make_samples(self, name, prompt, params, options)

    def require_open(self) -> None:
        """Closed, if this engine was."""
        if self._closed:
            raise Closed("this engine was closed; make a new one")

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for this model; made with the first one. See GrammarCompiler for the errors."""
        return GrammarCompiler(self.model.tokenizer, self.model.vocab_size)

    def start(self, samples: Samples, sink: Sink | None = None, bounded: bool = True) -> None:
        """Queue what was prepared, all of it or, if one request is refused, nothing; `sink` is given its events.

        QueueFull, if it is `bounded` and as much waits as may.
        """
        with self._lock:
            self.require_open()
            if bounded:
                num_requests = len(samples.requests)
                self.scheduler.require_room(num_requests, num_requests * samples.requests[0].num_prompt)
            self.delivery.add(samples)
            samples.sink = sink
            try:
                for index, request in enumerate(samples.requests):
                    first = self.runner.first_token(request)
                    if first is not None:
                        request.known = np.append(request.prompt, np.int32(first))
                    self.scheduler.add(request)
                    live = self.delivery.open(samples, index)
                    if first is not None:
                        self.runner.deliver_first(live, first)
            except BaseException:
                self.delivery.refuse(samples)
                raise
            finally:
                self._settle()

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """What every call holds while it touches pages or the model. Reentrant."""
        return self._lock

    def drive(self, samples: Samples, events: Sized = ()) -> None:
        """One step for all, unless `samples` have ended or have brought `events` meanwhile.

        Where nothing can move, who would be next ends with "error".
        """
        with self._lock:
            if samples.output is None and not events and not self.advance():
                self._end_stuck(samples)

    def _end_stuck(self, samples: Samples | None) -> None:
        """Nothing can move: end who would be next, or `samples` where nobody waits, so that nobody waits for ever."""
        if self.num_building:
            return
        head = next(self.scheduler.policy.walk(self.scheduler.waiting, set()), None)
        stuck = samples if head is None else self.delivery.live[head.id].samples
        if stuck is not None:
            self.delivery.end_call(
                stuck, "error", "out of memory: its pages are held by handles or by sessions outside this engine"
            )
            self._settle()

    def advance(self) -> bool:
        """One step for all; False if nothing could run. Takes the lock."""
        with self._lock:
            self.delivery.begin_step()
            try:
                return self.runner.advance()
            finally:
                self.delivery.end_step()
                self._settle()

    def cancel_call(self, samples: Samples) -> bool:
        """Cancel what `prepare` made; False if it was not started or has ended."""
        with self._lock:
            done = self.delivery.cancel(samples)
            self._settle()
            return done

    def abandon(self, samples: Samples) -> None:
        """Cancel without waiting for anything: at once where nobody is at work, else when the next step begins or ends.

        For what the garbage collector calls.
        """
        self.delivery.doomed.append(samples)
        if self._lock.try_alone():
            try:
                self.delivery.end_doomed()
                self._settle(tell=False)  # nobody is to be called in the middle of whatever this thread does
            finally:
                self._lock.__exit__()

    def _settle(self, tell: bool = True) -> None:
        """After what may have ended a request: call subscribers; and where it was the last one, end a step that was
        begun ahead, since nobody else would give its pages back."""
        if self.delivery.stepping:
            return
        if not self.scheduler.requests:
            self.runner.settle()
        if tell:
            self.delivery.subscribers.tell()
