// What one round of a channel has sent so far, and whether it may be completed.
//
// NOTE [rounds]: a round is everything between two completions of a channel. It begins with the
// first send into one of the channel's windows (which opens the channel) and ends with `complete`.
// Rounds are kept apart by capture, so that a capture that was given up leaves nothing behind for
// eager calls.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "../plan.h"
#include "lanes.h"

namespace ulysses_ops {

struct WindowInfo {
  std::string name;
  std::string channel;
  Layout layout;
  uint64_t tag = 0;                 // equal on every rank, unlike any pointer
  std::vector<char*> base_of_rank;  // as mapped here
  std::set<CaptureId> captures;     // captures that baked these addresses in; they pin the window
  int64_t last_use = 0;             // higher is later
  std::shared_ptr<const std::string> description;  // for the log
};

// What a send reads. `keepalive` holds the memory until the round is joined.
struct Source {
  const void* identity = nullptr;  // the pointer that `complete` is asked about
  const char* base = nullptr;
  std::array<int64_t, 4> strides{};
  std::shared_ptr<void> keepalive;
};

// A copy of the own share. Those of eager sends are held until `complete`.
struct OwnCopy {
  PitchedCopy copy;
  char* dst = nullptr;
  const char* src = nullptr;
};

class Round {
 public:
  // Throws when a share of `peer` (every share for kEveryRank) is in flight into the window
  // already.
  void check_send(const WindowInfo& window, int64_t peer, const char* op) const;
  // Whether any share has been sent into the window.
  bool has(const WindowInfo& window) const;
  // Throws unless exactly the windows of this round are among `bases`, each with all peers' parts.
  void check_complete(const std::vector<const void*>& bases, int64_t rank) const;

  void note(const WindowInfo& window, int64_t peer, int64_t rank, Source source,
            cudaStream_t sender);
  void hold(const std::vector<OwnCopy>& own) { held_.insert(held_.end(), own.begin(), own.end()); }

  const std::vector<Source>& sources() const { return sources_; }
  // Streams that sent; they own memory that is being read.
  const std::vector<cudaStream_t>& senders() const { return senders_; }
  uint64_t tag() const { return tag_; }  // a sum over windows: the order of parts does not matter
  bool has_own_share() const { return has_own_share_; }
  const std::vector<OwnCopy>& held() const { return held_; }

 private:
  struct Sent {
    const WindowInfo* window;
    uint64_t peers;  // ranks whose share was sent, as bits
  };
  const Sent* find(const WindowInfo& window) const;

  std::vector<Sent> sent_;
  std::vector<Source> sources_;
  std::vector<cudaStream_t> senders_;
  std::vector<OwnCopy> held_;
  uint64_t tag_ = 0;
  bool has_own_share_ = false;
};

}  // namespace ulysses_ops
