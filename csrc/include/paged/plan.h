// How one step is cut into work items, computed once a step and used by all its layers.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "paged/cpu.h"

namespace paged {

// What a partition depends on besides the batch.
struct Cut {
  int32_t q_heads, kv_heads, window, threads, block_vectors;
  bool cascade;

  bool operator==(const Cut& o) const {
    return q_heads == o.q_heads && kv_heads == o.kv_heads && window == o.window && threads == o.threads &&
           block_vectors == o.block_vectors && cascade == o.cascade;
  }
};

// Partial results that a step keeps at most (a quarter of a GiB at a head of 128): a vector times the splits of its keys.
constexpr int64_t kMostPartials = int64_t(1) << 19;

struct Partition {
  Cut cut;
  std::vector<Segment> segments;
  std::vector<Item> items;          // the most expensive first
  std::vector<int32_t> merges;      // segment * kv_heads + kv_head of what a second pass merges
  int64_t partial_vectors = 0;      // query vectors times splits that are kept for the second pass
  int32_t most_vectors = 0;         // of one item
  int32_t min_page = 0, max_page = -1;
  int64_t cost = 0;                 // in units of one query vector against one tile
  int32_t shared_seqs = 0;          // sequences whose leading pages are read together with others'
};

// The step that a batch describes. Its arrays must outlive it and keep their values.
class Plan {
 public:
  // Null if the batch is sound, else what is wrong with it.
  static const char* problem(const Batch& batch);

  explicit Plan(const Batch& batch);
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const Batch& batch() const { return batch_; }
  int64_t min_slot() const { return min_slot_; }
  int64_t max_slot() const { return max_slot_; }
  const Partition& partition(const Cut& cut);

 private:
  Batch batch_;
  int64_t min_slot_ = -1, max_slot_ = -1;
  std::vector<std::unique_ptr<Partition>> partitions_;
};

void run_attend(const CpuKernels& kernels, const Partition& partition, AttendArgs args, int threads);
void run_append(const CpuKernels& kernels, const AppendArgs& args, int32_t num_rows, int threads);
void run_copy(const Pages& pages, const int32_t* src, const int32_t* dst, int32_t count, int threads);
float run_read_each(const CpuKernels& kernels, const int64_t* addresses, int32_t count, size_t bytes, int threads);
float run_read(const CpuKernels& kernels, const void* base, size_t bytes, int threads);

}  // namespace paged
