// A CUDA runtime without a GPU, for tests of the host side: what it links with instead of cudart.
//
// Memory is the host's. A stream is a thread that does one operation after the other; a wait for a
// value blocks it until somebody writes that value. Captures do not exist here.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <functional>

namespace simulated_gpu {

cudaStream_t new_stream();

// Something that the stream does in its turn, with the lock of all memory held.
void enqueue(cudaStream_t stream, std::function<void()> operation);

// Whether the stream has done everything within this time.
bool finishes(cudaStream_t stream, std::chrono::milliseconds limit);

// Every operation of a stream takes up to this long, at random.
void set_jitter(std::chrono::microseconds longest);

}  // namespace simulated_gpu
