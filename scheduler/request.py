"""Request: what one caller asked for, and how far it has come."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from paged.draw import TokenLogprob
from paged.errors import InvalidRequest, require_integer
from paged.matcher import GrammarMatcher
from paged.media import MediaSpan
from paged.prefix.cursor import Cursor
from paged.prefix.handles import PrefixHandle
from paged.prefix.retention import Retain, Retention
from paged.sampling import SamplingParams
from paged.spec import KVSpec, KVView

Int32 = npt.NDArray[np.int32]


ONE_GROUP = KVSpec(1, 1, 1).view()  # of a model that has nothing special


class RequestState(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(frozen=True, slots=True)
class PrefillStops:
    """Where the prefill of a recurrent model leaves checkpoints: numbers of leading prompt tokens, 0 for none.

    head          what every conversation shares, whatever its system text and its tools
    opening       system prompt and tools, up to the first user's text
    stable        every earlier turn, up to the last user's text; else it is found by comparing with the cache
    messages_end  the close of the last message; else one token short of the prompt

    `ChatRenderer.render_marked` finds them. A model without recurrent state needs none: its pages are the cache.
    """

    head: int = 0
    opening: int = 0
    stable: int = 0
    messages_end: int = 0

    def __post_init__(self) -> None:
        for name in ("head", "opening", "stable", "messages_end"):
            value = require_integer(f"PrefillStops.{name}", getattr(self, name), "a number of tokens")
            if value < 0:
                raise InvalidRequest(f"PrefillStops.{name} must be 0 (none) or more tokens, got {value}")


class RequestOptions(TypedDict, total=False):
    """What a request can say beside its prompt and its sampling.

    request_id    its name; default: one that the engine makes
    priority      for the policy "priority": a smaller number is more urgent
    deadline_s    for the policy "deadline": seconds from submission within which it should have started
    timeout_s     seconds from submission after which it ends with "cancelled", keeping the tokens that it has by then
    queue_timeout_s  the same for one that has not started by then
    namespace     salt: requests of different namespaces share no cached page
    stops         where the prefill of a model with recurrent state leaves checkpoints for later prompts
    loops         depth in a looped model; None: its default
    cache_window  W > 0: every token sees the last W positions alone, itself included, and older pages are given back
    retain        what its pages may expect when it has ended: "none" (this conversation is over), "turn" (it goes on),
                  a number of seconds, or a Retention with a priority; None: nothing is known
    cache         False: nothing is attached from the prefix cache and nothing enters it, neither while the request runs
                  nor when it ends; after a preemption it computes all of its tokens again. A `prefix` is still used
    media         spans of the prompt whose embeddings are given; see MediaSpan. They are cached by content: another one
                  is a miss, and a match that would end inside a span ends where it begins
    prefix        a handle from `build_prefix` of the prompt's first tokens, or of all of them: then the first token
                  comes without a forward
    """

    request_id: str | None
    priority: int
    deadline_s: float | None
    timeout_s: float | None
    queue_timeout_s: float | None
    namespace: str
    stops: PrefillStops | None
    loops: int | None
    cache_window: int
    retain: Retain
    cache: bool
    media: Sequence[MediaSpan]
    prefix: PrefixHandle | None


@dataclass(slots=True, eq=False)
class Request:
    """One request. While it runs, its tokens and counts live in the scheduler's slot arrays, not here.

    `prompt` has ids below 0 where there is media (see MediaIds): the same tokens go through scheduler and cache, and a
    model gets the embeddings of `media` there. `known` holds prompt and output whenever the request has no slot: before
    admission, after preemption, at the end. `scored` are the log probabilities of its prompt so far, from the second
    token on, if it asks for them: they outlive a preemption. `limit` is the number of tokens at which it ends with
    "length".
    """

    id: str
    prompt: Int32
    params: SamplingParams
    seed: int
    end_ids: tuple[int, ...]  # ids that end it: the model's (unless ignore_eos) and its own
    limit: int
    namespace: str = ""
    priority: int = 0
    stops: PrefillStops = PrefillStops()
    retain: Retention | None = None
    view: KVView = ONE_GROUP  # what it uses of the page groups, by its depth and its cache window
    cache: bool = True  # False: the prefix cache neither serves nor keeps it; then it has no cursor
    media: tuple[MediaSpan, ...] = ()  # in order of position
    prefix: PrefixHandle | None = None  # its first tokens, computed: used where the cache has less of them
    matcher: GrammarMatcher | None = None  # where its output stands in params.grammar; preemption does not move it
    deadline_s: float | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    arrival: int = 0  # order of submission
    arrival_step: int = 0  # steps that the scheduler had made then
    submitted: float = 0.0  # the scheduler's clock then
    state: RequestState = RequestState.WAITING
    known: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    cursor: Cursor | None = None
    scored: list[TokenLogprob | None] = field(default_factory=list["TokenLogprob | None"])
    stop_digests: dict[int, bytes] = field(default_factory=dict[int, bytes])  # by position; see Checkpointer
    slot: int = -1
    finish_reason: str | None = None
    error: str = ""
    num_cached_tokens: int = 0  # attached at the first admission
    num_reattached_tokens: int = 0  # attached again after preemptions
    num_computed_tokens: int = 0  # rows computed for it, recomputation included
    num_preemptions: int = 0
    num_preempted_tokens: int = 0  # computed tokens that it gave up with its pages
    num_bypassed: int = 0  # passes in which later requests were admitted before it

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    def columns(self, page_size: int) -> int:
        """Pages of one group that its known tokens fill, the last one perhaps in part."""
        return -(-len(self.known) // page_size)

    @property
    def scores(self) -> bool:
        """Whether its output says how likely its prompt was."""
        return self.params.prompt_logprobs is not None

    @property
    def readable(self) -> Int32:
        """The known tokens of which all but the last may be attached: every one, unless logits of rows that were
        computed before would have to be there again."""
        if not self.scores or len(self.scored) >= self.num_prompt - 1:
            return self.known
        return self.known[: len(self.scored) + 1]
