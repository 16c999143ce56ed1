// The kernel of the projection, for Hopper: TMA loads, warp-specialised, persistent.
//
//   warp group 0     one warp feeds stages of x and W by TMA; W is shared by a cluster of two
//   warp groups 1,2  take tiles in turn ("pingpong"): while one multiplies, the other normalises,
//                    rotates and stores, so the tensor cores never wait for an epilogue
//
// A warp holds 16 rows of a tile, and the two heads that they cross, in registers: a sum over a
// head takes two shuffles, and both elements of every pair are in one thread, whatever the style.
// The main loop is CUTLASS's.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cutlass/numeric_conversion.h>

#include <array>
#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/pipeline/pipeline.hpp>

#include "../check.h"
#include "qkv_projection_kernels.h"

namespace ulysses_ops {
namespace projection {

inline constexpr int kGroupThreads = cutlass::NumThreadsPerWarpGroup;
inline constexpr int kThreads = 3 * kGroupThreads;
inline constexpr int kHeadsPerTile = 2;
inline constexpr int kEightColumns = kProjectionHeadDim / 8;  // of a head
inline constexpr int kPairs = 16;                             // of a head's row in one thread
inline constexpr int kPassColumns = 64;                       // that a warp stages at a time

using TileShape =
    cute::Shape<cute::Int<kTileRows>, cute::Int<kHeadsPerTile * kProjectionHeadDim>, cute::_64>;
using ClusterShape = cute::Shape<cute::Int<kClusterRows>, cute::_1, cute::_1>;
using Turn = cutlass::OrderedSequenceBarrier<1, 2>;

// What does not belong to the main loop.
template <class T>
struct EpilogueStorage {
  alignas(128) T staging[kThreads / 32 - 4][kWarpRows][kPassColumns];
  alignas(16) float norm[2][kProjectionHeadDim];
  alignas(16) typename Turn::SharedStorage turn;
};

template <class T>
using MainLoop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, T, cutlass::layout::RowMajor, 8, T,
    cutlass::layout::ColumnMajor, 8, float, TileShape, ClusterShape,
    cutlass::gemm::collective::StageCountAutoCarveout<sizeof(EpilogueStorage<T>) + 512>,
    cutlass::gemm::KernelTmaWarpSpecializedPingpong>::CollectiveOp;

template <class T>
struct Storage {
  alignas(128) typename MainLoop<T>::TensorStorage tensors;
  alignas(128) EpilogueStorage<T> epilogue;
  alignas(16) typename MainLoop<T>::PipelineStorage pipeline;
};

template <class T>
struct Arguments {
  typename MainLoop<T>::Params main_loop;
  ProjectionParams params;
  TileOrder order;  // a tile of rows is one of a cluster
};

// What a thread rotates its two rows with: by pair as `rotate` takes them, once `arrange` has run.
struct Angles {
  float cos[2][kPairs];
  float sin[2][kPairs];
};

// Neighbouring pairs of a row, as they are read: with pairs side by side, 16 bytes at a time.
__device__ inline void load_table(const ProjectionParams& params, const float* row, int in_quad,
                                  float (&values)[kPairs]) {
  if (params.rope == Rope::kHalfSplit) {
    CUTE_UNROLL
    for (int i = 0; i < kPairs; i += 2) {
      const auto two = __ldg(reinterpret_cast<const float2*>(row + 2 * in_quad + 4 * i));
      values[i] = two.x;
      values[i + 1] = two.y;
    }
    return;
  }
  const bool is_wide = params.table_width == kProjectionHeadDim;
  CUTE_UNROLL
  for (int i = 0; i < kPairs; i += 4) {
    const int pair = 4 * i + 4 * in_quad;
    const auto four = __ldg(reinterpret_cast<const float4*>(row + (is_wide ? 2 * pair : pair)));
    if (is_wide) {  // each value is there twice
      const auto more = __ldg(reinterpret_cast<const float4*>(row + 2 * pair + 4));
      values[i] = four.x;
      values[i + 1] = four.z;
      values[i + 2] = more.x;
      values[i + 3] = more.z;
    } else {
      values[i] = four.x;
      values[i + 1] = four.y;
      values[i + 2] = four.z;
      values[i + 3] = four.w;
    }
  }
}

// Asked for before the product, so that they are there after it.
__device__ inline void load_angles(const ProjectionParams& params, int row0, int lane,
                                   Angles& angles) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const auto row = static_cast<uint32_t>(cute::min(row0 + lane / 4 + 8 * r, params.num_rows - 1));
    const uint32_t seq = row - params.seq.quotient(row) * params.seq.value;
    const int64_t offset = static_cast<int64_t>(seq) * params.table_width;
    load_table(params, params.cos + offset, lane % 4, angles.cos[r]);
    load_table(params, params.sin + offset, lane % 4, angles.sin[r]);
  }
}

// Element `u` of lane t of a quad and element t of lane u change places.
__device__ inline void transpose_in_quad(float (&v)[4], int in_quad) {
  const bool is_high = (in_quad & 2) != 0;
  const float a = __shfl_xor_sync(0xffffffffU, is_high ? v[0] : v[2], 2);
  const float b = __shfl_xor_sync(0xffffffffU, is_high ? v[1] : v[3], 2);
  const float w[4] = {is_high ? a : v[0], is_high ? b : v[1], is_high ? v[2] : a,
                      is_high ? v[3] : b};
  const bool is_odd = (in_quad & 1) != 0;
  const float c = __shfl_xor_sync(0xffffffffU, is_odd ? w[0] : w[1], 1);
  const float d = __shfl_xor_sync(0xffffffffU, is_odd ? w[2] : w[3], 1);
  v[0] = is_odd ? c : w[0];
  v[1] = is_odd ? w[1] : c;
  v[2] = is_odd ? d : w[2];
  v[3] = is_odd ? w[3] : d;
}

// Of interleaved pairs a thread reads four neighbours and rotates every fourth.
__device__ inline void arrange(const ProjectionParams& params, int lane, Angles& angles) {
  if (params.rope != Rope::kInterleaved) {
    return;
  }
  const auto by_fours = [&](float (&values)[kPairs]) {
    CUTE_UNROLL
    for (int i = 0; i < kPairs; i += 4) {
      float four[4] = {values[i], values[i + 1], values[i + 2], values[i + 3]};
      transpose_in_quad(four, lane % 4);
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) {
        values[i + j] = four[j];
      }
    }
  };
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    by_fours(angles.cos[r]);
    by_fours(angles.sin[r]);
  }
}

// Whether any of the heads of a tile is rotated.
__device__ inline bool rotates(const ProjectionParams& params, int head0) {
  const int last = cute::min(head0 + kHeadsPerTile, params.num_heads) - 1;
  return params.rope != Rope::kNone && (params.spans[span_at(params, head0)].part != Part::kV ||
                                        params.spans[span_at(params, last)].part != Part::kV);
}

// One head of a warp's 16 rows. Element (c, r, j): row lane / 4 + 8 r, column 8 j + 2 (lane % 4)
// + c, as wgmma leaves them.
template <class T, class Accumulators>
class HeadOfWarp {
 public:
  __device__ HeadOfWarp(const ProjectionParams& params, Accumulators& accumulators, int head,
                        int head_in_tile, int lane)
      : params_(params),
        accumulators_(accumulators),
        span_(params.spans[span_at(params, head)]),
        head_(head),
        first_(head_in_tile * kEightColumns),
        lane_(lane) {}

  __device__ void add_bias() {
    if (params_.bias == nullptr) {
      return;
    }
    const T* bias = static_cast<const T*>(params_.bias) + int64_t{head_} * kProjectionHeadDim;
    CUTE_UNROLL
    for (int j = 0; j < kEightColumns; ++j) {
      const auto two =
          *reinterpret_cast<const cutlass::Array<T, 2>*>(bias + 8 * j + 2 * (lane_ % 4));
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        const auto value = static_cast<float>(two[c]);
        at(c, 0, j) += value;
        at(c, 1, j) += value;
      }
    }
  }

  __device__ void normalise_and_rotate(const float (&norm)[2][kProjectionHeadDim],
                                       const Angles& angles) {
    if (span_.part == Part::kV) {
      return;
    }
    if (params_.normalises) {
      normalise(norm[static_cast<int>(span_.part)]);
    }
    if (params_.rope == Rope::kInterleaved) {
      rotate<Rope::kInterleaved>(angles);
    } else if (params_.rope == Rope::kHalfSplit) {
      rotate<Rope::kHalfSplit>(angles);
    }
  }

  // What a warp stored is there for whoever sees that its progress has risen.
  __device__ void tell() const {
    if (params_.progress != nullptr && span_.destination != params_.last) {
      __threadfence();
      __syncwarp();
      if (lane_ == 0) {
        atomicAdd(params_.progress + span_.destination, 1);
      }
    }
  }

  // Through shared memory, so that eight lanes write 128 bytes of a row.
  __device__ void store(int row0, T (&staging)[kWarpRows][kPassColumns]) const {
    T* out = static_cast<T*>(span_.out) +
             static_cast<int64_t>(head_ - span_.first_head) * kProjectionHeadDim + lane_ % 8 * 8;
    CUTE_UNROLL
    for (int pass = 0; pass < kProjectionHeadDim / kPassColumns; ++pass) {
      __syncwarp();
      stage(pass * (kPassColumns / 8), staging);
      __syncwarp();
      CUTE_UNROLL
      for (int i = 0; i < kWarpRows / 4; ++i) {
        const int r = 4 * i + lane_ / 8;
        const auto data = *reinterpret_cast<const uint4*>(place(staging, r, lane_ % 8));
        if (row0 + r < params_.num_rows) {
          const auto row = static_cast<uint32_t>(row0 + r);
          const uint32_t batch = params_.seq.quotient(row);
          const uint32_t seq = row - batch * params_.seq.value;
          *reinterpret_cast<uint4*>(out + pass * kPassColumns + batch * span_.out_batch +
                                    seq * span_.out_row) = data;
        }
      }
    }
  }

 private:
  __device__ float& at(int c, int r, int j) const {
    return accumulators_(cute::make_coord(cute::make_coord(c, r, first_ + j), 0, 0));
  }

  __device__ void normalise(const float (&weight)[kProjectionHeadDim]) {
    float scale[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float sums[2] = {0.0F, 0.0F};  // of even and of odd columns
      CUTE_UNROLL
      for (int j = 0; j < kEightColumns; ++j) {
        sums[0] += at(0, r, j) * at(0, r, j);
        sums[1] += at(1, r, j) * at(1, r, j);
      }
      float sum = sums[0] + sums[1];
      sum += __shfl_xor_sync(0xffffffffU, sum, 1);
      sum += __shfl_xor_sync(0xffffffffU, sum, 2);
      scale[r] = rsqrtf(sum * (1.0F / kProjectionHeadDim) + params_.eps);
    }
    CUTE_UNROLL
    for (int j = 0; j < kEightColumns; ++j) {
      const auto two = *reinterpret_cast<const float2*>(&weight[8 * j + 2 * (lane_ % 4)]);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        at(0, r, j) *= two.x * scale[r];
        at(1, r, j) *= two.y * scale[r];
      }
    }
  }

  template <Rope kRope>
  __device__ void rotate(const Angles& angles) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        constexpr bool kHalves = kRope == Rope::kHalfSplit;
        float& first = kHalves ? at(i % 2, r, i / 2) : at(0, r, i);
        float& second = kHalves ? at(i % 2, r, i / 2 + kEightColumns / 2) : at(1, r, i);
        const float a = first;
        const float b = second;
        first = a * angles.cos[r][i] - b * angles.sin[r][i];
        second = b * angles.cos[r][i] + a * angles.sin[r][i];
      }
    }
  }

  // Eight elements of a row; rows are 128 bytes, so their eights are permuted row by row to meet
  // in no bank.
  static __device__ const T* place(const T (&staging)[kWarpRows][kPassColumns], int row,
                                   int eight) {
    return &staging[row][(eight ^ (row & 7)) * 8];
  }

  // From the eight columns `first` on, four 8x8 matrices at a time.
  __device__ void stage(int first, T (&staging)[kWarpRows][kPassColumns]) const {
    const cutlass::NumericArrayConverter<T, float, 2> convert;
    CUTE_UNROLL
    for (int j = 0; j < kPassColumns / 8; j += 2) {
      uint32_t packed[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        cutlass::Array<float, 2> two;
        two[0] = at(0, i % 2, first + j + i / 2);
        two[1] = at(1, i % 2, first + j + i / 2);
        const auto rounded = convert(two);
        packed[i] = *reinterpret_cast<const uint32_t*>(&rounded);
      }
      auto* to = const_cast<T*>(place(staging, lane_ % 16, j + lane_ / 16));
      cute::SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3],
                                    *reinterpret_cast<cute::uint128_t*>(to));
    }
  }

  const ProjectionParams& params_;
  Accumulators& accumulators_;
  const ProjectionSpan& span_;
  int head_;
  int first_;  // column of the tile, in eights
  int lane_;
};

template <class T>
__device__ void run(const Arguments<T>& arguments, Storage<T>& storage) {
  using namespace cute;
  using Loop = MainLoop<T>;
  using Pipeline = typename Loop::MainloopPipeline;
  const ProjectionParams& params = arguments.params;
  const int group = cutlass::canonical_warp_group_idx();
  const int warp = cutlass::canonical_warp_idx_sync();
  const int lane = cutlass::canonical_lane_idx();
  const int in_group = static_cast<int>(threadIdx.x) % kGroupThreads;
  const uint32_t in_cluster = cute::block_rank_in_cluster();
  if (warp == 0 && cute::elect_one_sync()) {
    Loop::prefetch_tma_descriptors(arguments.main_loop);
  }

  typename Pipeline::Params pipeline_params;
  pipeline_params.role =
      group == 0 ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
  pipeline_params.is_leader = in_group == 0;
  pipeline_params.num_consumers = kGroupThreads;  // a stage belongs to one of the two
  pipeline_params.transaction_bytes = arguments.main_loop.tma_transaction_bytes;
  Pipeline pipeline(storage.pipeline, pipeline_params, ClusterShape{});
  typename Turn::Params turn_params;
  turn_params.group_id = group - 1;
  turn_params.group_size = kGroupThreads;
  Turn turn(storage.epilogue.turn, turn_params);
  if (group > 0 && params.normalises) {
    const int part = group - 1;
    float value = 1.0F;
    if (const void* norm = params.norm[part]; norm != nullptr) {
      value = params.norm_is_float ? static_cast<const float*>(norm)[in_group]
                                   : static_cast<float>(static_cast<const T*>(norm)[in_group]);
    }
    static_assert(kGroupThreads == kProjectionHeadDim);
    storage.epilogue.norm[part][in_group] = value;
  }
  cute::cluster_arrive();
  Loop loop;
  const auto inputs = loop.load_init(
      make_shape(params.num_rows, params.num_heads * kProjectionHeadDim, params.depth, 1),
      arguments.main_loop);
  const auto depth_tiles = shape<3>(get<0>(inputs));
  const int num_depth_tiles = static_cast<int>(size(depth_tiles));
  const int num_clusters = static_cast<int>(gridDim.x) / kClusterRows;
  const int cluster = static_cast<int>(blockIdx.x) / kClusterRows;
  cute::cluster_wait();

  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (warp == 0) {
      auto state = cutlass::make_producer_start_state<Pipeline>();
      for (int i = cluster; i < arguments.order.size; i += num_clusters) {
        const TileOrder::Tile tile = arguments.order.at(i);
        const int row = tile.row * kClusterRows + static_cast<int>(in_cluster);
        loop.load(arguments.main_loop, pipeline, state, inputs, make_coord(row, tile.column, _, 0),
                  cute::make_coord_iterator(idx2crd(0, depth_tiles), depth_tiles), num_depth_tiles,
                  lane, in_cluster, storage.tensors);
        state.advance(num_depth_tiles);
      }
      loop.load_tail(pipeline, state);
    }
    return;
  }
  cutlass::arch::warpgroup_reg_alloc<232>();
  typename Loop::TiledMma mma;
  typename Loop::PipelineState state;
  if (group == 2) {
    state.advance(num_depth_tiles);
  }
  for (int i = cluster + (group - 1) * num_clusters; i < arguments.order.size;
       i += 2 * num_clusters) {
    const TileOrder::Tile tile = arguments.order.at(i);
    const int row0 = (tile.row * kClusterRows + static_cast<int>(in_cluster)) * kTileRows +
                     in_group / 32 * kWarpRows;
    const int head0 = tile.column * kHeadsPerTile;
    Angles angles{};
    const bool is_rotated = rotates(params, head0);
    if (is_rotated) {
      load_angles(params, row0, lane, angles);
    }
    auto accumulators = partition_fragment_C(mma, take<0, 2>(TileShape{}));
    turn.wait();
    loop.mma(pipeline, state, accumulators, num_depth_tiles, in_group, storage.tensors,
             arguments.main_loop);
    turn.arrive();
    loop.mma_tail(pipeline, state, num_depth_tiles);
    state.advance(2 * num_depth_tiles);
    if (is_rotated) {
      arrange(params, lane, angles);
    }
    CUTE_UNROLL
    for (int h = 0; h < kHeadsPerTile; ++h) {
      if (head0 + h < params.num_heads) {
        HeadOfWarp<T, decltype(accumulators)> head(params, accumulators, head0 + h, h, lane);
        head.add_bias();
        head.normalise_and_rotate(storage.epilogue.norm, angles);
        head.store(row0, storage.epilogue.staging[warp - 4]);
        head.tell();
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    project(const __grid_constant__ Arguments<T> arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char storage[];
  run<T>(arguments, *reinterpret_cast<Storage<T>*>(storage));
#endif
}

// ---- host --------------------------------------------------------------------------------------

using LaunchAttributes = std::array<cudaLaunchAttribute, 2>;

// A launch of clusters; `attributes` outlive it, and one is left for another.
template <class T>
cudaLaunchConfig_t launch_config(int num_clusters, LaunchAttributes& attributes) {
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kClusterRows, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned int>(num_clusters * kClusterRows));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Storage<T>);
  config.attrs = attributes.data();
  config.numAttrs = 1;
  return config;
}

template <class T>
const void* address() {
  return reinterpret_cast<const void*>(&project<T>);
}

template <class T>
int load() {
  cudaFuncAttributes found{};
  const cudaError_t status = cudaFuncGetAttributes(&found, address<T>());
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    static_cast<void>(cudaGetLastError());  // nobody else is to meet it
    return 0;
  }
  UOPS_CUDA_CHECK(status);
  UOPS_CUDA_CHECK(cudaFuncSetAttribute(address<T>(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       sizeof(Storage<T>)));
  LaunchAttributes attributes;
  const cudaLaunchConfig_t config = launch_config<T>(1, attributes);
  int num_clusters = 0;
  UOPS_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&num_clusters, address<T>(), &config));
  return num_clusters;
}

template <class T>
void launch(const ProjectionOperands& operands, const ProjectionParams& params,
            const Launch& where) {
  using Loop = MainLoop<T>;
  const typename Loop::Arguments tensors{static_cast<const T*>(operands.x),
                                         {operands.x_row, cute::_1{}, 0},
                                         static_cast<const T*>(operands.weight),
                                         {operands.weight_row, cute::_1{}, 0}};
  const auto shape =
      cute::make_shape(params.num_rows, params.num_heads * kProjectionHeadDim, params.depth, 1);
  const auto row_bytes =
      int64_t{kTileRows} * kClusterRows * params.depth * static_cast<int64_t>(sizeof(T));
  Arguments<T> arguments{Loop::to_underlying_arguments(shape, tensors, nullptr), params,
                         order_tiles(cluster_tiles(params.num_rows), row_bytes, kHeadsPerTile,
                                     where.heads, where.order)};
  LaunchAttributes attributes;
  cudaLaunchConfig_t config =
      launch_config<T>(std::min(where.num_clusters, arguments.order.size), attributes);
  config.stream = where.stream;
  if (where.launched != nullptr) {
    attributes[1].id = cudaLaunchAttributeLaunchCompletionEvent;
    attributes[1].val.launchCompletionEvent = {where.launched, 0};
    config.numAttrs = 2;
  }
  void* pointers[] = {&arguments};
  UOPS_CUDA_CHECK(cudaLaunchKernelExC(&config, address<T>(), pointers));
}

template <class T>
ProjectionKernel kernel_of() {
  return {&load<T>, &launch<T>};
}

}  // namespace projection
}  // namespace ulysses_ops
