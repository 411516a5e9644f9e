#include "paged/cpu.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace paged {
namespace isa_baseline {

#include "vec.inc"

#include "records.inc"

#include "append.inc"
#include "attend_math.inc"
#include "attend_block.inc"
#include "attend_tile.inc"

#include "attend.inc"
#include "delta.inc"

static const CpuKernels table = {"baseline", 128, scratch_bytes, attend, merge, append, read,
                                 delta_conv, delta_head, delta_scratch_bytes};

}  // namespace isa_baseline

const CpuKernels* kernels_baseline() { return &isa_baseline::table; }

}  // namespace paged
