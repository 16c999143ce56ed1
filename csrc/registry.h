// The groups of this process, by number and by the name that operators carry.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "check.h"
#include "cuda/group.h"
#include "cuda/stream.h"

namespace ulysses_ops {

// The only mutable global. Never destroyed, since at exit the CUDA runtime may be gone before us.
class Registry {
 public:
  static Registry& get() {
    static auto* instance = new Registry;
    return *instance;
  }

  std::mutex& mutex() { return mutex_; }

  int64_t add(std::string name, std::unique_ptr<Group> group) {
    const int64_t number = next_++;
    by_name_[std::move(name)] = group.get();
    groups_[number] = std::move(group);
    return number;
  }

  void remove(int64_t number) {
    const auto found = groups_.find(number);
    if (found != groups_.end()) {
      std::erase_if(by_name_,
                    [&](const auto& entry) { return entry.second == found->second.get(); });
      groups_.erase(found);
    }
  }

  Group* find(int64_t number) const {
    const auto found = groups_.find(number);
    return found == groups_.end() ? nullptr : found->second.get();
  }

  Group* find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::unique_ptr<Group>> groups_;
  std::map<std::string, Group*, std::less<>> by_name_;
  int64_t next_ = 1;
};

// A group with the registry locked: operators run without Python's lock.
class LockedGroup {
 public:
  LockedGroup(int64_t number, const char* op)
      : lock_(Registry::get().mutex()), group_(Registry::get().find(number)) {
    STD_TORCH_CHECK(group_ != nullptr, op, ": the communicator of this group is closed");
  }
  // Null when no open communicator of transport `ce` has this name.
  explicit LockedGroup(std::string_view name)
      : lock_(Registry::get().mutex()), group_(Registry::get().find(name)) {}

  explicit operator bool() const { return group_ != nullptr; }
  Group* operator->() const { return group_; }
  Group* get() const { return group_; }

 private:
  std::lock_guard<std::mutex> lock_;
  Group* group_;
};

}  // namespace ulysses_ops
