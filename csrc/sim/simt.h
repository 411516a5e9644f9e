// Runs a CUDA kernel on the CPU: the threads of a block are fibers of one OS thread.
//
// Blocks are handed to OS threads. Within a block a thread runs until it meets others (a barrier, a shuffle, an mma)
// or ends. A meeting that cannot complete, or whose lanes name another operation or mask, ends the launch with an
// error that says who waits where. Dynamic shared memory has exactly the size of the launch and starts as 0xFF
// bytes, so that a value read before it was written is a NaN.
//
// Not modelled: time, occupancy, bank conflicts, register limits, the order of memory between blocks, and the order
// in which hardware sums an mma.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

namespace sim {

enum class Order { forward, reverse, random };  // forward, reverse: a warp runs as far as it can before the next
enum class Copies { late, early };              // cp.async takes effect at its wait, or at once

struct Config {
  Order order = Order::forward;
  Copies copies = Copies::late;
  int workers = 1;    // OS threads that take blocks
  unsigned seed = 0;  // of Order::random
};
Config& config();

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// Runs kernel() once for each thread of each block. Throws std::runtime_error on a meeting that never completes.
void launch(Index grid, Index block, size_t shared_bytes, const std::function<void()>& kernel);

// The thread that runs now; only inside launch().
struct Thread {
  Index thread, block, block_dim, grid_dim;
};
const Thread& self();
unsigned char* shared_memory();

// __syncthreads().
void barrier();

// Meets the lanes of `mask` in operation `kind`: the last to arrive runs combine(lanes, mask), where lanes[i] is what
// lane i passed as `mine`. Orders no memory unless `fence` is set (__syncwarp); neither does a shuffle on hardware.
using Combine = void (*)(void* const* lanes, uint32_t mask);
void meet(const char* kind, uint32_t mask, void* mine, Combine combine, bool fence = false);

// cp.async: `copy` is compiled with the kernel, so that sanitizers see its accesses as this thread's.
using Copy = void (*)(void* to, const void* from, bool fill);
void copy_queue(Copy copy, void* to, const void* from, bool fill);
void copy_commit();
void copy_wait(int pending);  // all but the newest `pending` groups take effect

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace sim
