#include "plan.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace ulysses_ops {
namespace {

// The longest pitch that a 2-D copy takes, in bytes (device attribute "max pitch").
constexpr int64_t kMaxPitch = 0x7fffffff;

// The widest element that torch has, in bytes, and how far strides may reach, in elements: then
// offsets in bytes are whole in 64 bits.
constexpr int64_t kMaxItem = 16;
constexpr int64_t kFarthest = std::numeric_limits<int64_t>::max() / kMaxItem;

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

int64_t start_of(const std::vector<int64_t>& splits, const std::vector<int64_t>& starts,
                 int64_t rank) {
  return starts.empty() ? std::accumulate(splits.begin(), splits.begin() + rank, int64_t{0})
                        : starts[rank];
}

// Whether the sizes can be added up, and multiplied, in 64 bits. An empty dimension counts as one,
// since products of some of the dimensions are needed too.
bool sum_fits(const std::vector<int64_t>& sizes) {
  int64_t total = 0;
  return std::none_of(sizes.begin(), sizes.end(),
                      [&](int64_t size) { return __builtin_add_overflow(total, size, &total); });
}

bool product_fits(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  return std::none_of(sizes.begin(), sizes.end(), [&](int64_t size) {
    return __builtin_mul_overflow(product, std::max<int64_t>(size, 1), &product);
  });
}

void check_starts(const std::string& what, const std::vector<int64_t>& splits,
                  const std::vector<int64_t>& starts, int64_t total, bool may_overlap) {
  if (starts.empty()) {
    return;
  }
  if (starts.size() != splits.size()) {
    throw std::invalid_argument("plan: " + what + "_starts has " + std::to_string(starts.size()) +
                                " entries; give one per rank");
  }
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (size_t rank = 0; rank < starts.size(); ++rank) {
    // Never added up: hostile values may be as large as there are.
    if (starts[rank] < 0 || total < 0 || starts[rank] > total - splits[rank]) {
      throw std::invalid_argument("plan: " + what + " range of rank " + std::to_string(rank) +
                                  " starts at " + std::to_string(starts[rank]) + " and has " +
                                  std::to_string(splits[rank]) + "; it must lie in the " +
                                  std::to_string(total) + " that there are");
    }
    if (splits[rank] > 0) {
      ranges.emplace_back(starts[rank], splits[rank]);
    }
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size() && !may_overlap; ++i) {
    if (ranges[i - 1].first + ranges[i - 1].second > ranges[i].first) {
      throw std::invalid_argument("plan: " + what +
                                  " ranges of two ranks overlap where they are put together; "
                                  "give starts that are apart");
    }
  }
}

// Strides with every size-1 dimension given the stride that a dense tensor would have.
std::array<int64_t, 4> meaningful_strides(const std::array<int64_t, 4>& shape,
                                          const std::array<int64_t, 4>& strides) {
  std::array<int64_t, 4> result = strides;
  if (shape[3] == 1) {
    result[3] = 1;
  }
  for (int dim = 2; dim >= 0; --dim) {
    if (shape[dim] == 1 && __builtin_mul_overflow(result[dim + 1], shape[dim + 1], &result[dim])) {
      result[dim] = std::numeric_limits<int64_t>::max();
    }
  }
  return result;
}

PitchedCopy without_slices(PitchedCopy copy) {
  if (copy.num_slices == 1) {
    copy.src_slice_pitch = copy.dst_slice_pitch = 0;
  }
  return copy;
}

// Fewer, longer rows where both sides are dense: the copy engine is fastest on flat copies.
PitchedCopy coalesced(PitchedCopy copy) {
  if (copy.num_rows == 1) {
    copy.src_pitch = copy.dst_pitch = copy.row_bytes;
  }
  if (copy.src_pitch != copy.row_bytes || copy.dst_pitch != copy.row_bytes) {
    return without_slices(copy);
  }
  copy.row_bytes *= copy.num_rows;
  copy.num_rows = 1;
  copy.src_pitch = copy.dst_pitch = copy.row_bytes;
  if (copy.num_slices == 1) {
    return without_slices(copy);
  }
  if (copy.src_slice_pitch == copy.row_bytes && copy.dst_slice_pitch == copy.row_bytes) {
    copy.row_bytes *= copy.num_slices;
    copy.num_slices = 1;
    copy.src_pitch = copy.dst_pitch = copy.row_bytes;
  } else if (std::max(copy.src_slice_pitch, copy.dst_slice_pitch) <= kMaxPitch) {
    copy.num_rows = std::exchange(copy.num_slices, 1);
    copy.src_pitch = copy.src_slice_pitch;
    copy.dst_pitch = copy.dst_slice_pitch;
  }
  return without_slices(copy);
}

}  // namespace

int64_t Layout::seq_global() const { return seq_starts.empty() ? sum(seq_splits) : seq_total; }
int64_t Layout::num_heads() const { return head_starts.empty() ? sum(head_splits) : head_total; }
int64_t Layout::seq_start(int64_t rank) const { return start_of(seq_splits, seq_starts, rank); }
int64_t Layout::head_start(int64_t rank) const { return start_of(head_splits, head_starts, rank); }

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
  if (layout.batch < 0 || layout.head_dim < 0 || layout.itemsize < 1 ||
      layout.itemsize > kMaxItem) {
    throw std::invalid_argument("plan: batch=" + std::to_string(layout.batch) +
                                " and head_dim=" + std::to_string(layout.head_dim) +
                                " must not be negative, and itemsize=" +
                                std::to_string(layout.itemsize) + " lie in 1 to 16");
  }
  if (!sum_fits(layout.seq_splits) || !sum_fits(layout.head_splits)) {
    throw std::invalid_argument("plan: the splits add up to more than 2^63; give sizes of tensors");
  }
  const bool scatter = layout.direction == Direction::kScatter;
  check_starts("seq", layout.seq_splits, layout.seq_starts, layout.seq_total, !scatter);
  check_starts("head", layout.head_splits, layout.head_starts, layout.head_total, scatter);
  // Every shape, pitch and offset of a window is at most this.
  if (!product_fits({layout.batch, layout.seq_global(), layout.num_heads(), layout.head_dim,
                     layout.itemsize})) {
    throw std::invalid_argument(
        "plan: shape " +
        to_string({layout.batch, layout.seq_global(), layout.num_heads(), layout.head_dim}) +
        " of " + std::to_string(layout.itemsize) +
        " bytes an element is more than 2^63 bytes; give sizes of tensors");
  }
}

bool is_pitched(const std::array<int64_t, 4>& shape, const std::array<int64_t, 4>& strides) {
  if (std::count(shape.begin(), shape.end(), 0) > 0) {
    return true;
  }
  const auto stride = meaningful_strides(shape, strides);
  if (stride[3] != 1) {
    return false;
  }
  // From the innermost dimension out, each must step over all of the one before.
  std::array<int, 3> order{2, 1, 0};
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return stride[a] < stride[b]; });
  int64_t extent = shape[3];
  for (const int dim : order) {
    if (shape[dim] > 1) {
      if (stride[dim] < extent || stride[dim] > kFarthest / shape[dim]) {
        return false;
      }
      extent += (shape[dim] - 1) * stride[dim];
    }
  }
  return extent <= kFarthest;
}

std::vector<PitchedCopy> plan_copies(const Layout& layout, int64_t rank,
                                     const std::array<int64_t, 4>& strides, int64_t peer) {
  const int64_t world_size = layout.world_size();
  const auto shape = layout.source_shape(rank, peer);
  const auto stride = meaningful_strides(shape, strides);
  const bool scatter = layout.direction == Direction::kScatter;
  const int64_t unit = layout.head_dim * layout.itemsize;  // bytes of one head of one row
  const int64_t head_pitch = stride[2] * layout.itemsize;

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
    if (layout.batch * rows * heads * unit == 0) {
      continue;
    }
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
    copy.dst_offset =
        scatter ? layout.seq_start(rank) * copy.dst_pitch : layout.head_start(rank) * unit;
    if (peer == kEveryRank) {
      copy.src_offset =
          scatter ? layout.head_start(dst) * head_pitch : layout.seq_start(dst) * copy.src_pitch;
    }
    if (heads == 1 || head_pitch == unit) {
      copies.push_back(coalesced(copy));
      continue;
    }
    copy.row_bytes = unit;
    for (int64_t head = 0; head < heads; ++head) {
      copies.push_back(coalesced(copy));
      copy.src_offset += head_pitch;
      copy.dst_offset += unit;
    }
  }
  return copies;
}

std::string to_string(const std::array<int64_t, 4>& shape) {
  return "[" + std::to_string(shape[0]) + ", " + std::to_string(shape[1]) + ", " +
         std::to_string(shape[2]) + ", " + std::to_string(shape[3]) + "]";
}

}  // namespace ulysses_ops
