// What the operators of compiled kernels check of their tensors, the last resort behind Python.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "check.h"
#include "kernels/norm_rope.h"

namespace ulysses_ops {

inline constexpr int64_t kAlignment = 16;  // bytes: what a thread reads or writes at once

inline bool is_aligned(const torch::stable::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kAlignment == 0;
}

// From the first byte to the last of both tensors, those of others between them included.
inline bool overlap(const torch::stable::Tensor& one, const torch::stable::Tensor& other) {
  const auto extent = [](const torch::stable::Tensor& tensor) {
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      last += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    const auto* begin = static_cast<const char*>(tensor.data_ptr());
    return std::pair(begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size()));
  };
  if (one.numel() == 0 || other.numel() == 0) {
    return false;
  }
  const auto [one_begin, one_end] = extent(one);
  const auto [other_begin, other_end] = extent(other);
  return one_begin < other_end && other_begin < one_end;
}

inline void check_apart(const char* op, const torch::stable::Tensor& in,
                        const torch::stable::Tensor& out) {
  STD_TORCH_CHECK(!overlap(in, out), op,
                  ": an output lies between the first and the last element of an input; give "
                  "memory of its own");
}

// Where a weight, a bias or a table starts; null where none is given.
inline const void* parameter(const char* op, const std::optional<torch::stable::Tensor>& tensor,
                             const std::string& name, int64_t num_elems,
                             torch::headeronly::ScalarType dtype, int64_t device) {
  if (!tensor.has_value()) {
    return nullptr;
  }
  STD_TORCH_CHECK(tensor->numel() == num_elems && tensor->is_contiguous() &&
                      tensor->scalar_type() == dtype && tensor->is_cuda() &&
                      tensor->get_device_index() == device && is_aligned(*tensor),
                  op, ": ", name, " must hold ", num_elems,
                  " elements, contiguous at a multiple of 16 bytes, on the device of the rows, all "
                  "weights of one dtype and all biases of one dtype: that of the rows, or float32");
  return tensor->data_ptr();
}

inline Rope rope_of(const char* op, const std::string& name) {
  if (name == "interleaved") {
    return Rope::kInterleaved;
  }
  STD_TORCH_CHECK(name == "half_split" || name == "none", op, ": rope='", name,
                  "' must be 'none', 'interleaved' or 'half_split'");
  return name == "none" ? Rope::kNone : Rope::kHalfSplit;
}

}  // namespace ulysses_ops
