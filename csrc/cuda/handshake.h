// Self-resetting signal words: 0 -> tag -> 0, one producer and one consumer a word.
//
//   announce   write word@peer[me] = tag, for every peer       the payload before it is visible
//   note       write word@me[me] = number                      which handshake this rank waits in
//   await      wait word@me[peer] == tag, for every peer
//   reset      write words@me = 0, two at a time               the note with them
//
// A peer sets a word again only after it saw the answer that this rank sends after its reset; so no
// signal is lost, no count is kept on the host, and eager calls, replays and mixtures of both look
// the same to the words.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace ulysses_ops {

inline constexpr int64_t kMaxRanks = 64;  // sets of ranks are 64-bit masks

enum class SignalKind : int64_t {
  kWriteValue = 0,  // a stream-memory write into the peer's memory
  kMemcpy = 1,      // a copied word, for drivers that write only local memory
};

// Where the words of one handshake lie, one entry per peer (this rank left out), in rotated order.
struct SignalWords {
  std::vector<CUdeviceptr> remote;  // this rank's word in each peer's memory
  std::vector<CUdeviceptr> local;   // each peer's word in this rank's memory
  CUdeviceptr note = 0;             // this rank's word in its own memory
  std::vector<CUdeviceptr> pairs;   // `local` and `note`, two words at a time
};

// Faults for tests: each takes one half away, and a test that does not notice is blind.
enum class Fault : int64_t {
  kNone = 0,
  kNoOpen = 1,  // copies do not wait until their readers are done
  kNoWait = 2,  // a completion does not wait for the peers' parts
};

struct SignalPath {
  SignalKind kind = SignalKind::kWriteValue;
  CUdeviceptr scratch = 0;    // a local word: the source of copied signals
  bool flush_remote = false;  // the device can flush remote writes behind a wait
  Fault fault = Fault::kNone;
};

// The words of one channel and the tag that its round is known by.
struct Signal {
  const SignalWords* words = nullptr;
  uint32_t tag = 0;
};

// Both halves: announce all signals to every peer, then await every peer for all of them, on
// `stream`. Resets come behind all waits, so that what has arrived can be told from what has not.
// `number` stands in the first signal's note meanwhile.
void handshake(const std::vector<Signal>& signals, const SignalPath& path, cudaStream_t stream,
               uint32_t number);

// The first half alone; the probe of a signal path uses it.
void announce(const Signal& signal, const SignalPath& path, cudaStream_t stream);

// Writes `value` into local words.
void write_local(const std::vector<CUdeviceptr>& words, uint32_t value, cudaStream_t stream);

}  // namespace ulysses_ops
