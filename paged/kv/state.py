"""The recurrent state of sequences: what layers keep whose state only moves forward, one slot a sequence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paged.errors import GeometryMismatch, StateMismatch, check
from paged.spec import StateSpec

Int32 = npt.NDArray[np.int32]

UNKNOWN = -1  # position of a slot whose state a failed forward left half moved

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int64": torch.int64}
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """A copy of one slot: the tensors of its planes by name, and the one position at which they continue a sequence."""

    position: int
    tensors: Mapping[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class StatePool:
    """Recurrent state of `num_slots` sequences; the caller says which slot is whose.

    planes     name -> `[num_slots, *shape]`, contiguous, one for each plane of `spec`
    positions  int32 [num_slots]: tokens that the state of each slot has taken in; UNKNOWN (-1) after a forward that
               failed, until the slot is reset, restored, or starts again at position 0

    On the CPU a slot that was never used costs address space, not memory.

    Invariants (`check()`): the planes have the shapes and dtypes of `spec`; positions are UNKNOWN or more; a slot at
    position 0 is all zeros, so that nothing of an earlier sequence can leak into the next.
    """

    def __init__(self, spec: StateSpec, num_slots: int, device: str | torch.device = "cpu") -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.spec = spec
        self.device = torch.device(device)
        self.planes = {
            plane.name: _zeros((num_slots, *plane.shape), _DTYPES[plane.dtype], self.device) for plane in spec.planes
        }
        self.positions: Int32 = np.zeros(num_slots, np.int32)

    @property
    def num_slots(self) -> int:
        return len(self.positions)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, used or not."""
        return self.num_slots * self.spec.num_bytes

    # A step ---------------------------------------------------------------------------------------------------

    @contextmanager
    def advance(self, slots: Int32, q_indptr: Int32, kv_lens: Int32) -> Iterator[Int32]:
        """The frame of one forward: checks that each sequence's rows follow its state, and moves the positions.

        slots     int32 [S]      the slot of each sequence
        q_indptr  int32 [S + 1]  and
        kv_lens   int32 [S]      as in ForwardBatch: the rows of sequence s start at position
                                 `kv_lens[s] - (q_indptr[s + 1] - q_indptr[s])`

        Gives int32 [S]: the slots, -1 for a sequence that takes no part (no rows, or a padding sequence of length
        0, whose slot may be anything). A sequence that starts at position 0 finds zeros, whatever its slot held.
        Inside the frame the caller moves the states. On the way out the positions become `kv_lens`; after an
        exception they are UNKNOWN.

        StateMismatch where rows do not start at their slot's position, ValueError for a slot that is not in the
        pool or is given twice; then nothing was touched. O(S), plus zeroing the slots that start.
        """
        if len(slots) != len(kv_lens):
            raise ValueError(f"a step of {len(kv_lens)} sequences needs as many state slots, got {len(slots)}")
        counts = np.diff(q_indptr)
        active = (counts > 0) & (kv_lens > 0)
        used, starts = slots[active], (kv_lens - counts)[active]
        if used.size:
            self._check_step(used, starts)
        for slot in used[(starts == 0) & (self.positions[used] != 0)].tolist():
            self.reset(slot)
        self.positions[used] = UNKNOWN
        yield np.where(active, slots, np.int32(-1)).astype(np.int32, copy=False)
        self.positions[used] = kv_lens[active]

    def _check_step(self, slots: Int32, starts: Int32) -> None:
        if int(slots.min()) < 0 or int(slots.max()) >= self.num_slots:
            bad = int(slots.min()) if int(slots.min()) < 0 else int(slots.max())
            raise ValueError(f"state slots must be between 0 and {self.num_slots - 1}, got {bad}")
        ordered = np.sort(slots)
        if (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
            raise ValueError(f"two sequences of one step have state slot {int(twice[0])}; each needs one of its own")
        wrong = (starts != 0) & (starts != self.positions[slots])
        if wrong.any():
            slot, start = int(slots[wrong][0]), int(starts[wrong][0])
            found = self._describe(slot)
            raise StateMismatch(
                f"rows at position {start} need the state of position {start}, and {found}; "
                "restore a snapshot of that position, or run the sequence again from position 0"
            )

    def _describe(self, slot: int) -> str:
        position = int(self.positions[slot])
        if position == UNKNOWN:
            return f"slot {slot} has no valid state since a forward failed"
        return f"the state of slot {slot} is at position {position}"

    # One slot -------------------------------------------------------------------------------------------------

    def reset(self, slot: int) -> None:
        """Make the slot that of an empty sequence: zeros at position 0. Cost: writes one state, if it is not so yet."""
        self._check_slot(slot)
        if self.positions[slot] == 0:
            return
        for plane in self.planes.values():
            plane[slot] = 0
        self.positions[slot] = 0

    def copy(self, src: int, dst: int) -> None:
        """Make slot `dst` continue as slot `src` does (a fork). Cost: one copy of a state."""
        self._check_slot(src)
        self._check_slot(dst)
        if src == dst:
            return
        for plane in self.planes.values():
            plane[dst].copy_(plane[src])
        self.positions[dst] = self.positions[src]

    def snapshot(self, slot: int) -> StateSnapshot:
        """A copy of the slot that its sequence's later steps do not change, on the pool's device.

        StateMismatch if the state is not valid at any position. Cost: `spec.num_bytes` bytes copied.
        """
        self._check_slot(slot)
        if self.positions[slot] == UNKNOWN:
            raise StateMismatch(f"{self._describe(slot)}; reset or restore it before a snapshot is taken")
        return StateSnapshot(
            int(self.positions[slot]), {name: plane[slot].clone() for name, plane in self.planes.items()}
        )

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        """Continue from a snapshot, of this pool or of another pool of the same spec; the snapshot stays as it is.

        GeometryMismatch if it was taken of another geometry; then the slot is untouched. Cost: one copy of a state.
        """
        self._check_slot(slot)
        ours = {name: (tuple(plane.shape[1:]), plane.dtype) for name, plane in self.planes.items()}
        found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in snapshot.tensors.items()}
        if ours != found:
            raise GeometryMismatch(f"the snapshot has planes {_listed(found)}, and this pool {_listed(ours)}")
        for name, plane in self.planes.items():
            plane[slot].copy_(snapshot.tensors[name])
        self.positions[slot] = snapshot.position

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"state slots must be between 0 and {self.num_slots - 1}, got {slot}")

    def check(self) -> None:
        """Assert the invariants of the class docstring. Cost: reads the state of every slot at position 0."""
        check(list(self.planes) == [plane.name for plane in self.spec.planes], f"planes are {list(self.planes)}")
        for plane in self.spec.planes:
            tensor, want = self.planes[plane.name], (self.num_slots, *plane.shape)
            check(tuple(tensor.shape) == want, f"plane {plane.name} has shape {tuple(tensor.shape)}, expected {want}")
            check(tensor.dtype == _DTYPES[plane.dtype], f"plane {plane.name} has dtype {tensor.dtype}")
            check(tensor.is_contiguous(), f"plane {plane.name} is not contiguous")
        check(self.positions.dtype == np.int32, f"positions are {self.positions.dtype}")
        check(int(self.positions.min()) >= UNKNOWN, f"a slot is at position {int(self.positions.min())}")
        for slot in np.flatnonzero(self.positions == 0).tolist():
            for name, tensor in self.planes.items():
                check(not bool(tensor[slot].any()), f"slot {slot} is at position 0 and its {name} is not zero")


def _listed(planes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{name} {list(shape)} {str(dtype)[6:]}" for name, (shape, dtype) in planes.items()) or "none"


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, on the CPU in memory that the system hands out when it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
