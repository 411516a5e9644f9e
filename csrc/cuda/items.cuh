// Starts the items of a step for one stored type and head size: what one file in instances/ compiles.
#pragma once
#include "launch.cuh"
#include "simple.cuh"
#include "tensor.cuh"

namespace paged::cuda {

// The items of a step, for one stored type and head size; the merge of their partials follows in the same stream.
template <class T, int kDim>
int attend_items(const AttendParams& params, int kv_heads, Stream stream) {
  const Work& work = params.work;
  const unsigned y = unsigned(kv_heads);
  auto items = [&](const Item* first) {
    AttendParams p = params;
    p.items = first;
    return p;
  };
  int error = 0;
  if (work.num_wide) {
    constexpr int kWarps = wide_rows(kDim) / 16;
    error = launch(tensor_kernel<T, kDim, kWarps>, Shape{unsigned(work.num_wide), y}, kWarps * 32,
                   TensorShape<kDim>::bytes(kWarps, work.folds), stream, items(work.wide));
  }
  if (work.num_narrow && !error)
    error = launch(tensor_kernel<T, kDim, 1>, Shape{unsigned(work.num_narrow), y}, 32,
                   TensorShape<kDim>::bytes(1, work.folds), stream, items(work.narrow));
  if (work.num_simple && !error) {
    auto simple = [&](auto kernel, int bytes) {
      return launch(kernel, Shape{unsigned(work.num_simple), y}, kSimpleThreads, bytes, stream, items(work.simple));
    };
    if (params.group == 1) error = simple(simple_kernel<T, kDim, 1>, SimpleShape<kDim, 1>::bytes());
    if (params.group == 2) error = simple(simple_kernel<T, kDim, 2>, SimpleShape<kDim, 2>::bytes());
    if (params.group == 3) error = simple(simple_kernel<T, kDim, 3>, SimpleShape<kDim, 3>::bytes());
  }
  return error;
}

}  // namespace paged::cuda
