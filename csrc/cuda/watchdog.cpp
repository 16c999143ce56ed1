#include "watchdog.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <optional>
#include <utility>

#include "../check.h"

namespace ulysses_ops {
namespace {

using std::chrono::duration;
using std::chrono::milliseconds;

constexpr milliseconds kBusyPoll{10};
constexpr milliseconds kIdlePoll{100};
constexpr milliseconds kReleasePoll{1};
constexpr milliseconds kQuiet{50};  // without a wait for this long, nothing waits any more
constexpr milliseconds kSettling{5000};
constexpr double kClosedWait_s = 0.1;  // what a peer sent before it closed may still be on its way

constexpr int kMaxFailures = 3;  // then the device is lost to every stream: calls say so themselves

// The first rank that told this.
std::optional<size_t> rank_that(const Status& status, Told what) {
  const auto found = std::find(status.told.begin(), status.told.end(), what);
  return found == status.told.end() ? std::nullopt
                                    : std::optional<size_t>(found - status.told.begin());
}

bool attempt(const std::function<void()>& step) {
  try {
    step();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

Watchdog::Watchdog(int64_t device, const ExchangeLog& log, Rescue& rescue, const SignalPath& path,
                   double limit_s)
    : device_(device),
      log_(log),
      rescue_(rescue),
      path_(path),
      limit_s_(limit_s),
      seen_since_(Clock::now()),
      thread_([this] { run(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
  spare_events_.insert(spare_events_.end(), replays_.begin(), replays_.end());
  for (const cudaEvent_t event : spare_events_) {
    cudaEventDestroy(event);
  }
}

void Watchdog::watch_replay(cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!spare_events_.empty()) {
      event = spare_events_.back();
      spare_events_.pop_back();
    }
  }
  if (event == nullptr) {
    UOPS_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  UOPS_CUDA_CHECK(cudaEventRecord(event, stream));
  const std::lock_guard<std::mutex> lock(mutex_);
  replays_.push_back(event);
}

std::string Watchdog::failure() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!failure_.empty()) {
    wake_.wait_for(lock, kSettling, [&] { return is_settled_ || stop_; });
  }
  return failure_;
}

void Watchdog::set_limit(double limit_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  limit_s_ = limit_s;
}

void Watchdog::run() {
  try {
    UOPS_CUDA_CHECK(cudaSetDevice(static_cast<int>(device_)));
    const RelaxedCaptureMode relaxed;  // captures of other threads are none of its business
    std::unique_lock<std::mutex> lock(mutex_);
    int num_failures = 0;
    while (!stop_ && num_failures < kMaxFailures) {
      const bool is_busy = !replays_.empty() || seen_waiting_ != 0 || has_failed();
      wake_.wait_for(lock, is_busy ? kBusyPoll : kIdlePoll, [&] { return stop_; });
      if (!stop_) {
        lock.unlock();
        num_failures = attempt([&] { tick(); }) ? 0 : num_failures + 1;
        lock.lock();
      }
    }
  } catch (const std::exception&) {
    // No device: calls say so themselves.
  }
}

bool Watchdog::take_finished() {
  const std::lock_guard<std::mutex> lock(mutex_);
  bool any = false;
  while (!replays_.empty()) {
    const cudaError_t status = cudaEventQuery(replays_.front());
    if (status == cudaErrorNotReady) {
      break;
    }
    UOPS_CUDA_CHECK(status);
    spare_events_.push_back(replays_.front());
    replays_.pop_front();
    any = true;
  }
  return any;
}

void Watchdog::tick() {
  const bool has_finished = take_finished();
  if (has_failed()) {
    rescue_.release_wait();  // calls that were already under way
    return;
  }
  const Status status = rescue_.read_status();
  const auto now = Clock::now();
  if (has_finished || status.waiting != seen_waiting_) {
    seen_waiting_ = status.waiting;
    seen_since_ = now;
  }
  if (const auto rank = rank_that(status, Told::kGaveUp)) {
    fail("rank " + std::to_string(*rank) + " gave up on an exchange and told so");
    return;
  }
  if (seen_waiting_ == 0) {
    return;
  }
  double limit_s = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    limit_s = limit_s_;
  }
  const double waited_s = duration<double>(now - seen_since_).count();
  const auto entry = log_.find(seen_waiting_);
  const auto closed = rank_that(status, Told::kClosed);
  if (closed && waited_s > kClosedWait_s) {
    fail("rank " + std::to_string(*closed) + " closed its communicator" +
         (entry ? ", and " + rescue_.describe(*entry) : ""));
    return;
  }
  if (waited_s > limit_s) {
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%.3g s", waited_s);
    fail(std::string("after ") + seconds + " " +
         (entry ? rescue_.describe(*entry) : "a graph that is closed already still waits"));
  }
}

void Watchdog::fail(std::string why) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = std::move(why);
    has_failed_.store(true, std::memory_order_release);
  }
  // Each is tried, whatever became of the one before: a wait that is not ended is worst of all.
  attempt([&] { rescue_.tell_peers(Told::kGaveUp, path_.kind); });
  attempt([&] { rescue_.poison_windows(); });
  attempt([&] { release_until_idle(); });
  // What arrived in between lies over the first filling.
  attempt([&] { rescue_.poison_windows(); });
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_settled_ = true;
  }
  wake_.notify_all();
}

void Watchdog::release_until_idle() {
  std::unique_lock<std::mutex> lock(mutex_);
  auto quiet_since = Clock::now();
  while (!stop_ && Clock::now() - quiet_since < kQuiet) {
    lock.unlock();
    take_finished();
    if (rescue_.release_wait()) {
      quiet_since = Clock::now();
    }
    lock.lock();
    if (!replays_.empty()) {
      quiet_since = Clock::now();
    }
    wake_.wait_for(lock, kReleasePoll, [&] { return stop_; });
  }
}

void Watchdog::look() {
  if (!has_failed() && rank_that(rescue_.read_status(), Told::kGaveUp)) {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait_for(lock, kSettling, [&] { return is_settled_ || stop_; });
  }
}

}  // namespace ulysses_ops
