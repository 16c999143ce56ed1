// Taking arguments off the stack of a boxed operator.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>

#include "check.h"

namespace ulysses_ops {

// to<std::string> leaks the string that it makes.
inline std::string take_string(StableIValue value) {
  const auto handle = torch::stable::detail::to<StringHandle>(value);
  const char* data = nullptr;
  size_t length = 0;
  UOPS_TORCH_CHECK(torch_string_c_str(handle, &data));
  UOPS_TORCH_CHECK(torch_string_length(handle, &length));
  std::string text(data, length);
  UOPS_TORCH_CHECK(torch_delete_string(handle));
  return text;
}

}  // namespace ulysses_ops
