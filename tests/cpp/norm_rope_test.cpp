// Replays launches of the fused RMSNorm + RoPE over host buffers, block by block, thread by thread,
// with the index functions of the kernels themselves, and compares with the equations. What is left
// to a device is the copies' width, the shuffles and the barrier.
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "norm_rope_problem.h"

using namespace ulysses_ops;

namespace {

// A table of floats whose bounds and alignment are looked at.
struct CheckedCopy {
  const std::vector<float>* table;
  template <int kCount>
  void floats(const float* from, float* to) const {
    const int64_t at = from - table->data();
    expect(at >= 0 && at + kCount <= static_cast<int64_t>(table->size()), "a table is not left");
    expect(at % (kCount < 4 ? kCount : 4) == 0, "a table is read at a multiple of the vector");
    std::memcpy(to, from, kCount * sizeof(float));
  }
};

// What one lane owns of one head.
template <int kVec>
int64_t element(const NormRopeParams& params, int32_t lane, int i) {
  return i < kVec ? lane * kVec + i : params.head_dim / 2 + lane * kVec + i - kVec;
}

// All lanes of one slot do one chunk of one row. `sums` collects squares by tensor, or by head.
template <int kVec, Rope kRope>
void do_chunk(Problem& problem, const NormRopeParams& params, uint32_t first_thread, uint32_t row,
              Chunk chunk, bool writes, double (&row_sums)[2]) {
  const Span& span = params.spans[chunk.span];
  const RowPlace at = row_place(params, row);
  const bool across = params.norm == Norm::kAcrossHeads;
  const auto* bias = static_cast<const float*>(params.bias[span.tensor]);
  const auto* weight = static_cast<const float*>(params.weight[span.tensor]);
  for (int head = 0; head < chunk.count; ++head) {
    const int64_t in_tensor = span.first_head + chunk.head + head;
    const auto* in =
        static_cast<const float*>(span.in) + in_offset(params, span, at, chunk.head + head);
    auto* out = static_cast<float*>(span.out) + out_offset(params, span, at, chunk.head + head);
    double head_sum = 0.0;
    for (int pass = 0; pass < 2; ++pass) {
      for (uint32_t lane = 0; lane < (1U << params.lanes_log2); ++lane) {
        const Place place = place_of<kVec>(params, first_thread + lane);
        expect(place.lane == static_cast<int32_t>(lane), "slots begin at their first lane");
        if (!place.is_active) {
          continue;
        }
        float z[2 * kVec], w[2 * kVec], y[2 * kVec];
        for (int i = 0; i < 2 * kVec; ++i) {
          const int64_t d = element<kVec>(params, place.lane, i);
          z[i] = in[d] + bias[in_tensor * params.head_dim + d];
          w[i] = weight[(across ? in_tensor * params.head_dim : 0) + d];
          head_sum += pass == 0 ? static_cast<double>(z[i]) * z[i] : 0.0;
        }
        if (pass == 0 || !writes) {
          continue;
        }
        float cos[kVec] = {}, sin[kVec] = {};
        if (kRope != Rope::kNone) {
          load_pairs(params, params.cos, at.seq, place.lane, CheckedCopy{&problem.cos}, cos);
          load_pairs(params, params.sin, at.seq, place.lane, CheckedCopy{&problem.sin}, sin);
        }
        const int64_t heads = across ? params.num_heads[span.tensor] : 1;
        const double squares = across ? row_sums[span.tensor] : head_sum;
        const double mean = squares / static_cast<double>(heads * params.head_dim);
        const auto scale = static_cast<float>(
            params.norm == Norm::kNone ? 1.0 : 1.0 / std::sqrt(mean + params.eps));
        for (float& value : w) {
          value = params.norm == Norm::kNone ? 1.0F : value;
        }
        Rotation<kVec> rotation;
        weigh<kRope>(w, cos, sin, rotation);
        rotate<kRope>(rotation, scale, z, y);
        for (int i = 0; i < 2 * kVec; ++i) {
          float& target = out[element<kVec>(params, place.lane, i)];
          expect(target == kUntouched, "each element is written once");
          target = y[i];
        }
      }
    }
    row_sums[span.tensor] += writes ? 0.0 : head_sum;
  }
}

template <int kVec, Rope kRope>
void run(Problem& problem, const NormRopeParams& params) {
  const uint32_t lanes = 1U << params.lanes_log2;
  double sums[2] = {0.0, 0.0};
  if (params.norm == Norm::kAcrossHeads) {
    for (uint32_t row = 0; row < params.num_rows; ++row) {
      sums[0] = sums[1] = 0.0;
      for (const bool writes : {false, true}) {
        for (uint32_t thread = 0; thread < row_threads(params); thread += lanes) {
          const uint32_t slot = place_of<kVec>(params, thread).slot;
          if (slot < params.chunks_per_row.value) {
            do_chunk<kVec, kRope>(problem, params, thread, row, chunk_at(params, slot), writes,
                                  sums);
          }
        }
      }
    }
    return;
  }
  const uint32_t num_slots = 256 / lanes;
  const uint32_t num_blocks = 3;  // few, so that blocks make several rounds
  for (uint32_t block = 0; block < num_blocks; ++block) {
    for (uint32_t first = block * num_slots; first < params.num_tasks;
         first += num_blocks * num_slots) {
      for (uint32_t thread = 0; thread < 256; thread += lanes) {
        const uint32_t task = first + place_of<kVec>(params, thread).slot;
        if (task < params.num_tasks) {
          const uint32_t row = params.chunks_per_row.quotient(task);
          const Chunk chunk = chunk_at(params, task - row * params.chunks_per_row.value);
          do_chunk<kVec, kRope>(problem, params, thread, row, chunk, true, sums);
        }
      }
    }
  }
}

template <int kVec>
void run(Problem& problem, const NormRopeParams& params) {
  if (params.rope == Rope::kNone) {
    run<kVec, Rope::kNone>(problem, params);
  } else if (params.rope == Rope::kInterleaved) {
    run<kVec, Rope::kInterleaved>(problem, params);
  } else {
    run<kVec, Rope::kHalfSplit>(problem, params);
  }
}

void check(const Case& c, int64_t itemsize, const std::string& name) {
  Problem problem(c);
  const NormRopeParams params = problem.plan(itemsize);
  const int64_t vec = vector_elems({c.batch, c.seq, c.head_dim, itemsize});
  expect(vec * itemsize == 16 || c.head_dim % 16 == 8, name + ": vectors of 16 bytes");
  if (vec == 8) {
    run<8>(problem, params);
  } else {
    run<4>(problem, params);
  }
  const double worst = difference(problem, c.rope);
  expect(worst < 2e-5, name + ": differs by " + std::to_string(worst));
  // Control: the other style of pairs is something else.
  if (c.rope != Rope::kNone && c.seq > 0 && sum(c.q_in) > 0) {
    const Rope other = c.rope == Rope::kInterleaved ? Rope::kHalfSplit : Rope::kInterleaved;
    expect(difference(problem, other) > 1e-2, name + ": the other style would have passed");
  }
}

void check_divisors() {
  for (uint32_t divisor = 1; divisor < 4000; ++divisor) {
    const Divisor by(divisor);
    for (uint32_t k = 0; k < 600; ++k) {
      for (const uint32_t n : {k, k * divisor, k * divisor + divisor - 1, 0x7FFFFFFFU - k}) {
        expect(by.quotient(n) == n / divisor,
               std::to_string(n) + " / " + std::to_string(divisor) + " by multiplication");
      }
    }
  }
  for (const uint32_t divisor : {1U << 20, (1U << 20) + 1, 0x3FFFFFFFU, 0x7FFFFFFFU}) {
    for (const uint32_t n : {0U, divisor - 1, divisor, 0x7FFFFFFEU, 0x7FFFFFFFU}) {
      expect(Divisor(divisor).quotient(n) == n / divisor, "a large divisor");
    }
  }
}

void check_refusals() {
  const auto refuses = [](const NormRopeSizes& sizes, const HeadParts& q, const HeadParts& k) {
    NormRopeParams params;
    try {
      plan_norm_rope(sizes, q, k, params);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  static float memory[8];
  const HeadPart four{memory, 4, 512, 512};
  const HeadPart five{memory, 5, 640, 640};
  const HeadPart one{memory, 1, 128, 128};
  const NormRopeSizes sizes{1, 1, 128, 2};
  const HeadParts none{};
  expect(!refuses(sizes, {{four}, {four}}, none), "equal heads");
  expect(refuses(sizes, {{four}, {five}}, none), "the outputs have more heads");
  expect(refuses(sizes, none, {{five}, {four}}), "the outputs have fewer heads");
  expect(refuses({1, 1, 12, 2}, {{four}, {four}}, none), "D is no multiple of 8");
  expect(refuses({1, 1, 264, 2}, {{four}, {four}}, none), "D is above 256");
  expect(refuses({1 << 20, 1 << 12, 128, 2}, {{four}, {four}}, none), "too many rows");
  const std::vector<HeadPart> many(kMaxSpans, one);
  expect(!refuses(sizes, {many, many}, none), "as many pieces as fit");
  expect(refuses(sizes, {many, many}, {{one}, {one}}), "one piece more");
}

void check_dense_heads() {
  const std::array<int64_t, 4> shape{2, 4, 3, 8};
  expect(has_dense_heads(shape, {96, 24, 8, 1}), "contiguous");
  expect(has_dense_heads(shape, {288, 72, 8, 1}), "a view of a fused projection");
  expect(has_dense_heads(shape, {24, 48, 8, 1}), "sequence outermost");
  expect(has_dense_heads({2, 4, 1, 8}, {32, 8, 7, 1}), "the stride of one head means nothing");
  expect(!has_dense_heads(shape, {96, 8, 32, 1}), "heads outermost");
  expect(!has_dense_heads(shape, {192, 48, 16, 1}), "heads with gaps");
  expect(!has_dense_heads(shape, {192, 48, 16, 2}), "last stride 2");
  expect(!has_dense_heads(shape, {96, 0, 8, 1}), "one row for all");
}

}  // namespace

int main() {
  check_divisors();
  check_refusals();
  check_dense_heads();
  for (const Norm norm : {Norm::kNone, Norm::kPerHead, Norm::kAcrossHeads}) {
    for (const Rope rope : {Rope::kNone, Rope::kInterleaved, Rope::kHalfSplit}) {
      for (const bool full : {false, true}) {
        for (const int64_t itemsize : {2, 4}) {
          const std::string name = "norm " + std::to_string(static_cast<int>(norm)) + ", rope " +
                                   std::to_string(static_cast<int>(rope)) + ", itemsize " +
                                   std::to_string(itemsize) + (full ? ", full table" : "");
          for (const int64_t dim : {8, 24, 32, 64, 72, 96, 128, 248, 256}) {
            check({2, 5, dim, {5}, {5}, {3}, {3}, norm, rope, full}, itemsize,
                  name + ", D " + std::to_string(dim));
          }
          check({1, 7, 64, {24}, {12, 12}, {24}, {24}, norm, rope, full}, itemsize,
                name + " split");
          check({3, 2, 64, {1, 0, 9}, {4, 3, 3}, {2, 2}, {0, 4}, norm, rope, full}, itemsize,
                name + " parts that end at different heads");
          check({1, 3, 96, {}, {}, {6}, {2, 4}, norm, rope, full}, itemsize, name + " K alone");
          check({1, 1, 128, {4}, {4}, {}, {}, norm, rope, full}, itemsize, name + " Q alone");
          check({2, 0, 64, {4}, {4}, {4}, {4}, norm, rope, full}, itemsize, name + " no rows");
        }
      }
    }
  }
  std::printf("norm_rope_test: %s\n", failures == 0 ? "passed" : "FAILED");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
