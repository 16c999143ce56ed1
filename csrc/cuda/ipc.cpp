#include "ipc.h"

#include <cuda_runtime_api.h>

#include <cstring>

#include "../check.h"
#include "lanes.h"

namespace ulysses_ops {
namespace {

constexpr size_t kHandleNumbers = sizeof(cudaIpcMemHandle_t) / sizeof(int64_t);

void* as_pointer(int64_t pointer) { return reinterpret_cast<void*>(pointer); }

}  // namespace

int64_t ipc_allocate(int64_t bytes, int64_t device) {
  const RelaxedCaptureMode relaxed;
  UOPS_CUDA_CHECK(cudaSetDevice(static_cast<int>(device)));
  void* memory = nullptr;
  UOPS_CUDA_CHECK(cudaMalloc(&memory, static_cast<size_t>(bytes)));
  UOPS_CUDA_CHECK(cudaMemset(memory, 0, static_cast<size_t>(bytes)));
  UOPS_CUDA_CHECK(cudaStreamSynchronize(nullptr));
  return reinterpret_cast<int64_t>(memory);
}

void ipc_free(int64_t pointer) {
  const RelaxedCaptureMode relaxed;
  UOPS_CUDA_CHECK(cudaFree(as_pointer(pointer)));
}

std::vector<int64_t> ipc_export(int64_t pointer) {
  cudaIpcMemHandle_t handle{};
  UOPS_CUDA_CHECK(cudaIpcGetMemHandle(&handle, as_pointer(pointer)));
  std::vector<int64_t> numbers(kHandleNumbers);
  std::memcpy(numbers.data(), &handle, sizeof(handle));
  return numbers;
}

int64_t ipc_open(const std::vector<int64_t>& handle, int64_t device) {
  STD_TORCH_CHECK(handle.size() == kHandleNumbers, "ipc: a handle has ", kHandleNumbers,
                  " numbers, not ", handle.size());
  UOPS_CUDA_CHECK(cudaSetDevice(static_cast<int>(device)));
  cudaIpcMemHandle_t raw{};
  std::memcpy(&raw, handle.data(), sizeof(raw));
  void* memory = nullptr;
  UOPS_CUDA_CHECK(cudaIpcOpenMemHandle(&memory, raw, cudaIpcMemLazyEnablePeerAccess));
  return reinterpret_cast<int64_t>(memory);
}

void ipc_close(int64_t pointer) { UOPS_CUDA_CHECK(cudaIpcCloseMemHandle(as_pointer(pointer))); }

}  // namespace ulysses_ops
