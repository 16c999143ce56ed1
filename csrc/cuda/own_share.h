// The own share: a copy inside one GPU, by a kernel.
//
// The driver runs such a copy as a kernel as well, so no copy engine is given up; a launch costs
// the host half of what the driver's copy does, and a graph of it less (docs/design/measured.md).
#pragma once

#include <cuda_runtime_api.h>

#include "../plan.h"

namespace ulysses_ops {

// Loads the kernels into the current device: the first use of one would wait for an idle device.
void load_own_share();

// Issues one planned copy between two places of the current device's memory on `stream`.
void copy_own_share(const PitchedCopy& copy, char* dst_base, const char* src_base,
                    cudaStream_t stream);

}  // namespace ulysses_ops
