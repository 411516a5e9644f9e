// The work items of one call on the thread pool.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "paged/plan.h"
#include "paged/thread_pool.h"

namespace paged {
namespace {

// Waking a thread costs some microseconds: work below this many query vectors times tiles stays with the caller.
constexpr int64_t kAloneBelow = 200;

struct AttendCall {
  const CpuKernels& kernels;
  const Partition& partition;
  const AttendArgs& args;
  size_t scratch_bytes;
};

}  // namespace

void run_attend(const CpuKernels& kernels, const Partition& partition, AttendArgs args, int threads) {
  args.segments = partition.segments.data();
  args.partials = nullptr;
  if (partition.partial_vectors) {
    const size_t bytes = size_t(partition.partial_vectors) * (args.pages.head_dim + 2) * sizeof(float);
    args.partials = static_cast<float*>(thread_memory(kPartials, bytes));
  }
  if (partition.cost < kAloneBelow) threads = 1;
  AttendCall call{kernels, partition, args, kernels.scratch_bytes(partition.most_vectors, args.pages.head_dim)};
  parallel_for(int32_t(partition.items.size()), threads, [](void* context, int32_t i) {
    const AttendCall& c = *static_cast<AttendCall*>(context);
    c.kernels.attend(c.args, c.partition.items[i], thread_memory(kKernelScratch, c.scratch_bytes));
  }, &call);
  if (partition.merges.empty()) return;
  parallel_for(int32_t(partition.merges.size()), partition.merges.size() < 8 ? 1 : threads, [](void* context, int32_t i) {
    const AttendCall& c = *static_cast<AttendCall*>(context);
    const int32_t heads = c.partition.cut.kv_heads, m = c.partition.merges[i];
    c.kernels.merge(c.args, c.partition.segments[m / heads], m % heads);
  }, &call);
}

void run_append(const CpuKernels& kernels, const AppendArgs& args, int32_t num_rows, int threads) {
  struct Call {
    const CpuKernels& kernels;
    const AppendArgs& args;
    int32_t num_rows, rows;
  };
  const int64_t row_bytes = args.pages.row_bytes() * args.pages.kv_heads * 2;
  const int32_t rows = int32_t(std::max<int64_t>(1, (int64_t(1) << 16) / row_bytes));
  Call call{kernels, args, num_rows, rows};
  parallel_for((num_rows + rows - 1) / rows, threads, [](void* context, int32_t i) {
    const Call& c = *static_cast<Call*>(context);
    c.kernels.append(c.args, i * c.rows, std::min(c.num_rows, (i + 1) * c.rows));
  }, &call);
}

void run_copy(const Pages& pages, const int32_t* src, const int32_t* dst, int32_t count, int threads) {
  struct Call {
    const Pages& pages;
    const int32_t *src, *dst;
  };
  Call call{pages, src, dst};
  if (pages.page_bytes() * count < (1 << 16)) threads = 1;
  parallel_for(count, threads, [](void* context, int32_t i) {
    const Call& c = *static_cast<Call*>(context);
    const int64_t bytes = c.pages.page_bytes();
    std::memcpy(c.pages.base + c.dst[i] * bytes, c.pages.base + c.src[i] * bytes, size_t(bytes));
  }, &call);
}

float run_read_each(const CpuKernels& kernels, const int64_t* addresses, int32_t count, size_t bytes, int threads) {
  struct Call {
    const CpuKernels& kernels;
    const int64_t* addresses;
    size_t bytes;
    int32_t count, part;
    float sink[256];
  };
  const int32_t part = 16;
  Call call{kernels, addresses, bytes, count, part, {}};
  parallel_for((count + part - 1) / part, threads, [](void* context, int32_t i) {
    Call& c = *static_cast<Call*>(context);
    float sum = 0.0f;
    for (int32_t k = i * c.part; k < std::min(c.count, (i + 1) * c.part); ++k)
      sum += c.kernels.read(reinterpret_cast<const void*>(c.addresses[k]), c.bytes);
    c.sink[i & 255] = sum;
  }, &call);
  return std::accumulate(call.sink, call.sink + 256, 0.0f);
}

float run_read(const CpuKernels& kernels, const void* base, size_t bytes, int threads) {
  struct Call {
    const CpuKernels& kernels;
    const char* base;
    size_t bytes, part;
    float sink[256];
  };
  const size_t part = size_t(1) << 20;
  Call call{kernels, static_cast<const char*>(base), bytes, part, {}};
  parallel_for(int32_t((bytes + part - 1) / part), threads, [](void* context, int32_t i) {
    Call& c = *static_cast<Call*>(context);
    const size_t at = c.part * size_t(i);
    c.sink[i & 255] = c.kernels.read(c.base + at, std::min(c.part, c.bytes - at));
  }, &call);
  return std::accumulate(call.sink, call.sink + 256, 0.0f);
}

}  // namespace paged
