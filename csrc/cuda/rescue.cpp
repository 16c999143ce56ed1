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

std::string hexadecimal(uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof(text), "%#llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

Rescue::Rescue(Lanes& lanes, const ExchangeLog& log, int64_t rank, int64_t world_size,
               CUdeviceptr words, int64_t num_words, CUdeviceptr status,
               std::vector<CUdeviceptr> told_at_peers)
    : lanes_(lanes),
      log_(log),
      rank_(rank),
      world_size_(world_size),
      words_(words),
      num_words_(num_words),
      status_(status),
      told_at_peers_(std::move(told_at_peers)),
      host_(allocate_pinned<uint64_t>(num_words)),
      poison_(allocate_pinned<char>(kPoisonBytes)) {
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

void Rescue::read(CUdeviceptr from, int64_t num_words) {
  UOPS_CUDA_CHECK(cudaMemcpyAsync(host_.get(), reinterpret_cast<const void*>(from),
                                  num_words * sizeof(uint64_t), cudaMemcpyDefault, lanes_.side()));
  finish();
}

Status Rescue::read_status() {
  const std::lock_guard<std::mutex> lock(mutex_);
  read(status_, 1 + world_size_);
  Status status;
  status.waiting = host_.get()[0];
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    status.told.push_back(static_cast<Told>(host_.get()[1 + rank]));
  }
  return status;
}

std::string Rescue::describe(const LogEntry& entry) {
  const std::lock_guard<std::mutex> lock(mutex_);
  read(words_, num_words_);
  std::string missing;
  std::string held;
  for (const Awaited& awaited : entry.awaited) {
    // In rotated order, as handshake.cpp goes through them. Resets come behind all waits, so what
    // a peer has signalled is still there.
    for (size_t step = 0; step < awaited.words->local.size(); ++step) {
      const int64_t peer = (rank_ + 1 + static_cast<int64_t>(step)) % world_size_;
      const uint64_t value = host_.get()[(awaited.words->local[step] - words_) / sizeof(uint64_t)];
      if (value != awaited.tag) {
        missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
      }
      held += (held.empty() ? "" : ", ") + std::string("rank ") + std::to_string(peer) + ": " +
              hexadecimal(value) + " of " + hexadecimal(awaited.tag);
    }
  }
  return to_string(entry) + " waits for ranks [" + missing + "]; words held " + held;
}

void Rescue::tell_peers(Told what, SignalKind kind) {
  const auto value = static_cast<uint64_t>(what);
  SignalPath path;
  path.kind = kind;
  path.scratch = status_ + (1 + world_size_) * sizeof(uint64_t);
  const SignalWords words{told_at_peers_, {}};
  announce({&words, value}, path, lanes_.side());
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
