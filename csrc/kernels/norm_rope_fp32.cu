#include "norm_rope.cuh"

namespace ulysses_ops {

// Half a head is always a multiple of 16 bytes.
NormRopeKernels norm_rope_fp32() {
  return {norm_rope::per_head<float, 4>, norm_rope::across_heads<float, 4>, nullptr, nullptr};
}

}  // namespace ulysses_ops
