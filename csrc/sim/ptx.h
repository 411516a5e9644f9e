// What csrc/cuda/ptx.cuh writes as PTX, on the CPU: 16-bit conversions, cp.async, ldmatrix, mma.sync.
//
// The fragment layouts are those of the PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type":
// with g = lane / 4 and t = lane % 4,
//   A 16x16: a[0] = (g, 2t..), a[1] = (g + 8, 2t..), a[2] = (g, 2t + 8..), a[3] = (g + 8, 2t + 8..)
//   B 16x8 : b0 = (2t.., g), b1 = (2t + 8.., g)             C 16x8 : c[0..1] = (g, 2t..), c[2..3] = (g + 8, 2t..)
// where ".." is two neighbours in one register, the lower index in the lower half.
#pragma once
#include "cuda.h"

namespace sim {

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float fp16_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return float_of_bits(sign | 0x7F800000 | fraction << 13);
  if (exponent == 0) return float_of_bits(sign | bits_of_float(float(fraction) * 0x1p-24f));
  return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

inline uint16_t float_to_fp16(float value) {  // round to nearest even
  const uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return uint16_t(0x7FFF);
  if (magnitude >= 0x477FF000) return uint16_t(sign | 0x7C00);
  if (magnitude < 0x38800000)  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    return uint16_t(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3F000000));
  return uint16_t(sign | (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13);
}

inline float bf16_to_float(uint16_t h) { return float_of_bits(uint32_t(h) << 16); }

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline void copy16(void* to, const void* from, bool fill) {
  if (fill)
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
  else
    *static_cast<uint4*>(to) = uint4{0, 0, 0, 0};
}

// ---- ldmatrix.x4: lane i names row i % 8 of matrix i / 8 and receives one register of each matrix ----
struct Matrices {
  uint16_t row[8];
  uint32_t out[4];
};

template <bool kTransposed>
SIM_EXCHANGE void matrix_lanes(void* const* lanes, uint32_t) {
  auto at = [&](int matrix, int row, int column) SIM_EXCHANGE {
    return uint32_t(static_cast<Matrices*>(lanes[matrix * 8 + row])->row[column]);
  };
  for (int i = 0; i < 32; ++i)
    for (int m = 0; m < 4; ++m) {
      const int g = i / 4, t = i % 4 * 2;
      static_cast<Matrices*>(lanes[i])->out[m] =
          kTransposed ? at(m, t, g) | at(m, t + 1, g) << 16 : at(m, g, t) | at(m, g, t + 1) << 16;
    }
}

template <bool kTransposed>
void ldmatrix(uint32_t (&r)[4], const void* row) {
  Matrices mine;
  const uint4 loaded = *static_cast<const uint4*>(row);  // this lane's own access
  std::memcpy(mine.row, &loaded, 16);
  meet(kTransposed ? "ldmatrix.trans" : "ldmatrix", 0xFFFFFFFFu, &mine, matrix_lanes<kTransposed>);
  std::memcpy(r, mine.out, 16);
}

// ---- mma.sync.m16n8k16, fp32 accumulators ----
struct Product {
  uint32_t a[4], b[2];
  float c[4];
};

template <float (*kWiden)(uint16_t)>
SIM_EXCHANGE void product_lanes(void* const* lanes, uint32_t) {
  float a[16][16], b[16][8], c[16][8];
  auto low = [](uint32_t r) { return kWiden(uint16_t(r)); };
  auto high = [](uint32_t r) { return kWiden(uint16_t(r >> 16)); };
  for (int i = 0; i < 32; ++i) {
    const auto* lane = static_cast<const Product*>(lanes[i]);
    const int g = i / 4, t = i % 4 * 2;
    for (int r = 0; r < 4; ++r) {
      const int row = g + r % 2 * 8, column = t + r / 2 * 8;
      a[row][column] = low(lane->a[r]), a[row][column + 1] = high(lane->a[r]);
      c[g + r / 2 * 8][t + r % 2] = lane->c[r];
    }
    for (int r = 0; r < 2; ++r) b[t + r * 8][g] = low(lane->b[r]), b[t + r * 8 + 1][g] = high(lane->b[r]);
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
  for (int i = 0; i < 32; ++i)
    for (int r = 0; r < 4; ++r) static_cast<Product*>(lanes[i])->c[r] = c[i / 4 + r / 2 * 8][i % 4 * 2 + r % 2];
}

template <float (*kWiden)(uint16_t)>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product mine{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  meet("mma.sync", 0xFFFFFFFFu, &mine, product_lanes<kWiden>);
  std::memcpy(c, mine.c, 16);
}

}  // namespace sim
