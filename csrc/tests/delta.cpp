// Drives the gated delta kernels without Python, for the sanitizers: memory of exactly the size that a step needs,
// ragged steps with sequences that take no part, and each sequence in chunks, whose rows must have the bits of one whole
// step.
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "paged/cpu.h"

using namespace paged;

namespace {

struct Sizes {
  int key_heads, value_heads, key_dim, value_dim, kernel;
};

// A layer with random weights, and the state of `slots` sequences.
class Layer {
 public:
  Layer(const Sizes& s, int slots) : random_(3) {
    layer_ = {s.key_heads, s.value_heads, s.key_dim, s.value_dim, s.kernel, nullptr, nullptr, nullptr, nullptr, 1e-6f};
    channels_ = layer_.channels();
    weights_ = numbers(s.kernel * channels_ + 2 * s.value_heads + s.value_dim);
    layer_.conv = weights_.get();
    layer_.decay = layer_.conv + s.kernel * channels_;
    layer_.dt_bias = layer_.decay + s.value_heads;
    layer_.norm = layer_.dt_bias + s.value_heads;
    for (int h = 0; h < s.value_heads; ++h) weights_[s.kernel * channels_ + h] = 0.01f * float(h + 1);
    history_size_ = int64_t(s.kernel - 1) * channels_;
    state_size_ = int64_t(s.value_heads) * s.key_dim * s.value_dim;
    history_.reset(new float[slots * history_size_]());
    state_.reset(new float[slots * state_size_]());
  }

  int width() const { return channels_ + layer_.value_size() + 2 * layer_.value_heads; }
  int out_width() const { return layer_.value_size(); }

  std::unique_ptr<float[]> numbers(int64_t count) {
    std::normal_distribution<float> normal;
    std::unique_ptr<float[]> r(new float[count]);
    for (int64_t i = 0; i < count; ++i) r[i] = normal(random_);
    return r;
  }

  // One step over `rows`; returns `[num_rows, out_width]`.
  std::unique_ptr<float[]> step(const CpuKernels& kernels, const std::vector<int32_t>& q_indptr,
                                const std::vector<int32_t>& slots, const float* rows, int threads) {
    const int64_t n = q_indptr.back();
    std::unique_ptr<float[]> mixed(new float[n * channels_]), out(new float[n * out_width()]);
    std::memset(out.get(), 0xff, sizeof(float) * n * out_width());  // not a number, unless it is written
    run_delta(kernels, {&layer_, int32_t(slots.size()), q_indptr.data(), slots.data(), rows, width(), history_.get(),
                        state_.get(), history_size_, state_size_, mixed.get(), out.get()}, threads);
    return out;
  }

 private:
  std::mt19937 random_;
  DeltaLayer layer_{};
  int channels_;
  int64_t history_size_, state_size_;
  std::unique_ptr<float[]> weights_, history_, state_;
};

bool run(const CpuKernels& kernels, const Sizes& sizes, int threads) {
  const std::vector<int32_t> q_indptr = {0, 40, 41, 41, 44, 114}, slots = {2, -1, 0, 4, 1};
  Layer together(sizes, 5);
  const auto rows = together.numbers(int64_t(q_indptr.back()) * together.width());
  const auto want = together.step(kernels, q_indptr, slots, rows.get(), threads);
  for (int chunk : {1, 7, 33}) {
    for (size_t s = 0; s < slots.size(); ++s) {
      if (slots[s] < 0) continue;
      Layer fresh(sizes, 1);
      for (int r = q_indptr[s]; r < q_indptr[s + 1]; r += chunk) {
        const int count = r + chunk < q_indptr[s + 1] ? chunk : q_indptr[s + 1] - r;
        const auto got = fresh.step(kernels, {0, count}, {0}, rows.get() + int64_t(r) * fresh.width(), threads);
        const int64_t size = fresh.out_width();
        if (std::memcmp(got.get(), want.get() + r * size, sizeof(float) * count * size)) return false;
      }
    }
  }
  for (int64_t i = 0; i < int64_t(q_indptr.back()) * together.out_width(); ++i) {
    const bool idle = i / together.out_width() == 40;
    if (!(want[i] * 0.0f == 0.0f) || (idle && want[i] != 0.0f)) return false;
  }
  return true;
}

}  // namespace

// Returns the number of runs that failed.
int check_delta() {
  int runs = 0, failed = 0;
  for (const char* isa : {"baseline", "avx2", "avx512"})
    if (const CpuKernels* kernels = cpu_kernels(isa))
      for (const Sizes& s :
           {Sizes{2, 4, 16, 16, 4}, Sizes{1, 1, 8, 8, 1}, Sizes{1, 3, 24, 72, 3}, Sizes{2, 2, 128, 128, 16}})
        for (int threads : {1, 3}) {
          ++runs;
          if (run(*kernels, s, threads)) continue;
          ++failed;
          std::printf("%s delta %d:%d heads of %d x %d, %d taps, threads %d: wrong\n", isa, s.key_heads, s.value_heads,
                      s.key_dim, s.value_dim, s.kernel, threads);
        }
  std::printf("delta: %d runs, %d failed\n", runs, failed);
  return failed;
}
