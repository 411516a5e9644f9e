#include "paged/thread_pool.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace paged {
namespace {

void pause() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Torch can switch denormals off for a thread; results must not depend on who called.
struct DefaultFloatMode {
#if defined(__SSE2__)
  unsigned saved = _mm_getcsr();
  DefaultFloatMode() { _mm_setcsr(0x1f80); }
  ~DefaultFloatMode() { _mm_setcsr(saved); }
#endif
};

int available_processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n ? int(n) : 1;
}

int initial_threads() {
  const char* text = std::getenv("PAGED_THREADS");
  const int asked = text ? std::atoi(text) : 0;
  return asked >= 1 ? asked : available_processors();
}

std::atomic<int> wanted{0};

// `control` holds the number of the present job in its upper half, and in the lower half whether workers may still
// join it (kOpen) and how many have. The fields of a job change only while it is closed and nobody is in it.
class Pool {
 public:
  // Fewer than asked where the system gives no more: those that run have a pointer to this, which must stay.
  explicit Pool(int workers) {
    try {
      for (int i = 0; i < workers; ++i) std::thread([this, i] { work(i); }).detach();
    } catch (const std::system_error&) {
    }
  }

  void run(int32_t n, int threads, void (*fn)(void*, int32_t), void* context) {
    fn_ = fn, context_ = context, count_ = n, helpers_ = threads - 1;
    next_.store(0, std::memory_order_relaxed);
    const uint64_t job = (control_.load(std::memory_order_relaxed) >> 32) + 1;
    control_.store(job << 32 | kOpen, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    take();
    control_.fetch_and(~uint64_t(kOpen), std::memory_order_acq_rel);
    for (int spin = 0; uint32_t(control_.load(std::memory_order_acquire)) != 0; ++spin) {
      if (spin < kSpins) pause();
      else std::this_thread::yield();
    }
  }

 private:
  static constexpr uint64_t kOpen = uint64_t(1) << 31;
  static constexpr int kSpins = 1000;  // some ten microseconds: from one layer's attention to the next takes longer

  void take() {
    for (int32_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) fn_(context_, i);
  }

  void work(int index) {
    DefaultFloatMode mode;
    uint64_t seen = 0;
    for (;;) {
      uint64_t c = control_.load(std::memory_order_acquire);
      for (int spin = 0; c >> 32 == seen && spin < kSpins; ++spin) {
        pause();
        c = control_.load(std::memory_order_acquire);
      }
      if (c >> 32 == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return control_.load(std::memory_order_seq_cst) >> 32 != seen; });
        asleep_.fetch_sub(1, std::memory_order_seq_cst);
        c = control_.load(std::memory_order_acquire);
      }
      seen = c >> 32;
      while (c & kOpen && c >> 32 == seen) {
        if (!control_.compare_exchange_weak(c, c + 1, std::memory_order_acq_rel)) continue;
        if (index < helpers_) take();
        control_.fetch_sub(1, std::memory_order_acq_rel);
        break;
      }
    }
  }

  std::atomic<uint64_t> control_{0};
  std::atomic<int32_t> next_{0};
  std::atomic<int> asleep_{0};
  void (*fn_)(void*, int32_t) = nullptr;
  void* context_ = nullptr;
  int32_t count_ = 0;
  int helpers_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
};

// The pool is never destroyed: its threads sleep until the process ends. A fork takes none of them along, and perhaps a
// locked mutex, so that the child forgets both and starts anew.
struct Shared {
  std::mutex busy;
  Pool* pool = nullptr;
  int size = 0;
};
std::atomic<Shared*> shared{nullptr};

void forget_after_fork() { shared.store(new Shared, std::memory_order_release); }

Shared& get_shared() {
  Shared* s = shared.load(std::memory_order_acquire);
  if (s) return *s;
  static const bool registered = [] {
    shared.store(new Shared, std::memory_order_release);
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, forget_after_fork);
#endif
    return true;
  }();
  (void)registered;
  return *shared.load(std::memory_order_acquire);
}

}  // namespace

int num_threads() {
  int n = wanted.load(std::memory_order_relaxed);
  if (n == 0) {
    n = initial_threads();
    wanted.store(n, std::memory_order_relaxed);
  }
  return n;
}

void set_num_threads(int n) { wanted.store(n < 1 ? 1 : n, std::memory_order_relaxed); }

void parallel_for(int32_t n, int threads, void (*fn)(void*, int32_t), void* context) {
  DefaultFloatMode mode;
  if (threads > n) threads = n;
  if (threads > 1) {
    Shared& s = get_shared();
    std::unique_lock<std::mutex> lock(s.busy, std::try_to_lock);
    if (lock.owns_lock()) {
      if (s.size < threads) {  // grows only; threads that a job does not want go back to sleep
        s.pool = new Pool(threads - 1);
        s.size = threads;
      }
      return s.pool->run(n, threads, fn, context);
    }
  }
  for (int32_t i = 0; i < n; ++i) fn(context, i);
}

void* thread_memory(Purpose purpose, size_t bytes) {
  struct Buffer {
    void* memory = nullptr;
    size_t bytes = 0;
    ~Buffer() { std::free(memory); }
  };
  thread_local Buffer buffers[2];
  Buffer& b = buffers[purpose];
  if (b.bytes < bytes) {
    std::free(b.memory);
    b.bytes = 0;
    const size_t rounded = (bytes + 4095) & ~size_t(4095);
    b.memory = std::aligned_alloc(4096, rounded);
    if (!b.memory) std::abort();
    b.bytes = rounded;
  }
  return b.memory;
}

}  // namespace paged
