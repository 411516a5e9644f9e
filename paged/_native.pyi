"""The compiled CPU part of paged (csrc/bind/native.cpp). Addresses are those of tensors whose layout was checked."""

import numpy as np
import numpy.typing as npt

class Pages:
    """Address and geometry of the pages of one storage, which must outlive it. ValueError for sizes no kernel takes.

    dtype: 0 fp32, 1 fp16, 2 bf16, 3 int8, 4 int4
    """

    def __init__(
        self,
        address: int,
        num_pages: int,
        layers: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: int,
        /,
    ) -> None: ...

class Plan:
    """One step: its arrays, which it keeps alive and which must keep their values, and how it is cut into work items.

    ValueError if the arrays do not describe a step, TypeError for another dtype or layout.
    """

    def __init__(
        self,
        page_size: int,
        q_indptr: npt.NDArray[np.int32],
        kv_lens: npt.NDArray[np.int32],
        page_table: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int64],
    ) -> None: ...
    def describe(self, q_heads: int, kv_heads: int, window: int, /) -> dict[str, int]:
        """Number of work `items`, of `merges`, and of `shared_seqs` that read shared pages together."""

class DeltaLayer:
    """Sizes of one gated delta layer and the addresses of its fp32 weights, which must outlive it.

    ValueError unless head sizes are multiples of 8 and the convolution has at most 16 taps.
    """

    def __init__(
        self,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        conv: int,
        decay: int,
        dt_bias: int,
        norm: int,
        eps: float,
        /,
    ) -> None: ...

class Kernels:
    """The kernels of one instruction set ("baseline", "avx2", "avx512"); "" is the widest of this processor."""

    def __init__(self, isa: str = "") -> None: ...
    @property
    def isa(self) -> str: ...
    def attend(
        self,
        plan: Plan,
        pages: Pages,
        layer: int,
        q: int,
        q_row_stride: int,
        q_heads: int,
        q_dtype: int,
        out: int,
        lse: int,
        scale: float,
        window: int,
        softcap: float,
        /,
    ) -> None: ...
    def append(
        self,
        plan: Plan,
        pages: Pages,
        layer: int,
        k: int,
        k_row_stride: int,
        v: int,
        v_row_stride: int,
        dtype: int,
        /,
    ) -> None: ...
    def delta(
        self,
        layer: DeltaLayer,
        q_indptr: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        rows: int,
        row_stride: int,
        history: int,
        history_stride: int,
        state: int,
        state_stride: int,
        mixed: int,
        out: int,
        /,
    ) -> None:
        """One step of a gated delta layer; see DeltaArgs in csrc/include/paged/delta.h for the layouts."""
    def read_each(self, addresses: npt.NDArray[np.int64], num_bytes: int, /) -> float:
        """The same for pieces of memory: `num_bytes` at each of the addresses."""

    def read(self, address: int, num_bytes: int, /) -> float:
        """Read memory with plain vector loads on all threads: the bound that a kernel's bandwidth is compared with."""

def copy_pages(pages: Pages, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32], /) -> None: ...
def num_threads() -> int: ...
def set_num_threads(n: int, /) -> None: ...
def cascade() -> bool: ...
def set_cascade(on: bool, /) -> None:
    """Whether sequences whose leading pages are the same read them once. Results do not depend on it."""

class PageLookup:
    """From a page's parent and tokens to its node: see paged.prefix.lookup. `seed` makes its hash unpredictable."""

    def __init__(self, page_size: int, seed: int) -> None: ...
    def insert(self, node: int, parent: int, tokens: npt.NDArray[np.int32]) -> None: ...
    def insert_all(
        self, nodes: npt.NDArray[np.int32], parents: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32]
    ) -> None: ...
    def erase(self, node: int) -> bool: ...
    def clear(self) -> None: ...
    def match(
        self,
        parent: int,
        tokens: npt.NDArray[np.int32],
        num_pages: int,
        node_tokens: npt.NDArray[np.int32],
        node_parent: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int32]: ...
    def __len__(self) -> int: ...
