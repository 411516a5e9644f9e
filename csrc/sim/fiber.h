// A fiber: one stack that is switched by hand. Each simulated CUDA thread is one.
#pragma once
#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace sim {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Prepares entry(argument) to run at the next resume(). entry must end with finish(), never return.
  void start(void (*entry)(void*), void* argument);
  void resume();   // from the scheduler: runs until suspend() or finish()
  void suspend();  // from the fiber: back to the scheduler
  [[noreturn]] void finish();

 private:
  static void main(Fiber* fiber);
  void leave(bool last);
  char* memory_ = nullptr;
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
  void* scheduler_ = nullptr;
#else
  ucontext_t context_;
  ucontext_t scheduler_;
#endif
  // What the sanitizers need to follow a switch of stacks.
  void* fake_stack_ = nullptr;
  const void* scheduler_bottom_ = nullptr;
  size_t scheduler_size_ = 0;
  void* tsan_ = nullptr;
  void* tsan_scheduler_ = nullptr;
};

}  // namespace sim
