// The CPU kernels: attention, append and page copy over paged K and V. No Python, no torch, no exceptions.
//
// Every kernel exists once per instruction set; `cpu_kernels` returns the table of the one to use. Addresses are
// plain, offsets are 64-bit, counts of tokens and rows are 32-bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "paged/delta.h"
#include "paged/records.h"

namespace paged {

enum Dtype : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2, kInt8 = 3, kInt4 = 4 };  // the last two: of pages only

inline int64_t dtype_bytes(int32_t dtype) { return dtype == kF32 ? 4 : 2; }

constexpr int kMostDim = 256, kMostGroups = kMostDim / kGroup8;

// Keys are walked in tiles of kTile positions that start at position 0. The online softmax restarts at each multiple
// of kSplit positions, and the parts are merged from left to right. Both are fixed, so that the bits of a row depend on
// neither batch, chunk, page size, thread count nor on where its keys were divided among threads.
constexpr int kTile = 64;
constexpr int kSplit = 512;
constexpr int kTilesPerSplit = kSplit / kTile;

// K and V of all pages, contiguous: `[num_pages, layers, 2, kv_heads, page_size, head_dim]` of a plain dtype, or
// `[num_pages, layers, kv_heads, page_size, record_bytes]`.
struct Pages {
  char* base;
  int64_t num_pages;
  int32_t layers, kv_heads, page_size, head_dim, dtype;

  bool records() const { return dtype >= kInt8; }
  // From a position of a head to the next.
  int64_t row_bytes() const {
    return dtype == kInt8 ? record8_bytes(head_dim) : dtype == kInt4 ? record4_bytes(head_dim) : head_dim * dtype_bytes(dtype);
  }
  int64_t plane_bytes() const { return row_bytes() * page_size * kv_heads; }  // of one layer of a page: K, V or records
  int64_t value_bytes() const { return records() ? 0 : plane_bytes(); }       // from K's address to V's
  int64_t layer_bytes() const { return plane_bytes() + value_bytes(); }
  int64_t page_bytes() const { return layer_bytes() * layers; }
};

// One ragged step: see AttendPlan in paged/ops/plan.py for the layout of the arrays.
struct Batch {
  int32_t num_seqs, num_rows, page_size, max_pages;
  const int32_t *q_indptr, *kv_lens, *page_table;
  const int64_t* slots;
};

// Rows row0..row1 of the step, all of sequence `seq`. If the keys of a segment are divided among work items,
// `partial` is the index of its first partial result and `num_splits` the number of parts a row has; else -1.
struct Segment {
  int32_t seq, row0, row1;
  int32_t first_split, num_splits;
  int64_t partial;
};

// One work item: the segments seg0..seg1, the kv heads kv_head0..kv_head1 and the key splits split0..split1. Tiles below
// `shared_tiles` lie in the same pages for all its segments and are read once.
struct Item {
  int32_t seg0, seg1, kv_head0, kv_head1, split0, split1, shared_tiles;
};

struct AttendArgs {
  Pages pages;
  Batch batch;
  int32_t layer, q_heads, window;
  float scale, softcap;
  const void* q;  // [num_rows, q_heads, head_dim], rows q_row_stride elements apart
  int64_t q_row_stride;
  void* out;        // [num_rows, q_heads, head_dim], contiguous, of q's dtype
  float* lse;       // [num_rows, q_heads] or null
  int32_t q_dtype;
  const Segment* segments;
  float* partials;  // rows of head_dim + 2 floats: accumulator, maximum (base 2), sum
};

struct AppendArgs {
  Pages pages;
  int32_t layer, src_dtype;
  const void *k, *v;  // [rows, kv_heads, head_dim], rows k_row_stride, v_row_stride elements apart
  int64_t k_row_stride, v_row_stride;
  const int64_t* slots;  // page * page_size + offset of each row; negative: skipped
};

struct CpuKernels {
  const char* isa;
  int32_t preferred_rows;  // query vectors (rows times heads of a group) of a work item that use the caches well
  size_t (*scratch_bytes)(int32_t vectors, int32_t head_dim);
  void (*attend)(const AttendArgs& args, const Item& item, void* scratch);
  void (*merge)(const AttendArgs& args, const Segment& segment, int32_t kv_head);
  void (*append)(const AppendArgs& args, int32_t row0, int32_t row1);
  // Sum of `bytes` bytes read with plain vector loads: the bound that the bandwidth of attend is compared with.
  float (*read)(const void* base, size_t bytes);
  // One sequence: a range of channels of the convolution, then one value head with the delta rule.
  void (*delta_conv)(const DeltaArgs& args, int32_t seq, int32_t channel0, int32_t channel1);
  void (*delta_head)(const DeltaArgs& args, int32_t seq, int32_t head, void* scratch);
  size_t (*delta_scratch_bytes)(const DeltaLayer& layer);
};

// The kernels of the instruction set called `name` ("baseline", "avx2", "avx512"), null if this processor or build
// lacks it; an empty name gives the widest there is.
const CpuKernels* cpu_kernels(const char* name);

const CpuKernels* kernels_baseline();
const CpuKernels* kernels_avx2();
const CpuKernels* kernels_avx512();

}  // namespace paged
