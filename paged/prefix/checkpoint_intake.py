"""CheckpointIntake: which checkpoints of a file a cache takes in."""

from __future__ import annotations

import numpy as np

from paged.kv.pages import Int32
from paged.kv.state import StateSnapshot
from paged.prefix.checkpoints import Checkpoint, CheckpointStore
from paged.prefix.saved_checkpoints import SavedCheckpoints

_NOBODY = -1  # the donor of what came from a file: no sequence of this process


class CheckpointIntake:
    """What a store takes in of a file, decided before anything changes: `pages`, numbers in the file, ascending.

    Of what the store does not have, checkpoints enter while both budgets and `room` pages allow: openings before
    tails, what was used last first. A whole page that a checkpoint shares with one in the store is shared there too.
    """

    def __init__(self, saved: SavedCheckpoints, store: CheckpointStore, room: int) -> None:
        self.saved = saved
        self.store = store
        self.new: list[int] = []
        self.page_of = np.full(saved.num_pages + 1, -1, np.int32)  # the pool's; the last place stays -1
        missing = self._look_up()
        self.pages = self._choose(missing, room)

    def _look_up(self) -> list[int]:
        """Which ones the store lacks; the pages of the others serve them too."""
        saved, size = self.saved, self.store.pool.page_size
        missing: list[int] = []
        for i, record in enumerate(saved.records):
            same = self.store._same(saved.namespaces[record.namespace], saved.tokens[i])
            if same is None:
                missing.append(i)
                continue
            whole = record.num_tokens // size
            theirs, ours = saved.pages[i][:, :whole], same.pages[:, :whole]
            both = (theirs >= 0) & (ours >= 0)
            self.page_of[theirs[both]] = ours[both]
        return missing

    def _choose(self, missing: list[int], room: int) -> Int32:
        saved, store = self.saved, self.store
        assert store.pool.storage is not None and store.pool.state_spec is not None
        wanted = np.zeros(saved.num_pages, np.bool_)
        refused = np.zeros(saved.num_pages, np.bool_)
        num_states, bounded = store.max_states - len(store), store.max_state_bytes > 0
        num_bytes = store.max_state_bytes - store.num_bytes
        for i in sorted(missing, key=lambda i: (not saved.records[i].opening, -i)):
            own = saved.pages[i][saved.pages[i] >= 0]
            own = own[(self.page_of[own] < 0) & ~wanted[own]]
            cost = store.pool.state_spec.num_bytes + len(own) * store.pool.storage.page_bytes
            if num_states < 1 or len(own) > room or (bounded and cost > num_bytes):
                refused[own] = True
                continue
            wanted[own] = True
            num_states, room, num_bytes = num_states - 1, room - len(own), num_bytes - cost
            self.new.append(i)
        store.stats.load_refused += int(np.count_nonzero(refused & ~wanted))
        return np.flatnonzero(wanted).astype(np.int32)

    def enter(self, ids: Int32) -> None:
        """Enter the pool's pages `ids`, which hold `pages` with one reference each; then only the store holds them.

        The checkpoints count as used now, in the order of their last use.
        """
        saved, store, storage = self.saved, self.store, self.store.pool.storage
        assert storage is not None
        self.page_of[self.pages] = ids
        for i in sorted(self.new):
            record, pages = saved.records[i], saved.pages[i]
            own = self.page_of[pages]
            state = {name: tensor.to(storage.device, copy=True) for name, tensor in saved.states[i].items()}
            store._hold(own[own >= 0])
            store._tick += 1
            store._enter(
                Checkpoint(
                    saved.namespaces[record.namespace],
                    saved.tokens[i].copy(),
                    own,
                    StateSnapshot(record.num_tokens, state),
                    record.opening,
                    _NOBODY,
                    record.preview,
                    record.born_at,
                    store._tick,
                    record.num_hits,
                    record.last_hit_at,
                )
            )
            store.stats.checkpoint_inserts += 1
        store.pool.release(ids)
