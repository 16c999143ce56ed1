#include "norm_rope_plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "../plan.h"

namespace ulysses_ops {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("qk_norm_rope: " + what);
}

constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();

int64_t count_heads(const std::vector<HeadPart>& parts) {
  int64_t heads = 0;
  for (const HeadPart& part : parts) {
    heads += part.heads;
  }
  return heads;
}

void* at_head(const HeadPart& part, int64_t head, const NormRopeSizes& sizes) {
  return static_cast<char*>(part.data) + head * sizes.head_dim * sizes.itemsize;
}

// Cuts the heads of one tensor wherever an input or an output ends.
void add_spans(int32_t tensor, const char* name, const NormRopeSizes& sizes, const HeadParts& parts,
               uint32_t& num_chunks, NormRopeParams& params) {
  const int64_t heads = count_heads(parts.inputs);
  if (heads != count_heads(parts.outputs)) {
    refuse(std::string(name) + " has " + std::to_string(heads) + " heads, its outputs have " +
           std::to_string(count_heads(parts.outputs)));
  }
  size_t in = 0;
  size_t out = 0;
  int64_t in_head = 0;
  int64_t out_head = 0;
  for (int64_t head = 0; head < heads;) {
    while (in_head == parts.inputs[in].heads) {
      ++in;
      in_head = 0;
    }
    while (out_head == parts.outputs[out].heads) {
      ++out;
      out_head = 0;
    }
    const HeadPart& from = parts.inputs[in];
    const HeadPart& to = parts.outputs[out];
    const int64_t count = std::min(from.heads - in_head, to.heads - out_head);
    if (params.num_spans == kMaxSpans) {
      refuse("Q and K are cut into more than " + std::to_string(kMaxSpans) +
             " pieces by their parts; give fewer");
    }
    Span& span = params.spans[params.num_spans++];
    span.in = at_head(from, in_head, sizes);
    span.out = at_head(to, out_head, sizes);
    span.in_batch = sizes.batch == 1 ? 0 : from.batch_stride;
    span.in_row = sizes.seq == 1 ? 0 : from.row_stride;
    span.out_batch = sizes.batch == 1 ? 0 : to.batch_stride;
    span.out_row = sizes.seq == 1 ? 0 : to.row_stride;
    span.first_chunk = num_chunks;
    span.num_heads = static_cast<int32_t>(count);
    span.first_head = static_cast<int32_t>(head);
    span.tensor = tensor;
    num_chunks += static_cast<uint32_t>((count + kHeadsPerChunk - 1) / kHeadsPerChunk);
    head += count;
    in_head += count;
    out_head += count;
  }
  params.num_heads[tensor] = static_cast<int32_t>(heads);
  params.weight[tensor] = parts.weight;
  params.bias[tensor] = parts.bias;
}

}  // namespace

bool has_dense_heads(const std::array<int64_t, 4>& shape, const std::array<int64_t, 4>& strides) {
  return is_pitched(shape, strides) && (shape[2] == 1 || strides[2] == shape[3]);
}

int64_t vector_elems(const NormRopeSizes& sizes) {
  const int64_t elems = 16 / sizes.itemsize;
  return sizes.head_dim / 2 % elems == 0 ? elems : elems / 2;
}

int64_t row_threads(const NormRopeParams& params) {
  const int64_t threads = static_cast<int64_t>(params.chunks_per_row.value) << params.lanes_log2;
  return (threads + 31) / 32 * 32;
}

void plan_norm_rope(const NormRopeSizes& sizes, const HeadParts& q, const HeadParts& k,
                    NormRopeParams& params) {
  if (sizes.head_dim < 8 || sizes.head_dim > kMaxHeadDim || sizes.head_dim % 8 != 0) {
    refuse("D=" + std::to_string(sizes.head_dim) + " must be a multiple of 8 up to " +
           std::to_string(kMaxHeadDim));
  }
  params.head_dim = static_cast<int32_t>(sizes.head_dim);
  params.num_spans = 0;
  const int64_t lanes = sizes.head_dim / 2 / vector_elems(sizes);
  params.lanes_log2 = 0;
  while ((int64_t{1} << params.lanes_log2) < lanes) {
    ++params.lanes_log2;
  }
  if (count_heads(q.inputs) + count_heads(k.inputs) > kMaxCount / kMaxHeadDim) {
    refuse("too many heads for one launch");
  }
  uint32_t num_chunks = 0;
  add_spans(0, "q", sizes, q, num_chunks, params);
  add_spans(1, "k", sizes, k, num_chunks, params);
  const int64_t rows = sizes.batch * sizes.seq;
  if (rows * num_chunks > kMaxCount / 2) {
    refuse(std::to_string(rows) + " rows of " + std::to_string(num_chunks) +
           " chunks are too many for one launch; split the batch");
  }
  params.num_rows = static_cast<uint32_t>(rows);
  params.num_tasks = params.num_rows * num_chunks;
  params.chunks_per_row = Divisor(std::max(num_chunks, 1U));
  params.seq = Divisor(static_cast<uint32_t>(std::max<int64_t>(sizes.seq, 1)));
}

}  // namespace ulysses_ops
