// `_C_projection`: `_project_qkv_sm90`, which `project_qkv_into` calls where it fits. Schema of the
// latter, tags, the checks that name every argument and the choice are in
// ulysses_ops/qkv_projection.py; what is checked here is what a kernel would otherwise read or
// write out of bounds.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../check.h"
#include "../cuda/stream.h"
#include "../operands.h"
#include "../stack.h"
#include "qkv_projection_kernels.h"

namespace ulysses_ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::to;

constexpr const char* kOp = "project_qkv_into";
constexpr int64_t kAlignedElems = kAlignment / 2;  // of 16 bit
constexpr int kMaxDevices = 64;
constexpr int kNumTypes = 2;

struct Problem {
  Tensor x;
  Tensor weight;
  std::array<std::vector<Tensor>, 3> outs;  // Q, K, V
  std::optional<Tensor> bias;
  std::array<std::optional<Tensor>, 2> norm;
  std::optional<Tensor> cos;
  std::optional<Tensor> sin;
};

bool is_beside(const Tensor& tensor, const Tensor& x) {
  return tensor.is_cuda() && tensor.get_device_index() == x.get_device_index();
}

ProjectionKernel kernel_of(ScalarType dtype) {
  return dtype == ScalarType::Half ? projection_fp16() : projection_bf16();
}

// The clusters that a device runs at once; its kernel is loaded at the first call.
int num_clusters(ScalarType dtype, int64_t device) {
  // By device and type, one more than the answer; 0 before it is known.
  static std::array<std::array<std::atomic<int>, kNumTypes>, kMaxDevices> known{};
  STD_TORCH_CHECK(device >= 0 && device < kMaxDevices, kOp, ": device ", device, " is not below ",
                  kMaxDevices);
  auto& count = known[device][dtype == ScalarType::Half ? 0 : 1];
  if (count == 0) {
    count = kernel_of(dtype).load() + 1;
  }
  return count - 1;
}

void check_rows(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(x.dim() == 3 && weight.dim() == 2 && x.size(2) == weight.size(1), kOp,
                  ": x must be (B, S, width) and qkv_weight (columns, width)");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16 || x.scalar_type() == ScalarType::Half,
                  kOp, ": x must be bf16 or fp16");
  STD_TORCH_CHECK(weight.scalar_type() == x.scalar_type() && x.is_cuda() && is_beside(weight, x),
                  kOp, ": qkv_weight must be of the dtype and on the device of x");
  const bool is_one = x.size(0) == 1 || x.stride(0) == x.size(1) * x.stride(1);
  STD_TORCH_CHECK(x.stride(2) == 1 && weight.stride(1) == 1 && is_one, kOp,
                  ": rows of x and qkv_weight must be dense, and those of x evenly apart");
  STD_TORCH_CHECK(is_aligned(x) && is_aligned(weight) && x.stride(1) % kAlignedElems == 0 &&
                      weight.stride(0) % kAlignedElems == 0 && x.stride(1) >= x.size(2) &&
                      weight.stride(0) >= x.size(2),
                  kOp, ": rows of x and qkv_weight must lie apart, at multiples of 16 bytes");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  STD_TORCH_CHECK(x.size(0) * x.size(1) <= kMost - 1024 && weight.size(0) <= kMost - 1024 &&
                      x.size(2) <= kMost - 1024,
                  kOp, ": a size is not below 2^31");
  STD_TORCH_CHECK(x.size(2) > 0, kOp, ": x has rows of no elements");
}

ProjectionSpan span_of(const Tensor& out, Part part, int32_t destination, int64_t first_head,
                       const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(out.dim() == 4 && out.size(0) == x.size(0) && out.size(1) == x.size(1) &&
                      out.size(3) == kProjectionHeadDim,
                  kOp, ": outputs must be (B, S, heads, ", kProjectionHeadDim,
                  ") with B and S of x");
  STD_TORCH_CHECK(out.scalar_type() == x.scalar_type() && is_beside(out, x), kOp,
                  ": outputs must be of the dtype and on the device of x");
  const bool dense = out.stride(3) == 1 && (out.size(2) == 1 || out.stride(2) == out.size(3));
  const auto is_step = [&](int dim) {
    return out.size(dim) == 1 || out.stride(dim) % kAlignedElems == 0;
  };
  STD_TORCH_CHECK(dense && is_step(0) && is_step(1) && is_aligned(out), kOp,
                  ": outputs must have dense heads, and rows at multiples of 16 bytes");
  check_apart(kOp, x, out);
  check_apart(kOp, weight, out);
  return {out.data_ptr(), out.stride(0), out.stride(1), static_cast<int32_t>(first_head),
          destination,    part};
}

// Returns the heads of each destination.
std::vector<int32_t> set_spans(const Problem& problem, ProjectionParams& params) {
  const size_t num_destinations = problem.outs[0].size();
  STD_TORCH_CHECK(
      problem.outs[1].size() == num_destinations && problem.outs[2].size() == num_destinations &&
          3 * num_destinations <= kMaxProjectionSpans,
      kOp, ": q_out, k_out and v_out must have as many parts, at most ", kMaxProjectionSpans / 3);
  int64_t heads = 0;
  std::vector<int32_t> by_destination;
  for (size_t destination = 0; destination < num_destinations; ++destination) {
    const int64_t before = heads;
    for (int part = 0; part < 3; ++part) {
      const Tensor& out = problem.outs[part][destination];
      if (out.size(2) == 0) {
        continue;
      }
      params.spans[params.num_spans++] =
          span_of(out, static_cast<Part>(part), static_cast<int32_t>(destination), heads, problem.x,
                  problem.weight);
      heads += out.size(2);
    }
    by_destination.push_back(static_cast<int32_t>(heads - before));
  }
  STD_TORCH_CHECK(heads * kProjectionHeadDim == problem.weight.size(0), kOp, ": qkv_weight has ",
                  problem.weight.size(0), " rows for ", heads, " heads of ", kProjectionHeadDim);
  params.num_heads = static_cast<int32_t>(heads);
  return by_destination;
}

// Every destination once, as the order of a launch.
std::vector<int32_t> order_of(const std::vector<int64_t>& given, size_t num_destinations) {
  std::vector<bool> seen(num_destinations, false);
  for (const int64_t destination : given) {
    const bool is_new =
        destination >= 0 && destination < static_cast<int64_t>(seen.size()) && !seen[destination];
    STD_TORCH_CHECK(is_new, kOp, ": order names destination ", destination, " of ",
                    num_destinations, " more than once, or there is none");
    seen[destination] = true;
  }
  STD_TORCH_CHECK(given.size() == num_destinations, kOp, ": order names ", given.size(), " of ",
                  num_destinations, " destinations; name all");
  return {given.begin(), given.end()};
}

int32_t* counters(const Tensor& progress, size_t num_destinations, int64_t device) {
  STD_TORCH_CHECK(progress.is_cuda() && progress.get_device_index() == device &&
                      progress.scalar_type() == ScalarType::Int && progress.is_contiguous() &&
                      progress.numel() >= static_cast<int64_t>(num_destinations),
                  kOp, ": progress must hold an int32 for each of ", num_destinations,
                  " destinations, contiguous, on GPU ", device);
  return static_cast<int32_t*>(progress.data_ptr());
}

void set_norm(const Problem& problem, const std::string& name, double eps,
              ProjectionParams& params) {
  STD_TORCH_CHECK(name == "per_head" || name == "none", kOp, ": norm='", name,
                  "' must be 'none' or 'per_head'");
  params.normalises = name == "per_head";
  params.eps = static_cast<float>(eps);
  const auto& given = problem.norm[0].has_value() ? problem.norm[0] : problem.norm[1];
  params.norm_is_float = given.has_value() && given->scalar_type() == ScalarType::Float;
  const ScalarType dtype = params.norm_is_float ? ScalarType::Float : problem.x.scalar_type();
  const auto weight = [&](int tensor, const char* name) {
    return parameter(kOp, problem.norm[tensor], name, kProjectionHeadDim, dtype,
                     problem.x.get_device_index());
  };
  params.norm[0] = weight(0, "q_weight");
  params.norm[1] = weight(1, "k_weight");
}

void set_angles(const Problem& problem, const std::string& rope, ProjectionParams& params) {
  params.rope = rope_of(kOp, rope);
  if (params.rope == Rope::kNone) {
    return;
  }
  STD_TORCH_CHECK(problem.cos.has_value() && problem.sin.has_value(), kOp, ": rope='", rope,
                  "' needs cos and sin");
  const int64_t width = problem.cos->dim() == 2 ? problem.cos->size(1) : 0;
  STD_TORCH_CHECK(width == kProjectionHeadDim || width * 2 == kProjectionHeadDim, kOp,
                  ": cos must be (S, D/2) or (S, D), with D=", kProjectionHeadDim);
  const int64_t num_elems = problem.x.size(1) * width;
  const auto table = [&](const std::optional<Tensor>& given, const char* name) {
    return static_cast<const float*>(
        parameter(kOp, given, name, num_elems, ScalarType::Float, problem.x.get_device_index()));
  };
  params.table_width = static_cast<int32_t>(width);
  params.cos = table(problem.cos, "cos");
  params.sin = table(problem.sin, "sin");
}

// (Tensor x, Tensor qkv_weight, Tensor? qkv_bias, Tensor(a!)[] q_out, Tensor(b!)[] k_out,
// Tensor(c!)[] v_out, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin, str norm, str
// rope, float eps, int[] order, Tensor(d!)? progress, int launched) -> ()
void project_qkv(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  Problem problem{to<Tensor>(stack[0]), to<Tensor>(stack[1]), {}, {}, {}, {}, {}};
  problem.bias = to<std::optional<Tensor>>(stack[2]);
  for (int part = 0; part < 3; ++part) {
    problem.outs[part] = to<std::vector<Tensor>>(stack[3 + part]);
  }
  problem.norm = {to<std::optional<Tensor>>(stack[6]), to<std::optional<Tensor>>(stack[7])};
  problem.cos = to<std::optional<Tensor>>(stack[8]);
  problem.sin = to<std::optional<Tensor>>(stack[9]);
  const std::string norm = take_string(stack[10]);
  const std::string rope = take_string(stack[11]);
  const Tensor& x = problem.x;
  const Tensor& weight = problem.weight;
  const auto order = to<std::vector<int64_t>>(stack[13]);
  const auto progress = to<std::optional<Tensor>>(stack[14]);
  Launch where;
  where.launched = reinterpret_cast<cudaEvent_t>(to<int64_t>(stack[15]));
  check_rows(x, weight);
  const int64_t device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  where.num_clusters = num_clusters(x.scalar_type(), device);
  where.stream = current_stream(device);
  STD_TORCH_CHECK(where.num_clusters > 0, kOp, ": no kernel runs on GPU ", device,
                  "; it needs compute capability 9.0 and two whole multiprocessors");
  ProjectionParams params;
  where.heads = set_spans(problem, params);
  where.order = order_of(order, where.heads.size());
  params.last = where.order.empty() ? 0 : where.order.back();
  if (progress.has_value()) {
    params.progress = counters(*progress, where.heads.size(), device);
    // Room for what waits for it and for nothing else: a warp finds none beside these blocks.
    where.num_clusters = std::max(where.num_clusters - 1, 1);
  }
  set_norm(problem, norm, to<double>(stack[12]), params);
  set_angles(problem, rope, params);
  params.bias = parameter(kOp, problem.bias, "qkv_bias", weight.size(0), x.scalar_type(), device);
  params.num_rows = static_cast<int32_t>(x.size(0) * x.size(1));
  params.depth = static_cast<int32_t>(x.size(2));
  if (params.num_rows == 0 || params.num_heads == 0) {
    if (where.launched != nullptr) {
      UOPS_CUDA_CHECK(cudaEventRecord(where.launched, where.stream));
    }
    return;
  }
  params.seq = Divisor(static_cast<uint32_t>(x.size(1)));
  const ProjectionOperands operands{x.data_ptr(), weight.data_ptr(), x.stride(1), weight.stride(0)};
  kernel_of(x.scalar_type()).launch(operands, params, where);
}

// As `_load_kernels`: how many kernels there are for this GPU.
int64_t load_projection(int64_t device) {
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  int64_t count = 0;
  for (const ScalarType dtype : {ScalarType::Half, ScalarType::BFloat16}) {
    count += num_clusters(dtype, device) > 0 ? 1 : 0;
  }
  return count + (load_await_progress() ? 1 : 0);
}

// The current stream waits until the heads of one destination of a projection that is under way are
// all stored; its counter is then 0 again.
void await_projection(const Tensor& progress, int64_t destination, int64_t rows, int64_t heads) {
  const int64_t device = progress.get_device_index();
  int32_t* const counter = counters(progress, static_cast<size_t>(destination + 1), device);
  STD_TORCH_CHECK(destination >= 0 && rows >= 0 && heads >= 0, kOp, ": destination ", destination,
                  ", rows ", rows, " and heads ", heads, " must not be negative");
  const auto target = static_cast<int32_t>(heads * warps_of_head(static_cast<int32_t>(rows)));
  if (target > 0) {
    const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
    await_progress(counter + destination, target, current_stream(device));
  }
}

}  // namespace
}  // namespace ulysses_ops

STABLE_TORCH_LIBRARY_FRAGMENT(ulysses, m) {
  m.def("_load_projection(int device) -> int");
  m.def("_await_projection(Tensor(a!) progress, int destination, int rows, int heads) -> ()");
  m.def(
      "_project_qkv_sm90(Tensor x, Tensor qkv_weight, Tensor? qkv_bias, Tensor(a!)[] q_out, "
      "Tensor(b!)[] k_out, Tensor(c!)[] v_out, Tensor? q_weight, Tensor? k_weight, Tensor? cos, "
      "Tensor? sin, str norm, str rope, float eps, int[] order, Tensor(d!)? progress, int "
      "launched) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ulysses, CompositeExplicitAutograd, m) {
  m.impl("_load_projection", TORCH_BOX(&ulysses_ops::load_projection));
}

STABLE_TORCH_LIBRARY_IMPL(ulysses, CUDA, m) {
  m.impl("_project_qkv_sm90", &ulysses_ops::project_qkv);
  m.impl("_await_projection", TORCH_BOX(&ulysses_ops::await_projection));
}
