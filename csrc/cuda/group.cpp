#include "group.h"

#include <algorithm>

#include "../check.h"
#include "copy_engine.h"

namespace ulysses_ops {
namespace {

constexpr uint64_t kOpenSalt = 0x9e3779b97f4a7c15ull;
constexpr uint64_t kFullSalt = 0xc2b2ae3d27d4eb4full;

// Spreads the bits (the finaliser of splitmix64).
uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

// Never 0, which means "at rest".
uint32_t tag_of(uint64_t value) { return std::max<uint32_t>(mixed(value) >> 32, 1); }

void check_ranks(int64_t rank, int64_t world_size, const std::vector<int64_t>& word_bases) {
  STD_TORCH_CHECK(world_size > 1 && world_size <= kMaxRanks && rank >= 0 && rank < world_size,
                  "ulysses: rank=", rank, " and world_size=", world_size,
                  " need 1 < world_size <= ", kMaxRanks);
  STD_TORCH_CHECK(static_cast<int64_t>(word_bases.size()) == world_size,
                  "ulysses: ", word_bases.size(),
                  " word pointers given for world_size=", world_size);
}

}  // namespace

Group::Group(int64_t rank, int64_t world_size, int64_t device,
             const std::vector<int64_t>& word_bases, SignalPath path, double limit_s)
    : rank_((check_ranks(rank, world_size, word_bases), rank)),
      world_size_(world_size),
      block_{world_size},
      device_(device),
      lanes_(Lanes::of(device)),
      word_bases_(word_bases),
      path_(path),
      rescue_(lanes_, log_, rank, word_bases),
      watchdog_(device, log_, rescue_, path_, limit_s) {
  probe_words_ = std::make_shared<const SignalWords>(words_of_row(block_.probe_row()));
  answer_words_ = std::make_shared<const SignalWords>(words_of_row(block_.answer_row()));
  probe_.words = probe_words_.get();
  path_.scratch = own_word(block_.copy_scratch());
}

CaptureId Group::admit(cudaStream_t caller, const char* op) {
  STD_TORCH_CHECK(!watchdog_.has_failed(), op, ": the communicator gave up: ", watchdog_.failure(),
                  "; close it and construct another");
  return lanes_.admit(caller, this, op);
}

SignalWords Group::words_of_row(int64_t row) const {
  SignalWords words;
  for (int64_t step = 1; step < world_size_; ++step) {
    const int64_t peer = (rank_ + step) % world_size_;
    words.remote.push_back(WordBlock::at(word_bases_[peer], row + rank_));
    words.local.push_back(own_word(row + peer));
  }
  words.note = own_word(row + rank_);
  for (int64_t word = 0; word < block_.row_words(); word += 2) {
    words.pairs.push_back(own_word(row + word));
  }
  return words;
}

void Group::add_window(WindowInfo info) {
  check_layout(info.layout);
  STD_TORCH_CHECK(info.layout.world_size() == world_size_ &&
                      static_cast<int64_t>(info.base_of_rank.size()) == world_size_,
                  "ulysses: window '", info.name, "' has splits for ", info.layout.world_size(),
                  " ranks and pointers of ", info.base_of_rank.size(), ", world_size is ",
                  world_size_);
  const void* key = info.base_of_rank[rank_];
  STD_TORCH_CHECK(windows_.count(key) == 0, "ulysses: window '", info.name,
                  "' is registered already");
  auto found = channels_.find(info.channel);
  if (found == channels_.end()) {
    // Ranks add and remove windows in the same order, so the lowest free slot is the same
    // everywhere.
    int64_t slot = 0;
    const auto taken = [&](const auto& entry) { return entry.second.slot == slot; };
    while (std::any_of(channels_.begin(), channels_.end(), taken)) {
      ++slot;
    }
    STD_TORCH_CHECK(slot < kMaxChannels, "ulysses: more than ", kMaxChannels,
                    " channels; use fewer channel names");
    Channel channel;
    channel.slot = slot;
    for (const char letter : info.channel) {
      channel.key = mixed(channel.key + static_cast<unsigned char>(letter) + kOpenSalt);
    }
    channel.description = std::make_shared<const std::string>("channel '" + info.channel + "'");
    channel.empty = std::make_shared<const SignalWords>(words_of_row(block_.empty_row(slot)));
    channel.full = std::make_shared<const SignalWords>(words_of_row(block_.full_row(slot)));
    found = channels_.emplace(info.channel, std::move(channel)).first;
  }
  ++found->second.num_windows;
  info.last_use = ++num_uses_;
  info.description = std::make_shared<const std::string>(
      "channel '" + info.channel + "' for window '" + info.name + "' " +
      to_string({info.layout.batch, info.layout.seq_global(), info.layout.num_heads(),
                 info.layout.head_dim}));
  rescue_.add_window(info.base_of_rank[rank_], info.layout.window_bytes(rank_));
  windows_.emplace(key, std::make_unique<WindowInfo>(std::move(info)));
}

void Group::remove_window(const void* local_base) {
  const WindowInfo& info = window(local_base, "reserve");
  Channel& channel = channel_of(info);
  STD_TORCH_CHECK(channel.rounds.empty(), "reserve: window '", info.name,
                  "' cannot be given back while its channel '", info.channel,
                  "' has an exchange in flight");
  STD_TORCH_CHECK(info.captures.empty(), "reserve: window '", info.name,
                  "' cannot be given back while a captured graph uses it");
  if (--channel.num_windows == 0) {
    channels_.erase(info.channel);
  }
  rescue_.remove_window(info.base_of_rank[rank_]);
  windows_.erase(local_base);
}

WindowInfo& Group::window(const void* local_base, const char* op) const {
  const auto found = windows_.find(local_base);
  STD_TORCH_CHECK(
      found != windows_.end(), op,
      ": the tensor given as window is none of this communicator's windows, or a copy of one; pass "
      "Window.tensor as reserve() returned it");
  return *found->second;
}

Group::Channel& Group::channel_of(const WindowInfo& window) { return channels_.at(window.channel); }
const Group::Channel& Group::channel_of(const WindowInfo& window) const {
  return channels_.at(window.channel);
}

void Group::check_send(const WindowInfo& window, int64_t peer, CaptureId capture,
                       const char* op) const {
  STD_TORCH_CHECK(peer >= kEveryRank && peer < world_size_, op, ": peer=", peer,
                  " must be a rank below ", world_size_);
  const auto& rounds = channel_of(window).rounds;
  const auto round = rounds.find(capture);
  if (round != rounds.end()) {
    round->second.check_send(window, peer, op);
  }
}

void Group::shake(Step step, std::shared_ptr<const std::string> subject,
                  std::vector<Awaited> awaited, CaptureId capture) {
  std::vector<Signal> signals;
  for (const Awaited& one : awaited) {
    signals.push_back({one.words.get(), one.tag});
  }
  const uint32_t number = log_.add(step, std::move(subject), capture, std::move(awaited));
  handshake(signals, path_, lanes_.copy(), number);
}

// The previous round may have been read on another stream: this rank is done only when that stream
// is. The stream is kept and not an event, since its reads come after the completion. The caller
// follows it too, since it may be about to write own parts straight into windows of the channel.
void Group::follow_reader(const Channel& channel, cudaStream_t caller, CaptureId capture) {
  const auto reader = channel.readers.find(capture);
  if (reader != channel.readers.end() && reader->second != caller) {
    lanes_.order(reader->second, {lanes_.copy(), lanes_.own(), caller}, capture);
  }
}

// The handshake at the start of a round: every rank says that its windows are free, and waits until
// those of the peers are.
void Group::ask_for_space(const Channel& channel, const WindowInfo& window, CaptureId capture) {
  if (path_.fault != Fault::kNoOpen) {
    const uint32_t tag = tag_of(channel.key + window.tag + kOpenSalt);
    shake(Step::kOpen, window.description, {{channel.empty, tag}}, capture);
  }
}

void Group::open(const void* local_base, cudaStream_t caller) {
  const CaptureId capture = admit(caller, "exchange");
  const WindowInfo& info = window(local_base, "exchange");
  Channel& channel = channel_of(info);
  STD_TORCH_CHECK(channel.rounds.count(capture) == 0, "exchange: channel '", info.channel,
                  "' has an exchange in flight; complete it before opening another");
  lanes_.lead(caller, false, capture);
  follow_reader(channel, caller, capture);
  ask_for_space(channel, info, capture);
  channel.rounds[capture];
}

void Group::send(WindowInfo& window, Source source, int64_t peer, cudaStream_t caller,
                 CaptureId capture) {
  Channel& channel = channel_of(window);
  window.last_use = ++num_uses_;
  if (capture != 0) {
    window.captures.insert(capture);
  }
  const auto copies = plan_copies(window.layout, rank_, source.strides, peer);
  const bool own_share = peer == kEveryRank || peer == rank_;
  std::vector<OwnCopy> own;
  for (const PitchedCopy& copy : copies) {
    if (copy.peer == rank_) {
      own.push_back({copy, window.base_of_rank[rank_], source.base});
    }
  }
  lanes_.lead(caller, own_share, capture);
  const bool opens = channel.rounds.count(capture) == 0;
  if (opens) {
    follow_reader(channel, caller, capture);
  }
  // The own share needs no handshake. A graph starts it at once when it is issued first, and the
  // exchange of 84 MB takes 244 us instead of 253 (2x H200, docs/design/measured.md). An eager call
  // takes 5 us to issue it: `complete` does, behind everything that a peer waits for.
  if (capture != 0) {
    issue_own(own);
  }
  if (opens) {
    ask_for_space(channel, window, capture);
  }
  for (const PitchedCopy& copy : copies) {
    if (copy.peer != rank_) {
      issue_copy(copy, window.base_of_rank[copy.peer], source.base, lanes_.copy());
    }
  }
  Round& round = channel.rounds[capture];
  if (capture == 0) {
    round.hold(own);
  }
  round.note(window, peer, rank_, std::move(source), caller);
}

void Group::issue_own(const std::vector<OwnCopy>& copies) {
  for (const OwnCopy& own : copies) {
    issue_own_copy(own.copy, own.dst, own.src, lanes_.own());
  }
}

void Group::complete(const std::vector<const void*>& windows,
                     const std::vector<const void*>& sources, cudaStream_t caller) {
  const CaptureId capture = admit(caller, "complete");
  std::vector<Channel*> channels;
  std::vector<const void*> expected;
  for (const void* base : windows) {
    const WindowInfo& info = window(base, "complete");
    Channel& channel = channel_of(info);
    const auto round = channel.rounds.find(capture);
    STD_TORCH_CHECK(round != channel.rounds.end(), "complete: channel '", info.channel,
                    "' has nothing in flight here; send into window '", info.name,
                    "' first, in the same capture if there is one");
    STD_TORCH_CHECK(round->second.has(info), "complete: window '", info.name,
                    "' has nothing in flight; send into it first");
    if (std::find(channels.begin(), channels.end(), &channel) == channels.end()) {
      round->second.check_complete(windows, rank_);
      channels.push_back(&channel);
      for (const Source& source : round->second.sources()) {
        expected.push_back(source.identity);
      }
    }
  }
  std::vector<const void*> given = sources;
  std::sort(given.begin(), given.end());
  std::sort(expected.begin(), expected.end());
  STD_TORCH_CHECK(given == expected, "complete: the ", given.size(), " sources are not the ",
                  expected.size(),
                  " tensors that were sent; pass to complete the very tensors given to the sends");

  bool own_share = false;
  std::vector<Awaited> awaited;
  for (Channel* channel : channels) {
    const Round& round = channel->rounds.at(capture);
    const uint32_t tag = tag_of(channel->key + round.tag() + kFullSalt);
    awaited.push_back({channel->full, tag});
    own_share |= round.has_own_share();
  }
  if (path_.fault == Fault::kNoWait) {
    for (const Awaited& one : awaited) {
      announce({one.words.get(), one.tag}, path_, lanes_.copy());
    }
  } else if (!channels.empty()) {
    shake(Step::kClose, channels.front()->description, std::move(awaited), capture);
  }
  for (const Channel* channel : channels) {
    issue_own(channel->rounds.at(capture).held());
  }
  if (own_share) {
    lanes_.join_own(caller, capture);
  }
  lanes_.order(lanes_.copy(), {caller}, capture);
  for (Channel* channel : channels) {
    // A source may be given back to the stream that it came from once this round forgets it.
    for (const cudaStream_t sender : channel->rounds.at(capture).senders()) {
      if (sender != caller) {
        lanes_.order(caller, {sender}, capture);
      }
    }
    channel->rounds.erase(capture);
    channel->readers[capture] = caller;
  }
}

std::string Group::pending(CaptureId capture) const {
  std::string names;
  for (const auto& [name, channel] : channels_) {
    if (channel.rounds.count(capture) != 0) {
      names += (names.empty() ? "" : ", ") + name;
    }
  }
  return names;
}

void Group::abandon_captures() {
  for (auto& [name, channel] : channels_) {
    std::erase_if(channel.rounds, [](const auto& entry) { return entry.first != 0; });
  }
}

std::vector<int64_t> Group::window_states() const {
  std::vector<int64_t> states;
  for (const auto& [base, info] : windows_) {
    states.insert(states.end(), {reinterpret_cast<int64_t>(base), info->last_use,
                                 static_cast<int64_t>(info->captures.size())});
  }
  return states;
}

void Group::forget_capture(CaptureId capture) {
  log_.forget(capture);
  for (const auto& [base, info] : windows_) {
    info->captures.erase(capture);
  }
  for (auto& [name, channel] : channels_) {
    channel.readers.erase(capture);
  }
}

void Group::before_replay(cudaStream_t launch) {
  STD_TORCH_CHECK(admit(launch, "replay") == 0,
                  "replay: this stream is being captured; end that capture first");
  lanes_.before_replay(launch);
  for (auto& [name, channel] : channels_) {
    const auto reader = channel.readers.find(0);
    if (reader != channel.readers.end() && reader->second != launch) {
      lanes_.order(reader->second, {launch}, 0);
    }
  }
}

void Group::after_replay(cudaStream_t launch) {
  lanes_.after_replay(launch);
  for (auto& [name, channel] : channels_) {
    channel.readers[0] = launch;  // a graph may hand out a window; it is read on this stream
  }
  watchdog_.watch_replay(launch);
}

void Group::run_handshakes(int64_t num_pairs, cudaStream_t caller) {
  const CaptureId capture = admit(caller, "handshake");
  lanes_.order(caller, {lanes_.copy()}, capture);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    // Two words in turn: with one, a peer that runs ahead would set it before it was reset.
    shake(Step::kBare, nullptr, {{probe_words_, tag_of(kOpenSalt)}}, capture);
    shake(Step::kBare, nullptr, {{answer_words_, tag_of(kFullSalt)}}, capture);
  }
  lanes_.order(lanes_.copy(), {caller}, capture);
}

}  // namespace ulysses_ops
