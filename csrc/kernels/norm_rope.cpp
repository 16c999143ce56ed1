// `_C_kernels`: the operator `qk_norm_rope_into` on CUDA: check -> plan -> launch. Its schema, its
// tags and the checks that name every argument are in ulysses_ops/norm_rope.py; what is checked
// here is what a kernel would otherwise read or write out of bounds.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../check.h"
#include "../cuda/stream.h"
#include "../operands.h"
#include "../plan.h"
#include "../stack.h"
#include "norm_rope_kernels.h"
#include "norm_rope_plan.h"

namespace ulysses_ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::to;

constexpr const char* kOp = "qk_norm_rope_into";

struct Arguments {
  std::array<std::vector<Tensor>, 2> inputs;  // Q, K
  std::array<std::vector<Tensor>, 2> outputs;
  std::array<std::optional<Tensor>, 2> weight;
  std::array<std::optional<Tensor>, 2> bias;
  std::optional<Tensor> cos;
  std::optional<Tensor> sin;
  std::string norm;
  std::string rope;
  double eps = 0.0;
};

// What all parts have in common.
struct Common {
  NormRopeSizes sizes;
  ScalarType dtype = ScalarType::BFloat16;
  int64_t device = 0;

  ScalarType dtype_of(bool is_float) const { return is_float ? ScalarType::Float : dtype; }
};

const char* tensor_name(int tensor) { return tensor == 0 ? "q" : "k"; }

std::array<int64_t, 4> four(const torch::headeronly::IntHeaderOnlyArrayRef& values) {
  return {values[0], values[1], values[2], values[3]};
}

HeadPart head_part(const Tensor& part, const std::string& name, const Common& common) {
  STD_TORCH_CHECK(part.dim() == 4, kOp, ": ", name, " has ", part.dim(),
                  " dimensions; give (B, S, heads, D)");
  const auto shape = four(part.sizes());
  const auto strides = four(part.strides());
  const NormRopeSizes& sizes = common.sizes;
  STD_TORCH_CHECK(shape[0] == sizes.batch && shape[1] == sizes.seq && shape[3] == sizes.head_dim,
                  kOp, ": ", name, " is ", to_string(shape), ", but B, S and D are ", sizes.batch,
                  ", ", sizes.seq, ", ", sizes.head_dim, " elsewhere; they must agree");
  STD_TORCH_CHECK(part.scalar_type() == common.dtype && part.is_cuda() &&
                      part.get_device_index() == common.device,
                  kOp, ": ", name, " differs in dtype or device from the first part");
  HeadPart result{nullptr, shape[2], strides[0], strides[1]};
  if (part.numel() == 0) {
    return result;
  }
  const auto is_multiple = [&](int dim) {
    return shape[dim] == 1 || strides[dim] * sizes.itemsize % kAlignment == 0;
  };
  STD_TORCH_CHECK(has_dense_heads(shape, strides), kOp, ": ", name, " has strides ",
                  to_string(strides),
                  "; heads and head_dim must be dense and rows apart: pass a contiguous copy");
  STD_TORCH_CHECK(is_aligned(part) && is_multiple(0) && is_multiple(1), kOp, ": ", name,
                  " must lie at a multiple of 16 bytes, and its rows too (strides ",
                  to_string(strides), "); pass a fresh copy");
  result.data = part.data_ptr();
  return result;
}

// Both parameters of one kind share a dtype; the one that is given says which.
bool is_float(const std::array<std::optional<Tensor>, 2>& tensors) {
  const auto& given = tensors[0].has_value() ? tensors[0] : tensors[1];
  return given.has_value() && given->scalar_type() == ScalarType::Float;
}

Norm norm_of(const std::string& name) {
  if (name == "per_head") {
    return Norm::kPerHead;
  }
  STD_TORCH_CHECK(name == "across_heads" || name == "none", kOp, ": norm='", name,
                  "' must be 'none', 'per_head' or 'across_heads'");
  return name == "none" ? Norm::kNone : Norm::kAcrossHeads;
}

void set_tables(const Arguments& arguments, const Common& common, NormRopeParams& params) {
  if (params.rope == Rope::kNone) {
    return;
  }
  STD_TORCH_CHECK(arguments.cos.has_value() && arguments.sin.has_value(), kOp, ": rope='",
                  arguments.rope, "' needs cos and sin");
  const int64_t width = arguments.cos->dim() == 2 ? arguments.cos->size(1) : 0;
  STD_TORCH_CHECK(width == common.sizes.head_dim || width * 2 == common.sizes.head_dim, kOp,
                  ": cos must be (S, D/2) or (S, D), with D=", common.sizes.head_dim);
  const int64_t num_elems = common.sizes.seq * width;
  params.table_width = static_cast<int32_t>(width);
  const auto table = [&](const std::optional<Tensor>& given, const char* name) {
    return static_cast<const float*>(
        parameter(kOp, given, name, num_elems, ScalarType::Float, common.device));
  };
  params.cos = table(arguments.cos, "cos");
  params.sin = table(arguments.sin, "sin");
}

NormRopeKernels kernels_of(ScalarType dtype) {
  if (dtype == ScalarType::BFloat16) {
    return norm_rope_bf16();
  }
  if (dtype == ScalarType::Half) {
    return norm_rope_fp16();
  }
  STD_TORCH_CHECK(dtype == ScalarType::Float, kOp, ": q and k must be bf16, fp16 or fp32");
  return norm_rope_fp32();
}

const void* address(NormRopeKernel kernel) { return reinterpret_cast<const void*>(kernel); }

// Blocks that leave every multiprocessor with the same number of rounds, or one more.
int64_t num_blocks(NormRopeKernel kernel, int threads, int64_t wanted, int64_t device) {
  int on_one = 0;
  int processors = 0;
  UOPS_CUDA_CHECK(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&on_one, address(kernel), threads, 0));
  UOPS_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount,
                                         static_cast<int>(device)));
  const int64_t at_once = std::max<int64_t>(int64_t{on_one} * processors, 1);
  const int64_t rounds = (wanted + at_once - 1) / at_once;
  return (wanted + rounds - 1) / rounds;
}

void launch(const NormRopeParams& params, const Common& common) {
  const NormRopeKernels kernels = kernels_of(common.dtype);
  const bool is_narrow = vector_elems(common.sizes) * common.sizes.itemsize < 16;
  const bool across = params.norm == Norm::kAcrossHeads;
  const NormRopeKernel kernel = across ? (is_narrow ? kernels.across_heads_8 : kernels.across_heads)
                                       : (is_narrow ? kernels.per_head_8 : kernels.per_head);
  const int threads = across ? static_cast<int>(row_threads(params)) : kPerHeadThreads;
  const int64_t slots = kPerHeadThreads >> params.lanes_log2;
  const int64_t wanted = across ? params.num_rows : (params.num_tasks + slots - 1) / slots;
  const auto blocks = static_cast<unsigned int>(num_blocks(kernel, threads, wanted, common.device));
  void* arguments[] = {const_cast<NormRopeParams*>(&params)};
  UOPS_CUDA_CHECK(cudaLaunchKernel(address(kernel), dim3(blocks),
                                   dim3(static_cast<unsigned int>(threads)), arguments, 0,
                                   current_stream(common.device)));
}

Common common_of(const Arguments& arguments) {
  for (const auto& parts : arguments.inputs) {
    if (!parts.empty() && parts[0].dim() == 4) {
      const auto shape = four(parts[0].sizes());
      const auto itemsize = static_cast<int64_t>(parts[0].element_size());
      return {{shape[0], shape[1], shape[3], itemsize},
              parts[0].scalar_type(),
              parts[0].get_device_index()};
    }
  }
  throw std::runtime_error(std::string(kOp) +
                           ": no parts of q and none of k are given; give (B, S, heads, D)");
}

// `invalid_argument` would reach Python as ValueError, which is for what Python checks itself.
void plan(const NormRopeSizes& sizes, const HeadParts& q, const HeadParts& k,
          NormRopeParams& params) {
  try {
    plan_norm_rope(sizes, q, k, params);
  } catch (const std::invalid_argument& refusal) {
    throw std::runtime_error(refusal.what());
  }
}

void norm_rope(const Arguments& arguments) {
  const Common common = common_of(arguments);
  NormRopeParams params;
  params.norm = norm_of(arguments.norm);
  params.rope = rope_of(kOp, arguments.rope);
  params.eps = static_cast<float>(arguments.eps);
  params.weight_is_float = is_float(arguments.weight);
  params.bias_is_float = is_float(arguments.bias);
  set_tables(arguments, common, params);
  std::array<HeadParts, 2> parts;
  for (int tensor = 0; tensor < 2; ++tensor) {
    const std::string name = tensor_name(tensor);
    int64_t elems = 0;
    for (const Tensor& part : arguments.inputs[tensor]) {
      parts[tensor].inputs.push_back(head_part(part, "a part of " + name, common));
      elems += parts[tensor].inputs.back().heads * common.sizes.head_dim;
    }
    for (const Tensor& part : arguments.outputs[tensor]) {
      parts[tensor].outputs.push_back(head_part(part, "a part of " + name + "_out", common));
    }
    STD_TORCH_CHECK(params.norm != Norm::kNone || !arguments.weight[tensor].has_value(), kOp, ": ",
                    name, "_weight goes with a norm; leave it out, or name the norm");
    const bool per_head = params.norm == Norm::kPerHead;
    if (params.norm != Norm::kNone && elems > 0) {
      parts[tensor].weight = parameter(kOp, arguments.weight[tensor], name + "_weight",
                                       per_head ? common.sizes.head_dim : elems,
                                       common.dtype_of(params.weight_is_float), common.device);
    }
    if (elems > 0) {
      parts[tensor].bias = parameter(kOp, arguments.bias[tensor], name + "_bias", elems,
                                     common.dtype_of(params.bias_is_float), common.device);
    }
  }
  for (const auto& inputs : arguments.inputs) {
    for (const auto& outputs : arguments.outputs) {
      for (const Tensor& in : inputs) {
        for (const Tensor& out : outputs) {
          check_apart(kOp, in, out);
        }
      }
    }
  }
  plan(common.sizes, parts[0], parts[1], params);
  if (params.num_tasks == 0) {
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(common.device));
  if (params.norm != Norm::kAcrossHeads || row_threads(params) <= kMaxRowThreads) {
    launch(params, common);
    return;
  }
  // A block holds a row. Q and K together are too long: one launch each.
  std::array<NormRopeParams, 2> single{params, params};
  plan(common.sizes, parts[0], {}, single[0]);
  plan(common.sizes, {}, parts[1], single[1]);
  for (const NormRopeParams& one : single) {
    STD_TORCH_CHECK(row_threads(one) <= kMaxRowThreads, kOp, ": a row of ",
                    std::max(one.num_heads[0], one.num_heads[1]), " heads of ", one.head_dim,
                    " is too long for norm='across_heads', which holds it in ", kMaxRowThreads,
                    " threads; use the PyTorch operators");
  }
  for (const NormRopeParams& one : single) {
    if (one.num_tasks > 0) {
      launch(one, common);
    }
  }
}

// (Tensor[] q, Tensor[] k, Tensor(a!)[] q_out, Tensor(b!)[] k_out, Tensor? q_weight, Tensor?
// k_weight, Tensor? q_bias, Tensor? k_bias, Tensor? cos, Tensor? sin, str norm, str rope, float
// eps) -> ()
void qk_norm_rope_into(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  Arguments arguments;
  for (int tensor = 0; tensor < 2; ++tensor) {
    arguments.inputs[tensor] = to<std::vector<Tensor>>(stack[tensor]);
    arguments.outputs[tensor] = to<std::vector<Tensor>>(stack[2 + tensor]);
    arguments.weight[tensor] = to<std::optional<Tensor>>(stack[4 + tensor]);
    arguments.bias[tensor] = to<std::optional<Tensor>>(stack[6 + tensor]);
  }
  arguments.cos = to<std::optional<Tensor>>(stack[8]);
  arguments.sin = to<std::optional<Tensor>>(stack[9]);
  arguments.norm = take_string(stack[10]);
  arguments.rope = take_string(stack[11]);
  arguments.eps = to<double>(stack[12]);
  norm_rope(arguments);
}

// A kernel is loaded when it is first used, which can need an idle device: done here instead,
// before anything waits. Returns how many there are; none where no code for this GPU was built.
int64_t load_kernels(int64_t device) {
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  int64_t count = 0;
  for (const NormRopeKernels& kernels : {norm_rope_bf16(), norm_rope_fp16(), norm_rope_fp32()}) {
    for (const NormRopeKernel kernel :
         {kernels.per_head, kernels.across_heads, kernels.per_head_8, kernels.across_heads_8}) {
      if (kernel == nullptr) {
        continue;
      }
      cudaFuncAttributes attributes{};
      const cudaError_t status = cudaFuncGetAttributes(&attributes, address(kernel));
      if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
        static_cast<void>(cudaGetLastError());  // nobody else is to meet it
        return 0;
      }
      UOPS_CUDA_CHECK(status);
      ++count;
    }
  }
  return count;
}

}  // namespace
}  // namespace ulysses_ops

STABLE_TORCH_LIBRARY_FRAGMENT(ulysses, m) { m.def("_load_kernels(int device) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(ulysses, CompositeExplicitAutograd, m) {
  m.impl("_load_kernels", TORCH_BOX(&ulysses_ops::load_kernels));
}

STABLE_TORCH_LIBRARY_IMPL(ulysses, CUDA, m) {
  m.impl("qk_norm_rope_into", &ulysses_ops::qk_norm_rope_into);
}
