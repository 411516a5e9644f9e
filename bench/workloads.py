"""The four offline workloads: seeded token ids, the end token ignored, so that every run computes the same work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Workload:
    """`prompts` and the number of tokens each of them generates."""

    name: str
    prompts: list[npt.NDArray[np.int32]]
    max_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(p) for p in self.prompts)


def _ids(rng: np.random.Generator, n: int, vocab_size: int) -> npt.NDArray[np.int32]:
    return rng.integers(100, vocab_size, n, dtype=np.int32)  # the first ids are control tokens


def single(vocab_size: int) -> Workload:
    """W1: one stream, 128 tokens in, 128 out."""
    rng = np.random.default_rng(1)
    return Workload("W1", [_ids(rng, 128, vocab_size)], 128)


def mixed(vocab_size: int, n: int = 64) -> Workload:
    """W2: 64 prompts of 64 to 256 tokens, 64 out."""
    rng = np.random.default_rng(2)
    return Workload("W2", [_ids(rng, int(k), vocab_size) for k in rng.integers(64, 257, n)], 64)


def shared(vocab_size: int, prefix: int, n: int, name: str) -> Workload:
    """W3 and W4: `n` prompts that share `prefix` tokens and have 16 of their own, 32 out."""
    rng = np.random.default_rng(prefix)
    head = _ids(rng, prefix, vocab_size)
    return Workload(name, [np.concatenate([head, _ids(rng, 16, vocab_size)]) for _ in range(n)], 32)


def all_workloads(vocab_size: int) -> list[tuple[Workload, tuple[bool, ...]]]:
    """Every workload, with the settings of the prefix cache that it is run under."""
    return [
        (single(vocab_size), (True,)),
        (mixed(vocab_size), (True,)),
        (shared(vocab_size, 1024, 10, "W3-10"), (False, True)),
        (shared(vocab_size, 1024, 50, "W3-50"), (False, True)),
        (shared(vocab_size, 500, 10, "W4-10"), (False, True)),
    ]
