// Replays plans over byte buffers, one per simulated rank, and compares with the layout equations
// of plan.h element by element. If this passes, a wrong result on a device is a fault of transport
// or synchronisation.
#include "../../csrc/plan.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>

using namespace ulysses_ops;

namespace {

int failures = 0;

void expect(bool condition, const std::string& what) {
  if (!condition) {
    ++failures;
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  }
}

using Buffer = std::vector<int32_t>;
constexpr int64_t kItem = sizeof(int32_t);

int64_t start_of(const std::vector<int64_t>& splits, const std::vector<int64_t>& starts,
                 int64_t rank) {
  return starts.empty() ? std::accumulate(splits.begin(), splits.begin() + rank, int64_t{0})
                        : starts[rank];
}

// The element of the global tensor [batch, seq, heads, head_dim].
int32_t value_at(const Layout& layout, int64_t b, int64_t s, int64_t h, int64_t d) {
  return static_cast<int32_t>(
             ((b * layout.seq_global() + s) * layout.num_heads() + h) * layout.head_dim + d) +
         1;
}

// Calls visit(b, s, h, d, value) over one rank's share of the global tensor.
void for_each(const Layout& layout, int64_t rank, bool by_sequence,
              const std::function<void(int64_t, int64_t, int64_t, int64_t, int32_t)>& visit) {
  const int64_t rows = by_sequence ? layout.seq_splits[rank] : layout.seq_global();
  const int64_t heads = by_sequence ? layout.num_heads() : layout.head_splits[rank];
  const int64_t first_row = by_sequence ? start_of(layout.seq_splits, layout.seq_starts, rank) : 0;
  const int64_t first_head =
      by_sequence ? 0 : start_of(layout.head_splits, layout.head_starts, rank);
  for (int64_t b = 0; b < layout.batch; ++b) {
    for (int64_t s = 0; s < rows; ++s) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t d = 0; d < layout.head_dim; ++d) {
          visit(b, s, h, d, value_at(layout, b, first_row + s, first_head + h, d));
        }
      }
    }
  }
}

void apply(const PitchedCopy& copy, Buffer& dst, const Buffer& src) {
  for (int64_t slice = 0; slice < copy.num_slices; ++slice) {
    for (int64_t row = 0; row < copy.num_rows; ++row) {
      const int64_t to = copy.dst_offset + slice * copy.dst_slice_pitch + row * copy.dst_pitch;
      const int64_t from = copy.src_offset + slice * copy.src_slice_pitch + row * copy.src_pitch;
      const bool inside =
          to >= 0 && to + copy.row_bytes <= static_cast<int64_t>(dst.size()) * kItem && from >= 0 &&
          from + copy.row_bytes <= static_cast<int64_t>(src.size()) * kItem;
      expect(inside, "a planned row lies inside both buffers");
      if (inside) {
        std::memcpy(reinterpret_cast<char*>(dst.data()) + to,
                    reinterpret_cast<const char*>(src.data()) + from, copy.row_bytes);
      }
    }
  }
}

// Whether some rank sends this row, or this head, of a window.
bool is_sent(const std::vector<int64_t>& splits, const std::vector<int64_t>& starts,
             int64_t place) {
  for (size_t rank = 0; rank < splits.size(); ++rank) {
    const int64_t start = start_of(splits, starts, static_cast<int64_t>(rank));
    if (place >= start && place < start + splits[rank]) {
      return true;
    }
  }
  return false;
}

// `width` times the heads of a row in memory: 3 for the view of a fused projection; 0 for heads
// outermost, as (B, H, S, D) is seen through a transposed view.
void check_exchange(const Layout& layout, int64_t width, const std::string& name) {
  const bool scatter = layout.direction == Direction::kScatter;
  const int64_t world_size = layout.world_size();
  std::vector<Buffer> windows;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    windows.emplace_back(layout.window_bytes(rank) / kItem, 0);
  }
  for (int64_t rank = 0; rank < world_size; ++rank) {
    const auto shape = layout.source_shape(rank);
    const int64_t row = width * shape[2] * shape[3];
    const int64_t slice = std::max<int64_t>(width, 1) * shape[1] * shape[2] * shape[3];
    const std::array<int64_t, 4> strides =
        width > 0 ? std::array<int64_t, 4>{slice, row, shape[3], 1}
                  : std::array<int64_t, 4>{slice, shape[3], shape[1] * shape[3], 1};
    Buffer source(shape[0] * slice, -1);
    for_each(layout, rank, scatter, [&](int64_t b, int64_t s, int64_t h, int64_t d, int32_t value) {
      source[b * strides[0] + s * strides[1] + h * strides[2] + d] = value;
    });
    expect(is_pitched(shape, strides), name + ": the source is readable by pitch");
    for (const PitchedCopy& copy : plan_copies(layout, rank, strides)) {
      apply(copy, windows[copy.peer], source);
    }
  }
  for (int64_t rank = 0; rank < world_size; ++rank) {
    int64_t index = 0;
    bool right = true;
    const auto& splits = scatter ? layout.seq_splits : layout.head_splits;
    const auto& starts = scatter ? layout.seq_starts : layout.head_starts;
    for_each(layout, rank, !scatter, [&](int64_t, int64_t s, int64_t h, int64_t, int32_t value) {
      const int32_t expected = is_sent(splits, starts, scatter ? s : h) ? value : 0;
      right = right && windows[rank][index++] == expected;
    });
    expect(right && index == static_cast<int64_t>(windows[rank].size()),
           name + ": window of rank " + std::to_string(rank));
  }
}

void check_parts(const Layout& layout) {
  // Parts sent one by one land where the whole would have.
  for (int64_t rank = 0; rank < layout.world_size(); ++rank) {
    for (int64_t peer = 0; peer < layout.world_size(); ++peer) {
      const auto shape = layout.source_shape(rank, peer);
      const std::array<int64_t, 4> dense{shape[1] * shape[2] * shape[3], shape[2] * shape[3],
                                         shape[3], 1};
      const auto part = plan_copies(layout, rank, dense, peer);
      const auto whole_shape = layout.source_shape(rank);
      const std::array<int64_t, 4> whole_dense{whole_shape[1] * whole_shape[2] * whole_shape[3],
                                               whole_shape[2] * whole_shape[3], whole_shape[3], 1};
      for (const PitchedCopy& copy : plan_copies(layout, rank, whole_dense)) {
        if (copy.peer == peer) {
          expect(
              part.size() == 1 && part[0].dst_offset == copy.dst_offset && part[0].src_offset == 0,
              "a part lands where its share of the whole lands");
        }
      }
    }
  }
}

bool is_refused(const Layout& layout) {
  try {
    check_layout(layout);
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void check_order_and_refusals() {
  const Layout layout{Direction::kScatter, 1, 8, 2, {4, 4, 4, 4}, {2, 2, 2, 2}};
  const auto copies = plan_copies(layout, 2, {256, 64, 8, 1});
  const std::vector<int64_t> expected{3, 0, 1, 2};
  for (size_t i = 0; i < copies.size(); ++i) {
    expect(copies[i].peer == expected[i], "peers are visited in rotated order, the own share last");
  }
  const std::array<int64_t, 4> shape{2, 4, 3, 8};
  expect(is_pitched(shape, {96, 24, 8, 1}), "dense");
  expect(is_pitched(shape, {288, 72, 8, 1}), "fused projection view");
  expect(is_pitched(shape, {96, 8, 32, 1}), "heads outermost");
  expect(is_pitched(shape, {24, 48, 8, 1}), "sequence outermost");
  expect(!is_pitched(shape, {96, 8, 24, 1}), "heads outermost that overlap");
  expect(!is_pitched(shape, {0, 24, 8, 1}), "an expanded batch overlaps itself");
  expect(!is_pitched(shape, {96, 0, 8, 1}), "an expanded sequence overlaps itself");
  expect(!is_pitched(shape, {192, 48, 16, 2}), "last stride 2");
  expect(is_pitched({1, 4, 3, 8}, {0, 24, 8, 1}), "the stride of a size-1 dimension means nothing");
  expect(is_pitched({2, 4, 1, 8}, {32, 8, 0, 1}), "one head with stride 0");
  expect(is_refused({Direction::kGather, 1, 8, 2, {4, -4}, {2, 2}}), "a negative split is refused");
}

void check_starts_refused() {
  const Layout cut{Direction::kScatter, 1, 8, 2, {4, 4}, {2, 2}, {}, {0, 1}, 0, 3};
  expect(!is_refused(cut), "ranges may overlap where a source is cut");
  const Layout placed{Direction::kGather, 1, 8, 2, {4, 4}, {2, 2}, {}, {0, 1}, 0, 3};
  expect(is_refused(placed), "ranges may not overlap where a window is put together");
  const Layout outside{Direction::kScatter, 1, 8, 2, {4, 4}, {2, 2}, {}, {0, 2}, 0, 3};
  expect(is_refused(outside), "ranges lie inside");
}

void check_large() {
  const int64_t rows = int64_t{1} << 22;
  const Layout layout{Direction::kScatter, 2, 128, 2, {rows, rows}, {24, 24}};
  const auto copies = plan_copies(layout, 1, {rows * 48 * 128, 48 * 128, 128, 1});
  expect(copies.size() == 2 && copies[0].dst_offset == rows * 24 * 128 * 2 &&
             copies[1].src_offset == 24 * 128 * 2 &&
             copies[0].src_slice_pitch == rows * 48 * 128 * 2 &&
             copies[0].dst_slice_pitch == 2 * rows * 24 * 128 * 2,
         "offsets beyond 2^32 bytes are whole");
}

// Sizes that only a broken or hostile caller gives: their sums and products wrap round in 64 bits,
// and what has wrapped round looks small. Built with -ftrapv or a sanitizer, this also shows that
// none is ever added up or multiplied.
void check_hostile() {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  constexpr int64_t kBig = int64_t{1} << 62;
  const auto scatter = Direction::kScatter;
  const auto gather = Direction::kGather;
  expect(is_refused({scatter, 1, 8, 2, {4, 4}, {2, 2}, {0, kMost}, {}, 8, 0}),
         "a start whose range wraps round");
  expect(is_refused({gather, 1, 8, 2, {4, 4}, {2, kMost}, {}, {0, 1}, 0, kMost}),
         "a range that wraps round behind its start");
  expect(is_refused({scatter, 1, 8, 2, {4, 4}, {2, 2}, {0, 4}, {}, kLeast, 0}),
         "a total from which nothing can be taken");
  expect(is_refused({scatter, 1, 8, 2, {kBig, kBig}, {2, 2}}), "rows that add up to 2^63");
  expect(is_refused({gather, 1, 8, 2, {4, 4}, {kMost, 3}}), "heads that wrap round to 2^63 + 2");
  expect(is_refused({scatter, kBig, 8, 2, {4, 4}, {2, 2}}), "a product of 2^62 batches");
  expect(is_refused({scatter, int64_t{1} << 32, int64_t{1} << 32, 2, {4, 4}, {2, 2}}),
         "a product that wraps round to 0");
  expect(is_refused({scatter, 0, kBig, 2, {4, 4}, {2, 2}}), "an empty one whose rows are too long");
  expect(is_refused({scatter, 1, 8, 17, {4, 4}, {2, 2}}), "an element that torch does not have");
  expect(!is_refused({scatter, 1, 1, 1, {kMost - 4, 4}, {1, 0}}), "the most that there can be");
  expect(!is_refused({scatter, 1, 8, 2, {4, 4}, {2, 2}, {0, 4}, {}, 8, 0}), "and starts that fit");

  const std::array<int64_t, 4> shape{2, 4, 3, 8};
  expect(!is_pitched(shape, {kMost, 24, 8, 1}), "a batch further away than offsets reach");
  expect(!is_pitched(shape, {kBig, 24, 8, 1}), "a batch whose end wraps round");
  expect(!is_pitched(shape, {96, kBig, 8, 1}), "a row whose end wraps round to 0");
  expect(!is_pitched({1, 4, 3, 8}, {0, kBig, 8, 1}), "likewise, beside a size-1 dimension");
  expect(!is_pitched(shape, {kLeast, 24, 8, 1}), "a negative stride");
  expect(!is_pitched({kBig, 4, 1, 1}, {1, kBig, 1, 1}), "a shape whose product wraps round to 0");
  expect(is_pitched({0, kBig, kBig, 8}, {kMost, kMost, kMost, 2}), "nothing at all");
}

}  // namespace

int main() {
  for (const Direction direction : {Direction::kScatter, Direction::kGather}) {
    const std::string name = direction == Direction::kScatter ? "scatter" : "gather";
    for (const int64_t batch : {1, 2, 3}) {
      for (const int64_t width : {0, 1, 3}) {
        check_exchange({direction, batch, 8, kItem, {4, 4}, {2, 2}}, width, name + " even");
        check_exchange({direction, batch, 5, kItem, {251, 250, 250, 250}, {1, 2, 1, 2}}, width,
                       name + " uneven");
        check_exchange({direction, batch, 8, kItem, {1, 1, 1, 0}, {1, 1, 1, 1}}, width,
                       name + " a rank with nothing");
        check_exchange({direction, batch, 1, kItem, {7, 6}, {1, 1}}, width,
                       name + " one head, head_dim 1");
        check_exchange({direction, batch, 16, kItem, {5}, {3}}, width, name + " one rank");
        check_exchange({direction, batch, 8, kItem, {3, 2}, {1, 2}, {1, 6}, {0, 3}, 9, 5}, width,
                       name + " gaps");
      }
    }
    if (direction == Direction::kScatter) {
      check_exchange({direction, 2, 8, kItem, {3, 2}, {3, 2}, {}, {0, 2}, 0, 4}, 1,
                     name + " a head that two ranks need");
    } else {
      check_exchange({direction, 2, 8, kItem, {5, 5}, {3, 2}, {0, 0}, {}, 5, 0}, 1,
                     name + " rows that every rank gets");
    }
    check_parts({direction, 2, 8, kItem, {3, 5, 2}, {2, 1, 4}});
  }
  check_order_and_refusals();
  check_starts_refused();
  check_large();
  check_hostile();
  std::printf("plan_test: %s\n", failures == 0 ? "passed" : "FAILED");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
