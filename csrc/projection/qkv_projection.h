// Projection of Q, K and V with RMSNorm and RoPE in its epilogue: what a launch is told, and the
// order of its tiles. No CUDA and no torch, so that the host can check it
// (tests/cpp/qkv_projection_test).
//
//   z = x W^T + b
//   q, k: n = z * weight / sqrt(mean(z^2) + eps) over a head;  y_a = n_a cos - n_b sin,
//         y_b = n_b cos + n_a sin      for every pair (a, b) of the head
//   v:    y = z
//
// NOTE [columns]: the rows of W are heads of kHeadDim, first those of one destination (of Q, then
// K, then V), then those of the next. A span is what of one of the three one destination gets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../kernels/norm_rope.h"

namespace ulysses_ops {

inline constexpr int32_t kProjectionHeadDim = 128;
inline constexpr int32_t kMaxDestinations = 10;
inline constexpr int32_t kMaxProjectionSpans = 3 * kMaxDestinations;

enum class Part : int32_t { kQ, kK, kV };

// Heads that lie in one output. Strides in elements.
struct ProjectionSpan {
  void* out = nullptr;
  int64_t out_batch = 0;
  int64_t out_row = 0;
  int32_t first_head = 0;  // among the columns
  int32_t destination = 0;
  Part part = Part::kV;
};

struct ProjectionParams {
  ProjectionSpan spans[kMaxProjectionSpans];
  const void* bias = nullptr;                // (columns,); null: none
  const void* norm[2] = {nullptr, nullptr};  // (kHeadDim,) for Q and K; null: all ones
  const float* cos = nullptr;                // (S, table_width)
  const float* sin = nullptr;
  int32_t last = 0;             // destination that is computed last, and so not counted
  int32_t* progress = nullptr;  // by destination, rises as warps have stored heads; null: untold
  int32_t num_spans = 0;
  int32_t num_heads = 0;    // of all spans
  int32_t num_rows = 0;     // batch * sequence
  int32_t depth = 0;        // elements of a row of x
  int32_t table_width = 0;  // D/2, or D with each value at both places of its pair
  Divisor seq;
  float eps = 0.0F;
  Rope rope = Rope::kNone;
  bool normalises = false;
  bool norm_is_float = false;  // else of the type of the elements
};

// The span of a head.
UOPS_HOST_DEVICE int32_t span_at(const ProjectionParams& params, int32_t head) {
  int32_t span = 0;
  for (int32_t i = 1; i < params.num_spans; ++i) {
    span += head >= params.spans[i].first_head ? 1 : 0;
  }
  return span;
}

// The tiles of a launch by the order in which clusters take them: destination after destination,
// and of one, a block of `rows_at_once` tiles of rows after the other, so that what clusters which
// run at once read of x and of W stays in the L2 cache.
struct TileOrder {
  struct Tile {
    int32_t row = 0;
    int32_t column = 0;
  };
  // Neighbouring columns of tiles.
  struct Slab {
    int32_t first_tile = 0;  // tiles of slabs that come before
    int32_t first_column = 0;
    int32_t num_columns = 0;
  };

  Slab slabs[kMaxDestinations];
  int32_t num_slabs = 0;
  int32_t num_rows = 0;  // tiles down
  int32_t rows_at_once = 1;
  int32_t size = 0;  // tiles

  UOPS_HOST_DEVICE Tile at(int32_t index) const {
    int32_t which = 0;
    for (int32_t i = 1; i < num_slabs; ++i) {
      which += index >= slabs[i].first_tile ? 1 : 0;
    }
    const Slab& slab = slabs[which];
    const int32_t in_block = rows_at_once * slab.num_columns;
    const int32_t in_slab = index - slab.first_tile;
    const int32_t first = in_slab / in_block * rows_at_once;
    const int32_t rest = in_slab % in_block;
    const int32_t left = num_rows - first;
    const int32_t rows = left < rows_at_once ? left : rows_at_once;
    return {first + rest % rows, slab.first_column + rest / rows};
  }
};

// Blocks of like sizes whose part of x, `row_bytes` for each tile of rows, leaves most of the L2
// cache to the rest.
inline int32_t rows_at_once(int32_t num_rows, int64_t row_bytes) {
  constexpr int64_t kBlockBytes = 16 << 20;
  const auto most = static_cast<int32_t>(std::clamp<int64_t>(kBlockBytes / row_bytes, 1, num_rows));
  const int32_t blocks = (num_rows + most - 1) / most;
  return (num_rows + blocks - 1) / blocks;
}

// `heads` are those of each destination, in the order of the columns; `order` names destinations. A
// tile with heads of two of them comes with the earlier one.
inline TileOrder order_tiles(int32_t num_rows, int64_t row_bytes, int32_t heads_per_tile,
                             const std::vector<int32_t>& heads, const std::vector<int32_t>& order) {
  std::vector<int32_t> first_head(heads.size() + 1, 0);
  for (size_t i = 0; i < heads.size(); ++i) {
    first_head[i + 1] = first_head[i] + heads[i];
  }
  std::vector<bool> taken((first_head.back() + heads_per_tile - 1) / heads_per_tile, false);
  TileOrder result;
  result.num_rows = num_rows;
  result.rows_at_once = rows_at_once(num_rows, row_bytes);
  for (const int32_t destination : order) {
    int32_t column = first_head[destination] / heads_per_tile;
    int32_t end = (first_head[destination + 1] + heads_per_tile - 1) / heads_per_tile;
    while (column < end && taken[column]) {
      ++column;
    }
    while (column < end && taken[end - 1]) {
      --end;
    }
    if (heads[destination] == 0 || column == end) {
      continue;
    }
    std::fill(taken.begin() + column, taken.begin() + end, true);
    result.slabs[result.num_slabs++] = {result.size, column, end - column};
    result.size += num_rows * (end - column);
  }
  return result;
}

}  // namespace ulysses_ops
