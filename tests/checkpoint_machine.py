"""Sequences with recurrent state driven by hand, and a hypothesis machine: checkpoints against a list of token tuples.

Each row in a page holds its token, position and group and a digest of all tokens before it; the state of a sequence
is a digest of all its tokens, beside their sum and number. A row or a state that is not the right one then shows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged.errors import OutOfPages
from paged.kv.page_table import PageTable
from paged.kv.pages import PagePool
from paged.kv.state import StatePool, StateSnapshot
from paged.kv.storage import PageStorage
from paged.prefix.checkpoints import Checkpoint, CheckpointStore
from paged.spec import KVSpec, StatePlane, StateSpec

STATE = StateSpec((StatePlane("digest", (1,), "int64"), StatePlane("sums", (2,), "fp32")))  # 16 bytes


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def digest(tokens) -> int:
    value = 7
    for token in tokens:
        value = (value * 1_000_003 + token + 11) % 999_983  # exact in fp32 as well
    return value


class Lab:
    """A pool with storage, a pool of states, and a store of checkpoints that the pool may reclaim from."""

    def __init__(
        self,
        num_pages: int = 10,
        page_size: int = 4,
        num_groups: int = 1,
        max_pages: int | None = None,
        max_states: int = 16,
        max_state_bytes: int = 0,
    ) -> None:
        self.num_groups = num_groups
        spec = KVSpec(1, 1, 8, num_groups, (0,) * num_groups)
        storage = PageStorage(spec, num_pages, page_size)
        storage.pages.fill_(-1)
        self.pool = PagePool(num_pages, page_size, storage, max_pages)
        self.states = StatePool(STATE, 8)
        self.slots = list(range(7, -1, -1))
        self.store = CheckpointStore(self.pool, num_groups, max_states, max_state_bytes)
        self.pool.reclaim = self.store.reclaim
        self.num_streams = 0

    def stream(self, namespace: bytes = b"") -> Stream:
        return Stream(self, namespace)

    def run(self, tokens, namespace: bytes = b"") -> Stream:
        """A sequence that computed all of `tokens`, attaching nothing."""
        stream = self.stream(namespace)
        stream.eval(tokens)
        return stream

    def leave(self, tokens, namespace: bytes = b"", **how) -> Checkpoint | None:
        """A sequence computes `tokens`, leaves a checkpoint at their end, and is gone."""
        stream = self.run(tokens, namespace)
        checkpoint = stream.insert(**how)
        stream.release()
        self.check()
        return checkpoint

    def rows(self, pages: np.ndarray, n: int) -> np.ndarray:
        """What `pages [num_groups, m]` hold of positions below n: [num_groups, n, 4]."""
        planes = self.pool.storage.pages[:, 0, 0, 0].numpy()
        where = np.arange(n)
        return planes[pages[:, where // self.pool.page_size], where % self.pool.page_size, :4]

    def expect_rows(self, pages: np.ndarray, tokens) -> None:
        want = [[[t, i, g, digest(tokens[:i])] for i, t in enumerate(tokens)] for g in range(self.num_groups)]
        assert np.array_equal(self.rows(pages, len(tokens)), np.reshape(want, (self.num_groups, len(tokens), 4)))

    def bytes_of(self, pages: np.ndarray) -> bytes:
        return self.pool.storage.pages.numpy()[pages.ravel()].tobytes()

    def kept(self) -> list[list[int]]:
        """Tokens of the checkpoints, oldest use first."""
        return [checkpoint.tokens.tolist() for checkpoint in self.store]

    def check(self) -> None:
        self.pool.check()
        self.states.check()
        self.store.check()
        for checkpoint in self.store:
            self.expect_rows(checkpoint.pages, checkpoint.tokens.tolist())
            expect_state(checkpoint.snapshot, checkpoint.tokens.tolist())


def expect_state(snapshot: StateSnapshot, tokens) -> None:
    assert snapshot.position == len(tokens)
    assert snapshot.tensors["digest"].tolist() == ([digest(tokens)] if tokens else [0])
    assert snapshot.tensors["sums"].tolist() == [float(sum(tokens)), float(len(tokens))]


class Stream:
    """One sequence: a page table, a slot of the states, and the tokens it has computed."""

    def __init__(self, lab: Lab, namespace: bytes) -> None:
        self.lab = lab
        self.namespace = namespace
        self.table = PageTable(lab.pool, lab.num_groups)
        self.tokens: list[int] = []
        self.slot = lab.slots.pop()
        self.restart()

    def restart(self) -> None:
        """Be a new, empty sequence with a number of its own."""
        self.table.release()
        self.tokens = []
        self.lab.states.reset(self.slot)
        self.lab.num_streams += 1
        self.donor = self.lab.num_streams

    def eval(self, tokens) -> None:
        """Compute `tokens` in one step; OutOfPages leaves the sequence as it was."""
        lab, start, size = self.lab, len(self.tokens), self.lab.pool.page_size
        if not len(tokens):
            return
        history = [*self.tokens, *tokens]
        self.table.ensure(start, len(history))
        planes = lab.pool.storage.pages[:, 0, 0, 0].numpy()
        for position in range(start, len(history)):
            for group in range(lab.num_groups):
                page = self.table.rows[group, position // size]
                planes[page, position % size, :4] = (history[position], position, group, digest(history[:position]))
        states = lab.states
        with states.advance(ids(self.slot), ids(0, len(tokens)), ids(len(history))):
            before = int(states.planes["digest"][self.slot]) if start else 7
            for token in tokens:
                before = (before * 1_000_003 + int(token) + 11) % 999_983
            states.planes["digest"][self.slot] = before
            states.planes["sums"][self.slot, 0] += float(sum(tokens))
            states.planes["sums"][self.slot, 1] += float(len(tokens))
        self.tokens = history

    def attach(self, prompt) -> int:
        """Start from the deepest checkpoint of `prompt`; returns its tokens, 0 where there is none."""
        checkpoint = self.lab.store.find(self.namespace, ids(*prompt))
        if checkpoint is None:
            return 0
        pages = self.lab.store.attach(checkpoint)
        self.table.append(pages)
        self.lab.states.restore(self.slot, checkpoint.snapshot)
        self.tokens = list(prompt[: checkpoint.num_tokens])
        return checkpoint.num_tokens

    def insert(self, **how) -> Checkpoint | None:
        """Leave a checkpoint where the sequence stands."""
        snapshot = self.lab.states.snapshot(self.slot)
        how.setdefault("donor", self.donor)
        return self.lab.store.insert(self.namespace, ids(*self.tokens), self.table.rows, snapshot, **how)

    def fork(self) -> Stream:
        other = Stream(self.lab, self.namespace)
        other.table = self.table.fork()
        other.tokens = list(self.tokens)
        self.lab.states.copy(self.slot, other.slot)
        return other

    def expect_exact(self) -> None:
        """Every row and the state are those of the tokens alone."""
        self.table.check()
        self.lab.expect_rows(self.table.rows, self.tokens)
        expect_state(self.lab.states.snapshot(self.slot), self.tokens)

    def release(self) -> None:
        self.table.release()
        self.tokens = []
        self.lab.states.reset(self.slot)
        self.lab.slots.append(self.slot)


# The machine ----------------------------------------------------------------------------------------------------

BASE = [0, 1, 2, -7, -7, 2, 1, 0, 0, 1, 1, 2, 2, -7, -7, 0]  # most prompts open like this
tails = st.lists(st.sampled_from([0, 1, -7]), max_size=4)
spaces = st.sampled_from([b"", b"", b"a"])
which = st.integers(0, 9)
cuts = st.sampled_from([0, 0, 0, 0, 1, 2, 5])
hints = st.sampled_from([0, 0, 0, 1, 2, 4, 6])  # tokens past the match; 0: no hint


@dataclass(eq=False)
class Kept:
    """What the oracle knows of one checkpoint; `real` is read for the ids of copied pages, once."""

    namespace: bytes
    tokens: tuple[int, ...]
    opening: bool
    donor: int
    pages: list[int]
    content: bytes
    real: Checkpoint
    pins: int = 0
    hits: int = 0


class CheckpointMachine(RuleBasedStateMachine):
    """`self.kept`, oldest use first, is what the store must hold: after every rule exactly that, with every page's
    references, the order of use, both budgets and all counters recomputed from it and from the sequences' tables."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_groups=st.integers(1, 2),
        pages=st.integers(6, 30),
        grows=st.booleans(),
        max_states=st.sampled_from([16, 16, 16, 5, 4, 3, 2, 1, -1]),
        pages_in_budget=st.sampled_from([0, 0, 0, 0, 3, 9, 15]),
    )
    def start(
        self, page_size: int, num_groups: int, pages: int, grows: bool, max_states: int, pages_in_budget: int
    ) -> None:
        page_bytes = 2 * page_size * 8 * 4
        num_pages = pages * num_groups
        self.lab = Lab(
            num_pages, page_size, num_groups, num_pages + 5 if grows else None, max_states, pages_in_budget * page_bytes
        )
        self.pool, self.store = self.lab.pool, self.lab.store
        self.page_bytes, self.num_pages, self.max_states = page_bytes, num_pages, max(0, max_states)
        self.streams = [self.lab.stream(namespace) for namespace in (b"", b"", b"a")]
        self.kept: list[Kept] = []
        self.outside: list[np.ndarray] = []
        self.pins: list[tuple[Kept, np.ndarray]] = []
        self.refused = self.evicted = self.inserted = self.hits = 0

    # What the oracle knows --------------------------------------------------------------------------------------

    def users(self) -> Counter[int]:
        """How many sequences, pins and others have each page."""
        tables = [*self.outside, *(stream.table.rows.ravel() for stream in self.streams)]
        tables += [pages for _, pages in self.pins]
        return Counter(page for pages in tables for page in pages.tolist())

    def held(self) -> set[int]:
        return {page for kept in self.kept for page in kept.pages}

    def in_order(self) -> list[Kept]:
        return [k for k in self.kept if not k.opening] + [k for k in self.kept if k.opening]

    def reclaimed(self, num_pages: int, users: Counter[int]) -> int:
        """Drop what must go for `num_pages` pages; returns the pages that become free."""
        freed = 0
        for kept in self.in_order():
            if freed >= num_pages:
                break
            if kept.pins or all(users[page] for page in kept.pages):
                continue
            self.kept.remove(kept)
            self.evicted += 1
            freed += len(set(kept.pages) - self.held() - set(users.keys()))
        return freed

    def take(self, n: int, extra: list[int] | None = None) -> bool:
        """Whether the pool can supply `n` pages while `extra` are in use too; it grows and evicts as it must."""
        users = self.users() + Counter(extra or [])
        live = len(users)
        free = self.num_pages - len(set(users) | self.held())
        if n <= free:
            return True
        if n > self.pool.max_pages - live:
            return False
        grown = min(self.pool.max_pages, max(2 * self.num_pages, self.num_pages + n - free))
        free, self.num_pages = free + grown - self.num_pages, grown
        return n <= free or n <= free + self.reclaimed(n - free, users)

    def deepest(self, namespace: bytes, prompt) -> Kept | None:
        fits = [k for k in self.kept if k.namespace == namespace and k.tokens == tuple(prompt[: len(k.tokens)])]
        return max((k for k in fits if len(k.tokens) < len(prompt)), key=lambda k: len(k.tokens), default=None)

    def shared(self, namespace: bytes, prompt) -> int:
        best = 0
        for kept in self.kept:
            if kept.namespace == namespace:
                n = 0
                while n < min(len(kept.tokens), len(prompt) - 1) and kept.tokens[n] == prompt[n]:
                    n += 1
                best = max(best, n)
        return best

    def stop(self, namespace: bytes, prompt, matched: int, stable_at: int) -> int:
        least = matched + self.pool.page_size
        if not self.max_states:
            return 0
        if least <= stable_at < len(prompt):
            return stable_at
        best = self.shared(namespace, prompt)
        return best if best >= least else 0

    def num_bytes(self) -> int:
        return 16 * len(self.kept) + self.page_bytes * len(self.held())

    def over(self) -> bool:
        bound = self.store.max_state_bytes
        return len(self.kept) > self.max_states or 0 < bound < self.num_bytes()

    def touched(self, kept: Kept) -> None:
        self.kept.remove(kept)
        self.kept.append(kept)

    def choose(self, n: int) -> Stream:
        return self.streams[n % len(self.streams)]

    # Rules ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.streams)
    @rule(n=which, shared=st.integers(1, len(BASE)), tail=tails, hint=hints, donate=st.booleans())
    def run(self, n: int, shared: int, tail: list[int], hint: int, donate: bool) -> None:
        self.request(self.choose(n), BASE[:shared] + tail, hint, donate)

    @precondition(lambda self: self.streams and self.kept)
    @rule(n=which, k=which, cut=cuts, tail=tails, hint=hints, donate=st.booleans())
    def run_on(self, n: int, k: int, cut: int, tail: list[int], hint: int, donate: bool) -> None:
        """Go on from a checkpoint, or from a little before its end."""
        self.request(self.choose(n), self.some_prompt(k, cut, tail), hint, donate)

    @precondition(lambda self: self.streams and self.kept)
    @rule(n=which, k=which, tail=tails.filter(len), leave=st.booleans())
    def attach_and_leave(self, n: int, k: int, tail: list[int], leave: bool) -> None:
        stream = self.choose(n)
        if self.attach(stream, self.some_prompt(k, 0, tail)) and leave:
            stream.restart()

    @precondition(lambda self: len(self.streams) > 1)
    @rule(n=which, tail=tails.filter(len), left=st.integers(0, 2), opening=st.booleans())
    def attach_when_full(self, n: int, tail: list[int], left: int, opening: bool) -> None:
        """One leaves a checkpoint, somebody takes all but a few of the pages, and then another one attaches."""
        stream, other = self.choose(n), self.choose(n + 1)
        self.evaluate(stream, tail)
        self.donate(stream, opening)
        prompt = [*stream.tokens, *tail]
        other.restart()
        self.alloc(max(0, self.pool.max_pages - len(self.users()) - left * self.lab.num_groups))
        self.attach(other, prompt)

    def some_prompt(self, k: int, cut: int, tail: list[int]) -> list[int]:
        tokens = self.kept[k % len(self.kept)].tokens
        return [*tokens[: max(0, len(tokens) - cut)], *tail]

    def request(self, stream: Stream, prompt: list[int], hint: int, donate: bool) -> None:
        """Attach, stop where a checkpoint pays, go on, leave one at the end."""
        matched = self.attach(stream, prompt)
        stable_at = matched + hint if hint else 0
        stop = self.store.stop_at(stream.namespace, ids(*prompt), matched, stable_at)
        assert stop == self.stop(stream.namespace, prompt, matched, stable_at)
        if stop:
            self.evaluate(stream, prompt[matched:stop])
            if len(stream.tokens) == stop:
                self.donate(stream, opening=stop != stable_at)
        self.evaluate(stream, prompt[len(stream.tokens) :])
        if donate:
            self.donate(stream, opening=False)

    def attach(self, stream: Stream, prompt: list[int]) -> int:
        stream.restart()
        want = self.deepest(stream.namespace, prompt)
        found = self.store.find(stream.namespace, ids(*prompt))
        assert found is (want.real if want else None)
        if want is None:
            return 0
        before = self.users()
        idle = len([p for p in want.pages[: self.whole(want) * self.lab.num_groups] if not before[p]])
        assert self.store.idle_pages(want.real) == idle
        partial = len(want.tokens) % self.pool.page_size > 0
        fits = not partial or self.take(self.lab.num_groups, want.pages)
        try:
            got = stream.attach(prompt)
        except OutOfPages:
            assert not fits
            return 0
        assert fits and got == len(want.tokens)
        copied = set(stream.table.rows[:, -1].tolist()) if partial else set[int]()
        assert not copied & (set(before) | self.held()), "the copy of a partial page was not a free page"
        self.hits += 1
        want.hits += 1
        self.touched(want)
        return got

    def whole(self, kept: Kept) -> int:
        return len(kept.tokens) // self.pool.page_size

    @precondition(lambda self: self.streams)
    @rule(n=which, tokens=tails.filter(len), donate=st.booleans(), opening=st.booleans())
    def extend(self, n: int, tokens: list[int], donate: bool, opening: bool) -> None:
        stream = self.choose(n)
        self.evaluate(stream, tokens)
        if donate:
            self.donate(stream, opening)

    def evaluate(self, stream: Stream, tokens: list[int]) -> None:
        if not tokens:
            return
        table, start, size = stream.table, len(stream.tokens), self.pool.page_size
        need = (-(-(start + len(tokens)) // size) - table.num_pages) * self.lab.num_groups
        users, held = self.users(), self.held()
        if start % size and any(users[p] + (p in held) > 1 for p in table.rows[:, -1].tolist()):
            need += self.lab.num_groups
        fits = self.take(need)
        try:
            stream.eval(tokens)
        except OutOfPages:
            assert not fits and len(stream.tokens) == start
        else:
            assert fits

    @precondition(lambda self: self.streams)
    @rule(n=which, opening=st.booleans(), shared_number=st.booleans())
    def insert(self, n: int, opening: bool, shared_number: bool) -> None:
        self.donate(self.choose(n), opening, donor=3 if shared_number else None)

    def donate(self, stream: Stream, opening: bool, donor: int | None = None) -> None:
        tokens, size, groups = tuple(stream.tokens), self.pool.page_size, self.lab.num_groups
        donor = stream.donor if donor is None else donor
        same = next((k for k in self.kept if (k.namespace, k.tokens) == (stream.namespace, tokens)), None)
        users = self.users()
        kept = bool(tokens) and self.max_states > 0
        if kept and not same and len(tokens) % size and not self.take(groups):
            kept, self.refused = False, self.refused + 1
        got = stream.insert(opening=opening, donor=donor)
        if not kept:
            assert got is None
            return
        assert got is not None
        if same:
            assert got is same.real
            same.opening |= opening or donor != same.donor
            self.touched(same)
            return
        whole = len(tokens) // size
        assert np.array_equal(got.pages[:, :whole], stream.table.rows[:, :whole])
        copied = got.pages[:, whole:].ravel().tolist()
        assert not set(copied) & (set(users) | self.held()), "the copy of a partial page was not a free page"
        self.inserted += 1
        content = self.lab.bytes_of(got.pages)
        pages = got.pages.T.ravel().tolist()
        newest = Kept(stream.namespace, tokens, opening, donor, pages, content, got)
        self.kept.append(newest)
        for victim in self.in_order():
            if self.over() and victim is not newest and not victim.pins:
                self.kept.remove(victim)
                self.evicted += 1

    @precondition(lambda self: self.streams)
    @rule(n=which, moved=st.sampled_from([-1, 1]))
    def insert_from_elsewhere(self, n: int, moved: int) -> None:
        """The state is not the one after the tokens."""
        stream = self.choose(n)
        tokens = stream.tokens[:-1] if moved < 0 else stream.tokens
        if any((k.namespace, k.tokens) == (stream.namespace, tuple(tokens)) for k in self.kept):
            return
        snapshot = StateSnapshot(len(tokens) + 1, self.lab.states.snapshot(stream.slot).tensors)
        assert self.store.insert(stream.namespace, ids(*tokens), stream.table.rows, snapshot) is None

    @rule(n=which, namespace=spaces, dice=st.integers(0, 3))
    def come_and_go(self, n: int, namespace: bytes, dice: int) -> None:
        if dice == 0 and len(self.streams) < 5:
            self.streams.append(self.lab.stream(namespace))
        elif dice == 1 and self.streams and len(self.streams) < 5:
            self.streams.append(self.choose(n).fork())
        elif self.streams and len(self.streams) > 1:
            self.streams.pop(n % len(self.streams)).release()

    @precondition(lambda self: self.kept or self.pins)
    @rule(n=which, up=st.booleans())
    def pin(self, n: int, up: bool) -> None:
        """A pin has a reference to each page, also where its checkpoint was dropped meanwhile."""
        if self.kept and (up or not self.pins):
            kept = self.kept[n % len(self.kept)]
            self.pins.append((kept, kept.real.pages.ravel()))
            self.pool.share(kept.real.pages.ravel())
            kept.pins += 1
        else:
            kept, pages = self.pins.pop(n % len(self.pins))
            self.pool.release(pages)
            kept.pins -= 1
        kept.real.pins = kept.pins

    @rule(num_pages=st.integers(0, 5))
    def reclaim(self, num_pages: int) -> None:
        freed = self.reclaimed(num_pages, self.users())
        assert self.store.reclaim(num_pages) == freed

    @precondition(lambda self: self.kept)
    @rule(n=which, dice=st.integers(0, 11))
    def forget(self, n: int, dice: int) -> None:
        """Drop one; now and then a whole namespace, or all."""
        if dice > 1:
            self.store.drop(self.kept.pop(n % len(self.kept)).real)
            return
        namespace = self.kept[n % len(self.kept)].namespace
        gone = [k for k in self.kept if dice or k.namespace == namespace]
        self.kept = [k for k in self.kept if k not in gone]
        if dice:
            self.store.clear()
        else:
            assert self.store.drop_namespace(namespace) == len(gone)

    @rule(n=st.integers(1, 4))
    def press(self, n: int) -> None:
        """Somebody else takes pages of the pool, or gives them back."""
        if self.outside and n % 2:
            self.pool.release(self.outside.pop())
        else:
            self.alloc(n)

    def alloc(self, n: int) -> None:
        fits = self.take(n)
        try:
            self.outside.append(self.pool.alloc(n))
        except OutOfPages:
            assert not fits
        else:
            assert fits

    @precondition(lambda self: self.kept)
    @rule(namespace=spaces, k=which, cut=cuts, tail=tails)
    def ask(self, namespace: bytes, k: int, cut: int, tail: list[int]) -> None:
        prompt = self.some_prompt(k, cut, tail)
        want = self.deepest(namespace, prompt)
        assert self.store.find(namespace, ids(*prompt)) is (want.real if want else None)
        assert self.store.common(namespace, ids(*prompt)) == self.shared(namespace, prompt)

    # After every rule -------------------------------------------------------------------------------------------

    @invariant()
    def the_store_holds_what_it_must(self) -> None:
        if not hasattr(self, "lab"):
            return
        self.lab.check()
        assert [k.real for k in self.kept] == list(self.store)
        assert len(self.store) == len(self.kept)
        for kept in self.kept:
            real = kept.real
            assert (real.namespace, tuple(real.tokens.tolist())) == (kept.namespace, kept.tokens)
            assert (real.opening, real.donor, real.num_hits) == (kept.opening, kept.donor, kept.hits)
            assert self.lab.bytes_of(real.pages) == kept.content, "the pages of a checkpoint changed"
        assert self.store.held_pages == len(self.held())
        assert self.store.num_bytes == self.num_bytes()
        stats = self.store.stats
        counted = (stats.checkpoint_inserts, stats.checkpoint_hits, stats.checkpoint_evictions)
        assert counted == (self.inserted, self.hits, self.evicted)
        assert stats.checkpoints_refused == self.refused

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if not hasattr(self, "lab"):
            return
        assert self.pool.num_pages == self.num_pages
        users, held = self.users(), self.held()
        assert self.pool.refs.tolist() == [users[p] + (p in held) for p in range(self.num_pages)]
        assert np.flatnonzero(self.pool.held).tolist() == sorted(held)
        for stream in self.streams:
            stream.expect_exact()

    def teardown(self) -> None:
        if not hasattr(self, "lab"):
            return
        for stream in self.streams:
            stream.release()
        for pages in [*self.outside, *(pages for _, pages in self.pins)]:
            self.pool.release(pages)
        self.store.clear()
        assert self.store.held_pages == self.store.num_bytes == len(self.store) == 0
        assert self.pool.num_free == self.pool.num_pages
        assert not self.pool.refs.any()
