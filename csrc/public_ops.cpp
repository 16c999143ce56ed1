// The public deferred operators on CUDA: check -> plan -> launch, with no Python on the way, which
// would cost as much again as the launch. Schemas, tags and everything else are in
// ulysses_ops/ops.py. A group that this library does not know is on another transport: its
// exchanges go to the Python operators `_collective_send` and `_collective_complete`, which return
// what is wrong as a sentence, since an exception's text does not survive the stable ABI.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "registry.h"
#include "stack.h"

namespace ulysses_ops {
namespace {

using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

// Calls an operator that returns a sentence when it refuses.
template <size_t kCount>
void call_collective(const char* op, std::array<StableIValue, kCount> stack) {
  UOPS_TORCH_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  const std::string refusal = take_string(stack[0]);
  if (!refusal.empty()) {
    throw std::runtime_error(refusal);
  }
}

std::array<int64_t, 4> four(const torch::headeronly::IntHeaderOnlyArrayRef& values) {
  return {values[0], values[1], values[2], values[3]};
}

// Where a window's memory starts. An empty tensor has no data pointer, yet its rank has a window to
// be told by: a view of one byte, and so of one element, reaches the memory behind it.
const void* address_of(const Tensor& window) {
  if (window.numel() > 0) {
    return window.data_ptr();
  }
  const std::array<int64_t, 1> one{1};
  AtenTensorHandle view = nullptr;
  UOPS_TORCH_CHECK(
      aoti_torch__reinterpret_tensor(window.get(), 1, one.data(), one.data(), 0, &view));
  return Tensor(view).data_ptr();
}

void send(const LockedGroup& group, Direction direction, const Tensor& x, const Tensor& window,
          int64_t world_size, int64_t peer) {
  const char* op = direction == Direction::kGather ? "gather_into" : "scatter_into";
  WindowInfo& info = group->window(address_of(window), op);
  STD_TORCH_CHECK(info.layout.direction == direction, op, ": window '", info.name,
                  "' is for the other direction; use that operator");
  STD_TORCH_CHECK(info.layout.world_size() == world_size, op, ": world_size=", world_size,
                  ", but the communicator has ", info.layout.world_size(),
                  " ranks; pass comm.world_size");
  STD_TORCH_CHECK(window.numel() * info.layout.itemsize == info.layout.window_bytes(group->rank()),
                  op, ": a view of window '", info.name, "' was given; pass all of Window.tensor");
  STD_TORCH_CHECK(x.dim() == 4 && x.scalar_type() == window.scalar_type() &&
                      x.get_device_index() == group->device(),
                  op, ": x of ", x.dim(), " dimensions on device ", x.get_device_index(),
                  " does not fit window '", info.name, "' of another dtype, or on device ",
                  group->device());
  const cudaStream_t caller = current_stream(group->device());
  const CaptureId capture = group->admit(caller, op);
  group->check_send(info, peer, capture, op);
  const auto shape = four(x.sizes());
  const auto expected = info.layout.source_shape(group->rank(), peer);
  STD_TORCH_CHECK(shape == expected, op, ": x has shape ", to_string(shape), ", window '",
                  info.name, "' takes ", to_string(expected), " from rank ", group->rank());
  const bool in_place = is_pitched(shape, four(x.strides()));
  const Tensor readable = in_place ? x : torch::stable::contiguous(x);
  Source source;
  source.identity = x.data_ptr();
  source.base = static_cast<const char*>(readable.data_ptr());
  source.strides = four(readable.strides());
  source.keepalive = std::make_shared<std::pair<Tensor, Tensor>>(x, readable);
  group->send(info, std::move(source), peer, caller, capture);
}

// (Tensor x, Tensor(a!) window, Tensor(b!) token, int world_size, str group_name, int? peer) -> ()
template <Direction kDirection>
void send_into(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  const auto x = to<Tensor>(stack[0]);
  const auto window = to<Tensor>(stack[1]);
  const auto token = to<Tensor>(stack[2]);
  const auto world_size = to<int64_t>(stack[3]);
  const std::string name = take_string(stack[4]);
  const auto peer = to<std::optional<int64_t>>(stack[5]);
  if (const LockedGroup group(name); group) {
    send(group, kDirection, x, window, world_size, peer.value_or(kEveryRank));
    return;
  }
  call_collective("ulysses::_collective_send",
                  std::array{from(x), from(window), from(world_size), from(name), from(peer),
                             from(kDirection == Direction::kGather)});
}

std::vector<const void*> addresses(const std::vector<Tensor>& tensors) {
  std::vector<const void*> result;
  result.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    result.push_back(tensor.data_ptr());
  }
  return result;
}

// (Tensor(a!)[] windows, Tensor[] sources, Tensor(b!) token, int world_size, str group_name) -> ()
void complete(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  const auto windows = to<std::vector<Tensor>>(stack[0]);
  const auto sources = to<std::vector<Tensor>>(stack[1]);
  const auto token = to<Tensor>(stack[2]);
  const auto world_size = to<int64_t>(stack[3]);
  const std::string name = take_string(stack[4]);
  if (const LockedGroup group(name); group) {
    std::vector<const void*> bases;
    for (const Tensor& window : windows) {
      bases.push_back(address_of(window));
    }
    group->complete(bases, addresses(sources), current_stream(group->device()));
    return;
  }
  call_collective("ulysses::_collective_complete",
                  std::array{from(windows), from(sources), from(world_size), from(name)});
}

}  // namespace
}  // namespace ulysses_ops

STABLE_TORCH_LIBRARY_IMPL(ulysses, CUDA, m) {
  using namespace ulysses_ops;
  m.impl("scatter_into", &send_into<Direction::kScatter>);
  m.impl("gather_into", &send_into<Direction::kGather>);
  m.impl("complete", &complete);
}
