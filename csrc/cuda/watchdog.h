// Ends waits that no peer will answer, on a thread of its own.
//
// A stream-memory wait has no time-out. The device notes which handshake it waits in (NOTE
// [numbers]); when that stays the same for longer than the limit, or a peer has told that it gave
// up, the watchdog
//   1. marks the group as failed, so that no host call goes on,
//   2. tells every peer, whose watchdogs then do the same at once,
//   3. fills the windows with NaN bytes, so that no half-filled result looks like a good one,
//   4. writes what is waited for, again and again, until nothing waits any more: every later layer
//      of a graph waits too.
// A replay is watched by an event, since the same handshakes come again in each.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "exchange_log.h"
#include "lanes.h"
#include "rescue.h"

namespace ulysses_ops {

class Watchdog {
 public:
  Watchdog(int64_t device, const ExchangeLog& log, Rescue& rescue, const SignalPath& path,
           double limit_s);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // A replay was launched on `stream`.
  void watch_replay(cudaStream_t stream);

  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  // Why; empty while all is well. Returns when the windows are spoiled and the waits have ended, or
  // after some seconds.
  std::string failure();
  // Looks at the device now, and takes a peer's failure for this rank's.
  void look();

  void set_limit(double limit_s);

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  void tick();
  // Whether a watched replay has finished since the last call.
  bool take_finished();
  void fail(std::string why);
  void release_until_idle();

  int64_t device_;
  const ExchangeLog& log_;
  Rescue& rescue_;
  const SignalPath& path_;

  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  double limit_s_;
  std::string failure_;
  bool is_settled_ = false;  // all that follows a failure is done
  std::deque<cudaEvent_t> replays_;
  std::vector<cudaEvent_t> spare_events_;

  std::atomic<bool> has_failed_{false};
  // Of the thread alone:
  uint32_t seen_waiting_ = 0;
  Clock::time_point seen_since_;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace ulysses_ops
