// The streams of one device: a single copy chain for all communicators of the process, and an
// own-share stream beside it.
//
// NOTE [one chain]: channels of all communicators share one FIFO copy stream, so ranks that issue
// the same operations in the same order cannot deadlock on the order of their channels. Caller
// streams only fork into it and join it by events. NOTE [two sets of events]: an event that was
// recorded in a capture means nothing outside it, so captures and eager calls use events of their
// own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

namespace ulysses_ops {

// Id of the capture that a stream takes part in; 0 when it does not.
using CaptureId = uint64_t;
CaptureId capture_id(cudaStream_t stream);

// While alive, this thread's calls do not disturb captures of other threads.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode();
  ~RelaxedCaptureMode();
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class Lanes {
 public:
  // The lanes of a device, created at first use and kept until the process ends.
  static Lanes& of(int64_t device);

  cudaStream_t copy() const { return copy_; }
  cudaStream_t own() const { return own_; }
  cudaStream_t side() const { return side_; }  // for probes and releases, never behind a wait

  // The capture that a call from `caller` belongs to. Throws, before anything is issued, when the
  // lanes take part in another capture.
  CaptureId admit(cudaStream_t caller, const void* group, const char* op);

  // One captured step belongs to one group: its windows are pinned, and ordered, by that group
  // alone.
  void set_capture_owner(CaptureId capture, const void* group);

  // Whether all eager work is done. Looks at events and not at the streams, which may be taking
  // part in a capture.
  bool is_idle();

  // Makes every stream of `after` wait for what `before` holds now; all take part in `capture` or,
  // if it is 0, in none.
  void order(cudaStream_t before, std::initializer_list<cudaStream_t> after, CaptureId capture);

  // Makes the copy chain, and for an own share its stream too, wait for what `caller` holds now.
  // The chain of a capture that does so already, as behind several parts of one kernel, is left
  // alone. In a capture an own-share stream of which this very caller has joined all takes the
  // caller's place in the graph, instead of adding it to its own: the edge that says nothing new
  // costs an exchange 4 to 6 us (docs/design/measured.md). Behind another caller the edge says
  // something: a later completion there would miss what is left behind.
  void lead(cudaStream_t caller, bool own_share, CaptureId capture);
  // Makes `caller` wait for the own-share stream.
  void join_own(cudaStream_t caller, CaptureId capture);

  // Orders a replay on `launch` behind the eager work of the lanes, and the lanes behind it.
  // Replays one after the other on one stream need the first half once: it would lead each through
  // the lanes and back.
  void before_replay(cudaStream_t launch);
  void after_replay(cudaStream_t launch);

 private:
  explicit Lanes(int64_t device);
  // Remembers what the lanes hold now as their latest eager work.
  void mark();

  cudaStream_t copy_ = nullptr;
  cudaStream_t own_ = nullptr;
  cudaStream_t side_ = nullptr;
  cudaEvent_t eager_event_ = nullptr;
  cudaEvent_t capture_event_ = nullptr;
  cudaEvent_t copy_mark_ = nullptr;
  cudaEvent_t own_mark_ = nullptr;
  bool is_marked_ = true;  // whether the marks cover all eager work: a mark for each call costs it
  bool may_be_captured_ = false;  // a call in a capture leaves it set, until both are found free
  // The stream whose replay was the latest eager work, by its id: handles are used again.
  std::optional<unsigned long long> replaying_;
  // The capture and the caller that has joined all that the own-share stream holds; 0 for none.
  CaptureId own_joined_in_ = 0;
  cudaStream_t own_joined_by_ = nullptr;
  // The capture and the nodes that the copy chain was led behind last.
  CaptureId led_in_ = 0;
  std::vector<cudaGraphNode_t> led_behind_;
  CaptureId owned_capture_ = 0;
  const void* owner_ = nullptr;
};

}  // namespace ulysses_ops
