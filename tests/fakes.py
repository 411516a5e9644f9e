"""Models without weights whose logits depend on every visible row, for tests of accounting.

EchoModel stores each token and its position in its KV rows, and beside them a digest of everything before (in a group
with a window: of what the window shows), and reads all of it back through the page tables, so that a wrong, stale,
doubled or missing row, or the right tokens after another prefix, change its output. `oracle` computes the same logits
from the token list alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from paged.models.base import ForwardBatch, LanguageModel
from paged.ops.plan import AttendPlan
from paged.spec import KVSpec, LoopGroups, StatePlane, StateSpec

_JUNK = np.uint64(0xBAD)  # stands for a row that is not the one it should be


def mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: any change of the input changes about half of the bits."""
    with np.errstate(over="ignore"):
        z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def row_digest(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # rows that nobody wrote may hold anything
        ids = np.nan_to_num(tokens, nan=0.0, posinf=0.0, neginf=0.0).astype(np.int64).astype(np.uint64)
    return mix(ids * np.uint64(1_000_003) + positions.astype(np.uint64))


def logits_of(digests: np.ndarray, vocab_size: int) -> np.ndarray:
    """fp32 [n, vocab_size] in 0..8, from one 64-bit number a row."""
    with np.errstate(over="ignore"):
        grid = mix(digests[:, None] + np.arange(vocab_size, dtype=np.uint64)[None, :])
    return ((grid >> np.uint64(40)).astype(np.float64) / 2**21).astype(np.float32)


def prefix_sums(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.cumsum(values, dtype=np.uint64)


def seen(values: np.ndarray, window: int) -> np.ndarray:
    """For each row the sum of what it sees: all rows up to it, or the last `window` of them."""
    sums = prefix_sums(values)
    if window:
        with np.errstate(over="ignore"):
            sums[window:] -= sums[:-window].copy()
    return sums


def split(digests: np.ndarray) -> np.ndarray:
    """uint64 [n] as four 16-bit numbers [n, 4], which fp32 holds exactly."""
    return np.stack([(digests >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4)], axis=1)


def join(pieces: np.ndarray) -> np.ndarray:
    """What `split` split; pieces that were never written give some number."""
    whole = np.nan_to_num(pieces, nan=1.0, posinf=2.0, neginf=3.0).clip(0, 0xFFFF).astype(np.uint64)
    shifted = [whole[:, i] << np.uint64(16 * i) for i in range(4)]
    return shifted[0] | shifted[1] | shifted[2] | shifted[3]


def narrower(window: int, other: int) -> int:
    """The smaller of two windows; 0 is none."""
    return min(window, other) if window and other else window or other


def embedded(batch: ForwardBatch) -> np.ndarray:
    """The token ids of a batch; the first value of an embedding is that of its token."""
    tokens = batch.tokens.astype(np.int64)
    for row, values in batch.media:
        assert (tokens[row : row + len(values)] < 0).all(), "media where there is a token"
        tokens[row : row + len(values)] = values[:, 0]
    assert (tokens >= 0).all(), "an id of media, and no embedding"
    return tokens


class EchoModel(LanguageModel):
    windows_cache = True
    media_size = 2

    def __init__(
        self,
        vocab_size: int = 97,
        max_seq_len: int = 4096,
        num_groups: int = 1,
        eos: tuple[int, ...] = (),
        windows: tuple[int, ...] = (),
    ):
        windows = windows or (0,) * num_groups
        self.spec = KVSpec(1, 1, 8, len(windows), windows)
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.eos_token_ids = eos
        self.fingerprint = f"echo-{vocab_size}"
        self.name = "echo"
        self.weights = 0  # another number gives other rows and logits, as if the weights had been changed in place
        self.num_forwards = 0
        self.num_rows = 0

    def forward(self, batch: ForwardBatch, storage) -> torch.Tensor:
        """Two layers: rows of the first depend on their token, rows of the second on all tokens up to it."""
        self.num_forwards += 1
        self.num_rows += len(batch.tokens)
        planes = storage.pages[:, 0, 0, 0].numpy()  # [num_pages, page_size, 8]
        digests, tokens = np.zeros(len(batch.tokens), np.uint64), embedded(batch)
        for group, plan in enumerate(self._plans(batch, storage)):
            page, offset = plan.slots // storage.page_size, plan.slots % storage.page_size
            deep = np.repeat(self._deep(batch, group), np.diff(batch.q_indptr))
            page, offset = page[deep], offset[deep]
            planes[page, offset, 0] = tokens[deep]
            planes[page, offset, 1] = plan.positions[deep]
            planes[page, offset, 2] = group
            deep = self._deep(batch, group)
            for s in range(plan.num_seqs):
                if not deep[s]:
                    continue
                first, last = int(plan.q_indptr[s]), int(plan.q_indptr[s + 1])
                rows, good = self._visible(planes, plan, s, group)
                window = self._window(batch, group, s)
                firsts = self._first(rows[:, 0], np.arange(len(rows))) ^ self._salt(group, self._loops(batch)[s])
                sums = seen(np.where(good, firsts, _JUNK), window)
                at = plan.slots[first:last]
                planes[at // storage.page_size, at % storage.page_size, 3:7] = split(sums[len(rows) - (last - first) :])
            for s in range(plan.num_seqs):
                if not deep[s]:
                    continue
                first, last = int(plan.q_indptr[s]), int(plan.q_indptr[s + 1])
                rows, good = self._visible(planes, plan, s, group)
                sums = seen(np.where(good, mix(join(rows[:, 3:7])), _JUNK), self._window(batch, group, s))
                with np.errstate(over="ignore"):
                    digests[first:last] += sums[len(rows) - (last - first) :]
        return torch.from_numpy(logits_of(digests[batch.logit_rows], self.vocab_size))

    def _plans(self, batch: ForwardBatch, storage) -> list[AttendPlan]:
        return batch.plans(storage.page_size)

    def _deep(self, batch: ForwardBatch, group: int) -> np.ndarray:
        """Which sequences use a group."""
        loop = self.spec.loop
        if loop is None or group < loop.first_group:
            return np.ones(len(batch.kv_lens), np.bool_)
        return self._loops(batch) > group - loop.first_group

    def _loops(self, batch: ForwardBatch) -> np.ndarray:
        return np.full(len(batch.kv_lens), self.default_loops) if batch.loops is None else batch.loops

    def _salt(self, group: int, loops: int) -> np.uint64:
        """Rows of the group behind the loop block belong to one depth."""
        loop = self.spec.loop
        return mix(np.array(loops)) if loop is not None and group == loop.after_group else np.uint64(0)

    def _window(self, batch: ForwardBatch, group: int, s: int) -> int:
        return narrower(self.spec.windows[group], 0 if batch.cache_windows is None else int(batch.cache_windows[s]))

    def _first(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return row_digest(tokens, positions) ^ mix(np.array(self.weights))

    @staticmethod
    def _visible(planes: np.ndarray, plan: AttendPlan, s: int, group: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows [kv_len, 8] of sequence s as they lie in the pages, and which of them are where they should be."""
        where = np.arange(int(plan.kv_lens[s]))
        rows = planes[plan.page_table[s, where // plan.page_size], where % plan.page_size]
        return rows, (rows[:, 1] == where) & (rows[:, 2] == group)

    def oracle(self, tokens, loops: int | None = None, cache_window: int = 0) -> np.ndarray:
        """fp32 [vocab_size]: the logits after `tokens`, computed without any page."""
        ids = np.asarray(tokens, np.int64)
        total, first = np.uint64(0), self._first(ids, np.arange(len(ids)))
        with np.errstate(over="ignore"):
            view = self.spec.view(loops, cache_window)
            for group in view.groups.tolist():
                window = int(view.windows[group])
                total += seen(mix(seen(first ^ self._salt(group, view.loops), window)), window)[-1]
        return logits_of(np.array([total], np.uint64), self.vocab_size)[0]

    def greedy(self, prompt, max_tokens: int, loops: int | None = None, cache_window: int = 0) -> list[int]:
        """The tokens a greedy request must give, end ids left out."""
        tokens, out = list(prompt), []
        for _ in range(max_tokens):
            token = int(self.oracle(tokens, loops, cache_window).argmax())
            if token in self.eos_token_ids:
                break
            tokens.append(token)
            out.append(token)
        return out


class EchoHybrid(EchoModel):
    """An EchoModel with a recurrent state beside its pages: a digest of all tokens, in their order."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.state_spec = StateSpec((StatePlane("digest", (1,), "int64"), StatePlane("carry", (2, 3))))
        self.fingerprint += "-hybrid"

    def forward(self, batch: ForwardBatch, storage) -> torch.Tensor:
        assert batch.states is not None and batch.state_slots is not None
        moved, tokens = np.zeros(len(batch.tokens), np.uint64), embedded(batch)
        with batch.states.advance(batch.state_slots, batch.q_indptr, batch.kv_lens) as slots:
            digests = batch.states.planes["digest"].numpy().view(np.uint64)
            for s, slot in enumerate(slots.tolist()):
                rows = slice(int(batch.q_indptr[s]), int(batch.q_indptr[s + 1]))
                if slot >= 0:
                    moved[rows] = self._moved(digests[slot, 0], tokens[rows])
                    digests[slot, 0] = moved[rows][-1]
                    batch.states.planes["carry"][slot] += 1.0
        logits = super().forward(batch, storage).numpy()
        return torch.from_numpy(logits + logits_of(moved[batch.logit_rows], self.vocab_size))

    def _moved(self, start: np.uint64, tokens) -> np.ndarray:
        """The state after each of `tokens`."""
        out = np.zeros(len(tokens), np.uint64)
        for i, token in enumerate(np.asarray(tokens).tolist()):
            start = out[i] = mix(np.array(start ^ np.uint64(token + 1) ^ np.uint64(self.weights << 32)))
        return out

    def oracle(self, tokens, loops: int | None = None, cache_window: int = 0) -> np.ndarray:
        return (
            super().oracle(tokens, loops, cache_window)
            + logits_of(self._moved(np.uint64(0), tokens)[-1:], self.vocab_size)[0]
        )


class EchoLooped(EchoModel):
    """An EchoModel with a page group for each iteration; `after` adds one whose rows belong to one depth."""

    def __init__(self, vocab_size: int = 97, max_loops: int = 4, default_loops: int = 2, after: bool = False) -> None:
        super().__init__(vocab_size, num_groups=1 + after + max_loops)
        self.default_loops, self.max_loops = default_loops, max_loops
        groups = LoopGroups(1 + after, max_loops, default_loops, 1 if after else None)
        self.spec = replace(self.spec, loop=groups)
        self.fingerprint += "-looped"


class EchoAfter(EchoLooped):
    """An EchoLooped with a layer behind its loop block."""

    def __init__(self, vocab_size: int = 97, max_loops: int = 4, default_loops: int = 2) -> None:
        super().__init__(vocab_size, max_loops, default_loops, after=True)


class ByteTokenizer:
    """Token i stands for `pieces[i]`; a prompt text is one token a byte where the vocabulary has that byte.

    `names` are the control tokens, whose piece is b"".
    """

    def __init__(self, pieces: list[bytes], names: dict[int, str] | None = None) -> None:
        self.pieces = pieces
        self.names = names or {}
        self.eos_ids: tuple[int, ...] = ()

    def encode(self, text: str, add_special: bool = True) -> np.ndarray:
        return np.array([self.pieces.index(bytes([b])) for b in text.encode()], np.int32)

    def decode(self, ids, skip_special: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token] if token < len(self.pieces) else b""

    def text_of(self, token: int) -> str:
        return self.names.get(token) or self.token_bytes(token).decode("utf-8", "replace")


class ScriptModel(LanguageModel):
    """Emits a given token list: after a prompt of any length, output i is `script[i]`, then the end id 0.

    The prompt's length is read from its first token, so that the model needs no state of its own.
    """

    def __init__(self, script: list[int], vocab_size: int = 64, max_seq_len: int = 512, eos: tuple[int, ...] = (0,)):
        self.spec = KVSpec(1, 1, 8)
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.eos_token_ids = eos
        self.fingerprint = "script"
        self.name = "script"
        self.script = script

    def forward(self, batch: ForwardBatch, storage) -> torch.Tensor:
        planes = storage.pages[:, 0, 0, 0].numpy()
        plan = batch.plans(storage.page_size)[0]
        planes[plan.slots // storage.page_size, plan.slots % storage.page_size, 0] = batch.tokens
        logits = torch.zeros(len(batch.logit_rows), self.vocab_size)
        seqs = np.searchsorted(plan.q_indptr, batch.logit_rows, side="right") - 1
        for i, (row, s) in enumerate(zip(batch.logit_rows.tolist(), seqs.tolist(), strict=True)):
            prompt_len = int(planes[plan.page_table[s, 0], 0, 0])
            at = int(plan.positions[row]) + 1 - prompt_len
            logits[i, self.script[at] if at < len(self.script) else 0] = 5.0
        return logits

    @staticmethod
    def prompt(n: int) -> list[int]:
        """A prompt of `n` tokens that this model understands."""
        return [n] + [1] * (n - 1)
