"""What happens to cached pages, as events: for routers and tools that keep a picture of a cache elsewhere."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from paged.errors import check
from paged.prefix.hashing import Int32


@dataclass(frozen=True, slots=True, eq=False)
class PagesStored:
    """Pages entered the cache, one below the other.

    `tokens` int32 [n] are those of all of them in a row, a page_size each; the last page of a donation may hold
    fewer. `parent` is the key of the page above the first, None for the first page of a prefix.
    """

    namespace: bytes
    parent: Hashable | None
    keys: tuple[Hashable, ...]
    tokens: Int32


@dataclass(frozen=True, slots=True)
class PageRemoved:
    """The page `key` left the cache: it was evicted, or a longer one took its place."""

    key: Hashable


@dataclass(frozen=True, slots=True)
class PagesCleared:
    """A namespace was dropped at once, or everything (None)."""

    namespace: bytes | None


CacheEvent = PagesStored | PageRemoved | PagesCleared


@dataclass(slots=True)
class MirroredPage:
    namespace: bytes
    parent: Hashable | None
    tokens: tuple[int, ...]


@dataclass(slots=True)
class PageMirror:
    """A cache's pages as its events tell them: give `apply` to `PrefixCache.listen`, or replay a log of events.

    Invariant (`check()`): the page above each page is there.
    """

    page_size: int
    pages: dict[Hashable, MirroredPage] = field(default_factory=dict[Hashable, MirroredPage])

    def apply(self, event: CacheEvent) -> None:
        """Take in one event, in the order in which they came. O(tokens); O(pages) to clear."""
        if isinstance(event, PagesStored):
            parent, size = event.parent, self.page_size
            for i, key in enumerate(event.keys):
                tokens = tuple(event.tokens[i * size : (i + 1) * size].tolist())
                self.pages[key] = MirroredPage(event.namespace, parent, tokens)
                parent = key
        elif isinstance(event, PageRemoved):
            del self.pages[event.key]
        elif event.namespace is None:
            self.pages.clear()
        else:
            self.pages = {key: page for key, page in self.pages.items() if page.namespace != event.namespace}

    def check(self) -> None:
        """Assert the invariant of the class docstring. O(pages)."""
        above = {page.parent for page in self.pages.values()} - {None}
        check(above <= self.pages.keys(), "a page was told of whose parent is not there")
