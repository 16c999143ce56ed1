#include "norm_rope.cuh"

namespace ulysses_ops {

NormRopeKernels norm_rope_bf16() {
  using T = cutlass::bfloat16_t;
  return {norm_rope::per_head<T, 8>, norm_rope::across_heads<T, 8>, norm_rope::per_head<T, 4>,
          norm_rope::across_heads<T, 4>};
}

}  // namespace ulysses_ops
