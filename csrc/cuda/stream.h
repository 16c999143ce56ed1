// torch's current stream.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

#include "../check.h"

namespace ulysses_ops {

inline cudaStream_t current_stream(int64_t device) {
  void* stream = nullptr;
  UOPS_TORCH_CHECK(aoti_torch_get_current_cuda_stream(static_cast<int32_t>(device), &stream));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace ulysses_ops
