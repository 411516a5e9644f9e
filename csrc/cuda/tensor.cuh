// Attention on tensor cores: prefill chunks, decodes and shared prefixes are all items of this one kernel.
//
// A block takes up to 16 flat rows a warp (query rows times the query heads of one kv head) and walks the item's keys
// in tiles counted from position 0. K and V tiles travel by cp.async through a ring of three half tiles: while one is
// multiplied, the next two are under way. A warp holds scores, probabilities and sums of its 16 rows in registers.
#pragma once
#include "attention.cuh"

namespace paged::cuda {

template <int kDim>
struct TensorShape {
  static constexpr int kTile = kDim > 128 ? 32 : 64;  // keys; divides kSplit
  static constexpr int kStride = kDim + 8;            // values: an odd number of 16-byte pieces, no bank conflicts
  static constexpr int kChunks = kDim / 8;
  static constexpr bool kQueryStays = kDim > 128;     // too many registers: fragments are read again for each tile
  static constexpr int kHalf = kTile * kStride;       // values of a K or V tile
  static constexpr int kBlocks = kDim < 80 ? 3 : 2;   // a processor must hold as many: what registers allow, unspilled
  static constexpr int kBases = 2 * kTile * 8;        // bytes
  static constexpr int kRing = 3 * kHalf * 2;

  // Bytes of shared memory: row bases, ring, then the queries and the folded sums (the latter over the former, if the
  // queries are in registers by then).
  static constexpr int bytes(int warps, bool folds) {
    const int query = warps * 16 * kStride * 2, sums = folds ? warps * 16 * kDim * 4 : 0;
    return kBases + kRing + (kQueryStays ? query + sums : query > sums ? query : sums);
  }
};

// Beside a mask, V values that are not finite need care: 0 * NaN is NaN. They are taken out of the product (returned
// value) and `hit` becomes one where they were; rows that see their key get NaN by a product of its own.
template <class T>
__device__ __forceinline__ uint32_t finite(uint32_t r, uint32_t& hit) {
  const bool low = (r & 0x7FFF) >= T::kInf, high = (r >> 16 & 0x7FFF) >= T::kInf;
  hit = (low ? T::kOne : 0) | (high ? T::kOne << 16 : 0);
  return r & ((low ? 0 : 0xFFFFu) | (high ? 0 : 0xFFFF0000u));
}

// Not zero if one of the two values is not finite, so that all bits of its exponent are set.
template <class T>
__device__ __forceinline__ uint32_t not_finite(uint32_t r) {
  constexpr uint32_t kBoth = T::kInf | T::kInf << 16;
  return ((r & kBoth ^ kBoth) - 0x00010001u) & 0x80008000u;
}

template <class T>
__device__ __forceinline__ void poison(float (&acc)[4], const uint32_t (&seen)[4], uint32_t b0, uint32_t b1) {
  float count[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  T::mma(count, seen, b0, b1);
  for (int c = 0; c < 4; ++c)
    if (count[c] != 0.0f) acc[c] = NAN;
}

// A bool that the compiler knows.
template <bool kValue>
struct Known {
  __device__ constexpr operator bool() const { return kValue; }
};

template <class T, int kDim, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, TensorShape<kDim>::kBlocks) tensor_kernel(const AttendParams p) {
  using Shape = TensorShape<kDim>;
  constexpr int kTile = Shape::kTile, kStride = Shape::kStride, kChunks = Shape::kChunks, kThreads = kWarps * 32;
  constexpr int kLooks = (kTile + kThreads - 1) / kThreads;
  const Item item = p.items[blockIdx.x];
  const int kv_head = int(blockIdx.y), tid = int(threadIdx.x), warp = tid / 32, lane = tid % 32;

  unsigned char* memory = dynamic_shared();
  auto* bases = reinterpret_cast<int64_t*>(memory);  // [2][kTile]: offset of a key's row, -1: not loaded
  auto* ring = reinterpret_cast<uint16_t*>(memory + Shape::kBases);
  auto* queries = ring + 3 * Shape::kHalf;
  auto* sums = reinterpret_cast<float*>(queries + (Shape::kQueryStays ? kWarps * 16 * kStride : 0)) + tid;

  constexpr int kRow = T::template kRowBytes<kDim>;
  const int64_t head_offset = int64_t(kv_head) * p.page_size * kRow;
  const Plane<T, false> k_plane{p.k + head_offset};
  const Plane<T, true> v_plane{p.v + head_offset};

  // ---- page lookups, one tile ahead of the copies, and those one half tile ahead of the products ----
  int64_t looked[kLooks];
  auto look = [&](int tile) {
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const int key = tile * kTile + tid + i * kThreads;
      const bool wanted = tid + i * kThreads < kTile && key >= item.key_begin && key < item.key_end;
      looked[i] = wanted ? key_base(p, item.table, key, kRow) : -1;
    }
  };
  auto publish = [&](int tile) {
#pragma unroll
    for (int i = 0; i < kLooks; ++i)
      if (tid + i * kThreads < kTile) bases[tile % 2 * kTile + tid + i * kThreads] = looked[i];
  };
  // Records are decoded on the way, so that their tiles are there at once; the ring is the same.
  auto load = [&](auto plane, int tile, int slot) {
    const int64_t* base = bases + tile % 2 * kTile;
    uint16_t* to = ring + slot * Shape::kHalf;
#pragma unroll 4
    for (int c = tid; c < kTile * kChunks; c += kThreads) {
      const int row = c / kChunks, chunk = c % kChunks;
      const int64_t offset = base[row];
      uint16_t* at = to + row * kStride + chunk * 8;
      if constexpr (T::kRecord)
        *reinterpret_cast<uint4*>(at) =
            offset < 0 ? make_uint4(0, 0, 0, 0) : plane.template read8<kDim>(offset, chunk);
      else
        cp_async16(at, plane.first + (offset < 0 ? 0 : offset) + chunk * 16, offset >= 0);
    }
  };

  const int first = item.key_begin / kTile;
  const int last = item.key_end > item.key_begin ? (item.key_end - 1) / kTile : first - 1;
  look(first);
  publish(first);
  look(first + 1);

  // ---- queries, and the two rows of the fragments that this thread holds ----
  for (int c = tid; c < kWarps * 16 * kChunks; c += kThreads) {
    const int r = c / kChunks, chunk = c % kChunks, flat = item.flat_begin + r;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (r < item.flat_count) {
      const int64_t row = p.work.rows[item.row_begin + flat / p.group];
      const int64_t head = int64_t(kv_head) * p.group + flat % p.group;
      value = load8<T>(p.query.q, (row * p.query.heads + head) * kDim + chunk * 8, p.query.fp32);
    }
    *reinterpret_cast<uint4*>(queries + r * kStride + chunk * 8) = value;
  }
  int row[2], head[2], position[2], low[2];
  int least_position = INT32_MAX, most_position = -1, least_low = INT32_MAX, most_low = 0;  // of the warp's rows
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int in_item = warp * 16 + lane / 4 + r * 8, flat = item.flat_begin + in_item;
    row[r] = in_item < item.flat_count ? p.work.rows[item.row_begin + flat / p.group] : -1;
    head[r] = kv_head * p.group + flat % p.group;
    position[r] = row[r] >= 0 ? p.work.positions[row[r]] : -1;
    low[r] = first_key(p, position[r]);
    if (row[r] < 0) continue;
    least_position = min(least_position, position[r]);
    most_position = max(most_position, position[r]);
    least_low = min(least_low, low[r]);
    most_low = max(most_low, low[r]);
  }
#pragma unroll
  for (int bit = 4; bit < 32; bit *= 2) {
    least_position = min(least_position, __shfl_xor_sync(kAllLanes, least_position, bit));
    most_position = max(most_position, __shfl_xor_sync(kAllLanes, most_position, bit));
    least_low = min(least_low, __shfl_xor_sync(kAllLanes, least_low, bit));
    most_low = max(most_low, __shfl_xor_sync(kAllLanes, most_low, bit));
  }
  __syncthreads();
  if (last >= first) load(k_plane, first, 0);
  cp_async_commit();
  if (last >= first) load(v_plane, first, 1);
  cp_async_commit();

  const uint16_t* query_row = queries + (warp * 16 + lane % 16) * kStride + lane / 16 * 8;
  uint32_t query[Shape::kQueryStays ? 1 : kDim / 16][4];
  if (!Shape::kQueryStays) {
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) ldmatrix(query[d], query_row + d * 16);
  }

  const bool folds = item.key_end > item.key_begin && item.key_begin / kSplit != (item.key_end - 1) / kSplit;
  bool folded = false;
  float acc[kDim / 8][4] = {};
  float m[2] = {minus_infinity(), minus_infinity()}, l[2] = {0.0f, 0.0f};
  float all_m[2] = {minus_infinity(), minus_infinity()}, all_l[2] = {0.0f, 0.0f};

  int slot = 0;  // of this tile's K; its V and the next tile's K follow in the ring
  for (int tile = first; tile <= last; ++tile) {
    if (tile < last) publish(tile + 1);
    look(tile + 2);
    cp_async_wait<1>();
    __syncthreads();
    if (tile < last) load(k_plane, tile + 1, (slot + 2) % 3);
    cp_async_commit();

    const int begin = tile * kTile, end = begin + kTile;
    const bool active = most_position >= begin && least_low < end;            // some row of the warp sees some key
    const bool masked = least_position < end - 1 || most_low > begin;         // some row does not see some key
    float s[kTile / 8][4] = {};
    if (active) {
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        uint32_t again[4];
        if (Shape::kQueryStays) ldmatrix(again, query_row + d * 16);
        const uint32_t(&a)[4] = Shape::kQueryStays ? again : query[Shape::kQueryStays ? 0 : d];
        const uint16_t* k_row =
            ring + slot * Shape::kHalf + (lane / 16 * 8 + lane % 8) * kStride + d * 16 + lane / 8 % 2 * 8;
#pragma unroll
        for (int n = 0; n < kTile / 16; ++n) {
          uint32_t b[4];
          ldmatrix(b, k_row + n * 16 * kStride);
          T::mma(s[2 * n], a, b[0], b[1]);
          T::mma(s[2 * n + 1], a, b[2], b[3]);
        }
      }
      float top[2] = {m[0], m[1]};
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int key = begin + n * 8 + lane % 4 * 2 + c % 2;
          float x = score(p, s[n][c]);
          if (masked && (key > position[c / 2] || key < low[c / 2])) x = minus_infinity();
          s[n][c] = x;
          top[c / 2] = fmaxf(top[c / 2], x);
        }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(kAllLanes, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(kAllLanes, top[r], 2));
        const float safe = finite_max(top[r]), scale = exp2_approx(m[r] - safe);
        m[r] = top[r];
        l[r] *= scale;
#pragma unroll
        for (int n = 0; n < kTile / 8; ++n)
#pragma unroll
          for (int c = 2 * r; c < 2 * r + 2; ++c) {
            s[n][c] = exp2_approx(s[n][c] - safe);
            l[r] += s[n][c];
          }
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          acc[n][2 * r] *= scale;
          acc[n][2 * r + 1] *= scale;
        }
      }
    }

    cp_async_wait<1>();
    __syncthreads();
    if (tile < last) load(v_plane, tile + 1, slot);
    cp_async_commit();
    if (active) {
      const uint16_t* v_tile = ring + (slot + 1) % 3 * Shape::kHalf;
      const uint16_t* v_row = v_tile + lane % 16 * kStride + lane / 16 * 8;
      auto multiply = [&](auto careful) {
#pragma unroll
        for (int n = 0; n < kTile / 16; ++n) {
          const uint32_t a[4] = {T::pack(s[2 * n][0], s[2 * n][1]), T::pack(s[2 * n][2], s[2 * n][3]),
                                 T::pack(s[2 * n + 1][0], s[2 * n + 1][1]), T::pack(s[2 * n + 1][2], s[2 * n + 1][3])};
          uint32_t seen[4] = {};
          if (careful) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int key = begin + n * 16 + lane % 4 * 2 + i / 2 * 8, r = i % 2;
              seen[i] = (key <= position[r] && key >= low[r] ? T::kOne : 0) |
                        (key + 1 <= position[r] && key + 1 >= low[r] ? T::kOne << 16 : 0);
            }
          }
#pragma unroll
          for (int d = 0; d < kDim / 16; ++d) {
            uint32_t b[4];
            if (careful) __syncwarp();  // keeps one step from the next: together they would take too many registers
            ldmatrix_trans(b, v_row + n * 16 * kStride + d * 16);
            if (careful) {
              uint32_t hit[4];
#pragma unroll
              for (int i = 0; i < 4; ++i) b[i] = finite<T>(b[i], hit[i]);
              poison<T>(acc[2 * d], seen, hit[0], hit[1]);
              poison<T>(acc[2 * d + 1], seen, hit[2], hit[3]);
            }
            T::mma(acc[2 * d], a, b[0], b[1]);
            T::mma(acc[2 * d + 1], a, b[2], b[3]);
          }
        }
      };
      uint32_t bad = 0;
      if (masked) {
#pragma unroll 4
        for (int c = lane; c < kTile * kChunks; c += 32) {
          const uint4 v = *reinterpret_cast<const uint4*>(v_tile + c / kChunks * kStride + c % kChunks * 8);
          bad |= not_finite<T>(v.x) | not_finite<T>(v.y) | not_finite<T>(v.z) | not_finite<T>(v.w);
        }
      }
      const bool careful = masked && __any_sync(kAllLanes, bad != 0);
      if (Shape::kQueryStays)
        multiply(careful);  // two copies of the loop would not fit into the registers
      else if (careful)
        multiply(Known<true>{});
      else
        multiply(Known<false>{});
    }
    slot = (slot + 2) % 3;

    if (tile != last && end % kSplit != 0) continue;
    // ---- the end of a split: one sum of exponentials for the four threads of a row, and the fold ----
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[r] += __shfl_xor_sync(kAllLanes, l[r], 1);
      l[r] += __shfl_xor_sync(kAllLanes, l[r], 2);
    }
    if (!folds) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Fold fold(all_m[r], m[r]);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int c = 2 * r; c < 2 * r + 2; ++c) {
          float* sum = sums + (n * 4 + c) * kThreads;  // this thread's own
          *sum = folded ? fold(*sum, acc[n][c]) : acc[n][c];
          acc[n][c] = 0.0f;
        }
      all_l[r] = folded ? fold(all_l[r], l[r]) : l[r];
      all_m[r] = fold.m;
      l[r] = 0.0f;
      m[r] = minus_infinity();
    }
    folded = true;
  }

  const int split = item.key_begin / kSplit;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row[r] < 0) continue;
    const float row_m = folds ? all_m[r] : m[r], row_l = folds ? all_l[r] : l[r];
    auto value = [&](int n, int c) { return folds ? sums[(n * 4 + 2 * r + c) * kThreads] : acc[n][2 * r + c]; };
    if (item.partial) {
      if (position[r] < split * kSplit || low[r] >= (split + 1) * kSplit) continue;  // the row has no such partial
      float* to = partial_at(p, int64_t(p.work.part_base[row[r]]) + split, head[r], kDim);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        *reinterpret_cast<float2*>(to + n * 8 + lane % 4 * 2) = make_float2(value(n, 0), value(n, 1));
      if (lane % 4 == 0) *reinterpret_cast<float2*>(to + kDim) = make_float2(row_m, row_l);
    } else {
      const int64_t at = int64_t(row[r]) * p.query.heads + head[r];
      const float scale = inverse(row_l);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        store2<T>(p, at * kDim + n * 8 + lane % 4 * 2, value(n, 0) * scale, value(n, 1) * scale);
      if (p.query.lse && lane % 4 == 0) p.query.lse[at] = log_sum(row_m, row_l);
    }
  }
}

}  // namespace paged::cuda
