// Rows of K and V as kernels read them: plain values, or records of int8 and int4, whose layouts are those of
// paged/kv/codecs. What a record holds is rounded to fp16, the type in which the tensor cores then multiply.
#pragma once
#include "../include/paged/records.h"
#include "api.h"
#include "ptx.cuh"

namespace paged::cuda {

// NaN stays NaN.
__device__ __forceinline__ float clamp_fp16(float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; }

// Eight codes, each less `middle`, times their scale.
template <class F>
__device__ __forceinline__ uint4 scaled8(F code, int middle, const unsigned char* scale) {
  const float s = Fp16::unpack(*reinterpret_cast<const uint16_t*>(scale)).x;
  auto two = [&](int i) {
    return Fp16::pack(clamp_fp16(float(code(i) - middle) * s), clamp_fp16(float(code(i + 1) - middle) * s));
  };
  return make_uint4(two(0), two(2), two(4), two(6));
}

__device__ __forceinline__ int group_of(int channel, int groups, int size) { return min(channel / size, groups - 1); }

struct Int8 : Fp16 {
  static constexpr bool kRecord = true;
  template <int kDim>
  static constexpr int kRowBytes = record8_bytes(kDim);
  template <int kDim>
  static constexpr int kGroups = num_groups(kDim, kGroup8);

  // Values chunk * 8 .. chunk * 8 + 7 of K, or of V.
  template <int kDim, bool kValue>
  static __device__ __forceinline__ uint4 read8(const unsigned char* record, int chunk) {
    const unsigned char* at = record + (kValue ? kDim : 0) + chunk * 8;
    const uint32_t low = load4(at), high = load4(at + 4);
    auto code = [&](int i) { return int(int8_t((i < 4 ? low : high) >> i % 4 * 8)); };
    return scaled8(code, 0, record + 2 * kDim + 2 * (kValue * kGroups<kDim> + group_of(chunk * 8, kGroups<kDim>, kGroup8)));
  }
};

struct Int4 : Fp16 {
  static constexpr bool kRecord = true;
  template <int kDim>
  static constexpr int kRowBytes = record4_bytes(kDim);
  template <int kDim>
  static constexpr int kGroups = num_groups(kDim, kGroup4);

  template <int kDim, bool kValue>
  static __device__ __forceinline__ uint4 read8(const unsigned char* record, int chunk) {
    const uint32_t word = load4(record + (kValue ? kDim / 2 : 0) + chunk * 4);
    const uint32_t fifth = kValue ? 0 : record[kDim + 4 * kGroups<kDim> + chunk];
    auto code = [&](int i) { return int((word >> 4 * i & 15) | (fifth >> i & 1) << 4); };
    const int group = kValue * kGroups<kDim> + group_of(chunk * 8, kGroups<kDim>, kGroup4);
    return scaled8(code, kValue ? 8 : 16, record + kDim + 2 * group);
  }
};

// K or V of one layer and kv head, from its first row in page 0 on.
template <class T, bool kValue>
struct Plane {
  const unsigned char* first;

  // 16 bytes: values chunk * 8 .. chunk * 8 + 7, as T packs them, of the row `offset` bytes on.
  template <int kDim>
  __device__ __forceinline__ uint4 read8(int64_t offset, int chunk) const {
    if constexpr (T::kRecord)
      return T::template read8<kDim, kValue>(first + offset, chunk);
    else
      return load16(first + offset + chunk * 16);
  }
};

}  // namespace paged::cuda
