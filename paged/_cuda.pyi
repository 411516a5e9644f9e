"""CUDA kernels of paged: launchers that take addresses, sizes and a stream (csrc/cuda/api.h says what each field is).

A record starts as zeros. Nothing waits for the device. RuntimeError carries the text of a CUDA error.
"""

class Pool:
    """Pages at address `pages`; type 0 fp16, 1 bf16: `[num_pages, layers, 2, kv_heads, page_size, head_dim]`; 2 int8,
    3 int4: records `[num_pages, layers, kv_heads, page_size, record_bytes]`."""

    pages: int
    num_pages: int
    layers: int
    kv_heads: int
    page_size: int
    head_dim: int
    type: int

class Rows:
    """New rows `[num_rows, kv_heads, head_dim]` at addresses `k` and `v`, and their int64 slots."""

    k: int
    v: int
    slots: int
    num_rows: int
    fp32: bool

class Query:
    """`q` and `out` `[T, heads, head_dim]`, `lse` `[T, heads]` fp32 or address 0."""

    q: int
    out: int
    lse: int
    heads: int
    fp32: bool
    scale: float
    window: int
    softcap: float

class Work:
    """The items and merges of a step, as `paged/ops/cuda_work.py` builds them; addresses on the device."""

    wide: int
    narrow: int
    simple: int
    num_wide: int
    num_narrow: int
    num_simple: int
    rows: int
    positions: int
    tables: int
    part_base: int
    merges: int
    num_merges: int
    partials: int
    folds: bool

def rotate(values: int, count: int, size: int, stream: int) -> None:
    """Blocks of `size` of `count` fp32 values times the Hadamard matrix, in place."""

def append(pool: Pool, layer: int, rows: Rows, stream: int) -> None: ...
def copy_pages(pool: Pool, src: int, dst: int, count: int, stream: int) -> None: ...
def attend(pool: Pool, layer: int, query: Query, work: Work, stream: int) -> None: ...
def set_device(device: int) -> None:
    """Make a device current for the calling thread; the launchers use the current one."""

def device_count() -> tuple[int, int]:
    """(error, number of devices); error 35: no driver, or one too old for this build."""

def error_name(error: int) -> str:
    """The text of a CUDA error."""
