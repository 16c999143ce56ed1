// The order in which the clusters of a fused projection take its tiles, and the spans of its heads.
#include "../../csrc/projection/qkv_projection.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

using namespace ulysses_ops;

namespace {

constexpr int kHeadsPerTile = 2;
constexpr int64_t kRowBytes = 128 * 5120 * 2;
int failures = 0;

void expect(bool condition, const char* what, int rows, int columns) {
  if (!condition) {
    ++failures;
    std::fprintf(stderr, "FAILED: %s, %d x %d tiles\n", what, rows, columns);
  }
}

void takes_each_tile_once(int rows, const std::vector<int>& heads,
                          const std::vector<int>& sequence) {
  const TileOrder order = order_tiles(rows, kRowBytes, kHeadsPerTile, heads, sequence);
  const int num_heads = std::accumulate(heads.begin(), heads.end(), 0);
  const int columns = (num_heads + kHeadsPerTile - 1) / kHeadsPerTile;
  std::set<std::pair<int, int>> seen;
  bool is_within = true;
  for (int i = 0; i < order.size; ++i) {
    const TileOrder::Tile tile = order.at(i);
    is_within &= tile.row >= 0 && tile.row < rows && tile.column >= 0 && tile.column < columns;
    seen.emplace(tile.row, tile.column);
  }
  expect(order.size == rows * columns, "another number of tiles", rows, columns);
  expect(is_within, "a tile lies outside", rows, columns);
  expect(static_cast<int>(seen.size()) == rows * columns, "a tile is left out", rows, columns);
}

// After the tiles of a destination and those before it, all of its heads have been computed.
void finishes_destinations_in_order(int rows, const std::vector<int>& heads,
                                    const std::vector<int>& sequence) {
  const TileOrder order = order_tiles(rows, kRowBytes, kHeadsPerTile, heads, sequence);
  std::vector<int> owner;  // of each head
  for (size_t i = 0; i < heads.size(); ++i) {
    owner.insert(owner.end(), heads[i], static_cast<int>(i));
  }
  std::vector<int> last(heads.size(), -1);  // tile that completes a destination
  for (int i = 0; i < order.size; ++i) {
    const int first = order.at(i).column * kHeadsPerTile;
    const int end = std::min<int>(first + kHeadsPerTile, static_cast<int>(owner.size()));
    for (int head = first; head < end; ++head) {
      last[owner[head]] = i;
    }
  }
  std::set<int> columns;  // with heads of this destination and those before it
  for (const int destination : sequence) {
    for (size_t head = 0; head < owner.size(); ++head) {
      if (owner[head] == destination) {
        columns.insert(static_cast<int>(head) / kHeadsPerTile);
      }
    }
    expect(last[destination] < rows * static_cast<int>(columns.size()), "a destination is late",
           rows, destination);
  }
}

// What 66 clusters, a whole H200, read at once: few rows of x, and few columns of W.
void stays_in_a_block(int rows, int columns) {
  constexpr int kAtOnce = 66;
  const TileOrder order = order_tiles(rows, kRowBytes, 1, {columns}, {0});
  for (int first = 0; first + kAtOnce <= order.size; first += kAtOnce) {
    std::set<int> rows_read;
    std::set<int> columns_read;
    for (int i = first; i < first + kAtOnce; ++i) {
      rows_read.insert(order.at(i).row);
      columns_read.insert(order.at(i).column);
    }
    expect(static_cast<int>(rows_read.size()) <= 2 * order.rows_at_once, "many rows at once", rows,
           columns);
    expect(rows_read.size() * columns_read.size() <= 4 * kAtOnce, "no block", rows, columns);
  }
}

void finds_the_span_of_each_head(const std::vector<int>& heads) {
  ProjectionParams params;
  for (const int count : heads) {
    params.spans[params.num_spans++].first_head = params.num_heads;
    params.num_heads += count;
  }
  int head = 0;
  for (int span = 0; span < params.num_spans; ++span) {
    for (int i = 0; i < heads[span]; ++i, ++head) {
      expect(span_at(params, head) == span, "a head is in another span", head, span);
    }
  }
}

}  // namespace

int main() {
  for (const int rows : {1, 7, 8, 9, 18, 40}) {
    for (const std::vector<int>& heads :
         {std::vector<int>{36, 36}, {9, 9, 9, 9}, {1}, {3, 0, 5}, {1, 1, 1, 1, 1}, {2, 7, 4}}) {
      std::vector<int> sequence(heads.size());
      std::iota(sequence.begin(), sequence.end(), 0);
      do {
        takes_each_tile_once(rows, heads, sequence);
        finishes_destinations_in_order(rows, heads, sequence);
      } while (std::next_permutation(sequence.begin(), sequence.end()));
    }
  }
  for (int rows = 1; rows <= 200; ++rows) {
    const int at_once = rows_at_once(rows, kRowBytes);
    expect(at_once >= 1 && at_once <= rows && at_once * kRowBytes <= 16 << 20, "too many at once",
           rows, at_once);
    constexpr int kMost = (16 << 20) / kRowBytes;
    expect((rows + at_once - 1) / at_once == (rows + kMost - 1) / kMost, "more blocks than needed",
           rows, at_once);
  }
  expect(rows_at_once(3, int64_t{1} << 40) == 1, "a row is too large and taken alone", 3, 1);
  stays_in_a_block(18, 36);
  stays_in_a_block(148, 84);
  finds_the_span_of_each_head({12, 12, 12});
  finds_the_span_of_each_head({1, 2, 3, 3, 2, 1, 5});
  finds_the_span_of_each_head(std::vector<int>(kMaxProjectionSpans, 3));
  if (failures == 0) {
    std::puts("ok");
  }
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
