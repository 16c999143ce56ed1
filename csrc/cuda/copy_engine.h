// Pitched copies on the copy engines. The pointers may be of different devices that can reach each
// other.
#pragma once

#include <cuda_runtime_api.h>

#include "../plan.h"

namespace ulysses_ops {

// Issues one planned copy on `stream`: flat, 2-D or 3-D, whichever is the least that describes it.
void issue_copy(const PitchedCopy& copy, char* dst_base, const char* src_base, cudaStream_t stream);

// The same for a copy inside one GPU, which must not get in the way of those to its peers.
void issue_own_copy(const PitchedCopy& copy, char* dst_base, const char* src_base,
                    cudaStream_t stream);

}  // namespace ulysses_ops
