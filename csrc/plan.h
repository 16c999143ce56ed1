// Layout arithmetic of scatter and gather: shapes, strides and splits -> pitched copies. No torch,
// no CUDA.
//
//   scatter:  y_r[b, off_s(p) + s, h, d] = x_p[b, s, off_h(r) + h, d]
//   gather:   y_r[b, s, off_h(p) + h, d] = x_p[b, off_s(r) + s, h, d]
//
// r is the rank that receives, p a rank that sends, off_s and off_h where a rank's rows and heads
// start: the prefix sums of the splits, unless starts are given. A source is cut in the dimension
// that r indexes, where ranges may overlap (a head that several ranks need) and leave gaps; the
// window is put together in the dimension that p indexes, where ranges may leave gaps (rows that
// nobody sends) but not overlap.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace ulysses_ops {

enum class Direction { kScatter, kGather };

// Sends to every rank; a part already cut for one rank names that rank instead.
inline constexpr int64_t kEveryRank = -1;

// What all ranks know about one exchange. Sizes in elements, itemsize in bytes.
struct Layout {
  Direction direction = Direction::kScatter;
  int64_t batch = 0;
  int64_t head_dim = 0;
  int64_t itemsize = 0;
  std::vector<int64_t> seq_splits;   // rows of the sequence held by each rank
  std::vector<int64_t> head_splits;  // heads held by each rank
  // First row and first head of each rank, and how many there are in all. Without starts, ranges
  // follow each other and the totals are their sums.
  std::vector<int64_t> seq_starts = {};
  std::vector<int64_t> head_starts = {};
  int64_t seq_total = 0;
  int64_t head_total = 0;

  int64_t world_size() const { return static_cast<int64_t>(seq_splits.size()); }
  int64_t seq_global() const;
  int64_t num_heads() const;
  int64_t seq_start(int64_t rank) const;
  int64_t head_start(int64_t rank) const;
  // [batch, rows, heads, head_dim] of the tensor that `rank` sends; a part for `peer` when it is
  // not kEveryRank.
  std::array<int64_t, 4> source_shape(int64_t rank, int64_t peer = kEveryRank) const;
  // [batch, rows, heads, head_dim] of the window that `rank` receives into.
  std::array<int64_t, 4> window_shape(int64_t rank) const;
  int64_t window_bytes(int64_t rank) const;
};

// `num_slices` slices of `num_rows` rows of `row_bytes` bytes. Offsets and pitches in bytes.
struct PitchedCopy {
  int64_t peer = 0;
  int64_t src_offset = 0;
  int64_t dst_offset = 0;
  int64_t row_bytes = 0;
  int64_t num_rows = 0;
  int64_t src_pitch = 0;
  int64_t dst_pitch = 0;
  int64_t num_slices = 0;
  int64_t src_slice_pitch = 0;
  int64_t dst_slice_pitch = 0;
};

// Throws std::invalid_argument, with a sentence, unless splits and starts describe one exchange of
// at most 2^63 bytes, so that no product and no sum of its sizes overflows.
void check_layout(const Layout& layout);

// Whether a source with these strides (in elements) can be read where it is: head_dim dense, and
// rows, heads and batches not overlapping, in whatever order they are nested, and no further apart
// than 64-bit offsets in bytes reach. Strides of dimensions of size 1 mean nothing and are ignored.
bool is_pitched(const std::array<int64_t, 4>& shape, const std::array<int64_t, 4>& strides);

// The copies that `rank` issues, peers first in rotated order (rank + 1, rank + 2, ...), its own
// share last. With `peer` given, the source is a part for that rank alone. A share is one copy
// where heads and head_dim of the source are dense, else one for each head. Empty copies are left
// out.
std::vector<PitchedCopy> plan_copies(const Layout& layout, int64_t rank,
                                     const std::array<int64_t, 4>& strides,
                                     int64_t peer = kEveryRank);

std::string to_string(const std::array<int64_t, 4>& shape);

}  // namespace ulysses_ops
