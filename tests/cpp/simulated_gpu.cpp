#include "simulated_gpu.h"

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "../../csrc/cuda/driver.h"

namespace simulated_gpu {
namespace {

// Of all words and bytes that operations touch, and of the queues: one lock is enough for a test.
// Never destroyed, since streams wait for something to do until the process ends.
std::mutex& memory = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
std::chrono::microseconds jitter{0};

// An operation says whether it is done; one that waits is asked again when something has changed.
using Operation = std::function<bool()>;

class Stream {
 public:
  Stream() : thread_([this] { run(); }) { thread_.detach(); }

  void push(Operation operation) {
    const std::lock_guard<std::mutex> lock(memory);
    queue_.push_back(std::move(operation));
    changed.notify_all();
  }

  bool is_idle() const { return queue_.empty(); }  // with the lock held

 private:
  void run() {
    std::minstd_rand random(static_cast<unsigned>(reinterpret_cast<uintptr_t>(this) >> 4));
    std::unique_lock<std::mutex> lock(memory);
    while (true) {
      changed.wait(lock, [&] { return !queue_.empty(); });
      if (jitter.count() > 0) {
        const std::chrono::microseconds pause(random() % jitter.count());
        lock.unlock();
        std::this_thread::sleep_for(pause);
        lock.lock();
      }
      changed.wait(lock, [&] { return queue_.front()(); });
      queue_.pop_front();
      changed.notify_all();
    }
  }

  std::deque<Operation> queue_;
  std::thread thread_;  // last: it uses everything above
};

struct Event {
  std::shared_ptr<bool> is_done = std::make_shared<bool>(true);
};

Stream& of(cudaStream_t stream) { return *reinterpret_cast<Stream*>(stream); }
Event& of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

uint32_t& word(CUdeviceptr address) { return *reinterpret_cast<uint32_t*>(address); }

CUresult batch(CUstream stream, unsigned int count, CUstreamBatchMemOpParams* operations,
               unsigned int /*flags*/) {
  for (unsigned int at = 0; at < count; ++at) {
    const CUstreamBatchMemOpParams op = operations[at];
    of(stream).push([op] {
      switch (op.operation) {
        case CU_STREAM_MEM_OP_WRITE_VALUE_32:
          word(op.writeValue.address) = op.writeValue.value;
          return true;
        case CU_STREAM_MEM_OP_WRITE_VALUE_64:
          std::memcpy(reinterpret_cast<void*>(op.writeValue.address), &op.writeValue.value64,
                      sizeof(uint64_t));
          return true;
        case CU_STREAM_MEM_OP_WAIT_VALUE_32:
          return word(op.waitValue.address) == op.waitValue.value;
        default:
          std::abort();
      }
    });
  }
  return CUDA_SUCCESS;
}

}  // namespace

cudaStream_t new_stream() { return reinterpret_cast<cudaStream_t>(new Stream); }

void enqueue(cudaStream_t stream, std::function<void()> operation) {
  of(stream).push([operation = std::move(operation)] {
    operation();
    return true;
  });
}

bool finishes(cudaStream_t stream, std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(memory);
  return changed.wait_for(lock, limit, [&] { return of(stream).is_idle(); });
}

void set_jitter(std::chrono::microseconds longest) {
  const std::lock_guard<std::mutex> lock(memory);
  jitter = longest;
}

}  // namespace simulated_gpu

namespace ulysses_ops {

const Driver& driver() {
  static const Driver simulated{simulated_gpu::batch, nullptr, nullptr};
  return simulated;
}

const char* driver_error_name(CUresult) { return "an error of the simulated driver"; }

}  // namespace ulysses_ops

using simulated_gpu::memory;
using simulated_gpu::of;

extern "C" {

cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t) { return "an error of the simulated runtime"; }
const char* cudaGetErrorString(cudaError_t) { return "which has none"; }

cudaError_t cudaMallocHost(void** pointer, size_t size) {
  *pointer = std::malloc(size);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int) {
  *stream = simulated_gpu::new_stream();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(memory);
  return of(stream).is_idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<unsigned long long>(stream);
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long*, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*,
                                                const cudaGraphEdgeData*, size_t, unsigned int) {
  return cudaErrorNotSupported;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  *event = reinterpret_cast<cudaEvent_t>(new simulated_gpu::Event);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const auto is_done = of(event).is_done = std::make_shared<bool>(false);
  simulated_gpu::enqueue(stream, [is_done] { *is_done = true; });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(memory);
  return *of(event).is_done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  of(stream).push([is_done = of(event).is_done] { return *is_done; });
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  simulated_gpu::enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  // Row by row, so that others come in between.
  for (size_t row = 0; row < height; ++row) {
    cudaMemcpyAsync(static_cast<char*>(to) + row * to_pitch,
                    static_cast<const char*>(from) + row * from_pitch, width, cudaMemcpyDefault,
                    stream);
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms*, cudaStream_t) {
  return cudaErrorNotSupported;
}

}  // extern "C"
