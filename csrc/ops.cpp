// `_C_cuda`: the private operators of the copy-engine transport; the public ones are in
// public_ops.cpp. Groups are numbers here because a string argument leaks in the stable ABI's
// unboxing; the two calls that take names run once a group or a window.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/driver.h"
#include "cuda/group.h"
#include "cuda/ipc.h"
#include "registry.h"

namespace ulysses_ops {
namespace {

int64_t create_group(std::string name, int64_t rank, int64_t world_size, int64_t device,
                     std::vector<int64_t> word_bases, int64_t signal_kind, double limit_s) {
  const std::lock_guard<std::mutex> lock(Registry::get().mutex());
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  SignalPath path;
  path.kind = static_cast<SignalKind>(signal_kind);
  path.flush_remote = device_attribute(CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, device) == 1;
  return Registry::get().add(std::move(name), std::make_unique<Group>(rank, world_size, device,
                                                                      word_bases, path, limit_s));
}

// Peers that still wait for this rank then need not wait for their limit.
void destroy_group(int64_t number) {
  const std::lock_guard<std::mutex> lock(Registry::get().mutex());
  if (Group* group = Registry::get().find(number); group != nullptr) {
    const RelaxedCaptureMode relaxed;
    try {
      group->rescue().tell_peers(Told::kClosed, group->path().kind);
    } catch (const std::exception&) {
      // A lost device tells nobody anything.
    }
  }
  Registry::get().remove(number);
}

int64_t words_bytes(int64_t world_size) { return WordBlock{world_size}.num_bytes(); }

void set_signal(int64_t number, int64_t signal_kind) {
  LockedGroup(number, "signal")->path().kind = static_cast<SignalKind>(signal_kind);
}

void set_fault(int64_t number, int64_t fault) {
  LockedGroup(number, "fault")->path().fault = static_cast<Fault>(fault);
}

void announce_probe(int64_t number, int64_t value) {
  const LockedGroup group(number, "probe");
  Signal signal = group->probe_signal();
  signal.tag = static_cast<uint32_t>(value);
  announce(signal, group->path(), group->lanes().side());
}

std::vector<int64_t> read_probe(int64_t number, int64_t world_size) {
  const LockedGroup group(number, "probe");
  std::vector<uint32_t> words(static_cast<size_t>(world_size));
  const cudaStream_t side = group->lanes().side();
  UOPS_CUDA_CHECK(cudaMemcpyAsync(words.data(), reinterpret_cast<const void*>(group->probe_words()),
                                  words.size() * sizeof(uint32_t), cudaMemcpyDefault, side));
  UOPS_CUDA_CHECK(cudaStreamSynchronize(side));
  return {words.begin(), words.end()};
}

// Pairs of bare handshakes behind the current stream, for measurements.
void run_handshakes(int64_t number, int64_t num_pairs) {
  const LockedGroup group(number, "handshake");
  group->run_handshakes(num_pairs, current_stream(group->device()));
}

void add_window(int64_t number, std::string name, std::string channel, int64_t tag, bool gather,
                int64_t batch, int64_t head_dim, int64_t itemsize, std::vector<int64_t> seq_splits,
                std::vector<int64_t> head_splits, std::vector<int64_t> seq_starts,
                std::vector<int64_t> head_starts, int64_t seq_total, int64_t head_total,
                std::vector<int64_t> bases) {
  WindowInfo info;
  info.name = std::move(name);
  info.channel = std::move(channel);
  info.tag = static_cast<uint64_t>(tag);
  info.layout = Layout{gather ? Direction::kGather : Direction::kScatter,
                       batch,
                       head_dim,
                       itemsize,
                       std::move(seq_splits),
                       std::move(head_splits),
                       std::move(seq_starts),
                       std::move(head_starts),
                       seq_total,
                       head_total};
  for (const int64_t base : bases) {
    info.base_of_rank.push_back(reinterpret_cast<char*>(base));
  }
  LockedGroup(number, "reserve")->add_window(std::move(info));
}

void remove_window(int64_t number, int64_t base) {
  LockedGroup(number, "reserve")->remove_window(reinterpret_cast<const void*>(base));
}

void open_round(int64_t number, int64_t base) {
  const LockedGroup group(number, "exchange");
  group->open(reinterpret_cast<const void*>(base), current_stream(group->device()));
}

std::string pending(int64_t number) {
  const LockedGroup group(number, "pending");
  return group->pending(capture_id(current_stream(group->device())));
}

// Id of the current stream's capture, which from now on belongs to this group.
int64_t own_capture(int64_t number) {
  const LockedGroup group(number, "capture");
  const CaptureId capture = capture_id(current_stream(group->device()));
  group->lanes().set_capture_owner(capture, group.get());
  return static_cast<int64_t>(capture);
}

std::vector<int64_t> window_states(int64_t number) {
  return LockedGroup(number, "reserve")->window_states();
}

void forget_capture(int64_t number, int64_t capture) {
  LockedGroup(number, "capture")->forget_capture(static_cast<CaptureId>(capture));
}

void abandon_captures(int64_t number) { LockedGroup(number, "capture")->abandon_captures(); }

void before_replay(int64_t number) {
  const LockedGroup group(number, "replay");
  group->before_replay(current_stream(group->device()));
}

void after_replay(int64_t number) {
  const LockedGroup group(number, "replay");
  group->after_replay(current_stream(group->device()));
}

bool is_idle(int64_t number) {
  const LockedGroup group(number, "idle");
  const RelaxedCaptureMode relaxed;
  return group->lanes().is_idle();
}

void poison_windows(int64_t number) {
  const LockedGroup group(number, "close");
  const RelaxedCaptureMode relaxed;
  group->rescue().poison_windows();
}

void release_wait(int64_t number) {
  const LockedGroup group(number, "close");
  const RelaxedCaptureMode relaxed;
  group->rescue().release_wait();
}

// Why the group gave up, empty while it did not; with `look`, after a look at what peers told.
std::string failure(int64_t number, bool look) {
  const LockedGroup group(number, "check");
  const RelaxedCaptureMode relaxed;
  if (look) {
    group->watchdog().look();
  }
  return group->watchdog().failure();
}

void set_limit(int64_t number, double limit_s) {
  LockedGroup(number, "limit")->watchdog().set_limit(limit_s);
}

// What a capture holds, one a line.
std::string captured_exchanges(int64_t number, int64_t capture) {
  std::string text;
  for (const LogEntry& entry :
       LockedGroup(number, "capture")->log().of_capture(static_cast<CaptureId>(capture))) {
    text += kind_of(entry) + "\n";
  }
  return text;
}

// The latest calls, one a line: microseconds since the epoch, a space, what was issued.
std::string exchange_log(int64_t number) {
  std::string text;
  for (const LogEntry& entry : LockedGroup(number, "log")->log().latest()) {
    const auto issued =
        std::chrono::duration_cast<std::chrono::microseconds>(entry.issued.time_since_epoch());
    text += std::to_string(issued.count()) + " " + to_string(entry) + "\n";
  }
  return text;
}

std::vector<int64_t> device_facts(int64_t device) {
  return {device_attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device),
          device_attribute(CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, device),
          device_attribute(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, device),
          device_attribute(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, device)};
}

std::vector<int64_t> ipc_export_op(int64_t pointer) { return ipc_export(pointer); }
int64_t ipc_open_op(std::vector<int64_t> handle, int64_t device) {
  return ipc_open(handle, device);
}

}  // namespace
}  // namespace ulysses_ops

STABLE_TORCH_LIBRARY_FRAGMENT(ulysses, m) {
  m.def("_cuda_device_facts(int device) -> int[]");

  m.def("_ipc_allocate(int bytes, int device) -> int");
  m.def("_ipc_free(int pointer) -> ()");
  m.def("_ipc_export(int pointer) -> int[]");
  m.def("_ipc_open(int[] handle, int device) -> int");
  m.def("_ipc_close(int pointer) -> ()");

  m.def("_ce_words_bytes(int world_size) -> int");
  m.def(
      "_ce_create_group(str name, int rank, int world_size, int device, int[] word_bases, int "
      "signal_kind, float limit_s) -> int");
  m.def("_ce_destroy_group(int group) -> ()");
  m.def("_ce_set_signal(int group, int signal_kind) -> ()");
  m.def("_ce_set_fault(int group, int fault) -> ()");
  m.def("_ce_announce_probe(int group, int value) -> ()");
  m.def("_ce_read_probe(int group, int world_size) -> int[]");
  m.def("_ce_run_handshakes(int group, int num_pairs) -> ()");
  m.def(
      "_ce_add_window(int group, str name, str channel, int tag, bool gather, int batch, int "
      "head_dim, int itemsize, "
      "int[] seq_splits, int[] head_splits, int[] seq_starts, int[] head_starts, int seq_total, "
      "int "
      "head_total, int[] bases) -> ()");
  m.def("_ce_remove_window(int group, int base) -> ()");
  m.def("_ce_open_round(int group, int base) -> ()");
  m.def("_ce_pending(int group) -> str");
  m.def("_ce_own_capture(int group) -> int");
  m.def("_ce_window_states(int group) -> int[]");
  m.def("_ce_forget_capture(int group, int capture) -> ()");
  m.def("_ce_abandon_captures(int group) -> ()");
  m.def("_ce_before_replay(int group) -> ()");
  m.def("_ce_after_replay(int group) -> ()");
  m.def("_ce_is_idle(int group) -> bool");
  m.def("_ce_poison_windows(int group) -> ()");
  m.def("_ce_release_wait(int group) -> ()");
  m.def("_ce_failure(int group, bool look) -> str");
  m.def("_ce_set_limit(int group, float limit_s) -> ()");
  m.def("_ce_exchange_log(int group) -> str");
  m.def("_ce_captured_exchanges(int group, int capture) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(ulysses, CompositeExplicitAutograd, m) {
  using namespace ulysses_ops;
  m.impl("_cuda_device_facts", TORCH_BOX(&device_facts));

  m.impl("_ipc_allocate", TORCH_BOX(&ipc_allocate));
  m.impl("_ipc_free", TORCH_BOX(&ipc_free));
  m.impl("_ipc_export", TORCH_BOX(&ipc_export_op));
  m.impl("_ipc_open", TORCH_BOX(&ipc_open_op));
  m.impl("_ipc_close", TORCH_BOX(&ipc_close));

  m.impl("_ce_words_bytes", TORCH_BOX(&words_bytes));
  m.impl("_ce_create_group", TORCH_BOX(&create_group));
  m.impl("_ce_destroy_group", TORCH_BOX(&destroy_group));
  m.impl("_ce_set_signal", TORCH_BOX(&set_signal));
  m.impl("_ce_set_fault", TORCH_BOX(&set_fault));
  m.impl("_ce_announce_probe", TORCH_BOX(&announce_probe));
  m.impl("_ce_read_probe", TORCH_BOX(&read_probe));
  m.impl("_ce_run_handshakes", TORCH_BOX(&run_handshakes));
  m.impl("_ce_add_window", TORCH_BOX(&add_window));
  m.impl("_ce_remove_window", TORCH_BOX(&remove_window));
  m.impl("_ce_open_round", TORCH_BOX(&open_round));
  m.impl("_ce_pending", TORCH_BOX(&pending));
  m.impl("_ce_own_capture", TORCH_BOX(&own_capture));
  m.impl("_ce_window_states", TORCH_BOX(&window_states));
  m.impl("_ce_forget_capture", TORCH_BOX(&forget_capture));
  m.impl("_ce_abandon_captures", TORCH_BOX(&abandon_captures));
  m.impl("_ce_before_replay", TORCH_BOX(&before_replay));
  m.impl("_ce_after_replay", TORCH_BOX(&after_replay));
  m.impl("_ce_is_idle", TORCH_BOX(&is_idle));
  m.impl("_ce_poison_windows", TORCH_BOX(&poison_windows));
  m.impl("_ce_release_wait", TORCH_BOX(&release_wait));
  m.impl("_ce_failure", TORCH_BOX(&failure));
  m.impl("_ce_set_limit", TORCH_BOX(&set_limit));
  m.impl("_ce_exchange_log", TORCH_BOX(&exchange_log));
  m.impl("_ce_captured_exchanges", TORCH_BOX(&captured_exchanges));
}
