// The launchers of api.h: parameters, and the choice of an instance. The instances are compiled one file each.
#include "launch.cuh"
#include "pages.cuh"
#include "quantise.cuh"
#include "simple.cuh"

#include <algorithm>

#ifndef PAGED_HEAD_SIZES  // a test build may hold fewer
#define PAGED_HEAD_SIZES 64, 80, 96, 128, 256
#endif

namespace paged::cuda {

template <class T, int kDim>
int attend_items(const AttendParams& params, int kv_heads, Stream stream);  // items.cuh, compiled in instances/

namespace {

#ifdef PAGED_SIM
constexpr int kInvalid = 1, kTooLarge = 9;
#else
constexpr int kInvalid = cudaErrorInvalidValue, kTooLarge = cudaErrorInvalidConfiguration;
#endif

bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

// The first instance whose type and head size are the pool's.
template <class T, int kDim, int... kMore>
int choose(const AttendParams& params, const Pool& pool, Stream stream) {
  if (pool.head_dim == kDim) return attend_items<T, kDim>(params, pool.kv_heads, stream);
  if constexpr (sizeof...(kMore) > 0)
    return choose<T, kMore...>(params, pool, stream);
  else
    return kInvalid;
}

}  // namespace

int rotate(float* values, int64_t count, int size, Stream stream) {
  if (size < 1 || size > kMostRotated || (size & (size - 1)) || count % size) return kInvalid;
  const int64_t blocks = (count + 511) / 512;
  if (blocks > INT32_MAX) return kTooLarge;
  return blocks ? launch(rotate_kernel, Shape{unsigned(blocks)}, 256, 0, stream, values, count, size) : 0;
}

int append(const Pool& pool, int layer, const Rows& rows, Stream stream) {
  if (!aligned(pool.pages) || !aligned(rows.k) || !aligned(rows.v) || pool.head_dim % 8) return kInvalid;
  const int64_t threads = rows.num_rows * pool.kv_heads * (pool.records() ? 32 : pool.head_dim / 8);
  const int64_t blocks = (threads + 255) / 256;
  if (blocks == 0) return 0;
  if (blocks > INT32_MAX) return kTooLarge;
  auto* first = static_cast<unsigned char*>(pool.pages) + layer * pool.layer();
  const Shape grid{unsigned(blocks)};
  if (pool.records()) {
    if (!rows.fp32 || pool.head_dim > 32 * kMostEach) return kInvalid;
    const RecordParams params{first, pool.page(), pool.kv_heads, pool.page_size, pool.head_dim, pool.row(), rows};
    return pool.type == Type::int8 ? launch(append_records_kernel<Int8>, grid, 256, 0, stream, params)
                                   : launch(append_records_kernel<Int4>, grid, 256, 0, stream, params);
  }
  const AppendParams params{reinterpret_cast<uint16_t*>(first), pool.plane() / 2, pool.page() / 2, pool.kv_heads,
                            pool.page_size, pool.head_dim, rows};
  return pool.type == Type::fp16 ? launch(append_kernel<Fp16>, grid, 256, 0, stream, params)
                                 : launch(append_kernel<Bf16>, grid, 256, 0, stream, params);
}

int copy_pages(const Pool& pool, const int* from, const int* to, int count, Stream stream) {
  const bool wide = pool.page() % 16 == 0;
  if (!aligned(pool.pages) || pool.page() % 4) return kInvalid;
  const int64_t pieces = pool.page() / (wide ? 16 : 4);
  const auto blocks = unsigned(std::min<int64_t>((pieces + 255) / 256, 64));
  for (int done = 0; done < count; done += 65535) {  // the largest grid.y
    const Shape grid{blocks, unsigned(std::min(count - done, 65535))};
    const int error = wide ? launch(copy_kernel<uint4>, grid, 256, 0, stream, static_cast<uint4*>(pool.pages), pieces,
                                    from + done, to + done)
                           : launch(copy_kernel<uint32_t>, grid, 256, 0, stream, static_cast<uint32_t*>(pool.pages),
                                    pieces, from + done, to + done);
    if (error) return error;
  }
  return 0;
}

int attend(const Pool& pool, int layer, const Query& query, const Work& work, Stream stream) {
  if (!aligned(pool.pages) || !aligned(query.q) || !aligned(query.out) || query.heads % pool.kv_heads) return kInvalid;
  if (pool.kv_heads > 65535 || query.heads > 65535) return kTooLarge;
  if (pool.records() && !query.fp32) return kInvalid;
  const auto* first = static_cast<const unsigned char*>(pool.pages) + layer * pool.layer();
  AttendParams params{};
  params.k = first;
  params.v = first + pool.values();
  params.page = pool.page();
  params.page_size = pool.page_size;
  params.group = query.heads / pool.kv_heads;
  params.query = query;
  params.work = work;
  // tanh(s / c) = 1 - 2 / (2^(s / c * 2 log2 e) + 1)
  params.before = query.softcap != 0.0f ? query.scale / query.softcap * 2.0f * kLog2e : query.scale * kLog2e;
  params.after = query.softcap * kLog2e;
  const bool bf16 = pool.type == Type::bf16;
  int error = pool.type == Type::int8   ? choose<Int8, PAGED_HEAD_SIZES>(params, pool, stream)
              : pool.type == Type::int4 ? choose<Int4, PAGED_HEAD_SIZES>(params, pool, stream)
              : bf16                    ? choose<Bf16, PAGED_HEAD_SIZES>(params, pool, stream)
                                        : choose<Fp16, PAGED_HEAD_SIZES>(params, pool, stream);
  if (error || !work.num_merges) return error;
  const Shape grid{unsigned(work.num_merges), unsigned(query.heads)};
  return bf16 ? launch(merge_kernel<Bf16>, grid, 128, 0, stream, params, pool.head_dim)
              : launch(merge_kernel<Fp16>, grid, 128, 0, stream, params, pool.head_dim);
}

#ifdef PAGED_SIM
int set_device(int) { return 0; }
int device_count(int* count) {
  *count = 1;
  return 0;
}
const char* error_name(int error) { return error == kInvalid ? "invalid argument" : "invalid configuration argument"; }
#else
int set_device(int device) { return cudaSetDevice(device); }
int device_count(int* count) { return cudaGetDeviceCount(count); }
const char* error_name(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
#endif

}  // namespace paged::cuda
