"""SavedCheckpoints: tokens, pages and recurrent states of a cache's checkpoints, oldest use first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from paged.kv.pages import Int32
from paged.kv.state import StatePool
from paged.media import holds_media
from paged.prefix.checkpoints import CheckpointStore
from paged.prefix.hashing import fields_of
from paged.prefix.saved_file import Part, SavedFile
from paged.spec import StateSpec

if TYPE_CHECKING:
    from paged.prefix.cache import PrefixCache


class CheckpointRecord(msgspec.Struct, forbid_unknown_fields=True):
    """A Checkpoint as it is saved, but for its arrays."""

    namespace: int  # its number in the file
    opening: bool
    preview: str
    born_at: float
    num_hits: int
    last_hit_at: float
    num_tokens: int


class SavedCheckpoints:
    """Checkpoints by their number here, pages by their number in the file.

    tokens  int32 [num_tokens] each
    pages   int32 [num_groups, ceil(num_tokens / page_size)] each; -1 where a sliding window left the page behind
    states  plane name -> tensor, each: the state behind the last of the tokens
    """

    def __init__(
        self,
        namespaces: list[bytes],
        records: list[CheckpointRecord],
        tokens: list[Int32],
        pages: list[Int32],
        states: list[Mapping[str, torch.Tensor]],
        num_pages: int,
    ) -> None:
        self.namespaces = namespaces
        self.records = records
        self.tokens = tokens
        self.pages = pages
        self.states = states
        self.num_pages = num_pages
        self.ids: Int32 = np.zeros(0, np.int32)  # the pool's id of each page, where it comes from a cache
        self.rows_of_page: Int32 = np.zeros(0, np.int32)  # rows that each of them holds

    # Out of a cache -------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, store: CheckpointStore) -> SavedCheckpoints:
        """Every checkpoint of a store but for those with media in it. O(tokens); the states are not copied."""
        kept = [c for c in store if not holds_media(c.tokens[None]).any()]
        namespaces, size = store.namespaces(), store.pool.page_size
        records = [
            CheckpointRecord(
                namespaces.index(c.namespace), c.opening, c.preview, c.born_at, c.num_hits, c.last_hit_at, c.num_tokens
            )
            for c in kept
        ]
        ids = np.unique(np.concatenate([np.zeros(0, np.int32), *(c.page_ids for c in kept)]))
        rows = np.full(len(ids), size, np.int32)
        pages = [np.where(c.pages >= 0, np.searchsorted(ids, c.pages), -1).astype(np.int32) for c in kept]
        for c, own in zip(kept, pages, strict=True):
            if c.num_tokens % size:
                rows[own[:, -1]] = c.num_tokens % size
        states = [c.snapshot.tensors for c in kept]
        saved = cls(namespaces, records, [c.tokens for c in kept], pages, states, len(ids))
        saved.ids, saved.rows_of_page = ids, rows
        return saved

    def parts(self, spec: StateSpec) -> list[Part]:
        """The arrays as tensors of a file."""
        tokens, pages = np.concatenate(self.tokens or [np.zeros(0, np.int32)]), [own.ravel() for own in self.pages]
        numbers = np.concatenate(pages or [np.zeros(0, np.int32)])
        return [
            Part("checkpoint_tokens", torch.int32, tokens.shape, [torch.from_numpy(tokens)]),
            Part("checkpoint_pages", torch.int32, numbers.shape, [torch.from_numpy(numbers)]),
            *(
                Part(f"state.{name}", plane.dtype, (len(self.states), *plane.shape[1:]), self._pieces(name))
                for name, plane in _planes(spec).items()
            ),
        ]

    def _pieces(self, name: str) -> Iterator[torch.Tensor]:
        return (tensors[name].cpu() for tensors in self.states)

    # Out of a file --------------------------------------------------------------------------------------------

    @classmethod
    def read(
        cls,
        file: SavedFile,
        cache: PrefixCache,
        namespaces: list[bytes],
        records: list[CheckpointRecord],
        num_pages: int,
    ) -> SavedCheckpoints:
        """The checkpoints of a file, fit for `cache`. LoadError where they and its `num_pages` pages do not agree.

        The states lie in the file until they are copied.
        """
        spec, groups, size = cache.pool.state_spec, cache.num_groups, cache.pool.page_size
        assert spec is not None
        lengths = np.array([record.num_tokens for record in records], np.int64)
        few = int(lengths.min(initial=1))
        file.expect(few > 0, "checkpoints of at least one token", few)
        ends, last = np.cumsum(lengths), groups * np.cumsum(-(-lengths // size))
        tokens = file.tensor("checkpoint_tokens", torch.int32, (int(lengths.sum()),)).numpy()
        pages = file.tensor("checkpoint_pages", torch.int32, (int(last[-1]) if records else 0,)).numpy()
        states: list[dict[str, torch.Tensor]] = [{} for _ in records]
        for name, plane in _planes(spec).items():
            file.shape(f"state.{name}", plane.dtype, (len(records), *plane.shape[1:]))
            for i, piece in file.pieces(f"state.{name}", 1):
                states[i][name] = piece[0]
        saved = cls(
            namespaces,
            records,
            np.split(tokens, ends)[:-1],  # what lies behind the last end is nothing
            [own.reshape(groups, -1) for own in np.split(pages, last)[:-1]],
            list(states),
            num_pages,
        )
        saved._verify(file, cache)
        return saved

    def _verify(self, file: SavedFile, cache: PrefixCache) -> None:
        storage, size, num_pages = cache.pool.storage, cache.pool.page_size, self.num_pages
        assert storage is not None
        places = np.concatenate([np.zeros(0, np.int32), *(own.ravel() for own in self.pages)])
        in_range = (places >= -1) & (places < num_pages)
        file.expect(in_range.all(), f"pages below {num_pages}", places[~in_range][:1])
        uses = np.bincount(places[places >= 0], minlength=num_pages)
        file.expect((uses > 0).all(), f"each of {num_pages} pages in a checkpoint", f"{int((uses == 0).sum())} in none")
        named: set[tuple[int, bytes]] = set()
        holder = np.full(num_pages, -1, np.int32)  # the first checkpoint that has each page, and where in it
        place = np.zeros(num_pages, np.int64)
        for i, (record, tokens, pages) in enumerate(zip(self.records, self.tokens, self.pages, strict=True)):
            one, n = f"checkpoint {i}", len(tokens)
            known = 0 <= record.namespace < len(self.namespaces)
            file.expect(known, f"{len(self.namespaces)} namespaces", f"{one} in number {record.namespace}")
            file.expect((tokens >= 0).all(), f"token ids of 0 or more in {one}", int(tokens.min()))
            named.add((record.namespace, tokens.tobytes()))
            file.expect(len(named) == i + 1, f"other tokens in {one} than in any before", "the same")
            window = int(fields_of(self.namespaces[record.namespace]).get("cache_window", 0))
            needed = np.arange(pages.shape[1]) >= storage.spec.view(None, window).first_columns(n, size)[:, None]
            file.expect((pages[needed] >= 0).all(), f"each page that {one} needs", "one missing")
            own = pages[pages >= 0]
            file.expect(len(np.unique(own)) == len(own), f"different pages in {one}", "one of them twice")
            if n % size:
                file.expect((uses[pages[:, -1]] == 1).all(), f"a partial page of {one} alone", "another one has it")
            group, column = np.nonzero(pages >= 0)
            at = group * np.int64(2**31) + column
            shared = holder[own] >= 0
            file.expect((place[own[shared]] == at[shared]).all(), f"pages of {one} in their places", "one moved")
            for other in np.unique(holder[own[shared]]).tolist():
                end = size * (int(column[shared & (holder[own] == other)].max()) + 1)
                same = record.namespace == self.records[other].namespace
                same = same and np.array_equal(tokens[:end], self.tokens[other][:end])
                file.expect(same, f"the tokens of checkpoint {other} in {one}, which has its pages", "others")
            holder[own[~shared]], place[own[~shared]] = i, at[~shared]


def _planes(spec: StateSpec) -> dict[str, torch.Tensor]:
    """The planes of one blank state, `[1, *shape]` each."""
    return StatePool(spec, 1).planes
