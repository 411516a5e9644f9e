// One way to start a kernel, on the device or in the simulation.
#pragma once
#include "api.h"
#include "ptx.cuh"

namespace paged::cuda {

struct Shape {
  unsigned x = 1, y = 1;
};

#ifdef PAGED_SIM

template <class... Params, class... Args>
int launch(void (*kernel)(Params...), Shape grid, unsigned threads, int shared, Stream, Args... args) {
  sim::launch({grid.x, grid.y, 1}, {threads, 1, 1}, size_t(shared), [=] { kernel(args...); });
  return 0;
}

#else

template <class... Params, class... Args>
int launch(void (*kernel)(Params...), Shape grid, unsigned threads, int shared, Stream stream, Args... args) {
  if (shared > 48 * 1024) {  // more than that must be asked for
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
  }
  kernel<<<dim3(grid.x, grid.y), threads, shared, static_cast<cudaStream_t>(stream)>>>(args...);
  return cudaGetLastError();
}

#endif

}  // namespace paged::cuda
