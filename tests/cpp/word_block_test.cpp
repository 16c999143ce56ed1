// Words of all rows lie apart, and a reset of 64 bits lies on its boundary and within its row.
#include "../../csrc/cuda/word_block.h"

#include <cstdio>
#include <set>

using namespace ulysses_ops;

namespace {

int failures = 0;

void expect(bool condition, const char* what, int64_t world_size) {
  if (!condition) {
    ++failures;
    std::fprintf(stderr, "FAILED at world_size=%lld: %s\n", static_cast<long long>(world_size),
                 what);
  }
}

void check_world(int64_t world_size) {
  const WordBlock block{world_size};
  std::set<int64_t> rows{block.probe_row(), block.answer_row(), block.told()};
  for (int64_t channel = 0; channel < kMaxChannels; ++channel) {
    rows.insert({block.empty_row(channel), block.full_row(channel)});
  }
  expect(rows.size() == WordBlock::kNumRows + 1, "every row has a place of its own", world_size);
  int64_t end = 0;
  for (const int64_t row : rows) {
    expect(row == end, "rows lie behind one another", world_size);
    end = row + block.row_words();
    expect(WordBlock::at(0, row) % sizeof(uint64_t) == 0, "rows are aligned", world_size);
  }
  expect(block.row_words() >= world_size && block.row_words() % 2 == 0,
         "a row has a word for each rank, and whole pairs", world_size);
  expect(block.copy_scratch() == end && block.side_scratch() == end + 1 &&
             block.num_words() == end + 2,
         "scratch words are in no row", world_size);
  expect(block.num_bytes() == 4 * block.num_words(), "words have 32 bits", world_size);
}

}  // namespace

int main() {
  for (int64_t world_size = 2; world_size <= 64; ++world_size) {
    check_world(world_size);
  }
  if (failures == 0) {
    std::puts("word block: ok");
  }
  return failures == 0 ? 0 : 1;
}
