#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <limits>

#include "../check.h"
#include "copy_engine.h"
#include "own_share.h"

namespace ulysses_ops {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kUnroll = 4;       // loads of a thread that are under way at once
constexpr int64_t kMaxBlocks = 2048;  // they take turns; a GPU runs about a thousand at once

// Slices of rows of vectors; a row is cut into pieces of lanes * kUnroll vectors.
struct Pieces {
  int64_t src_pitch;
  int64_t dst_pitch;
  int64_t src_slice_pitch;
  int64_t dst_slice_pitch;
  uint32_t num_pieces;  // of all rows of all slices
  uint32_t pieces_per_row;
  uint32_t rows_per_slice;
  uint32_t lanes;  // threads that share a piece
  int64_t vectors_per_row;
};

template <typename Vector>
__global__ void __launch_bounds__(kThreads)
    copy_pieces(char* __restrict__ dst, const char* __restrict__ src, Pieces pieces) {
  const uint32_t teams = kThreads / pieces.lanes;
  const uint32_t lane = threadIdx.x % pieces.lanes;
  for (uint32_t piece = blockIdx.x * teams + threadIdx.x / pieces.lanes; piece < pieces.num_pieces;
       piece += gridDim.x * teams) {
    const uint32_t row = piece / pieces.pieces_per_row;
    const uint32_t slice = row / pieces.rows_per_slice;
    const uint32_t row_of_slice = row - slice * pieces.rows_per_slice;
    const auto* from = reinterpret_cast<const Vector*>(src + slice * pieces.src_slice_pitch +
                                                       row_of_slice * pieces.src_pitch);
    auto* to = reinterpret_cast<Vector*>(dst + slice * pieces.dst_slice_pitch +
                                         row_of_slice * pieces.dst_pitch);
    const uint32_t piece_of_row = piece - row * pieces.pieces_per_row;
    const int64_t first = static_cast<int64_t>(piece_of_row) * pieces.lanes * kUnroll + lane;
    Vector held[kUnroll];
#pragma unroll
    for (uint32_t i = 0; i < kUnroll; ++i) {
      if (first + i * pieces.lanes < pieces.vectors_per_row) {
        held[i] = from[first + i * pieces.lanes];
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kUnroll; ++i) {
      if (first + i * pieces.lanes < pieces.vectors_per_row) {
        to[first + i * pieces.lanes] = held[i];
      }
    }
  }
}

using Kernel = void (*)(char*, const char*, Pieces);

// By the power of two bytes that a vector has.
constexpr Kernel kKernels[] = {copy_pieces<uint8_t>, copy_pieces<uint16_t>, copy_pieces<uint32_t>,
                               copy_pieces<uint2>, copy_pieces<uint4>};
constexpr int kWidest = std::size(kKernels) - 1;

int64_t ceil_div(int64_t dividend, int64_t divisor) { return (dividend + divisor - 1) / divisor; }

}  // namespace

void load_own_share() {
  for (const Kernel kernel : kKernels) {
    cudaFuncAttributes attributes{};
    UOPS_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)));
  }
}

void copy_own_share(const PitchedCopy& copy, char* dst_base, const char* src_base,
                    cudaStream_t stream) {
  char* dst = dst_base + copy.dst_offset;
  const char* src = src_base + copy.src_offset;
  // The widest vector that everything is a multiple of.
  const auto bits = reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) |
                    static_cast<uint64_t>(copy.row_bytes | copy.src_pitch | copy.dst_pitch |
                                          copy.src_slice_pitch | copy.dst_slice_pitch);
  const int width = std::min(std::countr_zero(bits), kWidest);
  const int64_t vectors = copy.row_bytes >> width;
  const int64_t rows = copy.num_rows * copy.num_slices;
  const auto lanes = static_cast<uint32_t>(std::min<int64_t>(
      kThreads,
      static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(ceil_div(vectors, kUnroll))))));
  const int64_t pieces_per_row = ceil_div(vectors, lanes * kUnroll);
  // The kernel counts pieces in 32 bits; what is longer is the driver's.
  if (pieces_per_row > std::numeric_limits<int32_t>::max() / rows) {
    issue_copy(copy, dst_base, src_base, stream);
    return;
  }
  const int64_t num_pieces = rows * pieces_per_row;
  const Pieces pieces{copy.src_pitch,
                      copy.dst_pitch,
                      copy.src_slice_pitch,
                      copy.dst_slice_pitch,
                      static_cast<uint32_t>(num_pieces),
                      static_cast<uint32_t>(pieces_per_row),
                      static_cast<uint32_t>(copy.num_rows),
                      lanes,
                      vectors};
  const auto blocks =
      static_cast<uint32_t>(std::min(ceil_div(num_pieces, kThreads / lanes), kMaxBlocks));
  kKernels[width]<<<blocks, kThreads, 0, stream>>>(dst, src, pieces);
  UOPS_CUDA_CHECK(cudaGetLastError());
}

}  // namespace ulysses_ops
