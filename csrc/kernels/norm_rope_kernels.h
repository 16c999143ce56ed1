// The compiled kernels of the fused RMSNorm + RoPE; one source file for each element type.
#pragma once

#include "norm_rope.h"

namespace ulysses_ops {

inline constexpr int kPerHeadThreads = 256;
inline constexpr int kMaxRowThreads = 512;  // a row across heads is held in registers

using NormRopeKernel = void (*)(NormRopeParams);

// Of one element type; null where the other vector width serves every head_dim.
struct NormRopeKernels {
  NormRopeKernel per_head = nullptr;  // vectors of 16 bytes
  NormRopeKernel across_heads = nullptr;
  NormRopeKernel per_head_8 = nullptr;  // vectors of 8 bytes
  NormRopeKernel across_heads_8 = nullptr;
};

NormRopeKernels norm_rope_bf16();
NormRopeKernels norm_rope_fp16();
NormRopeKernels norm_rope_fp32();

}  // namespace ulysses_ops
