// What can still be done on the device while its copy stream waits for a peer: look at the words,
// tell the peers, spoil the windows, end the waits.
//
// Everything runs on the side stream, which is behind no wait, and takes no lock of the group: a
// call of the group may be blocked inside CUDA with that lock held. It consists of memory
// operations and of copies from and to the host: the driver runs a copy inside the device as a
// kernel, which would wait behind a waiting graph where all streams share one hardware connection.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "exchange_log.h"
#include "handshake.h"
#include "lanes.h"
#include "word_block.h"

namespace ulysses_ops {

// What a rank tells its peers about itself.
enum class Told : uint32_t { kNothing = 0, kGaveUp = 1, kClosed = 2 };

struct Status {
  uint32_t waiting = 0;    // number of the handshake that the copy stream waits in; 0 for none
  std::vector<Told> told;  // by rank
};

class Rescue {
 public:
  Rescue(Lanes& lanes, const ExchangeLog& log, int64_t rank,
         const std::vector<int64_t>& word_bases);

  void add_window(char* base, int64_t num_bytes);
  void remove_window(const char* base);

  Status read_status();
  // Which ranks the handshake waits for and what their words hold, as a sentence.
  std::string describe(const LogEntry& entry);

  void tell_peers(Told what, SignalKind kind);
  // Fills all windows with NaN bytes: all ones is NaN in every float format.
  void poison_windows();
  // Writes the tags that the copy stream waits for now into the words that it waits on; true when
  // there were any.
  bool release_wait();

 private:
  void read_words();
  // Waits until the side stream is done; throws when it is not within some seconds.
  void finish();

  Lanes& lanes_;
  const ExchangeLog& log_;
  int64_t rank_;
  WordBlock block_;
  int64_t base_;                            // of this rank's block
  std::vector<CUdeviceptr> told_at_peers_;  // this rank's word at each peer
  std::mutex mutex_;                        // of the host words and the windows
  std::shared_ptr<uint32_t> host_;
  std::shared_ptr<char> poison_;
  std::vector<std::pair<char*, int64_t>> windows_;
};

}  // namespace ulysses_ops
