// Fused RMSNorm + RoPE of Q and K: what a launch is told, and every index that it computes. No CUDA
// and no torch, so that the host can replay a launch element by element (tests/cpp/norm_rope_test).
//
//   z = x + bias
//   n = z * weight / sqrt(mean(z^2) + eps)      mean over d (per head), or over h and d (across)
//   y_a = n_a cos - n_b sin,  y_b = n_b cos + n_a sin      for every pair (a, b) of a head
//
//   pairs, interleaved: (2i, 2i + 1)     half-split: (i, i + D/2)      i in [0, D/2)
//
// NOTE [lanes and chunks]: a head is the work of `1 << lanes_log2` lanes. Lane l owns the kVec
// elements from l * kVec on, and the kVec elements from D/2 + l * kVec on, so both elements of
// every pair are in one lane, whatever the style. Lanes from D/2/kVec on idle. A slot, which is the
// lanes of one head, works through a chunk: up to kHeadsPerChunk neighbouring heads of one row, all
// in one part of the input and one part of the output (a span).
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define UOPS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define UOPS_HOST_DEVICE inline
#endif

namespace ulysses_ops {

inline constexpr int32_t kMaxSpans = 32;
inline constexpr int32_t kMaxHeadDim = 256;
inline constexpr int32_t kHeadsPerChunk = 4;  // 2 * 16 bytes each: what a thread has in flight

enum class Norm : int32_t { kNone, kPerHead, kAcrossHeads };
enum class Rope : int32_t { kNone, kInterleaved, kHalfSplit };

// Division of numbers below 2^31 by multiply and shift; the GPU has no instruction for it.
struct Divisor {
  uint32_t value = 1;
  uint32_t multiplier = 1;
  uint32_t shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t divisor) : value(divisor) {
    while ((uint64_t{1} << shift) < divisor) {
      ++shift;
    }
    const uint64_t excess = (uint64_t{1} << shift) - divisor;
    multiplier = static_cast<uint32_t>(((excess << 32) / divisor) + 1);
  }

  UOPS_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    const auto high = static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier) >> 32);
    return (high + n) >> shift;
  }
};

// Heads that lie in one part of the input and in one part of the output. Strides in elements.
struct Span {
  const void* in = nullptr;  // its first head, at batch 0 and row 0
  void* out = nullptr;
  int64_t in_batch = 0;
  int64_t in_row = 0;
  int64_t out_batch = 0;
  int64_t out_row = 0;
  uint32_t first_chunk = 0;  // chunks of a row that come before
  int32_t num_heads = 0;
  int32_t first_head = 0;  // in its tensor, for bias and weight
  int32_t tensor = 0;      // 0: Q, 1: K
};

// A launch. The chunks of a row are those of all spans in their order, Q before K.
struct NormRopeParams {
  Span spans[kMaxSpans];
  const void* weight[2] = {nullptr, nullptr};  // (D,) per head, (H * D,) across; null: all ones
  const void* bias[2] = {nullptr, nullptr};    // (H * D,); null: none
  const float* cos = nullptr;                  // (S, table_width)
  const float* sin = nullptr;
  int32_t num_heads[2] = {0, 0};
  int32_t num_spans = 0;
  int32_t head_dim = 0;
  int32_t table_width = 0;  // D/2, or D with each value at both places of its pair
  int32_t lanes_log2 = 0;
  uint32_t num_rows = 0;   // batch * sequence
  uint32_t num_tasks = 0;  // num_rows * chunks of a row
  Divisor chunks_per_row;
  Divisor seq;
  float eps = 0.0F;
  Norm norm = Norm::kNone;
  Rope rope = Rope::kNone;
  bool weight_is_float = false;  // else of the type of the elements
  bool bias_is_float = false;
};

struct Place {
  uint32_t slot = 0;
  int32_t lane = 0;
  bool is_active = false;  // its lane owns elements
};

template <int kVec>
UOPS_HOST_DEVICE Place place_of(const NormRopeParams& params, uint32_t thread) {
  Place place;
  place.slot = thread >> params.lanes_log2;
  place.lane = static_cast<int32_t>(thread & ((1U << params.lanes_log2) - 1U));
  place.is_active = place.lane * kVec < params.head_dim / 2;
  return place;
}

struct Chunk {
  int32_t span = 0;
  int32_t head = 0;   // first head, counted in the span
  int32_t count = 0;  // heads
};

// `index` < chunks of a row.
UOPS_HOST_DEVICE Chunk chunk_at(const NormRopeParams& params, uint32_t index) {
  Chunk chunk;
  for (int32_t i = 1; i < params.num_spans; ++i) {
    chunk.span += index >= params.spans[i].first_chunk ? 1 : 0;
  }
  const Span& span = params.spans[chunk.span];
  chunk.head = static_cast<int32_t>(index - span.first_chunk) * kHeadsPerChunk;
  const int32_t left = span.num_heads - chunk.head;
  chunk.count = left < kHeadsPerChunk ? left : kHeadsPerChunk;
  return chunk;
}

struct RowPlace {
  uint32_t batch = 0;
  uint32_t seq = 0;
};

UOPS_HOST_DEVICE RowPlace row_place(const NormRopeParams& params, uint32_t row) {
  RowPlace place;
  place.batch = params.seq.quotient(row);
  place.seq = row - place.batch * params.seq.value;
  return place;
}

// Element offsets from Span::in and Span::out of the first element of a head.
UOPS_HOST_DEVICE int64_t in_offset(const NormRopeParams& params, const Span& span, RowPlace row,
                                   int32_t head) {
  return row.batch * span.in_batch + row.seq * span.in_row +
         static_cast<int64_t>(head) * params.head_dim;
}
UOPS_HOST_DEVICE int64_t out_offset(const NormRopeParams& params, const Span& span, RowPlace row,
                                    int32_t head) {
  return row.batch * span.out_batch + row.seq * span.out_row +
         static_cast<int64_t>(head) * params.head_dim;
}

// The values of one table for the kVec pairs of a lane. `copy.template floats<N>(from, to)` copies
// N neighbouring floats; all of them are aligned to their own size, up to 16 bytes.
template <int kVec, class Copy>
UOPS_HOST_DEVICE void load_pairs(const NormRopeParams& params, const float* table, uint32_t seq,
                                 int32_t lane, const Copy& copy, float (&values)[kVec]) {
  const float* row = table + static_cast<int64_t>(seq) * params.table_width;
  const int32_t first = lane * kVec;
  if (params.rope == Rope::kHalfSplit) {
    copy.template floats<kVec>(row + first, values);
  } else if (params.table_width * 2 == params.head_dim) {
    copy.template floats<kVec / 2>(row + first / 2, values);
    copy.template floats<kVec / 2>(row + params.head_dim / 4 + first / 2, values + kVec / 2);
  } else {
    float both[kVec];
    for (int half = 0; half < 2; ++half) {
      copy.template floats<kVec>(row + half * (params.head_dim / 2) + first, both);
      for (int i = 0; i < kVec / 2; ++i) {
        values[half * (kVec / 2) + i] = both[2 * i];
      }
    }
  }
}

// The two elements of pair `pair`, as indices into the 2 * kVec elements of a lane.
template <Rope kRope, int kVec>
UOPS_HOST_DEVICE constexpr int element_a(int pair) {
  return kRope == Rope::kHalfSplit ? pair : 2 * pair;
}
template <Rope kRope, int kVec>
UOPS_HOST_DEVICE constexpr int element_b(int pair) {
  return kRope == Rope::kHalfSplit ? pair + kVec : 2 * pair + 1;
}

// y_a = scale * (x_a * a_to_a - x_b * b_to_a), y_b = scale * (x_b * b_to_b + x_a * a_to_b)
template <int kVec>
struct Rotation {
  float a_to_a[kVec];
  float b_to_a[kVec];
  float b_to_b[kVec];
  float a_to_b[kVec];
};

// Weights are put into the rotation once for all heads that share them.
template <Rope kRope, int kVec>
UOPS_HOST_DEVICE void weigh(const float (&weight)[2 * kVec], const float (&cos)[kVec],
                            const float (&sin)[kVec], Rotation<kVec>& rotation) {
  for (int pair = 0; pair < kVec; ++pair) {
    const float a = weight[element_a<kRope, kVec>(pair)];
    const float b = weight[element_b<kRope, kVec>(pair)];
    if constexpr (kRope == Rope::kNone) {
      rotation.a_to_a[pair] = a;
      rotation.b_to_b[pair] = b;
    } else {
      rotation.a_to_a[pair] = a * cos[pair];
      rotation.b_to_a[pair] = b * sin[pair];
      rotation.b_to_b[pair] = b * cos[pair];
      rotation.a_to_b[pair] = a * sin[pair];
    }
  }
}

template <Rope kRope, int kVec>
UOPS_HOST_DEVICE void rotate(const Rotation<kVec>& rotation, float scale,
                             const float (&x)[2 * kVec], float (&y)[2 * kVec]) {
  for (int pair = 0; pair < kVec; ++pair) {
    constexpr bool kRotates = kRope != Rope::kNone;
    const int a = element_a<kRope, kVec>(pair);
    const int b = element_b<kRope, kVec>(pair);
    // Without rotation nothing may pass from one element to the other, not even 0 * infinity.
    const float from_b = kRotates ? x[b] * rotation.b_to_a[pair] : 0.0F;
    const float from_a = kRotates ? x[a] * rotation.a_to_b[pair] : 0.0F;
    y[a] = scale * (x[a] * rotation.a_to_a[pair] - from_b);
    y[b] = scale * (x[b] * rotation.b_to_b[pair] + from_a);
  }
}

}  // namespace ulysses_ops
