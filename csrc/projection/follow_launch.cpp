// A stream for work beside a kernel, behind the kernel's start.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <vector>

#include "../check.h"

namespace ulysses_ops {
namespace {

// A stream that is nobody else's: torch's come from a pool, and what another user of one had
// captured there would be left out below.
int64_t make_stream(int64_t device) {
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  cudaStream_t stream = nullptr;
  UOPS_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return reinterpret_cast<int64_t>(stream);
}

void destroy_stream(int64_t stream) {
  UOPS_CUDA_CHECK(cudaStreamDestroy(reinterpret_cast<cudaStream_t>(stream)));
}

// Makes `stream`, of `make_stream`, wait for an event that a launch records at its start. In a
// capture the stream is then behind that start alone: what it held before was joined by the
// exchange, and an edge from there, though it says nothing new, makes the graph start the stream's
// kernel at the end of the other one.
void follow_launch(int64_t event, int64_t stream_handle) {
  auto* const stream = reinterpret_cast<cudaStream_t>(stream_handle);
  UOPS_CUDA_CHECK(cudaStreamWaitEvent(stream, reinterpret_cast<cudaEvent_t>(event), 0));
  cudaStreamCaptureStatus status{};
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t count = 0;
  UOPS_CUDA_CHECK(
      cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &nodes, &edges, &count));
  if (status != cudaStreamCaptureStatusActive || edges == nullptr) {
    return;
  }
  std::vector<cudaGraphNode_t> starts;
  std::vector<cudaGraphEdgeData> from_starts;
  for (size_t i = 0; i < count; ++i) {
    if (edges[i].from_port == cudaGraphKernelNodePortLaunchCompletion) {
      starts.push_back(nodes[i]);
      from_starts.push_back(edges[i]);
    }
  }
  if (!starts.empty() && starts.size() < count) {
    UOPS_CUDA_CHECK(cudaStreamUpdateCaptureDependencies(stream, starts.data(), from_starts.data(),
                                                        starts.size(),
                                                        cudaStreamSetCaptureDependencies));
  }
}

}  // namespace
}  // namespace ulysses_ops

STABLE_TORCH_LIBRARY_FRAGMENT(ulysses, m) {
  m.def("_make_stream(int device) -> int");
  m.def("_destroy_stream(int stream) -> ()");
  m.def("_follow_launch(int event, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ulysses, CompositeExplicitAutograd, m) {
  m.impl("_make_stream", TORCH_BOX(&ulysses_ops::make_stream));
  m.impl("_destroy_stream", TORCH_BOX(&ulysses_ops::destroy_stream));
  m.impl("_follow_launch", TORCH_BOX(&ulysses_ops::follow_launch));
}
