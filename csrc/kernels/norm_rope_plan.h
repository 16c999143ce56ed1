// Parts of Q and K -> one launch of the fused RMSNorm + RoPE. No CUDA, no torch.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "norm_rope.h"

namespace ulysses_ops {

// (B, S, heads, D), heads and elements dense. Strides in elements.
struct HeadPart {
  void* data = nullptr;
  int64_t heads = 0;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
};

// One of Q and K: its heads, in order, lie in the parts; inputs and outputs may be cut differently.
struct HeadParts {
  std::vector<HeadPart> inputs;
  std::vector<HeadPart> outputs;
  const void* weight = nullptr;
  const void* bias = nullptr;
};

// Sizes in elements, itemsize in bytes.
struct NormRopeSizes {
  int64_t batch = 0;
  int64_t seq = 0;
  int64_t head_dim = 0;
  int64_t itemsize = 0;
};

// Whether a part (B, S, heads, D) with these strides, in elements, is a HeadPart: each row dense,
// rows and batches apart. Strides of dimensions of size 1 mean nothing.
bool has_dense_heads(const std::array<int64_t, 4>& shape, const std::array<int64_t, 4>& strides);

// Elements of a vector: 16 bytes, or 8 where half a head is no multiple of 16 bytes.
int64_t vector_elems(const NormRopeSizes& sizes);

// Threads that hold a row of all chunks.
int64_t row_threads(const NormRopeParams& params);

// Fills in spans, counts and divisors of `params`. Throws std::invalid_argument, with a sentence,
// when the parts do not fit each other or one launch.
void plan_norm_rope(const NormRopeSizes& sizes, const HeadParts& q, const HeadParts& k,
                    NormRopeParams& params);

}  // namespace ulysses_ops
