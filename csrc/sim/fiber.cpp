#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(PAGED_SIM_TSAN)  // this file itself is compiled without ThreadSanitizer
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
}
#endif

#if defined(__x86_64__)
// Saves the callee-saved registers on the stack, then the stack pointer at *%rdi; loads %rsi and returns there.
extern "C" void paged_sim_switch(void** save, void* load);
asm(R"(
.text
.globl paged_sim_switch
.hidden paged_sim_switch
.type paged_sim_switch, @function
paged_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size paged_sim_switch, .-paged_sim_switch
)");
#endif

namespace sim {
namespace {
constexpr size_t kStack = 512 * 1024;  // address space; only what is touched costs memory. Sanitizers need wide frames
constexpr size_t kGuard = 4096;
thread_local Fiber* starting = nullptr;
}  // namespace

Fiber::Fiber() {
  void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
  mprotect(memory_, kGuard, PROT_NONE);  // a stack that grows too far stops here
}

Fiber::~Fiber() {
#if defined(PAGED_SIM_TSAN)
  if (tsan_) __tsan_destroy_fiber(tsan_);
#endif
  munmap(memory_, kStack);
}

void Fiber::main(Fiber* fiber) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &fiber->scheduler_bottom_, &fiber->scheduler_size_);
#endif
  fiber->entry_(fiber->argument_);
}

void Fiber::start(void (*entry)(void*), void* argument) {
  entry_ = entry;
  argument_ = argument;
  fake_stack_ = nullptr;
#if defined(PAGED_SIM_TSAN)
  // Kept from block to block: thread i of a block follows thread i of the one before, for their stacks' sake.
  if (!tsan_) tsan_ = __tsan_create_fiber(0);
#endif
#if defined(__x86_64__)
  auto** top = reinterpret_cast<void**>(memory_ + kStack);
  *--top = nullptr;  // where a caller's return address would lie: ends a backtrace, and aligns the stack
  *--top = reinterpret_cast<void*>(+[] { main(starting); });
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  stack_pointer_ = top;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = memory_ + kGuard;
  context_.uc_stack.ss_size = kStack - kGuard;
  context_.uc_link = nullptr;
  makecontext(&context_, reinterpret_cast<void (*)()>(+[] { main(starting); }), 0);
#endif
}

void Fiber::resume() {
  starting = this;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, memory_ + kGuard, kStack - kGuard);
#endif
#if defined(PAGED_SIM_TSAN)
  tsan_scheduler_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(tsan_, 1);  // 1: the switch itself orders nothing
#endif
#if defined(__x86_64__)
  paged_sim_switch(&scheduler_, stack_pointer_);
#else
  swapcontext(&scheduler_, &context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void Fiber::leave([[maybe_unused]] bool last) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack_, scheduler_bottom_, scheduler_size_);
#endif
#if defined(PAGED_SIM_TSAN)
  __tsan_switch_to_fiber(tsan_scheduler_, 1);
#endif
#if defined(__x86_64__)
  paged_sim_switch(&stack_pointer_, scheduler_);
#else
  swapcontext(&context_, &scheduler_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, &scheduler_bottom_, &scheduler_size_);
#endif
}

void Fiber::suspend() { leave(false); }

void Fiber::finish() {
  leave(true);
  __builtin_unreachable();
}

}  // namespace sim
