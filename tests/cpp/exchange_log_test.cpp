// The numbers that the device notes stay unambiguous when their 32 bits run over.
#include "../../csrc/cuda/exchange_log.h"

#include <cstdio>
#include <set>

using namespace ulysses_ops;

namespace {

int failures = 0;

void expect(bool condition, const char* what) {
  if (!condition) {
    ++failures;
    std::fprintf(stderr, "FAILED: %s\n", what);
  }
}

std::shared_ptr<const std::string> named(const char* name) {
  return std::make_shared<const std::string>(name);
}

void numbers_run_over() {
  constexpr uint64_t kWrap = uint64_t{1} << 32;
  ExchangeLog log(kWrap - 3);
  const uint32_t before = log.add(Step::kOpen, named("before"), 7, {});
  const uint32_t eager = log.add(Step::kClose, named("eager"), 0, {});
  const uint32_t after = log.add(Step::kOpen, named("after"), 7, {});
  expect(before == 0xfffffffe && eager == 0xffffffff, "the last numbers before the turn");
  expect(after == 1, "0 means that nothing waits, and is no number");
  expect(log.find(after)->subject->compare("after") == 0, "an entry is found by its number");
  const auto captured = log.of_capture(7);
  expect(captured.size() == 2 && captured[0].subject->compare("before") == 0 &&
             captured[1].count == kWrap + 1,
         "a capture is told in the order of its calls, across the turn too");
}

void entries_stay_as_long_as_they_are_needed() {
  ExchangeLog log;
  const uint32_t kept = log.add(Step::kOpen, named("kept"), 7, {});
  std::set<uint32_t> numbers{kept};
  for (int call = 0; call < 5000; ++call) {
    numbers.insert(log.add(Step::kClose, nullptr, 0, {}));
  }
  expect(numbers.size() == 5001, "every number is given once");
  expect(log.find(kept)->capture == 7, "captured entries stay");
  expect(!log.find(kept + 1), "eager ones go when there are many newer ones");
  expect(log.latest().size() == 256, "a dump has the latest ones");
  log.forget(7);
  expect(!log.find(kept), "an entry goes with its graph");
}

void a_number_in_use_is_stepped_over() {
  constexpr uint64_t kTurn = uint64_t{1} << 32;
  const std::set<uint32_t> graphs{1, 2, 4};
  const auto taken = [&](uint32_t number) { return graphs.count(number) != 0; };
  expect(next_count(0, taken) == 3, "the numbers of graphs are not an eager call's as well");
  expect(next_count(kTurn - 1, taken) == kTurn + 3, "nor is 0, a turn later");
  expect(next_count(kTurn + 3, taken) == kTurn + 5, "nor one further on");
}

}  // namespace

int main() {
  numbers_run_over();
  entries_stay_as_long_as_they_are_needed();
  a_number_in_use_is_stepped_over();
  if (failures == 0) {
    std::puts("exchange log: ok");
  }
  return failures == 0 ? 0 : 1;
}
