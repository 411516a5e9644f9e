#include "paged/cpu.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paged {
namespace isa_avx512 {

#include "vec.inc"

#include "records.inc"

#include "append.inc"
#include "attend_math.inc"
#include "attend_block.inc"
#include "attend_tile.inc"

#include "attend.inc"
#include "delta.inc"

static const CpuKernels table = {"avx512", 128, scratch_bytes, attend, merge, append, read,
                                 delta_conv, delta_head, delta_scratch_bytes};

}  // namespace isa_avx512

const CpuKernels* kernels_avx512() { return &isa_avx512::table; }

}  // namespace paged
