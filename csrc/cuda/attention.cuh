// What the attention kernels share: parameters, masks, scores, and the fold of splits.
//
// A split leaves (m, l, acc) for each row: the maximum of its scores, the sum of 2^(score - m), and the same sum with
// each term times V. Scores are in units of log 2. Splits are folded from left to right; a split in which the row sees
// no key, (-inf, 0, 0), changes nothing. So a row's bits depend only on its own keys and their positions.
#pragma once
#include "api.h"
#include "ptx.cuh"
#include "records.cuh"

namespace paged::cuda {

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

struct AttendParams {
  const unsigned char* k;  // this layer's K in page 0
  const unsigned char* v;  // the same address if the pages hold records
  int64_t page;            // bytes from one page to the next
  int page_size, group;
  Query query;
  float before, after;  // score = query . key * before, capped if softcap is set, in units of log 2 after `after`
  const Item* items;
  Work work;
};

__device__ __forceinline__ float minus_infinity() { return -INFINITY; }

// tanh by one exponential; absolute error below 3e-7, so below 2e-5 in a score capped at 50.
__device__ __forceinline__ float score(const AttendParams& p, float dot) {
  if (p.query.softcap == 0.0f) return dot * p.before;
  return (1.0f - 2.0f / (exp2_approx(dot * p.before) + 1.0f)) * p.after;
}

__device__ __forceinline__ int first_key(const AttendParams& p, int position) {
  const int low = position - p.query.window + 1;
  return p.query.window > 0 && low > 0 ? low : 0;
}

// Bytes from its head's first row in page 0 to a key's row.
__device__ __forceinline__ int64_t key_base(const AttendParams& p, int table, int key, int row_bytes) {
  const int page = key / p.page_size;
  return p.work.tables[table + page] * p.page + int64_t(key - page * p.page_size) * row_bytes;
}

// Zero in place of the maximum of a row that has seen no key, so that no infinity is subtracted from itself.
__device__ __forceinline__ float finite_max(float m) { return m == minus_infinity() ? 0.0f : m; }

struct Fold {
  float m, keep, add;
  __device__ __forceinline__ Fold(float old_m, float new_m) {
    m = fmaxf(old_m, new_m);
    keep = exp2_approx(old_m - finite_max(m));
    add = exp2_approx(new_m - finite_max(m));
  }
  // Spelled as one multiplication and one fused step in every kernel: another contraction would change bits.
  __device__ __forceinline__ float operator()(float old_sum, float new_sum) const {
    return fmaf(new_sum, add, old_sum * keep);
  }
};

__device__ __forceinline__ float inverse(float l) { return l == 0.0f ? 0.0f : 1.0f / l; }

__device__ __forceinline__ float log_sum(float m, float l) {
  return l == 0.0f ? minus_infinity() : (m + log2f(l)) * kLn2;
}

__device__ __forceinline__ float* partial_at(const AttendParams& p, int64_t number, int head, int head_dim) {
  return p.work.partials + (number * p.query.heads + head) * (head_dim + 2);
}

template <class T>
__device__ __forceinline__ void store1(const AttendParams& p, int64_t at, float x) {
  if (p.query.fp32)
    static_cast<float*>(p.query.out)[at] = x;
  else
    static_cast<uint16_t*>(p.query.out)[at] = uint16_t(T::pack(x, 0.0f));
}

template <class T>
__device__ __forceinline__ void store2(const AttendParams& p, int64_t at, float x, float y) {
  if (p.query.fp32)
    *reinterpret_cast<float2*>(static_cast<float*>(p.query.out) + at) = make_float2(x, y);
  else
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.query.out) + at) = T::pack(x, y);
}

// Eight values, fp32 or 16-bit, from element `at` on, in the 16-bit type.
template <class T>
__device__ __forceinline__ uint4 load8(const void* from, int64_t at, bool fp32) {
  if (!fp32) return load16(static_cast<const uint16_t*>(from) + at);
  const auto* f = reinterpret_cast<const float4*>(static_cast<const float*>(from) + at);
  const float4 a = f[0], b = f[1];
  return make_uint4(T::pack(a.x, a.y), T::pack(a.z, a.w), T::pack(b.x, b.y), T::pack(b.z, b.w));
}

}  // namespace paged::cuda
