// The compiled kernels of the projection; one source file for each element type.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "qkv_projection.h"

namespace ulysses_ops {

inline constexpr int32_t kTileRows = 64;
inline constexpr int32_t kClusterRows = 2;  // tiles below each other that share columns of W
inline constexpr int32_t kWarpRows = 16;

// Tiles of a cluster, one below the other.
constexpr int32_t cluster_tiles(int32_t num_rows) {
  return (num_rows + kTileRows * kClusterRows - 1) / (kTileRows * kClusterRows);
}

// Warps that store a head of so many rows: what `progress` of a destination rises by with it.
constexpr int32_t warps_of_head(int32_t num_rows) {
  return cluster_tiles(num_rows) * kClusterRows * (kTileRows / kWarpRows);
}

// x (num_rows, depth) and W (columns, depth), elements of a row dense; strides in elements.
struct ProjectionOperands {
  const void* x = nullptr;
  const void* weight = nullptr;
  int64_t x_row = 0;
  int64_t weight_row = 0;
};

struct Launch {
  int num_clusters = 0;
  cudaStream_t stream = nullptr;
  cudaEvent_t launched = nullptr;  // without timing; recorded when all blocks have started
  std::vector<int32_t> heads;      // of each destination
  std::vector<int32_t> order;      // of the destinations
};

// Waits on the GPU until `progress` has risen to `target`, and sets it to 0.
void await_progress(int32_t* progress, int32_t target, cudaStream_t stream);
// Loads the kernel that does so; whether there is code for the current device.
bool load_await_progress();

// Of one element type. `load` returns the clusters that a device runs at once, 0 where no code for
// it was built, and has to come first; `launch` is told them.
struct ProjectionKernel {
  int (*load)() = nullptr;
  void (*launch)(const ProjectionOperands& operands, const ProjectionParams& params,
                 const Launch& where) = nullptr;
};

ProjectionKernel projection_bf16();
ProjectionKernel projection_fp16();

}  // namespace ulysses_ops
