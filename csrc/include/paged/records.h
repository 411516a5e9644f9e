// Sizes of the records of int8 and int4 pages, for the CPU and for CUDA: K and V of one position and head as whole
// numbers, the channels of a group with one fp16 scale. The layouts are described in paged/kv/codecs.
#pragma once

namespace paged {

constexpr int kGroup8 = 32, kGroup4 = 64;  // channels with one scale; what is left of a head belongs to its last group
constexpr int kMostRotated = 64;

constexpr int num_groups(int head_dim, int size) { return head_dim < size ? 1 : head_dim / size; }

// Neighbouring channels of int4 keys that are rotated together.
constexpr int rotation_size(int head_dim) {
  const int power = head_dim & -head_dim;
  return power < kMostRotated ? power : kMostRotated;
}

constexpr int record8_bytes(int head_dim) { return 2 * head_dim + 4 * num_groups(head_dim, kGroup8); }

constexpr int record4_bytes(int head_dim) {
  return (head_dim + 4 * num_groups(head_dim, kGroup4) + head_dim / 8 + 3) / 4 * 4;
}

}  // namespace paged
