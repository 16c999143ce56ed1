#include "driver.h"

#include "../check.h"

namespace ulysses_ops {
namespace {

// The first CUDA release whose form of the symbol we use. For stream memory operations that is the
// v2 form.
constexpr unsigned int kStreamMemOpsV2 = 11070;
constexpr unsigned int kBasic = 6000;

template <typename Function>
void find(Function*& function, const char* symbol, unsigned int version) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  UOPS_CUDA_CHECK(
      cudaGetDriverEntryPointByVersion(symbol, &address, version, cudaEnableDefault, &found));
  STD_TORCH_CHECK(found == cudaDriverEntryPointSuccess && address != nullptr,
                  "ulysses_ops: the CUDA driver has no ", symbol, " of CUDA ", version / 1000, ".",
                  version % 1000 / 10, "; install a newer driver");
  function = reinterpret_cast<Function*>(address);
}

Driver load() {
  Driver result{};
  find(result.stream_batch_mem_op, "cuStreamBatchMemOp", kStreamMemOpsV2);
  find(result.device_get_attribute, "cuDeviceGetAttribute", kBasic);
  find(result.get_error_name, "cuGetErrorName", kBasic);
  return result;
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load();
  return loaded;
}

int device_attribute(CUdevice_attribute attribute, int64_t device) {
  int value = 0;
  UOPS_DRIVER_CHECK(
      driver().device_get_attribute(&value, attribute, static_cast<CUdevice>(device)));
  return value;
}

const char* driver_error_name(CUresult status) {
  const char* name = nullptr;
  driver().get_error_name(status, &name);
  return name == nullptr ? "unknown driver error" : name;
}

}  // namespace ulysses_ops
