// The gated delta layers of hybrid models: a causal convolution of each channel, then the delta rule of each head. The
// arithmetic is described in paged/models/delta.py. All values are fp32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paged {

struct CpuKernels;

constexpr int kDeltaLanes = 8;
constexpr int kMaxTaps = 16;

// Sizes and weights of one layer; the weights must outlive it. Head sizes are multiples of kDeltaLanes, and the
// convolution has at most kMaxTaps taps.
struct DeltaLayer {
  int32_t key_heads, value_heads, key_dim, value_dim, kernel;
  const float* conv;     // [kernel, channels], the tap of the oldest input first
  const float* decay;    // [value_heads] exp(A_log)
  const float* dt_bias;  // [value_heads]
  const float* norm;     // [value_dim]
  float eps;             // of the norm

  int32_t key_size() const { return key_heads * key_dim; }
  int32_t value_size() const { return value_heads * value_dim; }
  int32_t channels() const { return 2 * key_size() + value_size(); }
};

// One step of one layer. Sequence s has the rows q_indptr[s] <= r < q_indptr[s + 1] and its state in slot slots[s]; a
// negative slot means that its rows become zeros.
struct DeltaArgs {
  const DeltaLayer* layer;
  int32_t num_seqs;
  const int32_t *q_indptr, *slots;
  const float* rows;  // [num_rows, channels + value_size + 2 value_heads] q, k, v, gate, b, a; row_stride apart
  int64_t row_stride;
  float* history;  // [slots, kernel - 1, channels], the oldest input first; history_stride from slot to slot
  float* state;    // [slots, value_heads, key_dim, value_dim]; state_stride from slot to slot
  int64_t history_stride, state_stride;
  float* mixed;  // [num_rows, channels] what the convolution gives
  float* out;    // [num_rows, value_size]
};

void run_delta(const CpuKernels& kernels, const DeltaArgs& args, int threads);

}  // namespace paged
