// Where the words of one rank lie in its block of memory.
//
// A word has 32 bits. A row has one for each rank, by rank, and an even number of them, so that two
// words are put back to 0 by one write of 64 bits. In the row of a handshake the word of a peer is
// set by that peer; the word of the rank itself is its note, see NOTE [numbers].
//
//   rows   `empty` and `full` of every channel, then two for probes and bare handshakes
//   told   what each rank told this one about itself, by rank
//   then a scratch word of the copy stream and one of the side stream
#pragma once

#include <cuda.h>

#include <cstdint>

namespace ulysses_ops {

// Channels that one communicator may hold at once.
inline constexpr int64_t kMaxChannels = 64;

struct WordBlock {
  static constexpr int64_t kWordBytes = sizeof(uint32_t);
  static constexpr int64_t kNumRows = 2 * kMaxChannels + 2;

  int64_t world_size = 0;

  int64_t row_words() const { return (world_size + 1) / 2 * 2; }
  int64_t row(int64_t index) const { return index * row_words(); }
  int64_t empty_row(int64_t channel) const { return row(2 * channel); }
  int64_t full_row(int64_t channel) const { return row(2 * channel + 1); }
  int64_t probe_row() const { return row(kNumRows - 2); }
  int64_t answer_row() const { return row(kNumRows - 1); }
  int64_t told() const { return row(kNumRows); }
  int64_t copy_scratch() const { return told() + row_words(); }
  int64_t side_scratch() const { return copy_scratch() + 1; }
  int64_t num_words() const { return side_scratch() + 1; }
  int64_t num_bytes() const { return num_words() * kWordBytes; }

  static CUdeviceptr at(int64_t base, int64_t word) {
    return static_cast<CUdeviceptr>(base + word * kWordBytes);
  }
};

}  // namespace ulysses_ops
