// Drives the CPU kernels without Python, for the sanitizers: every instruction set of this processor, all stored types,
// ragged steps in pages whose memory has exactly the size that the plan needs, so that a read past it is seen.
//
//   cmake -S csrc -B build/sanitize -DPAGED_SANITIZE=ON -DCMAKE_BUILD_TYPE=Debug && cmake --build build/sanitize
//   build/sanitize/kernels
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "paged/plan.h"
#include "paged/thread_pool.h"

using namespace paged;

namespace {

struct Shape {
  int heads, kv_heads, head_dim, page_size, dtype, window;
  float softcap;
};

const std::vector<int> kLengths = {1, 37, 600, 1030, 64, 600};
const std::vector<int> kRows = {1, 1, 1, 70, 64, 2};

float as_float(const char* p, int dtype = kF16) {
  if (dtype == kF32) {
    float f;
    std::memcpy(&f, p, 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, p, 2);
  if (dtype == kBF16) {
    const uint32_t u = uint32_t(h) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
  const int exponent = h >> 10 & 31;
  const float m = exponent ? 1.0f + float(h & 1023) / 1024.0f : float(h & 1023) / 512.0f;
  return std::ldexp(h & 0x8000 ? -m : m, exponent - 15);
}

// K, or V, of a position and head. A record is taken apart by the text of paged/kv/codecs, in plain loops.
std::vector<double> stored(const Pages& pages, const char* row, bool value) {
  const int dim = pages.head_dim;
  std::vector<double> x(dim);
  if (!pages.records()) {
    const int64_t width = dtype_bytes(pages.dtype);
    for (int c = 0; c < dim; ++c)
      x[c] = as_float(row + (value ? pages.plane_bytes() : 0) + c * width, pages.dtype);
    return x;
  }
  const bool eight = pages.dtype == kInt8;
  const int size = eight ? 32 : 64, groups = std::max(1, dim / size);
  const char* scales = row + (eight ? 2 * dim : dim) + (value ? 2 * groups : 0);
  for (int c = 0; c < dim; ++c) {
    int code;
    if (eight) {
      code = static_cast<signed char>(row[(value ? dim : 0) + c]);
    } else {
      const int byte = static_cast<unsigned char>(row[((value ? dim : 0) + c) / 2]);
      code = (c % 2 ? byte >> 4 : byte & 15) - 8;
      if (!value) code += (row[dim + 4 * groups + c / 8] >> c % 8 & 1) * 16 - 8;
    }
    x[c] = code * double(as_float(scales + 2 * std::min(c / size, groups - 1)));
  }
  if (eight || value) return x;
  int block = 1;  // K is rotated back
  while (block < 64 && dim % (2 * block) == 0) block *= 2;
  std::vector<double> y(dim, 0.0);
  for (int c = 0; c < dim; ++c)
    for (int i = 0; i < block; ++i)
      y[c] += x[c / block * block + i] * (__builtin_popcount(i & (c % block)) % 2 ? -1.0 : 1.0) / block;
  return y;
}

// The largest difference from a plain evaluation in double, over the rows of one step.
double run(const CpuKernels& kernels, const Shape& s, bool cascade, int threads) {
  const int seqs = int(kLengths.size());
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const int columns = (1030 + s.page_size - 1) / s.page_size;
  std::vector<int32_t> lens(kLengths.begin(), kLengths.end()), q_indptr(seqs + 1, 0), table(size_t(seqs) * columns, -1);
  for (int i = 0; i < seqs; ++i) q_indptr[i + 1] = q_indptr[i] + kRows[i];
  int32_t num_pages = 0;
  for (int i = 0; i < seqs; ++i)
    for (int p = 0; p < (lens[i] + s.page_size - 1) / s.page_size; ++p) {
      const bool shared = i == 5 && (p + 1) * s.page_size <= 500;  // the last one sits on the pages of the third
      table[size_t(i) * columns + p] = shared ? table[size_t(2) * columns + p] : num_pages++;
    }
  Pages pages{nullptr, num_pages, 2, s.kv_heads, s.page_size, s.head_dim, s.dtype};
  std::unique_ptr<char[]> memory(new char[size_t(pages.page_bytes()) * num_pages]);
  pages.base = memory.get();
  std::memset(pages.base, 0xff, size_t(pages.page_bytes()) * num_pages);  // not a number, in every type

  const int rows = q_indptr[seqs];
  std::vector<int64_t> slots;
  std::vector<float> k, v;
  for (int i = 0; i < seqs; ++i)
    for (int p = 0; p < lens[i]; ++p) {
      const int64_t slot = int64_t(table[size_t(i) * columns + p / s.page_size]) * s.page_size + p % s.page_size;
      slots.push_back(i == 5 && (p / s.page_size + 1) * s.page_size <= 500 ? -1 : slot);
      for (int c = 0; c < s.kv_heads * s.head_dim; ++c) k.push_back(normal(random)), v.push_back(normal(random));
    }
  const int64_t stride = int64_t(s.kv_heads) * s.head_dim;
  const AppendArgs append{pages, 1, kF32, k.data(), v.data(), stride, stride, slots.data()};
  run_append(kernels, append, int32_t(slots.size()), threads);

  std::vector<float> q(size_t(rows) * s.heads * s.head_dim), out(q.size()), lse(size_t(rows) * s.heads);
  for (float& x : q) x = normal(random);
  std::vector<int64_t> none(rows, -1);
  const Batch batch{seqs, rows, s.page_size, columns, q_indptr.data(), lens.data(), table.data(), none.data()};
  if (const char* wrong = Plan::problem(batch)) std::fprintf(stderr, "%s\n", wrong), std::exit(1);
  Plan plan(batch);
  AttendArgs a{};
  a.pages = pages, a.batch = batch, a.layer = 1, a.q_heads = s.heads, a.window = s.window;
  a.scale = 0.125f, a.softcap = s.softcap;
  a.q = q.data(), a.q_row_stride = int64_t(s.heads) * s.head_dim, a.out = out.data(), a.lse = lse.data();
  const Cut cut{s.heads, s.kv_heads, s.window, threads, kernels.preferred_rows, cascade};
  run_attend(kernels, plan.partition(cut), a, threads);

  double worst = 0.0;
  for (int i = 0; i < seqs; ++i)
    for (int r = 0; r < kRows[i]; r += 13) {
      const int end = lens[i] - kRows[i] + r + 1, start = s.window && end > s.window ? end - s.window : 0;
      for (int h = 0; h < s.heads; ++h) {
        const float* query = &q[(size_t(q_indptr[i] + r) * s.heads + h) * s.head_dim];
        auto row = [&](int p) {
          return pages.base + table[size_t(i) * columns + p / s.page_size] * pages.page_bytes() + pages.layer_bytes() +
                 (int64_t(h / (s.heads / s.kv_heads)) * s.page_size + p % s.page_size) * pages.row_bytes();
        };
        std::vector<double> weight, sum(s.head_dim, 0.0);
        double total = 0.0;
        for (int p = start; p < end; ++p) {
          double score = 0.0;
          const std::vector<double> key = stored(pages, row(p), false), value = stored(pages, row(p), true);
          for (int c = 0; c < s.head_dim; ++c) score += double(query[c]) * key[c];
          score *= 0.125;
          if (s.softcap != 0.0f) score = s.softcap * std::tanh(score / s.softcap);
          const double w = std::exp(score);
          total += w;
          for (int c = 0; c < s.head_dim; ++c) sum[c] += w * value[c];
        }
        for (int c = 0; c < s.head_dim; ++c) {
          const double d = std::fabs(sum[c] / total - out[(size_t(q_indptr[i] + r) * s.heads + h) * s.head_dim + c]);
          worst = d <= worst ? worst : d;  // a difference that is not a number stays
        }
      }
    }
  return worst;
}

}  // namespace

int check_delta();
int check_page_lookup();
int check_plan();

int main() {
  int runs = 0, failed = 0;
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    const CpuKernels* kernels = cpu_kernels(isa);
    if (!kernels) {
      std::printf("%s: not on this processor\n", isa);
      continue;
    }
    for (int dtype : {kF32, kF16, kBF16, kInt8, kInt4})
      for (const Shape& s : {Shape{3, 1, 64, 16, dtype, 0, 0.0f}, Shape{8, 2, 128, 7, dtype, 100, 0.0f},
                             Shape{5, 1, 40, 64, dtype, 0, 5.0f}, Shape{2, 2, 256, 1, dtype, 513, 0.0f},
                             Shape{12, 2, 24, 256, dtype, 1, 0.0f}})
        for (int threads : {1, 3}) {
          const double error = run(*kernels, s, threads == 3, threads);
          ++runs;
          if (!(error < 2e-5)) {
            ++failed;
            std::printf("%s dtype %d heads %d:%d x %d page %d window %d threads %d: off by %g\n", isa, dtype, s.heads,
                        s.kv_heads, s.head_dim, s.page_size, s.window, threads, error);
          }
        }
  }
  std::printf("%d runs, %d failed\n", runs, failed);
  return failed + check_delta() + check_page_lookup() + check_plan() ? 1 : 0;
}
