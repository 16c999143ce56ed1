#include "lanes.h"

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "../check.h"

namespace ulysses_ops {

namespace {

// The nodes that a capturing stream is behind; none where an edge from one is not a full one.
std::vector<cudaGraphNode_t> place_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t num_nodes = 0;
  UOPS_CUDA_CHECK(
      cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &nodes, &edges, &num_nodes));
  for (size_t i = 0; edges != nullptr && i < num_nodes; ++i) {
    if (edges[i].from_port != 0 || edges[i].type != 0) {
      return {};
    }
  }
  return {nodes, nodes + num_nodes};
}

}  // namespace

CaptureId capture_id(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  UOPS_CUDA_CHECK(
      cudaStreamGetCaptureInfo(stream, &status, &id, nullptr, nullptr, nullptr, nullptr));
  STD_TORCH_CHECK(status != cudaStreamCaptureStatusInvalidated,
                  "ulysses: the capture of this stream was invalidated by an earlier call; end it "
                  "and capture again");
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

RelaxedCaptureMode::RelaxedCaptureMode() {
  UOPS_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_));
}
RelaxedCaptureMode::~RelaxedCaptureMode() { cudaThreadExchangeStreamCaptureMode(&mode_); }

Lanes::Lanes(int64_t device) {
  int previous = 0;
  UOPS_CUDA_CHECK(cudaGetDevice(&previous));
  UOPS_CUDA_CHECK(cudaSetDevice(static_cast<int>(device)));
  const RelaxedCaptureMode relaxed;
  int least = 0;
  int greatest = 0;
  UOPS_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  UOPS_CUDA_CHECK(cudaStreamCreateWithPriority(&copy_, cudaStreamNonBlocking, greatest));
  UOPS_CUDA_CHECK(cudaStreamCreateWithPriority(&own_, cudaStreamNonBlocking, greatest));
  // A level of its own, so that it shares no hardware queue with a stream that waits.
  UOPS_CUDA_CHECK(cudaStreamCreateWithPriority(&side_, cudaStreamNonBlocking, greatest + 1));
  UOPS_CUDA_CHECK(cudaEventCreateWithFlags(&eager_event_, cudaEventDisableTiming));
  for (cudaEvent_t* event : {&capture_event_, &copy_mark_, &own_mark_}) {
    UOPS_CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  UOPS_CUDA_CHECK(cudaSetDevice(previous));
}

Lanes& Lanes::of(int64_t device) {
  // Never destroyed: at exit the CUDA runtime may be gone before us.
  static auto* lanes = new std::map<int64_t, std::unique_ptr<Lanes>>;
  auto& entry = (*lanes)[device];
  if (entry == nullptr) {
    entry.reset(new Lanes(device));
  }
  return *entry;
}

CaptureId Lanes::admit(cudaStream_t caller, const void* group, const char* op) {
  const CaptureId capture = capture_id(caller);
  bool lanes_captured = false;
  for (size_t lane = 0; may_be_captured_ && lane < 2; ++lane) {
    const CaptureId lane_capture = capture_id(lane == 0 ? copy_ : own_);
    STD_TORCH_CHECK(lane_capture == 0 || lane_capture == capture, op,
                    ": the copy streams of this device take part in another capture (id ",
                    lane_capture, ", this call's is ", capture,
                    "); complete and end that capture first");
    lanes_captured |= lane_capture != 0;
  }
  may_be_captured_ = lanes_captured;
  STD_TORCH_CHECK(capture == 0 || capture != owned_capture_ || group == owner_, op,
                  ": this step is captured for another communicator; capture a step with the "
                  "communicator that it uses, and use one in it");
  if (capture != 0 && !lanes_captured) {
    mark();  // the last chance: soon they take part in the capture
  }
  return capture;
}

void Lanes::set_capture_owner(CaptureId capture, const void* group) {
  owned_capture_ = capture;
  owner_ = group;
}

void Lanes::mark() {
  if (is_marked_) {
    return;
  }
  UOPS_CUDA_CHECK(cudaEventRecord(copy_mark_, copy_));
  UOPS_CUDA_CHECK(cudaEventRecord(own_mark_, own_));
  is_marked_ = true;
}

bool Lanes::is_idle() {
  mark();
  for (const cudaEvent_t event : {copy_mark_, own_mark_}) {
    const cudaError_t status = cudaEventQuery(event);
    if (status == cudaErrorNotReady) {
      return false;
    }
    UOPS_CUDA_CHECK(status);
  }
  return true;
}

void Lanes::order(cudaStream_t before, std::initializer_list<cudaStream_t> after,
                  CaptureId capture) {
  is_marked_ &= capture != 0;
  if (capture == 0) {
    replaying_.reset();
  }
  may_be_captured_ |= capture != 0;
  // A wait refers to the latest record, so one event serves all calls.
  const cudaEvent_t event = capture == 0 ? eager_event_ : capture_event_;
  UOPS_CUDA_CHECK(cudaEventRecord(event, before));
  for (const cudaStream_t stream : after) {
    UOPS_CUDA_CHECK(cudaStreamWaitEvent(stream, event, 0));
    if (stream == own_) {
      own_joined_in_ = 0;  // it holds something that nobody may have joined
    }
  }
}

void Lanes::lead(cudaStream_t caller, bool own_share, CaptureId capture) {
  std::vector<cudaGraphNode_t> place;
  if (capture != 0) {
    place = place_of(caller);
  }
  const bool takes_place =
      own_share && !place.empty() && own_joined_in_ == capture && own_joined_by_ == caller;
  if (own_share && !takes_place) {
    order(caller, {copy_, own_}, capture);
  } else if (place.empty() || led_in_ != capture || led_behind_ != place) {
    order(caller, {copy_}, capture);
  }
  if (takes_place) {
    UOPS_CUDA_CHECK(cudaStreamUpdateCaptureDependencies(own_, place.data(), nullptr, place.size(),
                                                        cudaStreamSetCaptureDependencies));
    own_joined_in_ = 0;
  }
  led_in_ = capture;
  led_behind_ = std::move(place);
}

void Lanes::join_own(cudaStream_t caller, CaptureId capture) {
  order(own_, {caller}, capture);
  own_joined_in_ = capture;
  own_joined_by_ = caller;
}

void Lanes::before_replay(cudaStream_t launch) {
  unsigned long long id = 0;
  UOPS_CUDA_CHECK(cudaStreamGetId(launch, &id));
  if (replaying_ != id) {
    order(copy_, {launch}, 0);
    order(own_, {launch}, 0);
  }
}

void Lanes::after_replay(cudaStream_t launch) {
  unsigned long long id = 0;
  UOPS_CUDA_CHECK(cudaStreamGetId(launch, &id));
  order(launch, {copy_, own_}, 0);
  replaying_ = id;
}

}  // namespace ulysses_ops
