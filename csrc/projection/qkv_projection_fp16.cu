#include "qkv_projection.cuh"

namespace ulysses_ops {

ProjectionKernel projection_fp16() { return projection::kernel_of<cutlass::half_t>(); }

}  // namespace ulysses_ops
