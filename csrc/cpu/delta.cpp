// One step of a gated delta layer on the thread pool.
#include "paged/delta.h"

#include <algorithm>

#include "paged/cpu.h"
#include "paged/thread_pool.h"

namespace paged {
namespace {

constexpr int32_t kChannels = 256;  // channels of a work item of the convolution

// Multiplications by values of a state; below this many the caller works alone.
constexpr int64_t kAloneBelow = 100000;

struct Call {
  const CpuKernels& kernels;
  const DeltaArgs& args;
  int32_t blocks;
  size_t scratch_bytes;
};

}  // namespace

void run_delta(const CpuKernels& kernels, const DeltaArgs& args, int threads) {
  const DeltaLayer& l = *args.layer;
  const int64_t rows = args.q_indptr[args.num_seqs];
  if (rows * l.value_size() * l.key_dim < kAloneBelow) threads = 1;
  Call call{kernels, args, (l.channels() + kChannels - 1) / kChannels, kernels.delta_scratch_bytes(l)};
  parallel_for(args.num_seqs * call.blocks, threads, [](void* context, int32_t i) {
    const Call& c = *static_cast<Call*>(context);
    const int32_t from = i % c.blocks * kChannels;
    c.kernels.delta_conv(c.args, i / c.blocks, from, std::min(from + kChannels, c.args.layer->channels()));
  }, &call);
  parallel_for(args.num_seqs * l.value_heads, threads, [](void* context, int32_t i) {
    const Call& c = *static_cast<Call*>(context);
    const int32_t heads = c.args.layer->value_heads;
    c.kernels.delta_head(c.args, i / heads, i % heads, thread_memory(kKernelScratch, c.scratch_bytes));
  }, &call);
}

}  // namespace paged
