// What a group has issued: the flight recorder, and the key to the number that the device says it
// is waiting in.
//
// NOTE [numbers]: every handshake has a number. Before it waits, the device notes the number in
// this rank's own word of the row, and takes it back with its resets. So the host can tell which
// handshake a blocked stream, or a replaying graph, is in, and whether it waits for peers at all or
// still computes. A word has 32 bits: counts that differ in higher ones alone have one number, so
// the counts of captured entries, which stay, and of number 0 are left out when they come again.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
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
  uint32_t tag = 0;
};

struct LogEntry {
  uint64_t count = 0;  // from 1, in the order of the calls
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

// The count after `last` whose number is not 0 and not taken.
uint64_t next_count(uint64_t last, const std::function<bool(uint32_t)>& is_taken);

// Locked by itself: the watchdog reads it while a call of the group may be blocked.
class ExchangeLog {
 public:
  // `last` is the count of the entry before the first.
  explicit ExchangeLog(uint64_t last = 0) : last_(last) {}

  // Returns the number of the new entry.
  uint32_t add(Step step, std::shared_ptr<const std::string> subject, CaptureId capture,
               std::vector<Awaited> awaited);
  std::optional<LogEntry> find(uint32_t number) const;
  // The latest entries outside captures, oldest first.
  std::vector<LogEntry> latest() const;
  // What a capture holds, in order; kept until its graph is gone.
  std::vector<LogEntry> of_capture(CaptureId capture) const;
  void forget(CaptureId capture);

 private:
  // More than a stream can hold before a call blocks: what is waited in is still known.
  static constexpr size_t kKept = 4096;

  mutable std::mutex mutex_;
  uint64_t last_;
  std::vector<LogEntry> eager_{kKept};
  size_t num_eager_ = 0;
  std::map<uint32_t, LogEntry> captured_;  // by number
};

}  // namespace ulysses_ops
