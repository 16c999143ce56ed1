#include "rescue.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include "../check.h"

namespace ulysses_ops {
namespace {

constexpr int64_t kPoisonBytes = int64_t{1} << 20;

constexpr std::chrono::seconds kSideLimit{2};

template <typename T>
std::shared_ptr<T> allocate_pinned(int64_t count) {
  void* memory = nullptr;
  UOPS_CUDA_CHECK(cudaMallocHost(&memory, count * sizeof(T)));
  return {static_cast<T*>(memory), [](T* pointer) { cudaFreeHost(pointer); }};
}

std::string hexadecimal(uint32_t value) {
  char text[20];
  std::snprintf(text, sizeof(text), "%#x", value);
  return text;
}

}  // namespace

Rescue::Rescue(Lanes& lanes, const ExchangeLog& log, int64_t rank,
               const std::vector<int64_t>& word_bases)
    : lanes_(lanes),
      log_(log),
      rank_(rank),
      block_{static_cast<int64_t>(word_bases.size())},
      base_(word_bases[rank]),
      host_(allocate_pinned<uint32_t>(block_.num_words())),
      poison_(allocate_pinned<char>(kPoisonBytes)) {
  for (int64_t peer = 0; peer < block_.world_size; ++peer) {
    if (peer != rank) {
      told_at_peers_.push_back(WordBlock::at(word_bases[peer], block_.told() + rank));
    }
  }
  std::memset(poison_.get(), 0xff, kPoisonBytes);
}

void Rescue::add_window(char* base, int64_t num_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  windows_.emplace_back(base, num_bytes);
}

void Rescue::remove_window(const char* base) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(windows_, [&](const auto& window) { return window.first == base; });
}

void Rescue::finish() {
  const auto deadline = std::chrono::steady_clock::now() + kSideLimit;
  cudaError_t status = cudaStreamQuery(lanes_.side());
  while (status == cudaErrorNotReady && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
    status = cudaStreamQuery(lanes_.side());
  }
  UOPS_CUDA_CHECK(status);
}

void Rescue::read_words() {
  UOPS_CUDA_CHECK(cudaMemcpyAsync(host_.get(), reinterpret_cast<const void*>(base_),
                                  block_.num_bytes(), cudaMemcpyDefault, lanes_.side()));
  finish();
}

Status Rescue::read_status() {
  const std::lock_guard<std::mutex> lock(mutex_);
  read_words();
  const uint32_t* words = host_.get();
  Status status;
  // One chain, so there is one note, but for a stream that goes on while its words are read.
  for (int64_t row = 0; row < WordBlock::kNumRows; ++row) {
    status.waiting = std::max(status.waiting, words[block_.row(row) + rank_]);
  }
  for (int64_t rank = 0; rank < block_.world_size; ++rank) {
    status.told.push_back(static_cast<Told>(words[block_.told() + rank]));
  }
  return status;
}

std::string Rescue::describe(const LogEntry& entry) {
  const std::lock_guard<std::mutex> lock(mutex_);
  read_words();
  std::vector<int64_t> missing;
  std::string held;
  for (const Awaited& awaited : entry.awaited) {
    // In rotated order, as handshake.cpp goes through them. Resets come behind all waits, so what
    // a peer has signalled is still there.
    for (size_t step = 0; step < awaited.words->local.size(); ++step) {
      const int64_t peer = (rank_ + 1 + static_cast<int64_t>(step)) % block_.world_size;
      const uint32_t value = host_.get()[(awaited.words->local[step] - WordBlock::at(base_, 0)) /
                                         WordBlock::kWordBytes];
      // A peer may be missed for several channels, and is named once.
      if (value != awaited.tag &&
          std::find(missing.begin(), missing.end(), peer) == missing.end()) {
        missing.push_back(peer);
      }
      held += (held.empty() ? "" : ", ") + std::string("rank ") + std::to_string(peer) + ": " +
              hexadecimal(value) + " of " + hexadecimal(awaited.tag);
    }
  }
  std::string names;
  for (const int64_t peer : missing) {
    names += (names.empty() ? "" : ", ") + std::to_string(peer);
  }
  return to_string(entry) + " waits for ranks [" + names + "]; words held " + held;
}

void Rescue::tell_peers(Told what, SignalKind kind) {
  SignalPath path;
  path.kind = kind;
  path.scratch = WordBlock::at(base_, block_.side_scratch());
  SignalWords words;
  words.remote = told_at_peers_;
  announce({&words, static_cast<uint32_t>(what)}, path, lanes_.side());
  finish();
}

void Rescue::poison_windows() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [base, bytes] : windows_) {
    for (int64_t done = 0; done < bytes; done += kPoisonBytes) {
      UOPS_CUDA_CHECK(cudaMemcpyAsync(base + done, poison_.get(),
                                      std::min(kPoisonBytes, bytes - done), cudaMemcpyDefault,
                                      lanes_.side()));
    }
  }
  finish();
}

bool Rescue::release_wait() {
  const auto entry = log_.find(read_status().waiting);
  if (!entry) {
    return false;
  }
  for (const Awaited& awaited : entry->awaited) {
    write_local(awaited.words->local, awaited.tag, lanes_.side());
  }
  finish();
  return true;
}

}  // namespace ulysses_ops
