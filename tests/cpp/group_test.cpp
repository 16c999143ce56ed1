// Ranks of a group in one process, on simulated GPUs: rounds with data, and the watchdog while
// other threads ask it. Built with the thread sanitizer where the compiler has it.
#include "../../csrc/cuda/group.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>

#include "simulated_gpu.h"

using namespace ulysses_ops;
using namespace std::chrono_literals;

namespace {

constexpr int64_t kRows = 6;   // of a rank
constexpr int64_t kHeads = 2;  // likewise
constexpr int64_t kRounds = 30;

std::atomic<int> failures{0};

void expect(bool condition, const std::string& what) {
  if (!condition) {
    ++failures;
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  }
}

Layout layout_of(int64_t world_size) {
  Layout result;
  result.batch = 1;
  result.head_dim = 1;
  result.itemsize = sizeof(int32_t);
  result.seq_splits.assign(world_size, kRows);
  result.head_splits.assign(world_size, kHeads);
  return result;
}

struct Rank {
  Rank(int64_t rank, const std::vector<int64_t>& word_bases,
       const std::vector<std::vector<int32_t>*>& windows, double limit_s)
      : rank(rank),
        window(*windows[rank]),
        caller(simulated_gpu::new_stream()),
        source_size(static_cast<int64_t>(windows.size()) * kRows * kHeads),
        group(std::make_unique<Group>(rank, static_cast<int64_t>(windows.size()), rank, word_bases,
                                      SignalPath{}, limit_s)) {
    WindowInfo info;
    info.name = info.channel = "test";
    info.layout = layout_of(static_cast<int64_t>(windows.size()));
    for (std::vector<int32_t>* each : windows) {
      info.base_of_rank.push_back(reinterpret_cast<char*>(each->data()));
    }
    group->add_window(std::move(info));
  }

  void send(std::vector<int32_t>& x) {
    WindowInfo& info = group->window(window.data(), "test");
    const auto shape = info.layout.source_shape(rank);
    Source source;
    source.identity = x.data();
    source.base = reinterpret_cast<const char*>(x.data());
    source.strides = {shape[1] * shape[2], shape[2], 1, 1};
    const CaptureId capture = group->admit(caller, "test");
    group->check_send(info, kEveryRank, capture, "test");
    group->send(info, std::move(source), kEveryRank, caller, capture);
  }

  void complete(std::vector<int32_t>& x) { group->complete({window.data()}, {x.data()}, caller); }

  int64_t rank;
  std::vector<int32_t>& window;
  cudaStream_t caller;
  int64_t source_size;
  std::deque<std::vector<int32_t>> sources;
  std::unique_ptr<Group> group;
};

struct Ranks {
  Ranks(int64_t world_size, double limit_s)
      : words(world_size), windows(world_size), ranks(world_size) {
    const WordBlock block{world_size};
    std::vector<int64_t> bases;
    std::vector<std::vector<int32_t>*> of_ranks;
    for (int64_t rank = 0; rank < world_size; ++rank) {
      words[rank].assign(block.num_words() / 2 + 1, 0);  // of 64 bits, so that pairs are aligned
      bases.push_back(reinterpret_cast<int64_t>(words[rank].data()));
      windows[rank].assign(world_size * kRows * kHeads, 0);
      of_ranks.push_back(&windows[rank]);
    }
    for (int64_t rank = 0; rank < world_size; ++rank) {
      ranks[rank] = std::make_unique<Rank>(rank, bases, of_ranks, limit_s);
    }
  }

  std::vector<std::vector<uint64_t>> words;
  std::vector<std::vector<int32_t>> windows;
  std::vector<std::unique_ptr<Rank>> ranks;
};

void together(const std::vector<std::function<void()>>& works) {
  std::vector<std::thread> threads(works.begin(), works.end());
  for (std::thread& thread : threads) {
    thread.join();
  }
}

int32_t value_of(int64_t round, int64_t sender) {
  return static_cast<int32_t>(1000 * (sender + 1) + round);
}

// Elements of the window that are not of this round.
int64_t count_wrong(const std::vector<int32_t>& window, int64_t round) {
  int64_t wrong = 0;
  for (int64_t at = 0; at < static_cast<int64_t>(window.size()); ++at) {
    wrong += window[at] != value_of(round, at / (kRows * kHeads));
  }
  return wrong;
}

// Rounds of one rank, each read behind its completion; higher ranks are slower to read. Ends early,
// with false, when the rank is told that the group gave up.
bool run_rounds(Rank& rank, std::atomic<int64_t>& wrong) {
  try {
    for (int64_t round = 0; round < kRounds; ++round) {
      std::vector<int32_t>& x = rank.sources.emplace_back(rank.source_size);
      std::fill(x.begin(), x.end(), value_of(round, rank.rank));
      rank.send(x);
      rank.complete(x);
      for (int64_t look = 0; look < 1 + 4 * rank.rank; ++look) {
        simulated_gpu::enqueue(rank.caller,
                               [&, round] { wrong += count_wrong(rank.window, round); });
      }
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// What users and the watchdog's own thread do at the same time.
void ask(Group& group, double limit_s, const std::atomic<bool>& stop) {
  for (int64_t turn = 0; !stop; ++turn) {
    group.watchdog().set_limit(limit_s + static_cast<double>(turn % 3));
    group.watchdog().look();
    group.watchdog().failure();
    group.log().latest();
    group.rescue().read_status();
    std::this_thread::sleep_for(1ms);
  }
}

// With a fault a signal may be lost as well: the watchdog then ends what waits for it.
int64_t wrong_elements(int64_t world_size, SignalKind kind, Fault fault) {
  const double limit_s = fault == Fault::kNone ? 20.0 : 1.0;
  Ranks all(world_size, limit_s);
  std::atomic<int64_t> wrong{0};
  std::atomic<int64_t> ended{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> asking;
  std::vector<std::function<void()>> works;
  for (auto& rank : all.ranks) {
    rank->group->path().fault = fault;
    rank->group->path().kind = kind;
    asking.emplace_back([&] { ask(*rank->group, limit_s, stop); });
    works.emplace_back([&] { ended += run_rounds(*rank, wrong); });
  }
  together(works);
  for (auto& rank : all.ranks) {
    Lanes& lanes = rank->group->lanes();
    for (const cudaStream_t stream : {rank->caller, lanes.copy(), lanes.own()}) {
      expect(simulated_gpu::finishes(stream, 30s), "everything that was issued ends");
    }
  }
  stop = true;
  for (std::thread& thread : asking) {
    thread.join();
  }
  if (fault == Fault::kNone) {
    expect(ended == world_size, "every rank goes through all rounds");
    const WordBlock block{world_size};
    for (auto& rank : all.ranks) {
      expect(rank->group->watchdog().failure().empty(), "nobody gave up");
      expect(rank->group->rescue().read_status().waiting == 0, "no note is left");
      const auto* words = reinterpret_cast<const uint32_t*>(all.words[rank->rank].data());
      expect(std::all_of(words, words + block.told(), [](uint32_t word) { return word == 0; }),
             "every word is back at rest");
    }
  }
  return wrong;
}

bool is_poisoned(const std::vector<int32_t>& window) {
  return std::all_of(window.begin(), window.end(), [](int32_t value) { return value == -1; });
}

void a_peer_that_does_not_come() {
  Ranks pair(2, 0.2);
  Rank& here = *pair.ranks[0];
  std::vector<int32_t> x(here.source_size, 7);
  here.send(x);
  here.complete(x);
  const auto start = std::chrono::steady_clock::now();
  std::string failure;
  std::string other;
  const auto until_told = [&](Rank& rank, std::string& told) {
    while (told.empty() && std::chrono::steady_clock::now() - start < 5s) {
      told = rank.group->watchdog().failure();
      std::this_thread::sleep_for(1ms);
    }
  };
  together({[&] { until_told(here, failure); }, [&] { until_told(*pair.ranks[1], other); }});
  const auto took = std::chrono::steady_clock::now() - start;
  expect(took > 200ms && took < 3s, "the limit and little more");
  expect(failure.find("waits for ranks [1]") != std::string::npos, "who is missed: " + failure);
  expect(other.find("rank 0 gave up") != std::string::npos, "the peer is told: " + other);
  expect(simulated_gpu::finishes(here.caller, 5s), "every wait is ended");
  expect(is_poisoned(here.window), "nothing half-filled looks like a result");
  try {
    here.send(x);
    expect(false, "no call goes on");
  } catch (const std::exception& error) {
    expect(std::string(error.what()).find("gave up") != std::string::npos, error.what());
  }
}

// The control: as late, within the limit.
void a_peer_that_comes_late() {
  Ranks pair(2, 20.0);
  std::vector<int32_t> x(pair.ranks[0]->source_size, 7);
  pair.ranks[0]->send(x);
  pair.ranks[0]->complete(x);
  expect(!simulated_gpu::finishes(pair.ranks[0]->caller, 400ms), "it waits");
  pair.ranks[1]->send(x);
  pair.ranks[1]->complete(x);
  for (auto& rank : pair.ranks) {
    expect(simulated_gpu::finishes(rank->caller, 5s), "then both go on");
    expect(rank->group->watchdog().failure().empty(), "nobody gave up");
    expect(!is_poisoned(rank->window), "and the data is there");
  }
}

}  // namespace

// For the control of the sanitizer: what it must report.
void race() {
  int64_t count = 0;
  together({[&] { ++count; }, [&] { ++count; }});
}

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "race") == 0) {
    race();
    return 0;
  }
  a_peer_that_comes_late();
  a_peer_that_does_not_come();
  simulated_gpu::set_jitter(30us);
  for (const int64_t world_size : {2, 3, 4}) {  // an odd one has a word in a row that is nobody's
    const std::string where = " at world_size=" + std::to_string(world_size);
    const auto wrong = [&](Fault fault, SignalKind kind = SignalKind::kWriteValue) {
      return wrong_elements(world_size, kind, fault);
    };
    expect(wrong(Fault::kNone) == 0, "every element is of its round" + where);
    expect(wrong(Fault::kNone, SignalKind::kMemcpy) == 0, "with copied signals too" + where);
    expect(wrong(Fault::kNoOpen) > 0, "without an open a reader is overwritten" + where);
    expect(wrong(Fault::kNoWait) > 0, "without a wait a reader comes too early" + where);
  }
  if (failures == 0) {
    std::puts("group: ok");
  }
  return failures == 0 ? 0 : 1;
}
