// The kernels of the fused RMSNorm + RoPE. Both read every element once and write it once; nobody
// waits for anybody outside a block.
//
//   per_head:      a slot (the lanes of one head) strides over the chunks of all rows; sums by
//                  shuffle
//   across_heads:  a block holds a row of Q and K in registers; sums by shuffle and shared memory
//
// Data move in vectors of 16 bytes, in float between load and store.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

#include "norm_rope.h"
#include "norm_rope_kernels.h"

namespace ulysses_ops {
namespace norm_rope {

// kVec elements from a lane's first half of a head, kVec from its second; one column each.
template <int kVec>
using LaneShape = cute::Shape<cute::Int<kVec>, cute::_2>;

template <class T, int kVec>
using VectorCopy = cute::Copy_Atom<cute::UniversalCopy<cute::uint_bit_t<8 * sizeof(T) * kVec>>, T>;

template <int kVec, class T>
__device__ auto lane_of_head(T* head, int32_t lane, int32_t head_dim) {
  return cute::make_tensor(
      cute::make_gmem_ptr(head + lane * kVec),
      cute::make_layout(LaneShape<kVec>{}, cute::make_stride(cute::_1{}, head_dim / 2)));
}

template <class T, int kVec>
__device__ auto make_fragment() {
  return cute::make_tensor<T>(LaneShape<kVec>{});
}

struct TableCopy {
  template <int kCount>
  __device__ void floats(const float* from, float* to) const {
    constexpr int kVec = kCount < 4 ? kCount : 4;
    using namespace cute;
    const auto source = make_tensor(make_gmem_ptr(from), Shape<Int<kVec>, Int<kCount / kVec>>{});
    auto target = make_tensor(make_rmem_ptr(to), Shape<Int<kVec>, Int<kCount / kVec>>{});
    auto fragment = make_fragment_like(source);
    copy(Copy_Atom<UniversalCopy<uint_bit_t<32 * kVec>>, float>{}, source, fragment);
    copy(fragment, target);
  }
};

template <class T, int kVec, class Fragment>
__device__ void to_floats(const Fragment& fragment, float (&x)[2 * kVec]) {
  const cutlass::NumericArrayConverter<float, T, kVec> convert;
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const auto values = convert(*reinterpret_cast<const cutlass::Array<T, kVec>*>(
        cute::raw_pointer_cast(&fragment(0, half))));
    CUTE_UNROLL
    for (int i = 0; i < kVec; ++i) {
      x[half * kVec + i] = values[i];
    }
  }
}

template <class T, int kVec, class Fragment>
__device__ void from_floats(const float (&y)[2 * kVec], Fragment& fragment) {
  const cutlass::NumericArrayConverter<T, float, kVec> convert;
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    cutlass::Array<float, kVec> values;
    CUTE_UNROLL
    for (int i = 0; i < kVec; ++i) {
      values[i] = y[half * kVec + i];
    }
    *reinterpret_cast<cutlass::Array<T, kVec>*>(cute::raw_pointer_cast(&fragment(0, half))) =
        convert(values);
  }
}

// A lane's elements of one head of a weight or bias, which is of type T or float.
template <class T, int kVec>
__device__ void load_parameter(const void* parameter, bool is_float, int32_t head, int32_t lane,
                               int32_t head_dim, float (&x)[2 * kVec]) {
  const int64_t offset = static_cast<int64_t>(head) * head_dim;
  if (is_float) {
    const float* from = static_cast<const float*>(parameter) + offset + lane * kVec;
    TableCopy().floats<kVec>(from, x);
    TableCopy().floats<kVec>(from + head_dim / 2, x + kVec);
  } else {
    auto fragment = make_fragment<T, kVec>();
    cute::copy(VectorCopy<T, kVec>{},
               lane_of_head<kVec>(static_cast<const T*>(parameter) + offset, lane, head_dim),
               fragment);
    to_floats<T, kVec>(fragment, x);
  }
}

// A slot's chunk of one row, in registers.
template <class T, int kVec>
class ChunkOfRow {
 public:
  __device__ ChunkOfRow(const NormRopeParams& params, Place place, Chunk chunk, RowPlace row)
      : params_(params), place_(place), chunk_(chunk), row_(row), span_(params.spans[chunk.span]) {}

  __device__ bool has(int head) const { return place_.is_active && head < chunk_.count; }
  __device__ int32_t tensor() const { return span_.tensor; }
  __device__ int32_t head_of_tensor(int head) const {
    return span_.first_head + chunk_.head + head;
  }

  // Zeros where there is nothing, so that sums may run over all lanes.
  __device__ void load() {
    const T* in = static_cast<const T*>(span_.in) + in_offset(params_, span_, row_, chunk_.head);
    CUTE_UNROLL
    for (int head = 0; head < kHeadsPerChunk; ++head) {
      if (has(head)) {
        cute::copy(VectorCopy<T, kVec>{},
                   lane_of_head<kVec>(in + head * params_.head_dim, place_.lane, params_.head_dim),
                   fragments_[head]);
      } else {
        cute::clear(fragments_[head]);
      }
    }
  }

  // z = x + bias. Worked out twice rather than kept: as floats it takes twice the registers.
  __device__ void biased(int head, float (&z)[2 * kVec]) const {
    to_floats<T, kVec>(fragments_[head], z);
    if (const void* bias = params_.bias[span_.tensor]; bias != nullptr && has(head)) {
      float b[2 * kVec];
      load_parameter<T, kVec>(bias, params_.bias_is_float, head_of_tensor(head), place_.lane,
                              params_.head_dim, b);
      CUTE_UNROLL
      for (int i = 0; i < 2 * kVec; ++i) {
        z[i] += b[i];
      }
    }
  }

  __device__ float sum_of_squares(int head) const {
    float z[2 * kVec];
    biased(head, z);
    float sum = 0.0F;
    CUTE_UNROLL
    for (int i = 0; i < 2 * kVec; ++i) {
      sum += z[i] * z[i];
    }
    return sum;
  }

  template <Rope kRope>
  __device__ void store(int head, const float (&z)[2 * kVec], const Rotation<kVec>& rotation,
                        float scale) {
    float y[2 * kVec];
    rotate<kRope>(rotation, scale, z, y);
    from_floats<T, kVec>(y, fragments_[head]);
    T* out = static_cast<T*>(span_.out) + out_offset(params_, span_, row_, chunk_.head + head);
    cute::copy(VectorCopy<T, kVec>{}, fragments_[head],
               lane_of_head<kVec>(out, place_.lane, params_.head_dim));
  }

  // Cosines and sines of the row; an idle lane reads nothing.
  __device__ void load_angles(float (&cos)[kVec], float (&sin)[kVec]) const {
    if (params_.rope != Rope::kNone && place_.is_active) {
      load_pairs(params_, params_.cos, row_.seq, place_.lane, TableCopy(), cos);
      load_pairs(params_, params_.sin, row_.seq, place_.lane, TableCopy(), sin);
    }
  }

 private:
  using Fragment = decltype(make_fragment<T, kVec>());

  const NormRopeParams& params_;
  const Place place_;
  const Chunk chunk_;
  const RowPlace row_;
  const Span& span_;
  Fragment fragments_[kHeadsPerChunk];
};

// Calls visit.operator()<kRope>() with the style of the launch.
template <class Visit>
__device__ void with_rope(Rope rope, const Visit& visit) {
  switch (rope) {
    case Rope::kNone:
      visit.template operator()<Rope::kNone>();
      break;
    case Rope::kInterleaved:
      visit.template operator()<Rope::kInterleaved>();
      break;
    case Rope::kHalfSplit:
      visit.template operator()<Rope::kHalfSplit>();
      break;
  }
}

template <class T, int kVec>
__global__ void __launch_bounds__(kPerHeadThreads, 2)
    per_head(const __grid_constant__ NormRopeParams params) {
  __shared__ __align__(16) float weights[2][kMaxHeadDim];
  for (int i = threadIdx.x; i < 2 * kMaxHeadDim; i += kPerHeadThreads) {
    const int tensor = i / kMaxHeadDim;
    const int d = i % kMaxHeadDim;
    const void* weight = params.weight[tensor];
    float value = 1.0F;
    if (weight != nullptr && d < params.head_dim) {
      value = params.weight_is_float ? static_cast<const float*>(weight)[d]
                                     : static_cast<float>(static_cast<const T*>(weight)[d]);
    }
    weights[tensor][d] = value;
  }
  __syncthreads();

  const Place place = place_of<kVec>(params, threadIdx.x);
  const uint32_t num_slots = kPerHeadThreads >> params.lanes_log2;
  // All threads make all rounds, with nothing to do in some: shuffles need whole warps.
  for (uint32_t first = blockIdx.x * num_slots; first < params.num_tasks;
       first += gridDim.x * num_slots) {
    const uint32_t task = first + place.slot;
    const bool has_task = task < params.num_tasks;
    const uint32_t row = has_task ? params.chunks_per_row.quotient(task) : 0;
    Chunk chunk;
    if (has_task) {
      chunk = chunk_at(params, task - row * params.chunks_per_row.value);
    }
    ChunkOfRow<T, kVec> data(params, place, chunk, row_place(params, row));
    data.load();
    float cos[kVec] = {};
    float sin[kVec] = {};
    data.load_angles(cos, sin);

    float scale[kHeadsPerChunk];
    CUTE_UNROLL
    for (int head = 0; head < kHeadsPerChunk; ++head) {
      scale[head] = params.norm == Norm::kNone ? 0.0F : data.sum_of_squares(head);
    }
    for (int step = 1 << params.lanes_log2 >> 1; step > 0; step >>= 1) {
      CUTE_UNROLL
      for (int head = 0; head < kHeadsPerChunk; ++head) {
        scale[head] += __shfl_xor_sync(0xffffffffU, scale[head], step);
      }
    }
    const float per_elem = 1.0F / static_cast<float>(params.head_dim);
    float weight[2 * kVec];
    const float* from = &weights[data.tensor()][place.is_active ? place.lane * kVec : 0];
    CUTE_UNROLL
    for (int i = 0; i < kVec; ++i) {
      weight[i] = from[i];
      weight[kVec + i] = from[params.head_dim / 2 + i];
    }
    with_rope(params.rope, [&]<Rope kRope>() {
      Rotation<kVec> rotation;
      weigh<kRope>(weight, cos, sin, rotation);
      CUTE_UNROLL
      for (int head = 0; head < kHeadsPerChunk; ++head) {
        if (data.has(head)) {
          const float root = rsqrtf(scale[head] * per_elem + params.eps);
          float z[2 * kVec];
          data.biased(head, z);
          data.template store<kRope>(head, z, rotation, params.norm == Norm::kNone ? 1.0F : root);
        }
      }
    });
  }
}

template <class T, int kVec>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    across_heads(const __grid_constant__ NormRopeParams params) {
  constexpr int kMaxWarps = kMaxRowThreads / 32;
  // Two sets in turn: a warp may be a row ahead of one that still reads, and never two.
  __shared__ float partial[2][2][kMaxWarps];
  const Place place = place_of<kVec>(params, threadIdx.x);
  Chunk chunk;
  if (place.slot < params.chunks_per_row.value) {
    chunk = chunk_at(params, place.slot);
  }
  const int num_warps = blockDim.x / 32;
  const int warp = threadIdx.x / 32;
  int set = 0;
  for (uint32_t row = blockIdx.x; row < params.num_rows; row += gridDim.x, set ^= 1) {
    ChunkOfRow<T, kVec> data(params, place, chunk, row_place(params, row));
    data.load();
    float cos[kVec] = {};
    float sin[kVec] = {};
    data.load_angles(cos, sin);

    float sum = 0.0F;
    CUTE_UNROLL
    for (int head = 0; head < kHeadsPerChunk; ++head) {
      sum += data.sum_of_squares(head);
    }
    float q_sum = data.tensor() == 0 ? sum : 0.0F;
    float k_sum = data.tensor() == 0 ? 0.0F : sum;
    CUTE_UNROLL
    for (int step = 16; step > 0; step >>= 1) {
      q_sum += __shfl_xor_sync(0xffffffffU, q_sum, step);
      k_sum += __shfl_xor_sync(0xffffffffU, k_sum, step);
    }
    if (threadIdx.x % 32 == 0) {
      partial[set][0][warp] = q_sum;
      partial[set][1][warp] = k_sum;
    }
    __syncthreads();
    float total = 0.0F;
    for (int i = 0; i < num_warps; ++i) {
      total += partial[set][data.tensor()][i];
    }
    const int32_t tensor = data.tensor();
    const float elems = static_cast<float>(params.num_heads[tensor]) * params.head_dim;
    const float scale = rsqrtf(total / elems + params.eps);
    with_rope(params.rope, [&]<Rope kRope>() {
      // Each head has weights of its own: they go into z, and the rotation stays as it is.
      float ones[2 * kVec];
      CUTE_UNROLL
      for (int i = 0; i < 2 * kVec; ++i) {
        ones[i] = 1.0F;
      }
      Rotation<kVec> rotation;
      weigh<kRope>(ones, cos, sin, rotation);
      CUTE_UNROLL
      for (int head = 0; head < kHeadsPerChunk; ++head) {
        if (data.has(head)) {
          float z[2 * kVec];
          data.biased(head, z);
          if (const void* from = params.weight[tensor]; from != nullptr) {
            float weight[2 * kVec];
            load_parameter<T, kVec>(from, params.weight_is_float, data.head_of_tensor(head),
                                    place.lane, params.head_dim, weight);
            CUTE_UNROLL
            for (int i = 0; i < 2 * kVec; ++i) {
              z[i] *= weight[i];
            }
          }
          data.template store<kRope>(head, z, rotation, scale);
        }
      }
    });
  }
}

}  // namespace norm_rope
}  // namespace ulysses_ops
