"""Drives sessions and a prefix cache by hand over an EchoModel, and compares every logit with the model's own."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import EchoLooped, EchoModel

from paged.errors import CheckFailed
from paged.kv.pages import PagePool
from paged.kv.storage import PageStorage
from paged.prefix.cache import PrefixCache
from paged.prefix.hashing import page_hash
from paged.session import Session


def ids(*values: int) -> np.ndarray:
    """Page ids or tokens as the int32 arrays that the pool takes."""
    return np.array(values, np.int32)


def span(first: int, n: int) -> list[int]:
    """`n` different tokens from `first` on."""
    return list(range(first, first + n))


def expect_check_fails(thing, match: str) -> None:
    """`thing.check()` must notice; `match` is part of what it says."""
    with pytest.raises(CheckFailed, match=match):
        thing.check()


class Hand:
    """A model, a pool and a cache, with the sessions that `ask` opened."""

    def __init__(
        self,
        num_pages: int = 10,
        page_size: int = 4,
        num_groups: int = 1,
        max_pages: int = 0,
        hash_page=page_hash,
        vocab_size: int = 997,
        kind: type[EchoModel] = EchoModel,
        windows: tuple[int, ...] = (),
        model: EchoModel | None = None,
        **options,
    ) -> None:
        """`options` are those of PrefixCache."""
        groups = {} if issubclass(kind, EchoLooped) else {"num_groups": num_groups, "windows": windows}
        self.model = model or kind(vocab_size, **groups)
        self.pool = self.model.create_kv_pool(num_pages, page_size)
        self.cache = PrefixCache(self.pool, max_pages, hash_page=hash_page, **options)

    def session(self, namespace: str = "", loops: int | None = None, cache_window: int = 0) -> Session:
        return Session(self.model, self.pool, loops, cache_window, namespace)

    def ask(self, tokens, namespace: str = "", loops: int | None = None, cache_window: int = 0) -> Session:
        """A session that attached what is cached of `tokens` and evaluated the rest; its logits are right."""
        session = self.session(namespace, loops, cache_window)
        matched = self.cache.attach(session, tokens)
        self.expect_exact(session, tokens, session.eval(tokens[matched:]))
        return session

    def donate(
        self, tokens, namespace: str = "", preview: str = "", loops: int | None = None, cache_window: int = 0
    ) -> int:
        """Evaluate `tokens`, donate them, and let the session go; returns the pages new to the cache."""
        session = self.ask(tokens, namespace, loops, cache_window)
        new = self.cache.insert(session, tokens, preview)
        session.release()
        self.check()
        return new

    def expect_exact(self, session: Session, tokens, logits) -> None:
        assert session.tokens.tolist() == list(tokens)
        view = session.view
        assert np.array_equal(logits.numpy(), self.model.oracle(tokens, view.loops or None, view.cache_window))

    def pages_of(self, tokens, namespace: str = "") -> list[int]:
        """Ids of the cached pages that `tokens` starts with (group 0)."""
        cursor = self.cache.cursor(namespace)
        self.cache.index.seek(cursor, ids(*tokens), len(tokens) // self.pool.page_size)
        return self.cache.index.pages[cursor.nodes, 0].tolist()

    def check(self) -> None:
        self.pool.check()
        self.cache.check()


def growing_pool(model: EchoModel, num_pages: int, max_pages: int, page_size: int = 4) -> PagePool:
    """A pool with storage that starts at `num_pages` and may double up to `max_pages`."""
    pool = PagePool(num_pages, page_size, PageStorage(model.spec, num_pages, page_size), max_pages)
    pool.fingerprint = model.fingerprint
    return pool


class CountingLookup:
    """Counts the calls of a look-up and the pages that they were about."""

    def __init__(self, real) -> None:
        self.real = real
        self.calls = self.pages = 0

    def __getattr__(self, name: str):
        return getattr(self.real, name)

    def __len__(self) -> int:
        return len(self.real)

    def match(self, parent: int, tokens, num_pages: int, *nodes):
        self.calls += 1
        self.pages += num_pages
        return self.real.match(parent, tokens, num_pages, *nodes)
