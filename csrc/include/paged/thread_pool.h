// A small pool of threads: the caller takes part, the others sleep after a short spin.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paged {

// Calls fn(context, i) for 0 <= i < n, on at most `threads` threads, the caller among them; returns when all are done.
// The order is that of the indices, but which thread runs which is not fixed. A second caller, while the pool is busy,
// runs its own work alone. fn must not throw. Denormals and rounding are in their default mode inside fn.
void parallel_for(int32_t n, int threads, void (*fn)(void* context, int32_t i), void* context);

// Number of threads: PAGED_THREADS, else the processors that this process may use. After a fork the child has its own
// pool of the same size.
int num_threads();
void set_num_threads(int n);

// Memory of at least `bytes` bytes that belongs to the calling thread, 64-byte aligned, kept for its next call. Each
// purpose has its own.
enum Purpose { kKernelScratch = 0, kPartials = 1 };
void* thread_memory(Purpose purpose, size_t bytes);

}  // namespace paged
