// A group of ranks as the device side sees it: peer pointers of windows and words, and the rounds
// in flight.
//
// NOTE [checks]: everything that can be refused is refused before the first CUDA call
// of an operation; Python has checked arguments already, so these are the last resort.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "../plan.h"
#include "exchange_log.h"
#include "handshake.h"
#include "lanes.h"
#include "rescue.h"
#include "round.h"
#include "watchdog.h"
#include "word_block.h"

namespace ulysses_ops {

class Group {
 public:
  Group(int64_t rank, int64_t world_size, int64_t device, const std::vector<int64_t>& word_bases,
        SignalPath path, double limit_s);

  int64_t rank() const { return rank_; }
  int64_t device() const { return device_; }
  Lanes& lanes() const { return lanes_; }
  SignalPath& path() { return path_; }
  const Signal& probe_signal() const { return probe_; }
  // The words that probes of the peers set, by rank.
  CUdeviceptr probe_words() const { return own_word(block_.probe_row()); }

  void add_window(WindowInfo info);
  void remove_window(const void* local_base);
  WindowInfo& window(const void* local_base, const char* op) const;

  // Throws, before anything is issued, when the group has failed or the capture is another's.
  CaptureId admit(cudaStream_t caller, const char* op);

  // Whether `peer`'s share (every share for kEveryRank) may be sent into the window now; throws
  // otherwise.
  void check_send(const WindowInfo& window, int64_t peer, CaptureId capture, const char* op) const;
  void send(WindowInfo& window, Source source, int64_t peer, cudaStream_t caller,
            CaptureId capture);

  // Opens a round of the window's channel before its first send: what the peers wait for is then on
  // its way while that send is still being computed, and `caller` is behind earlier readers of the
  // channel, so that it may write own parts.
  void open(const void* local_base, cudaStream_t caller);

  // Completes the rounds that consist of exactly these windows and sources.
  void complete(const std::vector<const void*>& windows, const std::vector<const void*>& sources,
                cudaStream_t caller);

  // Names of channels with a round in flight in this capture; of all captures for `any_capture`.
  std::string pending(CaptureId capture) const;
  // Forgets rounds that were begun in captures.
  void abandon_captures();

  // What eviction goes by: local address, last use and number of captured graphs of every window.
  std::vector<int64_t> window_states() const;
  // A captured graph is gone.
  void forget_capture(CaptureId capture);

  // A replay takes the place of the copy chain: it waits for the chain and all readers, and the
  // chain for it. So replays are serialised among each other and against eager exchanges, whatever
  // streams they are launched on.
  void before_replay(cudaStream_t launch);
  void after_replay(cudaStream_t launch);

  // Pairs of handshakes over the probe words, with nothing between them.
  void run_handshakes(int64_t num_pairs, cudaStream_t caller);

  Rescue& rescue() { return rescue_; }
  Watchdog& watchdog() { return watchdog_; }
  const ExchangeLog& log() const { return log_; }

 private:
  struct Channel {
    int64_t slot = 0;
    int64_t num_windows = 0;
    uint64_t key = 0;  // the name, as part of tags
    std::shared_ptr<const std::string> description;
    std::shared_ptr<const SignalWords> empty;
    std::shared_ptr<const SignalWords> full;
    std::map<CaptureId, Round> rounds;
    // The stream of the latest completion, by capture: the next open must follow what it reads.
    std::map<CaptureId, cudaStream_t> readers;
  };

  CUdeviceptr own_word(int64_t word) const { return WordBlock::at(word_bases_[rank_], word); }
  SignalWords words_of_row(int64_t row) const;
  Channel& channel_of(const WindowInfo& window);
  const Channel& channel_of(const WindowInfo& window) const;
  void follow_reader(const Channel& channel, cudaStream_t caller, CaptureId capture);
  void ask_for_space(const Channel& channel, const WindowInfo& window, CaptureId capture);
  void issue_own(const std::vector<OwnCopy>& copies);
  // A handshake on the copy stream, with a number in the log.
  void shake(Step step, std::shared_ptr<const std::string> subject, std::vector<Awaited> awaited,
             CaptureId capture);

  int64_t rank_;
  int64_t world_size_;
  WordBlock block_;
  int64_t device_;
  Lanes& lanes_;
  std::vector<int64_t> word_bases_;
  SignalPath path_;
  std::shared_ptr<const SignalWords> probe_words_;
  std::shared_ptr<const SignalWords> answer_words_;  // the other half of a pair with these
  Signal probe_;
  std::unordered_map<const void*, std::unique_ptr<WindowInfo>> windows_;
  std::map<std::string, Channel> channels_;
  int64_t num_uses_ = 0;
  ExchangeLog log_;
  Rescue rescue_;
  Watchdog watchdog_;  // last: its thread uses what is above
};

}  // namespace ulysses_ops
