#include <cstring>

#include "paged/cpu.h"

namespace paged {
namespace {

bool has_avx2() {
#if defined(PAGED_X86)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(PAGED_X86)
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

}  // namespace

const CpuKernels* cpu_kernels(const char* name) {
  const bool any = !name || !*name;
#if defined(PAGED_X86)
  if ((any || !std::strcmp(name, "avx512")) && has_avx512()) return kernels_avx512();
  if ((any || !std::strcmp(name, "avx2")) && has_avx2()) return kernels_avx2();
#endif
  if (any || !std::strcmp(name, "baseline")) return kernels_baseline();
  return nullptr;
}

}  // namespace paged
