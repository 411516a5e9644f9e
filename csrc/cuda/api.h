// What the CUDA kernels need to know, and the functions that launch them. No framework: addresses, sizes, a stream.
//
// Every function returns a cudaError_t as an int (0: launched). Nothing waits for the device.
#pragma once
#include <cstdint>

#include "../include/paged/records.h"

namespace paged::cuda {

enum class Type : int { fp16 = 0, bf16 = 1, int8 = 2, int4 = 3 };

// The keys of a row are folded in splits of this many positions, counted from position 0: a row's sums, and so its
// bits, are the same whether one block walks all splits or many blocks walk one each.
constexpr int kSplit = 256;

// The pages of one storage, contiguous, 16-byte aligned: [num_pages, layers, 2, kv_heads, page_size, head_dim] values, or
// [num_pages, layers, kv_heads, page_size, record bytes] of int8 and int4.
struct Pool {
  void* pages;
  int64_t num_pages;
  int layers, kv_heads, page_size, head_dim;
  Type type;

  bool records() const { return type == Type::int8 || type == Type::int4; }
  int row() const {  // bytes from a position of a head to the next
    return !records() ? 2 * head_dim : type == Type::int8 ? record8_bytes(head_dim) : record4_bytes(head_dim);
  }
  int64_t plane() const { return int64_t(kv_heads) * page_size * row(); }  // bytes of K, of V or of records, of a layer
  int64_t values() const { return records() ? 0 : plane(); }               // bytes from K to V
  int64_t layer() const { return plane() + values(); }
  int64_t page() const { return layers * layer(); }
};

// New rows of one layer, each [num_rows, kv_heads, head_dim]; row i goes to slot page * page_size + offset, -1: nowhere.
struct Rows {
  const void* k;
  const void* v;
  const int64_t* slots;
  int64_t num_rows;
  bool fp32;  // else of the pool's type; records are made of fp32 only, those of int4 of K that rotate() has rotated
};

// q and out are [T, heads, head_dim], fp32 or of the pool's type; lse is [T, heads] or null. For pages of records they
// are fp32; for those of int4, q has been rotated by rotate(), and scale divided by the size of its blocks.
struct Query {
  const void* q;
  void* out;
  float* lse;
  int heads;
  bool fp32;
  float scale;
  int window;     // 0: none
  float softcap;  // 0: none
};

// One block's share of a step for each kv head: query rows times the query heads of a kv head ("flat" rows: row * group
// + head), over the keys [key_begin, key_end) of one page table.
struct alignas(16) Item {
  int row_begin;   // its rows are rows[row_begin + flat / group]
  int flat_begin, flat_count;
  int table;               // where the page table begins in `tables`
  int key_begin, key_end;  // every key in between is seen by a row of the item
  int partial;             // 1: one split, written to `partials`; 0: all splits of its rows, the result is written
  int reserved;
};

// Row `row` has `count` partials from `base` on, in the order of its splits.
struct Merge {
  int row, base, count;
};

// The work of one step for one (group, window), all on the device; built by paged/ops/cuda_work.py.
struct Work {
  const Item* wide;    // up to wide_rows(head_dim) flat rows each, tensor cores
  const Item* narrow;  // up to 16 flat rows each, tensor cores
  const Item* simple;  // one row, group <= 3, no tensor cores
  int num_wide, num_narrow, num_simple;
  const int* rows;       // row lists of the items
  const int* positions;  // [T]
  const int* tables;     // page tables, one after the other
  const int* part_base;  // [T]: the partial of split s of a row is part_base[row] + s
  const Merge* merges;
  int num_merges;
  float* partials;  // [num_partials, heads, head_dim + 2]: the sums, then maximum and sum of exponentials
  bool folds;       // some item that is not partial has more than one split
};

using Stream = void*;  // cudaStream_t

constexpr int wide_rows(int head_dim) { return head_dim > 128 ? 32 : 64; }
constexpr int kNarrowRows = 16;

// Blocks of `size` (a power of two up to 64) of `count` neighbouring values times the Hadamard matrix, in place.
int rotate(float* values, int64_t count, int size, Stream stream);

int append(const Pool& pool, int layer, const Rows& rows, Stream stream);
int copy_pages(const Pool& pool, const int* from, const int* to, int count, Stream stream);
int attend(const Pool& pool, int layer, const Query& query, const Work& work, Stream stream);

// Makes a device current for the calling thread; the launchers use the current one.
int set_device(int device);

// 0 and the number of devices, or the error: 35 where there is no driver, or one too old for this build.
int device_count(int* count);
const char* error_name(int error);

}  // namespace paged::cuda
