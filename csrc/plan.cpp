#include "plan.h"

#include <numeric>
#include <stdexcept>

namespace ulysses_ops {
namespace {

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

int64_t offset_of(const std::vector<int64_t>& splits, int64_t rank) {
  return std::accumulate(splits.begin(), splits.begin() + rank, int64_t{0});
}

// Strides with every size-1 dimension given the stride that a dense tensor would have.
std::array<int64_t, 4> meaningful_strides(const std::array<int64_t, 4>& shape,
                                          const std::array<int64_t, 4>& strides) {
  std::array<int64_t, 4> result = strides;
  if (shape[3] == 1) {
    result[3] = 1;
  }
  for (int dim = 2; dim >= 0; --dim) {
    if (shape[dim] == 1) {
      result[dim] = result[dim + 1] * shape[dim + 1];
    }
  }
  return result;
}

// Fewer, longer rows where both sides are dense: the copy engine is fastest on flat copies.
PitchedCopy coalesced(PitchedCopy copy) {
  if (copy.num_rows == 1) {
    copy.src_pitch = copy.dst_pitch = copy.row_bytes;
  }
  if (copy.src_pitch == copy.row_bytes && copy.dst_pitch == copy.row_bytes) {
    copy.row_bytes *= copy.num_rows;
    copy.num_rows = copy.num_slices;
    copy.src_pitch = copy.num_slices == 1 ? copy.row_bytes : copy.src_slice_pitch;
    copy.dst_pitch = copy.num_slices == 1 ? copy.row_bytes : copy.dst_slice_pitch;
    copy.num_slices = 1;
    copy.src_slice_pitch = copy.dst_slice_pitch = 0;
    if (copy.src_pitch == copy.row_bytes && copy.dst_pitch == copy.row_bytes) {
      copy.row_bytes *= copy.num_rows;
      copy.num_rows = 1;
      copy.src_pitch = copy.dst_pitch = copy.row_bytes;
    }
  }
  if (copy.num_slices == 1) {
    copy.src_slice_pitch = copy.dst_slice_pitch = 0;
  }
  return copy;
}

}  // namespace

int64_t Layout::seq_global() const { return sum(seq_splits); }
int64_t Layout::num_heads() const { return sum(head_splits); }

std::array<int64_t, 4> Layout::source_shape(int64_t rank, int64_t peer) const {
  if (direction == Direction::kScatter) {
    return {batch, seq_splits[rank], peer == kEveryRank ? num_heads() : head_splits[peer],
            head_dim};
  }
  return {batch, peer == kEveryRank ? seq_global() : seq_splits[peer], head_splits[rank], head_dim};
}

std::array<int64_t, 4> Layout::window_shape(int64_t rank) const {
  if (direction == Direction::kScatter) {
    return {batch, seq_global(), head_splits[rank], head_dim};
  }
  return {batch, seq_splits[rank], num_heads(), head_dim};
}

int64_t Layout::window_bytes(int64_t rank) const {
  const auto shape = window_shape(rank);
  return shape[0] * shape[1] * shape[2] * shape[3] * itemsize;
}

void check_layout(const Layout& layout) {
  if (layout.seq_splits.empty() || layout.seq_splits.size() != layout.head_splits.size()) {
    throw std::invalid_argument("plan: seq_splits has " + std::to_string(layout.seq_splits.size()) +
                                " entries and head_splits " +
                                std::to_string(layout.head_splits.size()) +
                                "; give one of each per rank");
  }
  for (const auto* splits : {&layout.seq_splits, &layout.head_splits}) {
    for (const int64_t size : *splits) {
      if (size < 0) {
        throw std::invalid_argument("plan: a split of " + std::to_string(size) +
                                    " is negative; give sizes >= 0");
      }
    }
  }
  if (layout.batch < 0 || layout.head_dim < 0 || layout.itemsize <= 0) {
    throw std::invalid_argument("plan: batch=" + std::to_string(layout.batch) +
                                ", head_dim=" + std::to_string(layout.head_dim) + ", itemsize=" +
                                std::to_string(layout.itemsize) + " must not be negative");
  }
}

bool is_pitched(const std::array<int64_t, 4>& shape, const std::array<int64_t, 4>& strides) {
  const auto stride = meaningful_strides(shape, strides);
  const int64_t row = shape[2] * shape[3];
  if (shape[0] * shape[1] * row == 0) {
    return true;
  }
  const bool dense_row = stride[3] == 1 && stride[2] == shape[3];
  const bool rows_apart = stride[1] >= row;
  const bool slices_apart = stride[0] >= stride[1] * (shape[1] - 1) + row;
  return dense_row && rows_apart && slices_apart;
}

std::vector<PitchedCopy> plan_copies(const Layout& layout, int64_t rank,
                                     const std::array<int64_t, 4>& strides, int64_t peer) {
  const int64_t world_size = layout.world_size();
  const auto shape = layout.source_shape(rank, peer);
  const auto stride = meaningful_strides(shape, strides);
  const bool scatter = layout.direction == Direction::kScatter;
  const int64_t unit = layout.head_dim * layout.itemsize;  // bytes of one head of one row

  std::vector<PitchedCopy> copies;
  copies.reserve(world_size);
  for (int64_t step = 1; step <= world_size; ++step) {
    const int64_t dst = (rank + step) % world_size;
    if (peer != kEveryRank && peer != dst) {
      continue;
    }
    // Scatter sends a range of heads of all own rows; gather sends a range of rows of all own
    // heads.
    const int64_t rows = scatter ? layout.seq_splits[rank] : layout.seq_splits[dst];
    const int64_t heads = scatter ? layout.head_splits[dst] : layout.head_splits[rank];
    const auto window = layout.window_shape(dst);
    PitchedCopy copy;
    copy.peer = dst;
    copy.row_bytes = heads * unit;
    copy.num_rows = rows;
    copy.num_slices = layout.batch;
    copy.src_pitch = stride[1] * layout.itemsize;
    copy.src_slice_pitch = stride[0] * layout.itemsize;
    copy.dst_pitch = window[2] * unit;
    copy.dst_slice_pitch = window[1] * copy.dst_pitch;
    copy.dst_offset = scatter ? offset_of(layout.seq_splits, rank) * copy.dst_pitch
                              : offset_of(layout.head_splits, rank) * unit;
    if (peer == kEveryRank) {
      copy.src_offset = scatter ? offset_of(layout.head_splits, dst) * unit
                                : offset_of(layout.seq_splits, dst) * copy.src_pitch;
    }
    if (copy.row_bytes * copy.num_rows * copy.num_slices > 0) {
      copies.push_back(coalesced(copy));
    }
  }
  return copies;
}

std::string to_string(const std::array<int64_t, 4>& shape) {
  return "[" + std::to_string(shape[0]) + ", " + std::to_string(shape[1]) + ", " +
         std::to_string(shape[2]) + ", " + std::to_string(shape[3]) + "]";
}

}  // namespace ulysses_ops
