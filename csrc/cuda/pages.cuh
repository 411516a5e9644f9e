// Kernels that move K and V: append new rows, copy whole pages. Both write 16 bytes a thread.
#pragma once
#include "api.h"
#include "ptx.cuh"

namespace paged::cuda {

// A comparison, not fmin and fmax: those would turn a NaN into a number.
template <class T>
__device__ __forceinline__ float clamp(float x) {
  if (T::kLimit == 0.0f) return x;
  return x > T::kLimit ? T::kLimit : x < -T::kLimit ? -T::kLimit : x;
}

template <class T>
__device__ __forceinline__ uint32_t clamp2(uint32_t r) {
  const float2 f = T::unpack(r);
  return T::pack(clamp<T>(f.x), clamp<T>(f.y));
}

struct AppendParams {
  uint16_t* layer;  // K of this layer in page 0; V lies `plane` values on
  int64_t plane, page;
  int kv_heads, page_size, head_dim;
  Rows rows;
};

// One thread: eight neighbouring values of K and of V. Grid: all of them, in blocks of blockDim.x.
template <class T>
__global__ void append_kernel(AppendParams p) {
  const int chunks = p.head_dim / 8;
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t per_row = int64_t(p.kv_heads) * chunks;
  const int64_t row = i / per_row;
  if (row >= p.rows.num_rows) return;
  const int64_t slot = p.rows.slots[row];
  if (slot < 0) return;
  const int rest = int(i - row * per_row), head = rest / chunks, chunk = rest - head * chunks;
  const int64_t page = slot / p.page_size, offset = slot - page * p.page_size;
  uint16_t* to = p.layer + page * p.page + (head * int64_t(p.page_size) + offset) * p.head_dim + chunk * 8;
  uint4 k, v;
  if (p.rows.fp32) {  // the clamp comes before the rounding, which would give infinity
    const auto* kf = static_cast<const float4*>(p.rows.k) + i * 2;
    const auto* vf = static_cast<const float4*>(p.rows.v) + i * 2;
    const float4 a = kf[0], b = kf[1], c = vf[0], d = vf[1];
    k = make_uint4(T::pack(clamp<T>(a.x), clamp<T>(a.y)), T::pack(clamp<T>(a.z), clamp<T>(a.w)),
                   T::pack(clamp<T>(b.x), clamp<T>(b.y)), T::pack(clamp<T>(b.z), clamp<T>(b.w)));
    v = make_uint4(T::pack(clamp<T>(c.x), clamp<T>(c.y)), T::pack(clamp<T>(c.z), clamp<T>(c.w)),
                   T::pack(clamp<T>(d.x), clamp<T>(d.y)), T::pack(clamp<T>(d.z), clamp<T>(d.w)));
  } else {
    k = load16(static_cast<const uint4*>(p.rows.k) + i);
    v = load16(static_cast<const uint4*>(p.rows.v) + i);
    if (T::kLimit != 0.0f) {
      k = make_uint4(clamp2<T>(k.x), clamp2<T>(k.y), clamp2<T>(k.z), clamp2<T>(k.w));
      v = make_uint4(clamp2<T>(v.x), clamp2<T>(v.y), clamp2<T>(v.z), clamp2<T>(v.w));
    }
  }
  *reinterpret_cast<uint4*>(to) = k;
  *reinterpret_cast<uint4*>(to + p.plane) = v;
}

// Page from[blockIdx.y] to page to[blockIdx.y], `chunks` pieces each; blockIdx.x strides over them. A piece is 16 bytes,
// or 4 where small pages of records are no multiple of 16.
template <class Piece>
__global__ void copy_kernel(Piece* pages, int64_t chunks, const int* from, const int* to) {
  const Piece* source = pages + from[blockIdx.y] * chunks;
  Piece* target = pages + to[blockIdx.y] * chunks;
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < chunks; i += stride) target[i] = source[i];
}

}  // namespace paged::cuda
