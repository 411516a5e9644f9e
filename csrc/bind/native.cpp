// paged._native: what the CPU backend needs from C++. No torch, no numpy headers: addresses and sizes only.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_native, m) {
  m.doc() = "Native CPU code of paged.";
  m.def("isa", [] {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "baseline";
  }, "The widest instruction set of this processor that a kernel is built for.");
}
