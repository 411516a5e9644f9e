"""SamplingParams: how the tokens of one request are drawn, and when it ends. Loads neither torch nor a model."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, cast

from paged.errors import InvalidRequest, require_integer
from paged.grammar import Grammar

# Below this temperature two fp32 logits that differ at all leave the lower one no chance worth drawing for, so the
# row counts as greedy: then ties have one answer too, the lowest id.
GREEDY_BELOW = 1e-6

_MOST_SAMPLES = 16_384  # of one prompt: each is a request, made before anything of them runs


LogitsProcessor = Callable[[Any, Any], object]  # (int32 [tokens], fp32 [vocab_size]) -> None or fp32 [vocab_size]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled. Checked when it is made: TypeError for a wrong type, InvalidRequest (a ValueError)
    for a wrong value; what depends on the vocabulary is checked by `validate_for`.

    max_tokens          tokens to generate at most, >= 1; None: up to the limit of the model and the pool
    temperature         0.0 (the default) is greedy: the highest logit, the lowest id on ties. So is all below 1e-6
    top_k               draw among the k highest logits only, ties at the edge kept lowest id first; 0 or -1, or any
                        number from the size of the vocabulary on: off; 1: greedy
    top_p               draw among the smallest set of most likely tokens whose mass is >= top_p, in [0, 1]; the set
                        never is empty, so that 0.0 keeps the most likely token; 1.0: off
    min_p               drop tokens less likely than min_p times the most likely one, in [0, 1]; 0.0: off
    repetition_penalty  > 0: logits of tokens seen in prompt or output are divided by it where positive, multiplied
                        where negative; 1.0: off
    presence_penalty    subtracted once from the logit of each token seen in the output
    frequency_penalty   subtracted from the logit of a token once per occurrence in the output
    seed                0 .. 2**64 - 1; None: drawn by `draw_seed` at submit. The draw depends on (seed, position) only
    stop                strings that end the request when they appear in its text; one string equals a list of one
    stop_token_ids      ids that end the request, besides the model's own
    include_stop        show the stop string that ended the request, which is cut off otherwise
    min_tokens          no end id is drawn, and no stop string is heeded, before so many tokens are generated
    ignore_eos          the model's end ids end nothing (stop_token_ids still do)
    n                   outputs for one prompt, at most 16384; it is computed once. `sample(i)` gives the parameters of
                        output i
    logprobs            report the log probability of each token and of this many most likely ones (0: only the
                        token's own); None: off
    prompt_logprobs     the same for each token of the prompt but the first; None: off. The prompt is then computed in
                        full, by each of n outputs: neither the prefix cache nor a prefix handle holds its logits
    logit_bias          {token id: number added to its logit}
    logits_processors   functions `f(token_ids, logits)` that see copies of the known tokens (int32, prompt and output)
                        and of the row of logits after bias and penalties (fp32 [vocab_size]), and change the row in
                        place or return another one. They come one after the other, before the grammar. Each must
                        depend on its arguments alone: it may be called again for the same position. One that fails
                        ends its own request alone, with "error"
    grammar             only tokens that keep the output to this Grammar are drawn, and an end id only where the output
                        may end; an output that nothing can follow ends at once, with "stop". The mask comes after bias
                        and penalties and before temperature and top_k, so that these choose among allowed tokens.
                        min_tokens gives way where only an end may follow; a stop string ends an output that the
                        grammar has not completed, and so does max_tokens; logprobs are the model's, without the mask
    """

    max_tokens: int | None = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    logits_processors: Sequence[LogitsProcessor] = field(default=(), hash=False)
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "max_tokens": _optional("max_tokens", self.max_tokens, 1),
            "temperature": _number("temperature", self.temperature, low=0.0),
            "top_k": max(0, _integer("top_k", self.top_k, -1)),
            "top_p": _number("top_p", self.top_p, low=0.0, high=1.0),
            "min_p": _number("min_p", self.min_p, low=0.0, high=1.0),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, above=0.0),
            "presence_penalty": _number("presence_penalty", self.presence_penalty),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty),
            "seed": _optional("seed", self.seed, 0, 2**64 - 1),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "include_stop": _boolean("include_stop", self.include_stop),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0),
            "ignore_eos": _boolean("ignore_eos", self.ignore_eos),
            "n": _integer("n", self.n, 1, _MOST_SAMPLES),
            "logprobs": _optional("logprobs", self.logprobs, 0),
            "prompt_logprobs": _optional("prompt_logprobs", self.prompt_logprobs, 0),
            "logit_bias": _biases(self.logit_bias),
            "logits_processors": _processors(self.logits_processors),
            "grammar": _grammar(self.grammar),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"SamplingParams.min_tokens must be at most max_tokens, got min_tokens {self.min_tokens} and "
                f"max_tokens {self.max_tokens}"
            )

    @property
    def greedy(self) -> bool:
        """Whether every token is the arg-max: no number is drawn."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    def sample(self, index: int) -> SamplingParams:
        """The parameters of output `index` of n, alone: n is 1 and the seed is `sample_seed(seed, index)`.

        Output 0 is so what n = 1 gives. Without a seed each output draws one of its own at submit.
        """
        if not 0 <= index < self.n:
            raise IndexError(f"SamplingParams.sample takes an index from 0 to {self.n - 1}, got {index}")
        return replace(self, n=1, seed=None if self.seed is None else sample_seed(self.seed, index))

    def end_ids(self, eos_token_ids: Iterable[int] = ()) -> tuple[int, ...]:
        """The ids that end this request, ascending: its own and, unless `ignore_eos`, the model's."""
        return tuple(sorted({*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}))

    def validate_for(self, vocab_size: int) -> None:
        """InvalidRequest if an id, or the number of log probabilities, lies outside a vocabulary of this size."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias or ())):
            outside = [i for i in ids if i >= vocab_size]
            if outside:
                raise InvalidRequest(
                    f"SamplingParams.{name} must hold token ids from 0 to {vocab_size - 1}, got {outside[0]}"
                )
        for name, wanted in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if wanted is not None and wanted > vocab_size:
                raise InvalidRequest(
                    f"SamplingParams.{name} must be at most the {vocab_size} tokens of the vocabulary, got {wanted}"
                )


def draw_seed() -> int:
    """A seed for a request that came without one, 0 .. 2**64 - 1, from the operating system's randomness."""
    return int.from_bytes(os.urandom(8), "little")


def sample_seed(seed: int, index: int) -> int:
    """The seed of output `index` of a request with `seed`, 0 .. 2**64 - 1; `seed` itself for output 0.

    The others are mixed (SplitMix64's finaliser, as in `paged.draw`), so that they are unlike those of a request whose
    seed is near.
    """
    if not index:
        return seed
    z = (seed + index * 0xD1342543DE82EF95) % 2**64  # odd: no two of 2**64 outputs share a seed
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def _message(name: str, expected: str, value: object) -> str:
    return f"SamplingParams.{name} must be {expected}, got {reprlib.repr(value)}"


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    expected = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    number = require_integer(f"SamplingParams.{name}", value, expected)
    if number < low or (high is not None and number > high):
        raise InvalidRequest(_message(name, expected, value))
    return number


def _optional(name: str, value: object, low: int, high: int | None = None) -> int | None:
    return None if value is None else _integer(name, value, low, high)


def _number(
    name: str, value: object, *, low: float = -math.inf, high: float = math.inf, above: float = -math.inf
) -> float:
    """`value` as a finite float with low <= value <= high and value > above."""
    limits = [
        *([f">= {low:g}"] if low > -math.inf else []),
        *([f"> {above:g}"] if above > -math.inf else []),
        *([f"<= {high:g}"] if high < math.inf else []),
    ]
    expected = " ".join(["a finite number", *([" and ".join(limits)] if limits else [])])
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(_message(name, expected, value))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and low <= number <= high and number > above):
        raise InvalidRequest(_message(name, expected, value))
    return number


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(_message(name, "True or False", value))
    return value


def _stop_strings(value: object) -> tuple[str, ...]:
    expected = "a string or a sequence of strings, none of them empty"
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Iterable) or isinstance(strings, (bytes, Mapping)):
        raise TypeError(_message("stop", expected, value))
    stops: list[str] = []
    for stop in cast("Iterable[object]", strings):
        if not isinstance(stop, str):
            raise TypeError(_message("stop", expected, value))
        if not stop:
            raise InvalidRequest(_message("stop", expected, value))
        stops.append(stop)
    return tuple(dict.fromkeys(stops))


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise TypeError(_message(name, "a sequence of token ids", cast("object", value)))
    return tuple(
        dict.fromkeys(
            _integer(f"{name}[{i}]", token_id, 0) for i, token_id in enumerate(cast("Iterable[object]", value))
        )
    )


def _biases(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(_message("logit_bias", "None or a dict from token id to number", value))
    biases = {
        _integer("logit_bias key", i, 0): _number(f"logit_bias[{i}]", bias)
        for i, bias in cast("Mapping[object, object]", value).items()
    }
    return biases or None


def _processors(value: object) -> tuple[LogitsProcessor, ...]:
    expected = "a sequence of functions (token_ids, logits) -> None or logits"
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise TypeError(_message("logits_processors", expected, cast("object", value)))
    processors = tuple(cast("Iterable[object]", value))
    if not all(callable(processor) for processor in processors):
        raise TypeError(_message("logits_processors", expected, processors))
    return cast("tuple[LogitsProcessor, ...]", processors)


def _grammar(value: object) -> Grammar | None:
    if value is not None and not isinstance(value, Grammar):
        raise TypeError(_message("grammar", "None or a Grammar, such as Grammar.json_schema(...)", value))
    return value
