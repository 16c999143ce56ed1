// One check macro per library. The message is expression, code, text; checks of arguments say op,
// values, remedy.
#pragma once

#include <torch/headeronly/util/Exception.h>

// For calls of torch's C interface; torch's own macro has changed its name between releases.
#define UOPS_TORCH_CHECK(expr)                                         \
  do {                                                                 \
    STD_TORCH_CHECK((expr) == 0, #expr, ": the call of torch failed"); \
  } while (0)

#ifdef USE_CUDA
#include <cuda.h>
#include <cuda_runtime_api.h>

namespace ulysses_ops {
const char* driver_error_name(CUresult status);  // cuda/driver.cpp
}

#define UOPS_CUDA_CHECK(expr)                                                                     \
  do {                                                                                            \
    const cudaError_t uops_status = (expr);                                                       \
    STD_TORCH_CHECK(uops_status == cudaSuccess, #expr, ": ", cudaGetErrorName(uops_status), ", ", \
                    cudaGetErrorString(uops_status));                                             \
  } while (0)

#define UOPS_DRIVER_CHECK(expr)                                   \
  do {                                                            \
    const CUresult uops_status = (expr);                          \
    STD_TORCH_CHECK(uops_status == CUDA_SUCCESS, #expr, ": ",     \
                    ulysses_ops::driver_error_name(uops_status)); \
  } while (0)
#endif
