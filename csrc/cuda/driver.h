// The driver entry points that this package uses, found by version at run time: no -lcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ulysses_ops {

struct Driver {
  CUresult (*stream_batch_mem_op)(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);
  CUresult (*device_get_attribute)(int*, CUdevice_attribute, CUdevice);
  CUresult (*get_error_name)(CUresult, const char**);
};

// Loaded once; throws, naming the symbol, when the installed driver lacks one.
const Driver& driver();

// Attribute of the device with this CUDA ordinal.
int device_attribute(CUdevice_attribute attribute, int64_t device);

}  // namespace ulysses_ops
