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

namespace ulysses_ops {

// Where the status words lie in the block of words: `waiting`, then what each rank told us, then a
// scratch word. In words.
inline int64_t num_status_words(int64_t world_size) { return 1 + world_size + 1; }

// What a rank tells its peers about itself.
enum class Told : uint64_t { kNothing = 0, kGaveUp = 1, kClosed = 2 };

struct Status {
  uint64_t waiting = 0;    // number of the handshake that the copy stream waits in; 0 for none
  std::vector<Told> told;  // by rank
};

class Rescue {
 public:
  // `words` and `status` are the local block of words and the status words in it; `told_at_peers`
  // this rank's word at each peer.
  Rescue(Lanes& lanes, const ExchangeLog& log, int64_t rank, int64_t world_size, CUdeviceptr words,
         int64_t num_words, CUdeviceptr status, std::vector<CUdeviceptr> told_at_peers);

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
  void read(CUdeviceptr from, int64_t num_words);
  // Waits until the side stream is done; throws when it is not within some seconds.
  void finish();

  Lanes& lanes_;
  const ExchangeLog& log_;
  int64_t rank_;
  int64_t world_size_;
  CUdeviceptr words_;
  int64_t num_words_;
  CUdeviceptr status_;
  std::vector<CUdeviceptr> told_at_peers_;
  std::mutex mutex_;  // of the host words and the windows
  std::shared_ptr<uint64_t> host_;
  std::shared_ptr<char> poison_;
  std::vector<std::pair<char*, int64_t>> windows_;
};

}  // namespace ulysses_ops
