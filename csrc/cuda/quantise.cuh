// Kernels that write records: the rotation of queries and int4 keys, and append. The arithmetic, and so every byte, is that
// of paged/kv/codecs.
#pragma once
#include <type_traits>

#include "records.cuh"

namespace paged::cuda {

struct RecordParams {
  unsigned char* layer;  // in page 0
  int64_t page;          // bytes from one page to the next
  int kv_heads, page_size, head_dim, row_bytes;
  Rows rows;  // fp32; K of int4 is rotated
};

constexpr int kMostEach = 256 / 32;  // values of a lane

// One warp: K or V of one row and head. A lane has the values lane, lane + 32, ...; a group is whole lanes' values.
template <int kBits, bool kValue>
__device__ __forceinline__ void quantise_row(const float* from, unsigned char* record, int dim, int lane) {
  constexpr int kSize = kBits == 8 ? kGroup8 : kGroup4;
  constexpr float kLeast = -float(1 << (kBits - 1)), kMost = -kLeast - 1.0f;
  const int each = (dim + 31) / 32, groups = dim < kSize ? 1 : dim / kSize;
  unsigned char* scales = record + (kBits == 8 ? 2 * dim : dim) + (kValue ? 2 * groups : 0);
  for (int g = 0; g < groups; ++g) {
    const int first = g * (kSize / 32), end = g + 1 < groups ? first + kSize / 32 : each;
    float x[kMostEach], high = -INFINITY, low = INFINITY;
    bool bad = false;
    for (int j = first; j < end; ++j) {
      const int i = lane + 32 * j;
      x[j - first] = i < dim ? from[i] : 0.0f;
      if (i >= dim) continue;
      high = fmaxf(high, x[j - first]), low = fminf(low, x[j - first]);
      bad |= !(x[j - first] <= 3.402823466e38f && x[j - first] >= -3.402823466e38f);
    }
    for (int bit = 1; bit < 32; bit *= 2) {
      high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, bit));
      low = fminf(low, __shfl_xor_sync(kAllLanes, low, bit));
    }
    bad = __any_sync(kAllLanes, bad);
    const uint32_t scale = Fp16::pack(clamp_fp16((-low > high ? low : high) / kLeast), 0.0f);
    const float step = Fp16::unpack(scale).x;
    const bool empty = bad || step == 0.0f;
    if (lane == 0) *reinterpret_cast<uint16_t*>(scales + 2 * g) = bad ? 0x7E00 : empty ? 0 : uint16_t(scale);
    for (int j = first; j < end; ++j) {
      const int i = lane + 32 * j;
      int q = 0;
      if (!empty) q = int(rintf(fminf(fmaxf(x[j - first] / step, kLeast), kMost)));
      if (kBits == 8) {
        if (i < dim) record[(kValue ? dim : 0) + i] = uint8_t(q);
        continue;
      }
      const int code = q - int(kLeast);
      const int next = __shfl_xor_sync(kAllLanes, code, 1);
      if (i < dim && lane % 2 == 0) record[((kValue ? dim : 0) + i) / 2] = uint8_t((code & 15) | (next & 15) << 4);
      if (kBits == 5) {
        const uint32_t fifth = __ballot_sync(kAllLanes, code >> 4 & 1);
        if (lane < 4 && 32 * j + 8 * lane < dim) record[dim + 4 * groups + 4 * j + lane] = uint8_t(fifth >> 8 * lane);
      }
    }
  }
}

// blockDim.x / 32 warps, each with a row and head. Grid: all of them.
template <class T>
__global__ void append_records_kernel(RecordParams p) {
  const int lane = int(threadIdx.x) % 32, dim = p.head_dim;
  const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32, row = i / p.kv_heads;
  if (row >= p.rows.num_rows) return;
  const int64_t slot = p.rows.slots[row];
  if (slot < 0) return;
  const int64_t page = slot / p.page_size, offset = slot - page * p.page_size, head = i - row * p.kv_heads;
  unsigned char* record = p.layer + page * p.page + (head * p.page_size + offset) * p.row_bytes;
  const float* k = static_cast<const float*>(p.rows.k) + i * dim;
  const float* v = static_cast<const float*>(p.rows.v) + i * dim;
  if (std::is_same<T, Int8>::value) {
    quantise_row<8, false>(k, record, dim, lane);
    quantise_row<8, true>(v, record, dim, lane);
  } else {
    quantise_row<5, false>(k, record, dim, lane);
    quantise_row<4, true>(v, record, dim, lane);
    const int used = dim + 4 * (dim < kGroup4 ? 1 : dim / kGroup4) + dim / 8;
    if (lane < p.row_bytes - used) record[used + lane] = 0;
  }
}

// One warp: 64 values from number 64 * warp on, of which blocks of `size` are multiplied with the Hadamard matrix of +1
// and -1, in the order of paged/kv/codecs/int4.py. `count` is a multiple of `size`.
__global__ void rotate_kernel(float* x, int64_t count, int size) {
  const int64_t first = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32 * 64;
  const int lane = int(threadIdx.x) % 32;
  float v[2];
  for (int j = 0; j < 2; ++j) v[j] = first + lane + 32 * j < count ? x[first + lane + 32 * j] : 0.0f;
  for (int step = 1; step < 32 && step < size; step *= 2)
    for (int j = 0; j < 2; ++j) {
      const float other = __shfl_xor_sync(kAllLanes, v[j], step);
      v[j] = lane & step ? other - v[j] : v[j] + other;
    }
  if (size == 64) {
    const float a = v[0], b = v[1];
    v[0] = a + b, v[1] = a - b;
  }
  for (int j = 0; j < 2; ++j)
    if (first + lane + 32 * j < count) x[first + lane + 32 * j] = v[j];
}

}  // namespace paged::cuda
