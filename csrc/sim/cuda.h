// The CUDA names that the kernels use, for a C++ compiler: qualifiers, built-in variables, vector types, warp functions.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simt.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict

#define threadIdx (::sim::self().thread)
#define blockIdx (::sim::self().block)
#define blockDim (::sim::self().block_dim)
#define gridDim (::sim::self().grid_dim)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

using std::fmaf;
using std::fmaxf;
using std::fminf;
using std::log2f;
using std::rintf;
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

// Exchanges between lanes touch other lanes' stacks, which no kernel code can: they are hidden from ThreadSanitizer.
#define SIM_EXCHANGE __attribute__((no_sanitize("thread")))

namespace sim {

template <class V>
struct Shuffle {
  V value, result;
  int source;
};

template <class V>
SIM_EXCHANGE void shuffle_lanes(void* const* lanes, uint32_t mask) {
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    auto* lane = static_cast<Shuffle<V>*>(lanes[i]);
    if (!(mask >> lane->source & 1)) fail("lane %d reads lane %d, which is not in mask %08x", i, lane->source, mask);
    lane->result = static_cast<Shuffle<V>*>(lanes[lane->source])->value;
  }
}

struct Vote {
  uint32_t ballot;
  bool value;
};

SIM_EXCHANGE inline void vote_lanes(void* const* lanes, uint32_t mask) {
  uint32_t ballot = 0;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1 && static_cast<Vote*>(lanes[i])->value) ballot |= 1u << i;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) static_cast<Vote*>(lanes[i])->ballot = ballot;
}

inline int lane() { return int(self().thread.x + self().thread.y * self().block_dim.x) % 32; }

template <class V>
V shuffle(const char* kind, uint32_t mask, V value, int source) {
  Shuffle<V> mine{value, value, source & 31};
  meet(kind, mask, &mine, shuffle_lanes<V>);
  return mine.result;
}

}  // namespace sim

template <class V>
V __shfl_sync(uint32_t mask, V value, int source) {
  return sim::shuffle("__shfl_sync", mask, value, source);
}

template <class V>
V __shfl_xor_sync(uint32_t mask, V value, int bits) {
  return sim::shuffle("__shfl_xor_sync", mask, value, sim::lane() ^ bits);
}

inline uint32_t __ballot_sync(uint32_t mask, bool value) {
  sim::Vote mine{0, value};
  sim::meet("__ballot_sync", mask, &mine, sim::vote_lanes);
  return mine.ballot;
}

inline bool __any_sync(uint32_t mask, bool value) { return __ballot_sync(mask, value) != 0; }

inline void __syncwarp(uint32_t mask = 0xFFFFFFFFu) {
  sim::meet("__syncwarp", mask, nullptr, [](void* const*, uint32_t) {}, true);
}

inline void __syncthreads() { sim::barrier(); }
