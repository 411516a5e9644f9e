"""A hypothesis machine: everything that a cache can be asked by hand, over pages or checkpoints, against plain sets."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from fakes import EchoHybrid, EchoModel
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from saving import checkpoints_of, nodes_of

from paged.errors import OutOfPages
from paged.prefix.cache import PrefixCache
from paged.prefix.pins import Pin
from paged.session import Session

Item = tuple[str, tuple[int, ...], int]  # namespace, tokens up to the end of a page, its group; -1: a checkpoint

VOCABULARY = 4
BASE = [0, 1, 2, 3, 3, 2, 1, 0, 0, 0, 1, 1, 2, 2, 3, 3]  # most prompts open like this
NAMES = ("", "a", "b")
tails = st.lists(st.integers(0, VOCABULARY - 1), max_size=4)
spaces = st.sampled_from(["", *NAMES])
shares = st.sampled_from([0, 2, 4, 5, 7, 8, 8, 11, 12, 16])  # tokens of BASE
numbers = st.integers(0, 9)


class HandMachine(RuleBasedStateMachine):
    """`self.cached` is what the cache must hold: it grows by what is donated and loaded, and shrinks only by what is
    dropped and by evictions that were needed and hit nothing in use and nothing pinned. Every evaluation compares the
    logits with those of the tokens alone, and every attach the tokens matched with those that the set says."""

    kinds: tuple[type[EchoModel], ...] = (EchoModel, EchoHybrid)
    exact: tuple[bool, ...] = (False, True)
    window_sizes: tuple[int, ...] = (0, 0, 3, 5)
    bounds: tuple[int, ...] = (0, 0, 0, 5)
    states: tuple[int, ...] = (16, 3, 2)
    budgets: tuple[int | None, ...] = (None, None, 2, 6)
    times: tuple[float | None, ...] = (None, 2, 5)  # of pins
    priorities: tuple[int, ...] = (0, 1, 2)

    @initialize(
        data=st.data(),
        page_size=st.sampled_from([1, 2, 4]),
        pages=st.sampled_from([5, 9, 14, 30]),
    )
    def start(self, data, page_size: int, pages: int) -> None:
        kind = data.draw(st.sampled_from(self.kinds))
        self.windows = tuple(data.draw(st.lists(st.sampled_from(self.window_sizes), min_size=1, max_size=2)))
        self.groups, self.size = len(self.windows), page_size
        self.model = kind(VOCABULARY, windows=self.windows)
        self.options = {
            "max_pages": data.draw(st.sampled_from(self.bounds)) * self.groups,
            "partial": data.draw(st.sampled_from(self.exact)),
            "max_pinned_pages": data.draw(st.sampled_from(self.budgets)),
            "max_states": data.draw(st.sampled_from(self.states)),
        }
        self.hybrid = kind is EchoHybrid
        self.pool, self.cache = self.fresh(pages * self.groups)
        self.sessions = [Session(self.model, self.pool, namespace=name) for name in ("", "", "a")]
        self.cached: set[Item] = set()
        self.fixed: set[Item] = set()  # what may not go, as `remember` saw it
        self.outside: list[np.ndarray] = []
        self.cursors: dict[int, tuple] = {}  # of sessions, by number: the cursor, and whether it may still publish
        self.pins: list[Pin] = []
        self.now = 0.0
        self.cache.pins.clock = lambda: self.now
        self.folder = Path(tempfile.mkdtemp())

    def fresh(self, num_pages: int) -> tuple:
        pool = self.model.create_kv_pool(num_pages, self.size)
        return pool, PrefixCache(pool, **self.options)

    # What is there ------------------------------------------------------------------------------------------------

    def held(self) -> dict[Item, set[int]]:
        """What the cache holds, read entry by entry -> its pages."""
        out: dict[Item, set[int]] = {}
        names = {self.cache.namespace_key(name): name for name in NAMES}
        if self.cache.checkpoints is not None:
            for entry in self.cache.checkpoints:
                out[names[entry.namespace], tuple(entry.tokens.tolist()), -1] = set(entry.page_ids.tolist())
            return out
        index = self.cache.index
        for node in np.flatnonzero(index.birth >= 0).tolist():
            tokens, at = [], node
            while at >= 0:
                tokens.append(index.tokens[at, : index.rows[at]].tolist())
                at = int(index.parent[at])
            prefix = tuple(token for page in reversed(tokens) for token in page)
            for group, page in enumerate(index.pages[node].tolist()):
                if page >= 0:
                    out[names[index._root_of[at]], prefix, group] = {page}
        return out

    def live_pins(self) -> list[Pin]:
        """Those whose time is not over."""
        return [pin for pin in self.pins if pin.expires_at is None or pin.expires_at > self.now]

    def remember(self) -> None:
        """What may not go, and how much room there is, before a call that may evict."""
        self.free = self.pool.num_free
        pinned = {page for pin in self.live_pins() for page in pin.pages.tolist()}
        used = {page for ids in self.outside for page in ids.tolist()}
        used |= {page for session in self.sessions for page in session.table.ids.tolist()}
        held = self.held()
        if self.hybrid:
            kept = [(pin.namespace, tuple(pin.checkpoint.tokens.tolist()), -1) for pin in self.live_pins()]
            self.fixed = {item for item in held if item in kept}
        else:
            self.fixed = {item for item, pages in held.items() if pages & (used | pinned)}
        expired = [pin for pin in self.cache.pins if pin not in self.live_pins()]
        refs = self.pool.refs.copy()
        for pin in expired:
            refs[pin.pages] -= 1
        self.idle = int(((refs == 1) & self.pool.held).sum())
        self.available = self.free + self.idle

    def settle(self, added: Iterable[Item], needed: int | None, over: Iterable[Item] = ()) -> None:
        """The cache must now hold what it held and `added`, but for evictions of what may go.

        `needed` is the number of pages that had to be freed; None where a bound decides. `over` may go in any case.
        """
        now, want = set(self.held()), self.cached | set(added)
        assert now <= want, f"cached from nowhere: {now - want}"
        gone = (want - now) - set(over)
        if needed is not None and needed <= 0:
            assert not gone, f"nothing had to go, and {gone} went"
        if needed is not None and not self.hybrid:
            assert len(gone) < max(1, needed + self.groups), f"{needed} pages were needed, {gone} went"
        assert not (want - now) & self.cached & self.fixed, "what is in use, or pinned, was evicted"
        self.cached = now
        self.follow_pins()

    def follow_pins(self, ended: Iterable[Pin] = ()) -> None:
        """Pins end by their time, and by what `ended` says."""
        live, ended = list(self.cache.pins), list(ended)
        for pin in self.pins:
            assert pin in live or pin in ended or pin not in self.live_pins(), "a pin ended before its time"
        assert all(pin in self.pins for pin in live)
        self.pins = live

    # What must match ----------------------------------------------------------------------------------------------

    def sees(self, namespace: str, tokens: list[int], depth: int, position: int) -> bool:
        """Whether the pages are cached that a query at `position` sees of the first `depth` pages of `tokens`."""
        for group, window in enumerate(self.windows):
            first = max(0, position - window + 1) // self.size if window else 0
            for column in range(first, depth):
                if (namespace, tuple(tokens[: (column + 1) * self.size]), group) not in self.cached:
                    return False
        return True

    def matches(self, namespace: str, tokens: list[int]) -> tuple[int, set[int], int]:
        """The longest match of whole pages (of a checkpoint), all lengths that can be attached, the longest of them."""
        limit = len(tokens) - 1
        mine = {prefix for name, prefix, _ in self.cached if name == namespace}
        if self.hybrid:
            whole = max([len(p) for p in mine if len(p) <= limit and list(p) == tokens[: len(p)]], default=0)
            return whole, {whole}, whole
        whole, every = 0, {0}
        for depth in range(max(0, limit) // self.size + 1):
            start = depth * self.size
            if depth and not any(list(prefix[:start]) == tokens[:start] for prefix in mine):
                break
            if self.sees(namespace, tokens, depth, start):
                whole = start
                every.add(start)
            for prefix in mine if self.options["partial"] else ():
                here = start < len(prefix) <= start + self.size and list(prefix[:start]) == tokens[:start]
                if not here or any((namespace, prefix, group) not in self.cached for group in range(self.groups)):
                    continue
                rows = 0
                while start + rows < min(limit, len(prefix)) and prefix[start + rows] == tokens[start + rows]:
                    rows += 1
                every |= {start + r for r in range(1, rows + 1) if self.sees(namespace, tokens, depth, start + r)}
        return whole, every, max(every)

    def expect_match(self, namespace: str, tokens: list[int], got: int) -> None:
        whole, every, best = self.matches(namespace, tokens)
        assert got in every, f"{got} tokens matched, and {sorted(every)} can be attached"
        if any(self.windows) and self.options["partial"] and not self.hybrid:
            assert got >= whole
        else:
            assert got == best, f"{got} tokens matched, {best} are cached"

    # Sessions -----------------------------------------------------------------------------------------------------

    def choose(self, n: int) -> Session:
        return self.sessions[n % len(self.sessions)]

    @rule(namespace=spaces)
    def open(self, namespace: str) -> None:
        if len(self.sessions) < 5:
            self.sessions.append(Session(self.model, self.pool, namespace=namespace))

    @rule(n=numbers, shared=shares, tail=tails, warm=st.booleans(), donate=st.booleans(), opening=st.booleans())
    def run(self, n: int, shared: int, tail: list[int], warm: bool, donate: bool, opening: bool) -> None:
        session, prompt = self.choose(n), BASE[:shared] + tail
        session.release()
        self.cursors.pop(session.id, None)
        if warm:
            self.attach(session, prompt)
        self.evaluate(session, prompt[session.n_past :])
        if donate:
            self.donate(session, session.tokens.tolist(), opening)

    @rule(namespace=spaces, shared=shares, tail=tails.filter(len), opening=st.booleans())
    def visit(self, namespace: str, shared: int, tail: list[int], opening: bool) -> None:
        """A session that attaches, evaluates, donates and is gone."""
        session = Session(self.model, self.pool, namespace=namespace)
        self.sessions.append(session)
        self.attach(session, BASE[:shared] + tail)
        self.evaluate(session, [*BASE[:shared], *tail][session.n_past :])
        self.donate(session, session.tokens.tolist(), opening)
        self.sessions.remove(session)
        session.release()

    def attach(self, session: Session, prompt: list[int]) -> None:
        self.remember()
        try:
            got = self.cache.attach(session, prompt)
        except OutOfPages:  # for the copy of a partial page, with all that is shared in use meanwhile
            assert self.hybrid or self.options["partial"]
            most = (len(prompt) // self.size + 1) * self.groups
            assert self.available < self.groups + most
            assert not session.n_past and not session.table.num_pages
            self.settle((), 0)
            return
        self.expect_match(session.namespace, prompt, got)
        assert session.tokens.tolist() == prompt[:got]
        self.settle((), (self.groups if got % self.size else 0) - self.free)

    @rule(n=numbers, tokens=tails.filter(len))
    def extend(self, n: int, tokens: list[int]) -> None:
        self.evaluate(self.choose(n), tokens)

    def evaluate(self, session: Session, tokens: list[int]) -> None:
        """Evaluate, and know beforehand how many pages that takes and whether it can be done."""
        if not tokens:
            return
        table, history = session.table, session.tokens.tolist()
        need = (-(-(len(history) + len(tokens)) // self.size) - table.num_pages) * self.groups
        if len(history) % self.size and (self.pool.refs[table.rows[:, -1]] > 1).any():
            need += self.groups
        self.remember()
        try:
            logits = session.eval(tokens)
        except OutOfPages:
            assert need > self.available
            assert session.tokens.tolist() == history
            self.settle((), 0)
            return
        assert need <= self.available
        assert logits is not None and np.array_equal(logits.numpy(), self.model.oracle([*history, *tokens]))
        self.settle((), need - self.free)

    @rule(n=numbers)
    def fork(self, n: int) -> None:
        if len(self.sessions) < 5:
            self.sessions.append(self.choose(n).fork())

    @rule(n=numbers, one=tails, other=tails)
    def branch(self, n: int, one: list[int], other: list[int]) -> None:
        """Two continuations of one history, in turns, then one of them is let go."""
        session = self.choose(n)
        fork = session.fork()
        self.sessions.append(fork)
        for tokens in (one, other):
            self.evaluate(session, tokens)
            self.evaluate(fork, tokens[::-1])
        self.sessions.remove(fork)
        fork.release()

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(n=numbers, collected=st.booleans())
    def let_go(self, n: int, collected: bool) -> None:
        session = self.sessions.pop(n % len(self.sessions))
        self.cursors.pop(session.id, None)
        if not collected:
            session.release()
        del session
        gc.collect(0)
        self.settle((), 0)

    # Donations ----------------------------------------------------------------------------------------------------

    def whole_pages(self, session: Session, tokens: list[int]) -> set[Item]:
        """What the whole pages of `tokens` in a session's table would be in the cache."""
        return {
            (session.namespace, tuple(tokens[: (column + 1) * self.size]), group)
            for column in range(len(tokens) // self.size)
            for group in range(self.groups)
            if session.table.rows[group, column] >= 0
        }

    @precondition(lambda self: any(session.n_past for session in self.sessions))
    @rule(n=numbers, cut=st.sampled_from([0, 0, 1, 3]), opening=st.booleans())
    def insert(self, n: int, cut: int, opening: bool) -> None:
        holders = [session for session in self.sessions if session.n_past]
        session = holders[n % len(holders)]
        self.donate(session, session.tokens[: max(0, session.n_past - cut)].tolist(), opening)

    def donate(self, session: Session, tokens: list[int], opening: bool) -> None:
        self.remember()
        if self.hybrid:
            self.insert_checkpoint(session, tokens, opening)
            return
        items = self.whole_pages(session, tokens)
        tail = set()
        if self.options["partial"] and len(tokens) == session.n_past and len(tokens) % self.size:
            tail = {(session.namespace, tuple(tokens), group) for group in range(self.groups)}
        known = any(name == session.namespace and list(p[: len(tokens)]) == tokens for name, p, _ in self.cached)
        # Beside a place whose page a window left, a page that has the tail's rows may not be seen.
        optional = tail - self.cached if known and any(self.windows) else set()
        new = (items if known else items | tail) - self.cached
        bound = self.options["max_pages"]
        inserted = self.cache.insert(session, tokens)
        self.settle(new | optional, None if bound else 0, self.superseded(new | optional) | optional)
        assert bound or inserted in (len(new), len(new) + len(optional))
        self.sits_on_cached_pages(session, tokens)
        self.ends_with_pages(session, tokens)

    def superseded(self, new: set[Item]) -> set[Item]:
        """The tails whose rows all stand at the head of a new page."""
        return {
            (name, prefix, group)
            for name, prefix, group in self.cached
            if len(prefix) % self.size and any(n == name and p[: len(prefix)] == prefix for n, p, _ in new)
        }

    def sits_on_cached_pages(self, session: Session, tokens: list[int]) -> None:
        held = self.held()
        for name, prefix, group in self.whole_pages(session, tokens):
            page = held.get((name, prefix, group))
            assert page is None or page == {int(session.table.rows[group, len(prefix) // self.size - 1])}

    def ends_with_pages(self, session: Session, tokens: list[int]) -> None:
        """A place without pages is of use only below others."""
        cursor, index = self.cache.cursor(session.namespace), self.cache.index
        if index.seek(cursor, np.array(tokens, np.int32), len(tokens) // self.size):
            node = cursor.nodes[-1]
            assert index.children[node] or (index.pages[node] >= 0).any(), "a place was kept that nothing stands on"

    def insert_checkpoint(self, session: Session, tokens: list[int], opening: bool) -> None:
        item = (session.namespace, tuple(tokens), -1)
        copies = self.groups if len(tokens) % self.size else 0
        possible = len(tokens) == session.n_past and len(tokens) and copies <= self.available
        new = {item} if possible and self.options["max_states"] else set()
        full = len(self.cached | new) > self.options["max_states"]
        self.cache.insert(session, tokens, opening=opening)
        self.settle(new, None if full else copies - self.free if new - self.cached else 0)
        assert new <= self.cached, "the newest checkpoint was not kept"
        stay = len(self.pins)  # those whose time is over among them, until a call ends them
        assert len(self.cached) <= max(self.options["max_states"], stay + 1)

    @precondition(lambda self: not self.hybrid)
    @rule(n=numbers)
    def begin(self, n: int) -> None:
        """From now on this session publishes with a cursor of its own, as a scheduler does."""
        session = self.choose(n)
        self.cursors[session.id] = [self.cache.cursor(session.namespace), True]

    @precondition(lambda self: any(session.id in self.cursors for session in self.sessions))
    @rule(n=numbers)
    def publish(self, n: int) -> None:
        with_cursor = [session for session in self.sessions if session.id in self.cursors]
        session = with_cursor[n % len(with_cursor)]
        cursor, alive = self.cursors[session.id]
        if any(self.windows) and not cursor.alive:
            alive = False  # what its window has left was evicted down to the start: see PageTree.publish
        tokens = session.tokens.tolist()
        whole = len(tokens) // self.size
        new = self.whole_pages(session, tokens) - self.cached if alive else set()
        self.remember()
        self.cache.publish(cursor, session.tokens, session.table.rows[:, :whole])
        bound = self.options["max_pages"]
        self.settle(new, None if bound else 0, self.superseded(new))
        if not bound and not any(self.windows):
            assert new <= self.cached
        if alive:
            self.sits_on_cached_pages(session, tokens)

    def end_cursors(self, namespaces: Iterable[str]) -> None:
        for session in self.sessions:
            if session.id in self.cursors and session.namespace in namespaces:
                self.cursors[session.id][1] = False

    # Room ---------------------------------------------------------------------------------------------------------

    @rule(num_pages=st.sampled_from([0, 1, 2, 5, 99]))
    def evict(self, num_pages: int) -> None:
        self.remember()
        freed = self.cache.evict(num_pages)
        assert freed >= min(num_pages, self.idle)
        assert self.pool.num_free == self.free + freed
        self.settle((), num_pages)

    @rule(n=st.integers(1, 4))
    def press(self, n: int) -> None:
        """Somebody else takes pages of the pool, or gives them back."""
        self.remember()
        if self.outside and n % 2:
            self.pool.release(self.outside.pop())
            self.settle((), 0)
        elif n <= self.available:
            self.outside.append(self.pool.alloc(n))
            self.settle((), n - self.free)

    @rule(namespace=spaces, shared=shares, tail=tails)
    def ask(self, namespace: str, shared: int, tail: list[int]) -> None:
        before, tokens = self.pool.refs.copy(), BASE[:shared] + tail
        self.expect_match(namespace, tokens, self.cache.match_len(tokens, namespace))
        assert np.array_equal(self.pool.refs, before)

    @precondition(lambda self: self.cached)
    @rule(namespace=st.sampled_from(["a", "a", "b", ""]))
    def drop(self, namespace: str) -> None:
        self.remember()
        held = self.held()
        pages = {page for item, ids in held.items() if item[0] == namespace for page in ids}
        others = {page for item, ids in held.items() if item[0] != namespace for page in ids}
        assert self.cache.drop(namespace) == len(pages - others)
        assert all(pin.namespace != namespace for pin in self.cache.pins)
        self.follow_pins([pin for pin in self.pins if pin.namespace == namespace])
        self.cached = {item for item in self.cached if item[0] != namespace}
        self.end_cursors([namespace])
        self.settle((), 0)

    @rule(really=st.sampled_from([False, False, False, True]))
    def release_cache(self, really: bool) -> None:
        if really:
            self.forget()

    def forget(self) -> None:
        self.cache.release()
        self.cached = set()
        self.pins = []
        self.end_cursors(NAMES)
        self.remember()
        self.settle((), 0)

    # Pins ---------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.cached)
    @rule(n=st.integers(0, 99), tail=tails, data=st.data())
    def pin(self, n: int, tail: list[int], data) -> None:
        """Pin something that is cached, or more than that."""
        ttl, priority = data.draw(st.sampled_from(self.times)), data.draw(st.sampled_from(self.priorities))
        entries = [*sorted(self.cached), ("", (), 0)]
        namespace, prefix, _ = entries[n % len(entries)]
        tokens, budget = [*prefix, *tail], self.cache.pins.max_pages
        self.remember()
        before = self.live_pins()
        wanted = self.prefix_pages(namespace, tokens)
        try:
            pin = self.cache.pin(tokens, namespace, ttl, priority)
        except ValueError:
            assert not wanted
            self.settle((), 0)
            return
        except OutOfPages:
            stay = {page for pin in before if pin.priority >= priority for page in pin.pages.tolist()}
            assert len(stay | wanted) > budget
            assert set(before) <= set(self.cache.pins)
            self.settle((), 0)
            return
        assert set(pin.pages.tolist()) == wanted
        self.pins.append(pin)
        ended = [other for other in before if other not in self.cache.pins]
        assert all(other.priority < priority for other in ended)
        assert not ended or len({page for other in before for page in other.pages.tolist()} | wanted) > budget
        self.follow_pins(ended)
        self.settle((), 0)

    def prefix_pages(self, namespace: str, tokens: list[int]) -> set[int]:
        """The pages of all that is cached of `tokens`; of the deepest checkpoint that they start with."""
        held = self.held()
        mine = [item for item in held if item[0] == namespace and list(item[1]) == tokens[: len(item[1])]]
        if self.hybrid:
            return held[max(mine, key=lambda item: len(item[1]))] if mine else set()
        return {page for item in mine if not len(item[1]) % self.size for page in held[item]}

    @precondition(lambda self: self.pins)
    @rule(n=numbers)
    def unpin(self, n: int) -> None:
        pin = self.pins.pop(n % len(self.pins))
        self.cache.unpin(pin)
        assert pin not in self.cache.pins and not self.cache.unpin(pin)
        self.remember()
        self.settle((), 0)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    # Files --------------------------------------------------------------------------------------------------------

    def contents(self, cache: PrefixCache) -> list:
        return [nodes_of(cache), list(checkpoints_of(cache).items())]

    @precondition(lambda self: self.cached)
    @rule()
    def save_and_load(self) -> None:
        """What was saved comes back into the cache that forgot it, as far as there is room now."""
        path, before, was = self.folder / "cache", self.contents(self.cache), self.cached
        assert self.cache.save(path) == self.cache.held_pages
        held, whole = self.cache.held_pages, self.within_budget()
        self.forget()
        loaded = self.cache.load(path)
        self.settle(was, None)
        assert self.cache.held_pages == loaded
        if held <= self.free and whole:
            assert loaded == held and self.contents(self.cache) == before
        assert loaded <= self.free and self.pool.num_free == self.free - loaded
        assert self.cache.load(path) == 0

    def within_budget(self) -> bool:
        """Whether a load can bring back everything; pinned checkpoints may stand over their budget."""
        return not self.hybrid or len(self.cached) <= self.options["max_states"]

    @precondition(lambda self: self.cached and self.within_budget())
    @rule(namespace=spaces, shared=shares, tail=tails.filter(len))
    def load_elsewhere(self, namespace: str, shared: int, tail: list[int]) -> None:
        """Another cache takes all of it in, and continues a prompt as this one would."""
        path, prompt = self.folder / "cache", BASE[:shared] + tail
        assert self.cache.save(path) == self.cache.held_pages
        pool, cache = self.fresh(self.pool.num_pages + 30 * self.groups)
        assert cache.load(path) == self.cache.held_pages
        assert self.contents(cache) == self.contents(self.cache)
        session = Session(self.model, pool, namespace=namespace)
        assert cache.match_len(prompt, namespace) == self.cache.match_len(prompt, namespace)
        got = cache.attach(session, prompt)
        self.expect_match(namespace, prompt, got)
        assert np.array_equal(session.eval(prompt[got:]).numpy(), self.model.oracle(prompt))
        for thing in (pool, cache, session):
            thing.check()
        session.release()
        cache.evict(pool.num_pages)
        assert pool.num_free == pool.num_pages

    # After every rule ---------------------------------------------------------------------------------------------

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "folder"):
            return
        self.pool.check()
        self.cache.check()
        refs = self.pool.held.astype(np.int32) + self.cache.pins.refs()
        for pages in (*self.outside, *(session.table.ids for session in self.sessions)):
            refs[pages] += 1
        assert np.array_equal(refs, self.pool.refs)
        for session in self.sessions:
            session.check()
        assert set(self.held()) == self.cached
        self.follow_pins()

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        shutil.rmtree(self.folder)
        for session in self.sessions:
            session.release()
        for pages in self.outside:
            self.pool.release(pages)
        self.cache.release()
        assert self.pool.num_free == self.pool.num_pages
        assert not self.pool.refs.any()
