// Memory mapped into other processes by CUDA IPC. Only memory allocated here is ever exported:
// never a block of a caching allocator, whose handle would expose its neighbours and fails for
// expandable segments.
#pragma once

#include <cstdint>
#include <vector>

namespace ulysses_ops {

// Pointers travel as integers, handles as eight 64-bit numbers.
int64_t ipc_allocate(int64_t bytes, int64_t device);
void ipc_free(int64_t pointer);
std::vector<int64_t> ipc_export(int64_t pointer);
int64_t ipc_open(const std::vector<int64_t>& handle, int64_t device);
void ipc_close(int64_t pointer);

}  // namespace ulysses_ops
