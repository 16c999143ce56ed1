#include "exchange_log.h"

#include <algorithm>
#include <utility>

namespace ulysses_ops {
namespace {

constexpr size_t kTold = 256;  // entries of a dump

uint32_t number_of(uint64_t count) { return static_cast<uint32_t>(count); }

const char* name_of(Step step) {
  switch (step) {
    case Step::kOpen:
      return "open";
    case Step::kClose:
      return "close";
    case Step::kBare:
      return "bare handshake";
  }
  return "unknown";
}

}  // namespace

std::string kind_of(const LogEntry& entry) {
  return std::string(name_of(entry.step)) +
         (entry.subject == nullptr ? "" : " of " + *entry.subject);
}

std::string to_string(const LogEntry& entry) {
  std::string text = "#" + std::to_string(entry.count) + ", " + kind_of(entry);
  if (entry.capture != 0) {
    text += " in captured step " + std::to_string(entry.capture);
  }
  return text;
}

uint64_t next_count(uint64_t last, const std::function<bool(uint32_t)>& is_taken) {
  do {
    ++last;
  } while (number_of(last) == 0 || is_taken(number_of(last)));
  return last;
}

uint32_t ExchangeLog::add(Step step, std::shared_ptr<const std::string> subject, CaptureId capture,
                          std::vector<Awaited> awaited) {
  LogEntry entry{
      0, step, std::move(subject), capture, std::chrono::system_clock::now(), std::move(awaited)};
  const std::lock_guard<std::mutex> lock(mutex_);
  last_ = next_count(last_, [&](uint32_t number) { return captured_.count(number) != 0; });
  entry.count = last_;
  if (capture != 0) {
    captured_.emplace(number_of(last_), std::move(entry));
  } else {
    eager_[num_eager_++ % kKept] = std::move(entry);
  }
  return number_of(last_);
}

std::optional<LogEntry> ExchangeLog::find(uint32_t number) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = captured_.find(number); found != captured_.end()) {
    return found->second;
  }
  const auto same = [&](const LogEntry& entry) { return number_of(entry.count) == number; };
  const auto found = std::find_if(eager_.begin(), eager_.end(), same);
  return found == eager_.end() || number == 0 ? std::nullopt : std::optional(*found);
}

std::vector<LogEntry> ExchangeLog::latest() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<LogEntry> entries;
  for (size_t at = num_eager_ > kTold ? num_eager_ - kTold : 0; at < num_eager_; ++at) {
    entries.push_back(eager_[at % kKept]);
  }
  return entries;
}

std::vector<LogEntry> ExchangeLog::of_capture(CaptureId capture) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<LogEntry> entries;
  for (const auto& [number, entry] : captured_) {
    if (entry.capture == capture) {
      entries.push_back(entry);
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const LogEntry& a, const LogEntry& b) { return a.count < b.count; });
  return entries;
}

void ExchangeLog::forget(CaptureId capture) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(captured_, [&](const auto& entry) { return entry.second.capture == capture; });
}

}  // namespace ulysses_ops
