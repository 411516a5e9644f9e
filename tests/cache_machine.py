"""A hypothesis machine: sessions and a prefix cache by hand, against a set of cached prefixes as token tuples."""

from __future__ import annotations

import gc

import numpy as np
from fakes import EchoModel
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged.errors import OutOfPages
from paged.prefix.cache import PrefixCache
from paged.prefix.hashing import page_hash
from paged.session import Session

Prefix = tuple[str, tuple[int, ...]]  # namespace, tokens of whole pages

HASHES = {
    "real": page_hash,
    "one for all": lambda parent, tokens: 7,
    "one of four": lambda parent, tokens: hash((parent, tokens)) % 4,
}
VOCABULARY = 4
BASE = [0, 1, 2, 3, 3, 2, 1, 0, 0, 0, 1, 1, 2, 2, 3, 3]  # most prompts open like this
tails = st.lists(st.integers(0, VOCABULARY - 1), max_size=4)
spaces = st.sampled_from(["", "", "a", "b"])


class CacheMachine(RuleBasedStateMachine):
    """`self.cached` is what the cache must hold: it grows by donations, and shrinks only by evictions that were needed
    and hit no page in use. Every evaluation compares the logits with those of the tokens alone."""

    hashes = tuple(HASHES)

    @initialize(
        data=st.data(),
        page_size=st.sampled_from([1, 2, 4]),
        num_groups=st.integers(1, 3),
        pages=st.integers(4, 30),
        bound=st.sampled_from([0, 0, 1, 4]),
    )
    def start(self, data, page_size: int, num_groups: int, pages: int, bound: int) -> None:
        self.hash_name = data.draw(st.sampled_from(self.hashes))
        self.model = EchoModel(VOCABULARY, num_groups=num_groups)
        self.pool = self.model.create_kv_pool(pages * num_groups, page_size)
        self.cache = PrefixCache(self.pool, bound * num_groups, hash_page=HASHES[self.hash_name])
        self.sessions = [Session(self.model, self.pool, namespace=name) for name in ("", "", "a")]
        self.cached: set[Prefix] = set()
        self.outside: list[np.ndarray] = []

    # What the oracle knows ----------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self.pool.page_size

    def prefixes(self, namespace: str, tokens) -> list[Prefix]:
        """The whole-page prefixes of `tokens`, shortest first."""
        return [(namespace, tuple(tokens[: end * self.size])) for end in range(1, len(tokens) // self.size + 1)]

    def matched(self, namespace: str, tokens) -> int:
        """What must match, by the oracle alone: whole cached pages, one token short of the prompt."""
        best = 0
        for prefix in self.prefixes(namespace, tokens[: max(0, len(tokens) - 1)]):
            if prefix not in self.cached:
                break
            best = len(prefix[1])
        return best

    def found(self) -> dict[Prefix, int]:
        """What the index holds, read node by node: prefix -> node."""
        index, names = self.cache.index, {self.cache.cursor(n).namespace: n for n in ("", "a", "b")}
        out: dict[Prefix, int] = {}
        for node in np.flatnonzero(index.birth >= 0).tolist():
            tokens, at = [], node
            while at >= 0:
                tokens.append(index.tokens[at].tolist())
                at = int(index.parent[at])
            out[names[index._root_of[at]], tuple(t for page in reversed(tokens) for t in page)] = node
        return out

    def settle(self, added: list[Prefix], needed: int | None) -> None:
        """The cache must now hold what it held and `added`, but for evictions of idle pages.

        `needed` is the number of pages that had to be freed; None where a bound, not the pool, decides.
        """
        now = set(self.found())
        want = self.cached | set(added)
        assert now <= want, f"cached from nowhere: {now - want}"
        gone = want - now
        if needed is not None:
            groups = self.model.spec.num_groups
            assert len(gone) * groups < max(0, needed) + groups, f"{needed} pages were needed, {gone} went"
        for prefix in gone & self.cached:
            assert prefix not in self.in_use, "a page in use was evicted"
        self.cached = now

    def choose(self, n: int) -> Session:
        return self.sessions[n % len(self.sessions)]

    def remember(self) -> None:
        """Which cached prefixes sessions use, and how many pages are free, before a call that may evict."""
        used = {page for session in self.sessions for page in session.table.rows.ravel().tolist()}
        at = {prefix: self.cache.index.pages[node].tolist() for prefix, node in self.found().items()}
        self.in_use = {prefix for prefix, pages in at.items() if not used.isdisjoint(pages)}
        self.free = self.pool.num_free

    # Rules --------------------------------------------------------------------------------------------------------

    @rule(namespace=spaces)
    def open(self, namespace: str) -> None:
        if len(self.sessions) < 5:
            self.sessions.append(Session(self.model, self.pool, namespace=namespace))

    @precondition(lambda self: self.sessions)
    @rule(n=st.integers(0, 9), shared=st.integers(0, len(BASE)), tail=tails, warm=st.booleans(), donate=st.booleans())
    def run(self, n: int, shared: int, tail: list[int], warm: bool, donate: bool) -> None:
        session, prompt, got = self.choose(n), BASE[:shared] + tail, 0
        session.release()
        if warm:
            want = self.matched(session.namespace, prompt)
            got = self.cache.attach(session, prompt)
            assert got == want
            assert session.tokens.tolist() == prompt[:got]
        self.evaluate(session, prompt[got:])
        if donate:
            self.insert(n, 0)

    @precondition(lambda self: self.sessions)
    @rule(n=st.integers(0, 9), tokens=tails.filter(len))
    def extend(self, n: int, tokens: list[int]) -> None:
        self.evaluate(self.choose(n), tokens)

    def evaluate(self, session: Session, tokens: list[int]) -> None:
        """Evaluate, and know beforehand how many pages that takes and whether it can be done."""
        if not tokens:
            return
        table, history, groups = session.table, session.tokens.tolist(), self.model.spec.num_groups
        need = (-(-(len(history) + len(tokens)) // self.size) - table.num_pages) * groups
        if len(history) % self.size and (self.pool.refs[table.rows[:, -1]] > 1).any():
            need += groups
        fits = need <= self.pool.num_available
        self.remember()
        try:
            logits = session.eval(tokens)
        except OutOfPages:
            assert not fits
            assert session.tokens.tolist() == history
            self.settle([], 0)
            return
        assert fits
        assert logits is not None and np.array_equal(logits.numpy(), self.model.oracle([*history, *tokens]))
        self.settle([], need - self.free)

    @precondition(lambda self: self.sessions)
    @rule(n=st.integers(0, 9), cut=st.integers(0, 3))
    def insert(self, n: int, cut: int) -> None:
        session = self.choose(n)
        tokens = session.tokens.tolist()
        tokens = tokens[: max(0, len(tokens) - cut)]
        new = [p for p in self.prefixes(session.namespace, tokens) if p not in self.cached]
        collisions = self.cache.stats.num_collisions
        self.remember()
        inserted = self.cache.insert(session, tokens)
        if self.hash_name == "real":
            assert self.cache.stats.num_collisions == 0
            assert inserted == len(new) * self.model.spec.num_groups
            self.settle(new, None if self.cache.max_pages else 0)
        else:
            self.settle(new[: inserted // self.model.spec.num_groups], None if self.cache.max_pages else 0)
            assert inserted == len(new) * self.model.spec.num_groups or self.cache.stats.num_collisions > collisions
        for column, prefix in enumerate(self.prefixes(session.namespace, tokens)):
            if prefix in self.cached:  # the session sits on the cache's page from now on
                node = self.found()[prefix]
                assert session.table.rows[:, column].tolist() == self.cache.index.pages[node].tolist()

    @precondition(lambda self: self.sessions)
    @rule(n=st.integers(0, 9))
    def fork(self, n: int) -> None:
        if len(self.sessions) < 5:
            self.sessions.append(self.choose(n).fork())

    @precondition(lambda self: self.sessions)
    @rule(n=st.integers(0, 9), one=tails, other=tails)
    def branch(self, n: int, one: list[int], other: list[int]) -> None:
        """Two continuations of one history, in turns, then the history's own cousin is let go."""
        session = self.choose(n)
        fork = session.fork()
        self.sessions.append(fork)
        for tokens in (one, other):
            self.evaluate(session, tokens)
            self.evaluate(fork, tokens[::-1])
        self.sessions.remove(fork)
        fork.release()

    @precondition(lambda self: self.sessions)
    @rule(n=st.integers(0, 9), collected=st.booleans())
    def let_go(self, n: int, collected: bool) -> None:
        session = self.sessions.pop(n % len(self.sessions))
        if not collected:
            session.release()
        del session
        gc.collect(0)
        self.settle([], 0)

    @rule(num_pages=st.integers(0, 5))
    def evict(self, num_pages: int) -> None:
        self.remember()
        idle = self.pool.num_cached_only
        freed = self.cache.evict(num_pages)
        assert freed >= min(num_pages, idle)
        assert self.pool.num_free == self.free + freed
        self.settle([], num_pages)

    @rule(dice=st.integers(0, 4))
    def release_cache(self, dice: int) -> None:
        if dice:
            return
        self.cache.release()
        self.cached.clear()
        self.settle([], 0)

    @rule(n=st.integers(1, 4))
    def press(self, n: int) -> None:
        """Somebody else takes pages of the pool, or gives them back."""
        self.remember()
        if self.outside and n % 2:
            self.pool.release(self.outside.pop())
            self.settle([], 0)
        elif n <= self.pool.num_available:
            self.outside.append(self.pool.alloc(n))
            self.settle([], n - self.free)

    @rule(namespace=spaces, shared=st.integers(0, len(BASE)), tail=tails)
    def ask(self, namespace: str, shared: int, tail: list[int]) -> None:
        before, tokens = self.pool.refs.copy(), BASE[:shared] + tail
        assert self.cache.match_len(tokens, namespace) == self.matched(namespace, tokens)
        assert np.array_equal(self.pool.refs, before)

    # After every rule ---------------------------------------------------------------------------------------------

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        self.cache.check()
        refs = self.pool.held.astype(np.int32)
        for pages in (*self.outside, *(session.table.rows.ravel() for session in self.sessions)):
            refs[pages] += 1
        assert np.array_equal(refs, self.pool.refs)
        for session in self.sessions:
            session.check()
        assert set(self.found()) == self.cached

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for session in self.sessions:
            session.release()
        for pages in self.outside:
            self.pool.release(pages)
        self.cache.release()
        assert self.pool.num_free == self.pool.num_pages
        assert not self.pool.refs.any()
