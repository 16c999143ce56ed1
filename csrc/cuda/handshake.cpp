#include "handshake.h"

#include <algorithm>

#include "../check.h"
#include "driver.h"

namespace ulysses_ops {
namespace {

using Batch = std::vector<CUstreamBatchMemOpParams>;

// Each write has a fence: earlier writes of the stream are visible first. It costs 0.7 us, and the
// driver offers none without.
void push_write(Batch& batch, CUdeviceptr address, uint32_t value) {
  CUstreamBatchMemOpParams op{};
  op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  op.writeValue.address = address;
  op.writeValue.value = value;
  op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  batch.push_back(op);
}

void push_reset(Batch& batch, CUdeviceptr pair) {
  CUstreamBatchMemOpParams op{};
  op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
  op.writeValue.address = pair;
  op.writeValue.value64 = 0;
  op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  batch.push_back(op);
}

void push_wait(Batch& batch, CUdeviceptr address, uint32_t value, bool flush_remote) {
  CUstreamBatchMemOpParams op{};
  op.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  op.waitValue.address = address;
  op.waitValue.value = value;
  op.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ | (flush_remote ? CU_STREAM_WAIT_VALUE_FLUSH : 0);
  batch.push_back(op);
}

// The driver takes fewer than 256 operations a batch; batches of one stream keep their order.
constexpr size_t kMaxBatch = 255;

void submit(Batch& batch, cudaStream_t stream) {
  for (size_t first = 0; first < batch.size(); first += kMaxBatch) {
    const size_t count = std::min(kMaxBatch, batch.size() - first);
    UOPS_DRIVER_CHECK(driver().stream_batch_mem_op(stream, static_cast<unsigned int>(count),
                                                   batch.data() + first, 0));
  }
  batch.clear();
}

// A copied signal relies on stream order, so each copy is a node of its own behind the payload.
void announce_by_copy(const Signal& signal, CUdeviceptr scratch, cudaStream_t stream) {
  write_local({scratch}, signal.tag, stream);
  for (const CUdeviceptr remote : signal.words->remote) {
    UOPS_CUDA_CHECK(cudaMemcpyAsync(reinterpret_cast<void*>(remote),
                                    reinterpret_cast<const void*>(scratch), sizeof(uint32_t),
                                    cudaMemcpyDefault, stream));
  }
}

// Either copies the signal at once or leaves its writes in `batch`.
void begin_announce(Batch& batch, const Signal& signal, const SignalPath& path,
                    cudaStream_t stream) {
  if (path.kind == SignalKind::kMemcpy) {
    announce_by_copy(signal, path.scratch, stream);
    return;
  }
  for (const CUdeviceptr remote : signal.words->remote) {
    push_write(batch, remote, signal.tag);
  }
}

}  // namespace

void announce(const Signal& signal, const SignalPath& path, cudaStream_t stream) {
  Batch batch;
  begin_announce(batch, signal, path, stream);
  submit(batch, stream);
}

void handshake(const std::vector<Signal>& signals, const SignalPath& path, cudaStream_t stream,
               uint32_t number) {
  Batch batch;
  batch.reserve(1 + 3 * signals.size() * signals.front().words->local.size());
  for (const Signal& signal : signals) {
    begin_announce(batch, signal, path, stream);
  }
  // Behind the announcements: while they travel, it costs nothing.
  push_write(batch, signals.front().words->note, number);
  for (const Signal& signal : signals) {
    for (const CUdeviceptr local : signal.words->local) {
      push_wait(batch, local, signal.tag, path.flush_remote);
    }
  }
  for (const Signal& signal : signals) {
    for (const CUdeviceptr pair : signal.words->pairs) {
      push_reset(batch, pair);
    }
  }
  submit(batch, stream);
}

void write_local(const std::vector<CUdeviceptr>& words, uint32_t value, cudaStream_t stream) {
  Batch batch;
  for (const CUdeviceptr word : words) {
    push_write(batch, word, value);
  }
  submit(batch, stream);
}

}  // namespace ulysses_ops
