#include "paged/cpu.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paged {
namespace isa_avx2 {

#include "vec.inc"

#include "records.inc"

#include "append.inc"
#include "attend_math.inc"
#include "attend_block.inc"
#include "attend_tile.inc"

#include "attend.inc"
#include "delta.inc"

static const CpuKernels table = {"avx2", 128, scratch_bytes, attend, merge, append, read,
                                 delta_conv, delta_head, delta_scratch_bytes};

}  // namespace isa_avx2

const CpuKernels* kernels_avx2() { return &isa_avx2::table; }

}  // namespace paged
