// Decode without tensor cores, for one query row and up to three query heads a kv head; and the merge of splits.
//
// The first rung of the ladder: every product in fp32, nothing rounded to 16 bits but K and V themselves. A few lanes
// (head_dim / 8, rounded up to a power of two) share one key; each holds eight of its values in one 16-byte load.
#pragma once
#include "attention.cuh"

namespace paged::cuda {

constexpr int kSimpleThreads = 128;
constexpr int kSimpleBlocks = 3;  // a processor must hold as many: what registers allow, unspilled
constexpr int kSimpleKeys = 4;  // keys that a lane has under way at once

template <int kDim, int kGroup>
struct SimpleShape {
  static constexpr int kLanes = kDim > 128 ? 32 : kDim > 64 ? 16 : 8;
  static constexpr int kTeams = kSimpleThreads / kLanes;
  static constexpr int kBases = kSplit * 8;  // bytes
  static constexpr int bytes() { return kBases + kSimpleThreads / 32 * kGroup * (kDim + 2) * 4; }
};

template <class T>
__device__ __forceinline__ void unpack8(float (&f)[8], uint4 r) {
  const float2 a = T::unpack(r.x), b = T::unpack(r.y), c = T::unpack(r.z), d = T::unpack(r.w);
  f[0] = a.x, f[1] = a.y, f[2] = b.x, f[3] = b.y, f[4] = c.x, f[5] = c.y, f[6] = d.x, f[7] = d.y;
}

template <class T, int kDim, int kGroup>
__global__ void __launch_bounds__(kSimpleThreads, kSimpleBlocks) simple_kernel(const AttendParams p) {
  using Shape = SimpleShape<kDim, kGroup>;
  constexpr int kLanes = Shape::kLanes, kTeams = Shape::kTeams, kStep = kSimpleKeys * kTeams;
  constexpr int kEach = (kGroup * kDim + kSimpleThreads - 1) / kSimpleThreads;
  const Item item = p.items[blockIdx.x];
  const int kv_head = int(blockIdx.y), tid = int(threadIdx.x), warp = tid / 32;
  const int team = tid / kLanes, chunk = tid % kLanes;
  const bool loads = chunk * 8 < kDim;

  unsigned char* memory = dynamic_shared();
  auto* bases = reinterpret_cast<int64_t*>(memory);                       // [kSplit]
  auto* sums = reinterpret_cast<float*>(memory + Shape::kBases);          // [warps][kGroup][kDim + 2]
  constexpr int kRow = T::template kRowBytes<kDim>;
  const int64_t head_offset = int64_t(kv_head) * p.page_size * kRow;
  const Plane<T, false> k_plane{p.k + head_offset};
  const Plane<T, true> v_plane{p.v + head_offset};

  const int64_t row = p.work.rows[item.row_begin];
  float q[kGroup][8];
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    const int64_t at = (row * p.query.heads + kv_head * kGroup + g) * kDim + chunk * 8;
#pragma unroll
    for (int d = 0; d < 8; ++d) q[g][d] = 0.0f;
    if (!loads) continue;
    if (p.query.fp32) {
      const auto* f = reinterpret_cast<const float4*>(static_cast<const float*>(p.query.q) + at);
      const float4 x = f[0], y = f[1];
      q[g][0] = x.x, q[g][1] = x.y, q[g][2] = x.z, q[g][3] = x.w;
      q[g][4] = y.x, q[g][5] = y.y, q[g][6] = y.z, q[g][7] = y.w;
    } else {
      unpack8<T>(q[g], load16(static_cast<const uint16_t*>(p.query.q) + at));
    }
  }

  // This thread's elements of the result, e = tid + i * kSimpleThreads of [kGroup][kDim], folded over the splits.
  float all_m[kEach], all_l[kEach], all_acc[kEach];
  for (int i = 0; i < kEach; ++i) all_m[i] = minus_infinity(), all_l[i] = all_acc[i] = 0.0f;

  const int first = item.key_begin / kSplit;
  const int last = item.key_end > item.key_begin ? (item.key_end - 1) / kSplit : first - 1;
  for (int split = first; split <= last; ++split) {
    const int begin = split * kSplit;
    // Every thread is past the last split's keys, and so its bases: it had to meet the others before their sums.
    for (int i = tid; i < kSplit; i += kSimpleThreads) {
      const int key = begin + i;
      bases[i] = key >= item.key_begin && key < item.key_end ? key_base(p, item.table, key, kRow) : -1;
    }
    __syncthreads();  // the bases are there, and the last split's sums have been read

    float m[kGroup], l[kGroup], acc[kGroup][8];
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      m[g] = minus_infinity(), l[g] = 0.0f;
#pragma unroll
      for (int d = 0; d < 8; ++d) acc[g][d] = 0.0f;
    }
    const int skipped = item.key_begin > begin ? (item.key_begin - begin) / kStep * kStep : 0;
    const int stop = item.key_end - begin < kSplit ? item.key_end - begin : kSplit;
    for (int step = skipped; step < stop; step += kStep) {
      uint4 k[kSimpleKeys], v[kSimpleKeys];
      bool seen[kSimpleKeys];
#pragma unroll
      for (int u = 0; u < kSimpleKeys; ++u) {
        const int64_t base = bases[step + u * kTeams + team];
        seen[u] = base >= 0;
        k[u] = v[u] = make_uint4(0, 0, 0, 0);  // stays so where the key is not seen: nothing of it reaches a sum
        if (seen[u] && loads) {
          k[u] = k_plane.template read8<kDim>(base, chunk);
          v[u] = v_plane.template read8<kDim>(base, chunk);
        }
      }
      float s[kSimpleKeys][kGroup];
#pragma unroll
      for (int u = 0; u < kSimpleKeys; ++u) {
        float f[8];
        unpack8<T>(f, k[u]);
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
          float dot = 0.0f;
#pragma unroll
          for (int d = 0; d < 8; ++d) dot += q[g][d] * f[d];
#pragma unroll
          for (int bit = 1; bit < kLanes; bit *= 2) dot += __shfl_xor_sync(kAllLanes, dot, bit);
          s[u][g] = seen[u] ? score(p, dot) : minus_infinity();
        }
      }
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        float top = m[g];
#pragma unroll
        for (int u = 0; u < kSimpleKeys; ++u) top = fmaxf(top, s[u][g]);
        const float safe = finite_max(top), scale = exp2_approx(m[g] - safe);
        m[g] = top;
        l[g] *= scale;
#pragma unroll
        for (int d = 0; d < 8; ++d) acc[g][d] *= scale;
#pragma unroll
        for (int u = 0; u < kSimpleKeys; ++u) {
          s[u][g] = exp2_approx(s[u][g] - safe);
          l[g] += s[u][g];
        }
      }
#pragma unroll
      for (int u = 0; u < kSimpleKeys; ++u) {
        float f[8];
        unpack8<T>(f, v[u]);
#pragma unroll
        for (int g = 0; g < kGroup; ++g)
#pragma unroll
          for (int d = 0; d < 8; ++d) acc[g][d] += s[u][g] * f[d];
      }
    }

    // ---- teams of a warp by shuffles, warps through shared memory, both in a fixed order ----
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
#pragma unroll
      for (int bit = kLanes; bit < 32; bit *= 2) {
        const Fold fold(m[g], __shfl_xor_sync(kAllLanes, m[g], bit));
        l[g] = fold(l[g], __shfl_xor_sync(kAllLanes, l[g], bit));
#pragma unroll
        for (int d = 0; d < 8; ++d) acc[g][d] = fold(acc[g][d], __shfl_xor_sync(kAllLanes, acc[g][d], bit));
        m[g] = fold.m;
      }
      float* to = sums + (warp * kGroup + g) * (kDim + 2);
      if (tid % 32 < kLanes && loads) {
#pragma unroll
        for (int d = 0; d < 8; ++d) to[chunk * 8 + d] = acc[g][d];
        if (chunk == 0) to[kDim] = m[g], to[kDim + 1] = l[g];
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int e = tid + i * kSimpleThreads, g = e / kDim, d = e % kDim;
      if (e >= kGroup * kDim) break;
      const float* from = sums + g * (kDim + 2);
      float split_m = from[kDim], split_l = from[kDim + 1], split_acc = from[d];
      for (int w = 1; w < kSimpleThreads / 32; ++w) {
        from += kGroup * (kDim + 2);
        const Fold fold(split_m, from[kDim]);
        split_l = fold(split_l, from[kDim + 1]);
        split_acc = fold(split_acc, from[d]);
        split_m = fold.m;
      }
      const Fold fold(all_m[i], split_m);
      all_l[i] = split == first ? split_l : fold(all_l[i], split_l);
      all_acc[i] = split == first ? split_acc : fold(all_acc[i], split_acc);
      all_m[i] = fold.m;
    }
  }

#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = tid + i * kSimpleThreads, g = e / kDim, d = e % kDim, head = kv_head * kGroup + g;
    if (e >= kGroup * kDim) break;
    if (item.partial) {
      float* to = partial_at(p, int64_t(p.work.part_base[row]) + first, head, kDim);
      to[d] = all_acc[i];
      if (d == 0) to[kDim] = all_m[i], to[kDim + 1] = all_l[i];
    } else {
      const int64_t at = row * p.query.heads + head;
      store1<T>(p, at * kDim + d, all_acc[i] * inverse(all_l[i]));
      if (p.query.lse && d == 0) p.query.lse[at] = log_sum(all_m[i], all_l[i]);
    }
  }
}

// One block: one row and head; its partials from left to right, as a block that walks all splits would fold them.
template <class T>
__global__ void merge_kernel(const AttendParams p, int head_dim) {
  const Merge merge = p.work.merges[blockIdx.x];
  const int head = int(blockIdx.y);
  for (int d = int(threadIdx.x); d < head_dim; d += int(blockDim.x)) {
    float m = minus_infinity(), l = 0.0f, acc = 0.0f;
    for (int i = 0; i < merge.count; ++i) {
      const float* from = partial_at(p, int64_t(merge.base) + i, head, head_dim);
      const Fold fold(m, from[head_dim]);
      l = i ? fold(l, from[head_dim + 1]) : from[head_dim + 1];
      acc = i ? fold(acc, from[d]) : from[d];
      m = fold.m;
    }
    const int64_t at = int64_t(merge.row) * p.query.heads + head;
    store1<T>(p, at * head_dim + d, acc * inverse(l));
    if (p.query.lse && d == 0) p.query.lse[at] = log_sum(m, l);
  }
}

}  // namespace paged::cuda
