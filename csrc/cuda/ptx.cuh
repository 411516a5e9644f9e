// The instructions that C++ has no word for, each in one small function: copies, fragments, tensor-core products.
// Compiled with PAGED_SIM these are the CPU versions of sim/ptx.h; the kernels are the same source in both.
#pragma once
#include <cstdint>

#ifdef PAGED_SIM
#include "../sim/ptx.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

namespace paged::cuda {

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

#ifdef PAGED_SIM

__device__ inline unsigned char* dynamic_shared() { return sim::shared_memory(); }
__device__ inline void cp_async16(void* to, const void* from, bool fill) { sim::copy_queue(sim::copy16, to, from, fill); }
__device__ inline void cp_async_commit() { sim::copy_commit(); }
template <int kPending>
__device__ inline void cp_async_wait() {
  sim::copy_wait(kPending);
}
__device__ inline void ldmatrix(uint32_t (&r)[4], const void* row) { sim::ldmatrix<false>(r, row); }
__device__ inline void ldmatrix_trans(uint32_t (&r)[4], const void* row) { sim::ldmatrix<true>(r, row); }
__device__ inline float exp2_approx(float x) { return std::exp2(x); }
__device__ inline uint4 load16(const void* from) { return *static_cast<const uint4*>(from); }
__device__ inline uint32_t load4(const void* from) { return *static_cast<const uint32_t*>(from); }

#else

__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
}

// 16 bytes from global to shared memory, past the registers; zeros where `fill` is false (`from` is then not read).
__device__ __forceinline__ void cp_async16(void* to, const void* from, bool fill) {
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(fill ? 16 : 0) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups are under way. Other threads see the bytes after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit values: lane i passes the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const void* row) {
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_trans(uint32_t (&r)[4], const void* row) {
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 16 bytes that no thread writes during the kernel.
__device__ __forceinline__ uint4 load16(const void* from) {
  uint4 r;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(from));
  return r;
}

__device__ __forceinline__ uint32_t load4(const void* from) { return __ldg(static_cast<const unsigned*>(from)); }

#endif

// The two types that are stored as they are and multiplied. `pack` puts two floats into one register, the first in the lower half, rounded to nearest even.
struct Fp16 {
  static constexpr bool kRecord = false;  // a row of K, or of V, is its values; else see records.cuh
  template <int kDim>
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr uint32_t kOne = 0x3C00, kInf = 0x7C00;
  static constexpr float kLimit = 65504.0f;  // appended values are clamped to this; 0: no limit
#ifdef PAGED_SIM
  static float2 unpack(uint32_t r) { return {sim::fp16_to_float(uint16_t(r)), sim::fp16_to_float(uint16_t(r >> 16))}; }
  static uint32_t pack(float x, float y) { return sim::float_to_fp16(x) | uint32_t(sim::float_to_fp16(y)) << 16; }
  static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    sim::mma<sim::fp16_to_float>(c, a, b0, b1);
  }
#else
  static __device__ __forceinline__ float2 unpack(uint32_t r) { return __half22float2(reinterpret_cast<__half2&>(r)); }
  static __device__ __forceinline__ uint32_t pack(float x, float y) {
    __half2 h = __floats2half2_rn(x, y);
    return reinterpret_cast<uint32_t&>(h);
  }
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
};

struct Bf16 {
  static constexpr bool kRecord = false;
  template <int kDim>
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr uint32_t kOne = 0x3F80, kInf = 0x7F80;
  static constexpr float kLimit = 0.0f;
#ifdef PAGED_SIM
  static float2 unpack(uint32_t r) { return {sim::bf16_to_float(uint16_t(r)), sim::bf16_to_float(uint16_t(r >> 16))}; }
  static uint32_t pack(float x, float y) { return sim::float_to_bf16(x) | uint32_t(sim::float_to_bf16(y)) << 16; }
  static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    sim::mma<sim::bf16_to_float>(c, a, b0, b1);
  }
#else
  static __device__ __forceinline__ float2 unpack(uint32_t r) {
    return __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(r));
  }
  static __device__ __forceinline__ uint32_t pack(float x, float y) {
    __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<uint32_t&>(h);
  }
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
};

}  // namespace paged::cuda
