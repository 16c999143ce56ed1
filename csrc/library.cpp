// `_C`: the plan, for machines with and without CUDA. Loaded by torch.ops.load_library; no Python
// module.
#include <torch/csrc/stable/library.h>

#include <array>
#include <vector>

#include "check.h"
#include "plan.h"

namespace ulysses_ops {
namespace {

// Ten numbers a copy, in the order of PitchedCopy's members.
std::vector<int64_t> plan_copies_op(bool gather, int64_t batch, int64_t head_dim, int64_t itemsize,
                                    std::vector<int64_t> seq_splits,
                                    std::vector<int64_t> head_splits,
                                    std::vector<int64_t> seq_starts,
                                    std::vector<int64_t> head_starts, int64_t seq_total,
                                    int64_t head_total, int64_t rank, std::vector<int64_t> strides,
                                    int64_t peer) {
  Layout layout{gather ? Direction::kGather : Direction::kScatter,
                batch,
                head_dim,
                itemsize,
                std::move(seq_splits),
                std::move(head_splits),
                std::move(seq_starts),
                std::move(head_starts),
                seq_total,
                head_total};
  check_layout(layout);
  const int64_t world_size = layout.world_size();
  STD_TORCH_CHECK(rank >= 0 && rank < world_size && peer >= kEveryRank && peer < world_size,
                  "plan: rank=", rank, " and peer=", peer, " must lie in [0, ", world_size, ")");
  STD_TORCH_CHECK(strides.size() == 4, "plan: ", strides.size(), " strides given, 4 are needed");
  const std::array<int64_t, 4> stride{strides[0], strides[1], strides[2], strides[3]};
  const auto shape = layout.source_shape(rank, peer);
  STD_TORCH_CHECK(is_pitched(shape, stride), "plan: strides ", to_string(stride),
                  " of a source of shape ", to_string(shape),
                  " are not dense in head_dim, or overlap; copy the source first");
  std::vector<int64_t> flat;
  for (const PitchedCopy& copy : plan_copies(layout, rank, stride, peer)) {
    flat.insert(flat.end(), {copy.peer, copy.src_offset, copy.dst_offset, copy.row_bytes,
                             copy.num_rows, copy.src_pitch, copy.dst_pitch, copy.num_slices,
                             copy.src_slice_pitch, copy.dst_slice_pitch});
  }
  return flat;
}

}  // namespace
}  // namespace ulysses_ops

STABLE_TORCH_LIBRARY_FRAGMENT(ulysses, m) {
  m.def(
      "_plan_copies(bool gather, int batch, int head_dim, int itemsize, int[] seq_splits, int[] "
      "head_splits, "
      "int[] seq_starts, int[] head_starts, int seq_total, int head_total, int rank, int[] "
      "strides, "
      "int peer) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(ulysses, CompositeExplicitAutograd, m) {
  m.impl("_plan_copies", TORCH_BOX(&ulysses_ops::plan_copies_op));
}
