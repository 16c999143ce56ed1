#include "round.h"

#include <algorithm>
#include <utility>

#include "../check.h"
#include "handshake.h"

namespace ulysses_ops {
namespace {

uint64_t bit(int64_t rank) { return uint64_t{1} << rank; }

uint64_t all_ranks(int64_t world_size) {
  return world_size == kMaxRanks ? ~uint64_t{0} : bit(world_size) - 1;
}

uint64_t ranks_of(int64_t peer, int64_t world_size) {
  return peer == kEveryRank ? all_ranks(world_size) : bit(peer);
}

std::string names_of(uint64_t ranks) {
  std::string names;
  for (int64_t rank = 0; rank < kMaxRanks; ++rank) {
    if (ranks & bit(rank)) {
      names += (names.empty() ? "" : ", ") + std::to_string(rank);
    }
  }
  return names;
}

}  // namespace

const Round::Sent* Round::find(const WindowInfo& window) const {
  const auto found = std::find_if(sent_.begin(), sent_.end(),
                                  [&](const Sent& sent) { return sent.window == &window; });
  return found == sent_.end() ? nullptr : &*found;
}

bool Round::has(const WindowInfo& window) const { return find(window) != nullptr; }

void Round::check_send(const WindowInfo& window, int64_t peer, const char* op) const {
  const Sent* sent = find(window);
  const uint64_t again =
      sent == nullptr ? 0 : sent->peers & ranks_of(peer, window.layout.world_size());
  STD_TORCH_CHECK(again == 0, op, ": window '", window.name, "' of channel '", window.channel,
                  "' already has an exchange in flight for rank ", names_of(again),
                  "; complete it before sending again, or close the communicator if it was "
                  "given up");
}

void Round::check_complete(const std::vector<const void*>& bases, int64_t rank) const {
  for (const Sent& sent : sent_) {
    const WindowInfo& window = *sent.window;
    STD_TORCH_CHECK(std::count(bases.begin(), bases.end(), window.base_of_rank[rank]) == 1,
                    "complete: channel '", window.channel, "' also has window '", window.name,
                    "' in flight; complete all windows of a channel in one call");
    // The own share may have been written by its producer; a peer's share can only have been sent.
    const uint64_t missing = all_ranks(window.layout.world_size()) & ~(sent.peers | bit(rank));
    STD_TORCH_CHECK(missing == 0, "complete: window '", window.name, "' was sent nothing for rank ",
                    names_of(missing), "; send every peer its part first");
  }
}

void Round::note(const WindowInfo& window, int64_t peer, int64_t rank, Source source,
                 cudaStream_t sender) {
  const uint64_t peers = ranks_of(peer, window.layout.world_size());
  if (auto* sent = const_cast<Sent*>(find(window)); sent != nullptr) {
    sent->peers |= peers;
  } else {
    sent_.push_back({&window, peers});
    tag_ += window.tag;
  }
  has_own_share_ |= (peers & bit(rank)) != 0;
  sources_.push_back(std::move(source));
  if (std::find(senders_.begin(), senders_.end(), sender) == senders_.end()) {
    senders_.push_back(sender);
  }
}

}  // namespace ulysses_ops
