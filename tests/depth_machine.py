"""A hypothesis machine: sessions of every depth and cache window over one cache, rewound and opened from prefixes."""

from __future__ import annotations

import numpy as np
from fakes import EchoAfter, EchoLooped, EchoModel
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged.errors import LoopsMismatch, OutOfPages
from paged.prefix.cache import PrefixCache
from paged.prefix.handles import PrefixHandle
from paged.session import Session
from paged.spec import KVView

VOCABULARY = 4
BASE = [0, 1, 2, 3, 3, 2, 1, 0, 0, 0, 1, 1, 2, 2, 3, 3]  # most prompts open like this
Item = tuple[str, int, int, tuple[int, ...], int]  # namespace, window, depth where it counts, tokens, group

tails = st.lists(st.integers(0, VOCABULARY - 1), max_size=4)
numbers = st.integers(0, 9)


class DepthMachine(RuleBasedStateMachine):
    """Every evaluation compares the logits with those of the tokens alone, every attach the tokens matched with what is
    cached, page by page, and every call that may fail says beforehand whether it must."""

    kinds: tuple[type[EchoModel], ...] = (EchoLooped, EchoLooped, EchoAfter, EchoModel)
    windows: tuple[int, ...] = (0, 0, 2, 5)
    exact: tuple[bool, ...] = (False, True)

    @initialize(data=st.data(), size=st.sampled_from([1, 2, 4]), columns=st.sampled_from([8, 14, 30]))
    def start(self, data, size: int, columns: int) -> None:
        kind = data.draw(st.sampled_from(self.kinds))
        self.size = size
        self.model = kind(VOCABULARY, num_groups=2) if kind is EchoModel else kind(VOCABULARY, max_loops=3)
        loop = self.model.spec.loop
        self.depths: tuple[int | None, ...] = (1, 2, 3) if loop is not None else (None,)
        self.after = loop is not None and loop.after_group is not None
        self.shares = loop is not None and not self.after
        self.pool = self.model.create_kv_pool(columns * self.model.spec.num_groups, size)
        self.cache = PrefixCache(self.pool, partial=data.draw(st.sampled_from(self.exact)))
        self.sessions: list[Session] = []
        self.handles: list[PrefixHandle] = []

    # What is there ------------------------------------------------------------------------------------------------

    def kind_of(self, namespace: str, view: KVView) -> tuple[str, int, int]:
        return namespace, view.cache_window, view.loops if self.after else 0

    def cached(self) -> set[Item]:
        """What the cache holds, read page by page."""
        views = [self.model.view(loops, window) for loops in self.depths for window in set(self.windows)]
        kinds = {self.cache.namespace_key(n, **v.fields): self.kind_of(n, v) for n in ("", "a") for v in views}
        index, out = self.cache.index, set()
        for node in np.flatnonzero(index.birth >= 0).tolist():
            tokens, at = [], node
            while at >= 0:
                tokens.append(index.tokens[at, : index.rows[at]].tolist())
                at = int(index.parent[at])
            prefix = tuple(token for page in reversed(tokens) for token in page)
            kind = kinds[index._root_of[at]]
            out |= {(*kind, prefix, group) for group in np.flatnonzero(index.pages[node] >= 0).tolist()}
        return out

    def whole_match(self, session: Session, prompt: list[int]) -> int:
        """The tokens of the most whole pages behind which everything is cached that a query sees."""
        cached, kind = self.cached(), self.kind_of(session.namespace, session.view)
        best = 0
        for depth in range(1, max(0, len(prompt) - 1) // self.size + 1):
            seen = [
                (*kind, tuple(prompt[: (column + 1) * self.size]), group)
                for group in session.view.groups.tolist()
                for column in range(self.first(session.view, depth * self.size), depth)
            ]
            way = any(i[:3] == kind and i[3][: depth * self.size] == tuple(prompt[: depth * self.size]) for i in cached)
            if way and cached.issuperset(seen):
                best = depth * self.size
        return best

    def first(self, view: KVView, position: int) -> int:
        """The first page that a query at `position` sees; in these models alike in all groups."""
        return max(0, position - view.cache_window + 1) // self.size if view.cache_window else 0

    def gone(self, rows: np.ndarray, view: KVView, position: int) -> bool:
        """Whether a table lacks a page that a query at `position` sees."""
        return bool((rows[view.groups, self.first(view, position) : -(-position // self.size)] < 0).any())

    def choose(self, n: int) -> Session:
        return self.sessions[n % len(self.sessions)]

    # Sessions -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.sessions) < 4)
    @rule(
        data=st.data(),
        namespace=st.sampled_from(["", "", "a"]),
        shared=st.integers(0, len(BASE)),
        tail=tails,
        warm=st.booleans(),
        donate=st.booleans(),
    )
    def open(self, data, namespace: str, shared: int, tail: list[int], warm: bool, donate: bool) -> None:
        loops, window = data.draw(st.sampled_from(self.depths)), data.draw(st.sampled_from(self.windows))
        session, prompt = Session(self.model, self.pool, loops, window, namespace), BASE[:shared] + tail
        self.sessions.append(session)
        if warm:
            whole = self.whole_match(session, prompt)
            assert self.cache.match_len(prompt, namespace, loops, window) >= whole
            try:
                got = self.cache.attach(session, prompt)
            except OutOfPages:
                assert self.cache.exact and not session.table.num_pages
                return
            assert got == whole or (self.cache.exact and got > whole)
            assert session.tokens.tolist() == prompt[:got]
        self.evaluate(session, prompt[session.n_past :])
        if donate:
            self.insert(len(self.sessions) - 1)

    @precondition(lambda self: self.sessions)
    @rule(n=numbers, tokens=tails.filter(len))
    def extend(self, n: int, tokens: list[int]) -> None:
        self.evaluate(self.choose(n), tokens)

    def evaluate(self, session: Session, tokens: list[int]) -> None:
        if not tokens:
            return
        table, view, history = session.table, session.view, session.tokens.tolist()
        need = (-(-(len(history) + len(tokens)) // self.size) - table.num_pages) * view.num_groups
        if len(history) % self.size and (self.pool.refs[table.rows[view.groups, -1]] > 1).any():
            need += view.num_groups
        available = self.pool.num_available
        try:
            logits = session.eval(tokens)
        except OutOfPages:
            assert need > available
            assert session.tokens.tolist() == history
            return
        assert need <= available
        self.expect(session, logits)

    def expect(self, session: Session, logits) -> None:
        view = session.view
        want = self.model.oracle(session.tokens, view.loops or None, view.cache_window)
        assert np.array_equal(logits.numpy(), want)

    @precondition(lambda self: self.sessions)
    @rule(n=numbers)
    def insert(self, n: int) -> None:
        session = self.choose(n)
        table, tokens = session.table.rows, session.tokens.tolist()
        kind = self.kind_of(session.namespace, session.view)
        new = {
            (*kind, tuple(tokens[: (column + 1) * self.size]), group)
            for column in range(len(tokens) // self.size)
            for group in np.flatnonzero(table[:, column] >= 0).tolist()
        }
        before = self.cached()
        self.cache.insert(session, tokens)
        now = self.cached()
        assert new <= now
        assert all(len(item[3]) % self.size for item in before - now), "only what is longer now may go"

    @precondition(lambda self: self.sessions)
    @rule(n=numbers, to=st.integers(0, 20), tokens=tails)
    def rewind(self, n: int, to: int, tokens: list[int]) -> None:
        session = self.choose(n)
        before, gone = session.n_past, self.gone(session.table.rows, session.view, to)
        try:
            session.rewind(to)
        except ValueError:
            assert to > before
        except RuntimeError:
            assert to < before and gone
        else:
            assert session.n_past == to and (to == before or not gone)
        session.check()
        self.evaluate(session, tokens)

    @precondition(lambda self: self.sessions)
    @rule(n=numbers, fork=st.booleans())
    def fork_or_release(self, n: int, fork: bool) -> None:
        if fork and len(self.sessions) < 4:
            self.sessions.append(self.choose(n).fork())
        else:
            self.sessions.pop(n % len(self.sessions)).release()

    # Prefixes -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(session.logits is not None for session in self.sessions))
    @rule(n=numbers)
    def keep(self, n: int) -> None:
        able = [session for session in self.sessions if session.logits is not None]
        self.handles.append(PrefixHandle(able[n % len(able)], self.shares))
        del self.handles[:-2]

    @precondition(lambda self: self.handles)
    @rule(n=numbers, loops=st.sampled_from([None, 1, 2, 3]), tokens=tails)
    def open_kept(self, n: int, loops: int | None, tokens: list[int]) -> None:
        handle = self.handles[n % len(self.handles)]
        own, loops = handle.loops, loops if self.model.spec.loop is not None else None
        refs, gone = self.pool.refs.copy(), self.gone(handle.page_table, handle.view, handle.num_tokens - 1)
        try:
            session = handle.open(loops)
        except LoopsMismatch:
            assert loops is not None and (loops > own or (loops != own and not self.shares))
            return
        except OutOfPages:
            assert loops != own and self.pool.num_available < self.model.spec.num_groups
            return
        except RuntimeError:
            assert loops is not None and loops < own and gone
            assert np.array_equal(self.pool.refs, refs)
            return
        assert session.view is self.model.view(loops or own or None, handle.cache_window)
        self.expect(session, session.logits)
        self.evaluate(session, tokens)
        self.sessions.append(session)
        if len(self.sessions) > 4:
            self.sessions.pop(0).release()

    # The cache ----------------------------------------------------------------------------------------------------

    @rule(num_pages=st.sampled_from([1, 2, 5, 99]))
    def evict(self, num_pages: int) -> None:
        idle = self.pool.num_cached_only
        assert self.cache.evict(num_pages) >= min(num_pages, idle)

    @rule(namespace=st.sampled_from(["a", "a", ""]))
    def drop(self, namespace: str) -> None:
        """All depths and windows of it go."""
        others = {item for item in self.cached() if item[0] != namespace}
        self.cache.drop(namespace)
        assert self.cached() == others

    # After every rule ---------------------------------------------------------------------------------------------

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "handles"):
            return
        self.pool.check()
        self.cache.check()
        refs = self.pool.held.astype(np.int32)
        for session in self.sessions:
            session.check()
            refs[session.table.ids] += 1
        for handle in self.handles:
            handle.check()
            refs[handle.page_ids] += 1
        assert np.array_equal(refs, self.pool.refs)

    def teardown(self) -> None:
        if not hasattr(self, "handles"):
            return
        self.handles.clear()
        for session in self.sessions:
            session.release()
        assert self.pool.num_live == 0
        self.cache.release()
        assert self.pool.num_free == self.pool.num_pages
