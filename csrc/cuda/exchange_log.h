// What a group has issued: the flight recorder, and the key to the number that the device says it
// is waiting in.
//
// NOTE [numbers]: every handshake has a number. Before it waits, the device writes the number into
// the local word `waiting`, and 0 behind its resets. So the host can tell which handshake a blocked
// stream, or a replaying graph, is in, and whether it waits for peers at all or still computes.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "handshake.h"
#include "lanes.h"

namespace ulysses_ops {

enum class Step { kOpen, kClose, kBare };

struct Awaited {
  std::shared_ptr<const SignalWords> words;
  uint64_t tag = 0;
};

struct LogEntry {
  uint64_t number = 0;  // from 1, in the order of the calls
  Step step = Step::kBare;
  std::shared_ptr<const std::string> subject;  // a window, a channel
  CaptureId capture = 0;
  std::chrono::system_clock::time_point issued;
  std::vector<Awaited> awaited;
};

// What was issued, alike on ranks that issue alike; and the same with what tells it from others
// here.
std::string kind_of(const LogEntry& entry);
std::string to_string(const LogEntry& entry);

// Locked by itself: the watchdog reads it while a call of the group may be blocked.
class ExchangeLog {
 public:
  uint64_t add(Step step, std::shared_ptr<const std::string> subject, CaptureId capture,
               std::vector<Awaited> awaited);
  std::optional<LogEntry> find(uint64_t number) const;
  // The latest entries outside captures, oldest first.
  std::vector<LogEntry> latest() const;
  // What a capture holds, in order; kept until its graph is gone.
  std::vector<LogEntry> of_capture(CaptureId capture) const;
  void forget(CaptureId capture);

 private:
  // More than a stream can hold before a call blocks: what is waited in is still known.
  static constexpr size_t kKept = 4096;

  mutable std::mutex mutex_;
  uint64_t last_ = 0;
  std::vector<LogEntry> eager_{kKept};
  size_t num_eager_ = 0;
  std::map<uint64_t, LogEntry> captured_;
};

}  // namespace ulysses_ops
