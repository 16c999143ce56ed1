#include "qkv_projection.cuh"

namespace ulysses_ops {

ProjectionKernel projection_bf16() { return projection::kernel_of<cutlass::bfloat16_t>(); }

}  // namespace ulysses_ops
