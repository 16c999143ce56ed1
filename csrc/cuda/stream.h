// torch's current stream, and the current device while something is launched.
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

// Makes a device the current one, as launches of kernels need; copies and events do not.
class CurrentDevice {
 public:
  explicit CurrentDevice(int64_t device) : device_(static_cast<int>(device)) {
    UOPS_CUDA_CHECK(cudaGetDevice(&previous_));
    if (previous_ != device_) {
      UOPS_CUDA_CHECK(cudaSetDevice(device_));
    }
  }
  ~CurrentDevice() {
    if (previous_ != device_) {
      cudaSetDevice(previous_);
    }
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int device_;
  int previous_ = 0;
};

}  // namespace ulysses_ops
