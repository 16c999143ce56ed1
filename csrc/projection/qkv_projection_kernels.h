// The compiled kernels of the projection; one source file for each element type.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "qkv_projection.h"

namespace ulysses_ops {

// x (num_rows, depth) and W (columns, depth), elements of a row dense; strides in elements.
struct ProjectionOperands {
  const void* x = nullptr;
  const void* weight = nullptr;
  int64_t x_row = 0;
  int64_t weight_row = 0;
};

// Of one element type. `load` returns the clusters that a device runs at once, 0 where no code for
// it was built, and has to come first; `launch` is told them. An event that is given is recorded
// when all blocks have started; it must be without timing.
struct ProjectionKernel {
  int (*load)() = nullptr;
  void (*launch)(const ProjectionOperands& operands, const ProjectionParams& params,
                 int num_clusters, cudaStream_t stream, cudaEvent_t launched) = nullptr;
};

ProjectionKernel projection_bf16();
ProjectionKernel projection_fp16();

}  // namespace ulysses_ops
