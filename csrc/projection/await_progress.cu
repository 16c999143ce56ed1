#include "../check.h"
#include "qkv_projection_kernels.h"

namespace ulysses_ops {
namespace {

// One warp, on a multiprocessor that the projection leaves free. It is launched when all blocks of
// that one have started: nothing that it waits for waits for it.
__global__ void __launch_bounds__(32) wait_and_reset(int32_t* progress, int32_t target) {
  if (threadIdx.x == 0) {
    while (*static_cast<volatile int32_t*>(progress) < target) {
      __nanosleep(100);
    }
    *progress = 0;
    __threadfence();
  }
}

}  // namespace

void await_progress(int32_t* progress, int32_t target, cudaStream_t stream) {
  wait_and_reset<<<1, 32, 0, stream>>>(progress, target);
  UOPS_CUDA_CHECK(cudaGetLastError());
}

bool load_await_progress() {
  cudaFuncAttributes found{};
  const cudaError_t status = cudaFuncGetAttributes(&found, &wait_and_reset);
  static_cast<void>(cudaGetLastError());
  return status == cudaSuccess;
}

}  // namespace ulysses_ops
