#include "simt.h"

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fiber.h"

#if defined(PAGED_SIM_TSAN)
extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#else
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
#endif

namespace sim {
namespace {

enum class State { ready, meeting, barrier, done };

struct PendingCopy {
  Copy copy;
  void* to;
  const void* from;
  bool fill;
  int group;
};

struct Lane : Thread {
  Fiber fiber;
  State state = State::done;
  int number = 0;  // in the block
  const char* kind = nullptr;
  uint32_t mask = 0;
  void* mine = nullptr;
  int phase = 0;  // of the warp tags
  std::vector<PendingCopy> copies;
  int groups = 0;  // committed so far
};

struct Launch {
  Index grid, block;
  size_t shared_bytes;
  const std::function<void()>* kernel;
  char start_tag = 0, end_tag = 0;
};

class Block {
 public:
  void run(Launch& launch, Index index, unsigned seed);
  void barrier();
  void meet(const char* kind, uint32_t mask, void* mine, Combine combine, bool fence);
  [[noreturn]] void body();
  void reset();

  Lane* current = nullptr;
  unsigned char* shared = nullptr;

 private:
  bool step(Lane& lane);
  bool sweep();
  [[noreturn]] void deadlock();

  Launch* launch_ = nullptr;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<void*> kept_;  // shared memory of the blocks of a launch under ThreadSanitizer
  std::mt19937 random_;
  int size_ = 0;
  int at_barrier_ = 0;
  int phase_ = 0;
  char block_tags_[2] = {};
  char warp_tags_[32][2] = {};
  std::string error_;
};

thread_local Block* block = nullptr;
Config settings;

bool Block::step(Lane& lane) {
  if (lane.state != State::ready) return false;
  current = &lane;
  lane.fiber.resume();
  current = nullptr;
  if (!error_.empty()) throw std::runtime_error(error_);
  return true;
}

// Every ready lane runs once; forward and reverse let one warp run to the barrier before the next begins.
bool Block::sweep() {
  bool moved = false;
  if (settings.order == Order::random) {
    std::vector<int> order(size_);
    for (int i = 0; i < size_; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    for (int i : order) moved |= step(*lanes_[i]);
    return moved;
  }
  const int warps = (size_ + 31) / 32;
  for (int w = 0; w < warps; ++w) {
    const int first = (settings.order == Order::forward ? w : warps - 1 - w) * 32;
    const int count = std::min(32, size_ - first);
    for (bool again = true; again;) {
      again = false;
      for (int i = 0; i < count; ++i)
        again |= step(*lanes_[first + (settings.order == Order::forward ? i : count - 1 - i)]);
      moved |= again;
    }
  }
  return moved;
}

void Block::run(Launch& launch, Index index, unsigned seed) {
  launch_ = &launch;
  size_ = int(launch.block.x * launch.block.y * launch.block.z);
  random_.seed(seed);
  at_barrier_ = 0;
  error_.clear();
  while (int(lanes_.size()) < size_) lanes_.push_back(std::make_unique<Lane>());
  shared = static_cast<unsigned char*>(std::malloc(launch.shared_bytes));
  if (launch.shared_bytes) std::memset(shared, 0xFF, launch.shared_bytes);
  __tsan_release(&launch.start_tag);
  for (int i = 0; i < size_; ++i) {
    Lane& lane = *lanes_[i];
    const unsigned x = launch.block.x, y = launch.block.y;
    lane.thread = {unsigned(i) % x, unsigned(i) / x % y, unsigned(i) / (x * y)};
    lane.block = index;
    lane.block_dim = launch.block;
    lane.grid_dim = launch.grid;
    lane.number = i;
    lane.state = State::ready;
    lane.phase = 0;
    lane.copies.clear();
    lane.groups = 0;
    lane.fiber.start([](void* self) { static_cast<Block*>(self)->body(); }, this);
  }
  while (sweep()) {
  }
  for (int i = 0; i < size_; ++i)
    if (lanes_[i]->state != State::done) deadlock();
#if defined(PAGED_SIM_TSAN)  // freeing now would order this block before the next one
  kept_.push_back(shared);
#else
  std::free(shared);
#endif
  shared = nullptr;
}

// After a launch, or when a launch was given up: fibers that wait inside a kernel are never resumed.
void Block::reset() {
  for (auto& lane : lanes_)
    if (lane->state != State::done) lane.reset();
  lanes_.erase(std::remove(lanes_.begin(), lanes_.end(), nullptr), lanes_.end());
  for (void* memory : kept_) std::free(memory);
  kept_.clear();
  std::free(shared);
  shared = nullptr;
}

void Block::body() {
  Lane& lane = *current;
  __tsan_acquire(&launch_->start_tag);
  try {
    (*launch_->kernel)();
  } catch (const std::exception& e) {
    error_ = e.what();
  }
  __tsan_release(&launch_->end_tag);
  lane.state = State::done;
  lane.fiber.finish();
}

void Block::barrier() {
  Lane& lane = *current;
  const int phase = phase_;
  __tsan_release(&block_tags_[phase]);
  if (++at_barrier_ < size_) {
    lane.state = State::barrier;
    lane.kind = "__syncthreads";
    lane.fiber.suspend();
  } else {
    at_barrier_ = 0;
    phase_ ^= 1;
    for (int i = 0; i < size_; ++i)
      if (lanes_[i]->state == State::barrier) lanes_[i]->state = State::ready;
  }
  __tsan_acquire(&block_tags_[phase]);
}

void Block::meet(const char* kind, uint32_t mask, void* mine, Combine combine, bool fence) {
  Lane& lane = *current;
  const int warp = lane.number / 32, first = warp * 32, me = lane.number % 32;
  if (!(mask >> me & 1)) fail("thread %d calls %s with mask %08x that lacks its own lane", lane.number, kind, mask);
  char* tag = &warp_tags_[warp][lane.phase];
  if (fence) __tsan_release(tag);
  void* args[32] = {};
  args[me] = mine;
  uint32_t here = 1u << me;
  for (int i = 0; i < 32 && first + i < size_; ++i) {
    const Lane& other = *lanes_[first + i];
    if (i == me || other.state != State::meeting || !((mask | other.mask) >> i & 1 && other.mask & mask)) continue;
    if (other.mask != mask || (other.kind != kind && std::strcmp(other.kind, kind) != 0))
      fail("thread %d is in %s with mask %08x while thread %d is in %s with mask %08x", lane.number, kind, mask,
           other.number, other.kind, other.mask);
    args[i] = other.mine;
    here |= 1u << i;
  }
  if (here != mask) {
    lane.state = State::meeting;
    lane.kind = kind;
    lane.mask = mask;
    lane.mine = mine;
    lane.fiber.suspend();
  } else {
    if (fence) __tsan_acquire(tag);
    combine(args, mask);
    if (fence) __tsan_release(tag);
    for (int i = 0; i < 32; ++i)
      if (i != me && mask >> i & 1) lanes_[first + i]->state = State::ready;
  }
  if (fence) {
    __tsan_acquire(tag);
    lane.phase ^= 1;
  }
}

void Block::deadlock() {
  int waiting = 0, barrier = 0, left = 0;
  const Lane* first = nullptr;
  for (int i = 0; i < size_; ++i) {
    const Lane& lane = *lanes_[i];
    if (lane.state == State::meeting) {
      ++waiting;
      if (!first) first = &lane;
    }
    barrier += lane.state == State::barrier;
    left += lane.state == State::done;
  }
  const Index at = lanes_[0]->block;
  char text[400];
  if (first)
    std::snprintf(text, sizeof text,
                  "%d of %d threads wait in a warp op that never completes (block %u,%u,%u: thread %d in %s with mask "
                  "%08x; %d threads wait at __syncthreads, %d have left the kernel)",
                  waiting, size_, at.x, at.y, at.z, first->number, first->kind, first->mask, barrier, left);
  else
    std::snprintf(text, sizeof text,
                  "%d of %d threads wait at a __syncthreads that never completes (block %u,%u,%u: %d threads have left "
                  "the kernel)",
                  barrier, size_, at.x, at.y, at.z, left);
  throw std::runtime_error(text);
}

}  // namespace

Config& config() { return settings; }
const Thread& self() { return *block->current; }
unsigned char* shared_memory() { return block->shared; }
void barrier() { block->barrier(); }
void meet(const char* kind, uint32_t mask, void* mine, Combine combine, bool fence) {
  block->meet(kind, mask, mine, combine, fence);
}

void copy_queue(Copy copy, void* to, const void* from, bool fill) {
  if (settings.copies == Copies::early) return copy(to, from, fill);
  Lane& lane = *block->current;
  lane.copies.push_back({copy, to, from, fill, lane.groups});
}

void copy_commit() { ++block->current->groups; }

void copy_wait(int pending) {
  Lane& lane = *block->current;
  size_t n = 0;
  for (; n < lane.copies.size() && lane.copies[n].group < lane.groups - pending; ++n) {
    const PendingCopy& c = lane.copies[n];
    c.copy(c.to, c.from, c.fill);
  }
  lane.copies.erase(lane.copies.begin(), lane.copies.begin() + long(n));
}

void fail(const char* format, ...) {
  char text[400];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  throw std::runtime_error(text);
}

void launch(Index grid, Index dim, size_t shared_bytes, const std::function<void()>& kernel) {
  const unsigned threads = dim.x * dim.y * dim.z;
  if (threads == 0 || threads > 1024) fail("a block must have 1 to 1024 threads, got %u", threads);
  Launch state{grid, dim, shared_bytes, &kernel};
  const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
  std::atomic<uint64_t> next{0};
  std::mutex lock;
  std::string error;
  auto work = [&] {
    static thread_local Block mine;  // keeps its stacks from launch to launch
    block = &mine;
    try {
      for (uint64_t b; (b = next++) < blocks;) {
        const Index index{unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / grid.x / grid.y)};
        mine.run(state, index, settings.seed + unsigned(b));
      }
    } catch (const std::exception& e) {
      std::lock_guard<std::mutex> hold(lock);
      if (error.empty()) error = e.what();
      next = blocks;
    }
    __tsan_acquire(&state.end_tag);
    mine.reset();
    block = nullptr;
  };
  std::vector<std::thread> pool;
  for (int i = 1; i < settings.workers; ++i) pool.emplace_back(work);
  work();
  for (auto& t : pool) t.join();
  if (!error.empty()) throw std::runtime_error(error);
}

}  // namespace sim
