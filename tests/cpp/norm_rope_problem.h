// A fused RMSNorm + RoPE in host buffers: its tensors, and the equations of norm_rope.h over them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../csrc/kernels/norm_rope_plan.h"

namespace ulysses_ops {

inline int failures = 0;

inline void expect(bool condition, const std::string& what) {
  if (!condition) {
    ++failures;
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  }
}

inline constexpr float kUntouched = -12345.0F;
inline constexpr int64_t kPad = 16;  // elements between rows that nobody may touch

struct Case {
  int64_t batch, seq, head_dim;
  std::vector<int64_t> q_in, q_out, k_in, k_out;
  Norm norm;
  Rope rope;
  bool full_table;
};

// (B, S, heads, D) in a buffer with room between the rows.
struct Buffer {
  std::vector<float> data;
  HeadPart part;
  Buffer(const Case& c, int64_t heads, float value)
      : data(c.batch * c.seq * (heads * c.head_dim + kPad), value) {
    part.data = data.data();
    part.heads = heads;
    part.row_stride = heads * c.head_dim + kPad;
    part.batch_stride = c.seq * part.row_stride;
  }
  float& at(int64_t b, int64_t s, int64_t h, int64_t d, int64_t head_dim) {
    return data[b * part.batch_stride + s * part.row_stride + h * head_dim + d];
  }
};

inline int64_t sum(const std::vector<int64_t>& values) {
  int64_t total = 0;
  for (const int64_t value : values) {
    total += value;
  }
  return total;
}

// Deterministic noise in (-1, 1).
inline float noise(int64_t n) {
  const uint64_t x = (static_cast<uint64_t>(n) + 1) * 0x9E3779B97F4A7C15ULL;
  return static_cast<float>(static_cast<double>(x >> 40) / (1 << 23) - 1.0);
}

struct Problem {
  Case c;
  std::vector<Buffer> inputs[2], outputs[2];
  std::vector<float> weight[2], bias[2], cos, sin;

  explicit Problem(const Case& given) : c(given) {
    const std::vector<int64_t>* cuts[2][2] = {{&c.q_in, &c.q_out}, {&c.k_in, &c.k_out}};
    int64_t n = 0;
    for (int tensor = 0; tensor < 2; ++tensor) {
      const int64_t heads = sum(*cuts[tensor][0]);
      for (const int64_t part : *cuts[tensor][0]) {
        inputs[tensor].emplace_back(c, part, 0.0F);
        for (float& value : inputs[tensor].back().data) {
          value = noise(++n);
        }
      }
      for (const int64_t part : *cuts[tensor][1]) {
        outputs[tensor].emplace_back(c, part, kUntouched);
      }
      weight[tensor].resize(c.norm == Norm::kPerHead ? c.head_dim : heads * c.head_dim);
      bias[tensor].resize(heads * c.head_dim);
      for (auto* values : {&weight[tensor], &bias[tensor]}) {
        for (float& value : *values) {
          value = noise(++n);
        }
      }
    }
    const int64_t width = c.full_table ? c.head_dim : c.head_dim / 2;
    for (int64_t i = 0; i < c.seq * width; ++i) {
      // A full table holds each value at both places of its pair.
      const int64_t d = i % width;
      const int64_t pair = !c.full_table                  ? d
                           : c.rope == Rope::kInterleaved ? d / 2
                                                          : d % (c.head_dim / 2);
      const float angle = noise(i / width * c.head_dim + pair) * 3.0F;
      cos.push_back(std::cos(angle));
      sin.push_back(std::sin(angle));
    }
  }

  float input(int tensor, int64_t b, int64_t s, int64_t h, int64_t d) {
    for (Buffer& part : inputs[tensor]) {
      if (h < part.part.heads) {
        return part.at(b, s, h, d, c.head_dim);
      }
      h -= part.part.heads;
    }
    throw std::logic_error("no such head");
  }

  NormRopeParams plan(int64_t itemsize) {
    NormRopeParams params;
    params.norm = c.norm;
    params.rope = c.rope;
    params.table_width = static_cast<int32_t>(c.full_table ? c.head_dim : c.head_dim / 2);
    params.cos = cos.data();
    params.sin = sin.data();
    params.eps = 1e-6F;
    HeadParts parts[2];
    for (int tensor = 0; tensor < 2; ++tensor) {
      for (Buffer& buffer : inputs[tensor]) {
        parts[tensor].inputs.push_back(buffer.part);
      }
      for (Buffer& buffer : outputs[tensor]) {
        parts[tensor].outputs.push_back(buffer.part);
      }
      parts[tensor].weight = weight[tensor].data();
      parts[tensor].bias = bias[tensor].data();
    }
    // The buffers hold floats; vectors are those of the element size that is asked for.
    const NormRopeSizes sizes{c.batch, c.seq, c.head_dim, itemsize};
    plan_norm_rope(sizes, parts[0], parts[1], params);
    const NormRopeSizes floats{c.batch, c.seq, c.head_dim, sizeof(float)};
    NormRopeParams as_floats;
    plan_norm_rope(floats, parts[0], parts[1], as_floats);
    for (int32_t i = 0; i < params.num_spans; ++i) {
      params.spans[i].in = as_floats.spans[i].in;
      params.spans[i].out = as_floats.spans[i].out;
    }
    return params;
  }
};

// The equations, in double, from the tensors as a whole. `style` is how pairs are taken.
inline std::vector<double> expected_head(Problem& problem, int tensor, int64_t b, int64_t s,
                                         int64_t h, Rope style) {
  const Case& c = problem.c;
  const int64_t dim = c.head_dim;
  const auto num_heads = static_cast<int64_t>(problem.bias[tensor].size()) / dim;
  const auto z = [&](int64_t head, int64_t d) {
    return static_cast<double>(problem.input(tensor, b, s, head, d)) +
           problem.bias[tensor][head * dim + d];
  };
  const bool across = c.norm == Norm::kAcrossHeads;
  double squares = 0.0;
  for (int64_t head = across ? 0 : h; head < (across ? num_heads : h + 1); ++head) {
    for (int64_t d = 0; d < dim; ++d) {
      squares += z(head, d) * z(head, d);
    }
  }
  const double root =
      std::sqrt(squares / static_cast<double>((across ? num_heads : 1) * dim) + 1e-6);
  std::vector<double> n(dim), y(dim);
  for (int64_t d = 0; d < dim; ++d) {
    const double w = problem.weight[tensor][(across ? h * dim : 0) + d];
    n[d] = c.norm == Norm::kNone ? z(h, d) : z(h, d) * w / root;
  }
  if (style == Rope::kNone) {
    return n;
  }
  for (int64_t i = 0; i < dim / 2; ++i) {
    const int64_t a = style == Rope::kInterleaved ? 2 * i : i;
    const int64_t other = style == Rope::kInterleaved ? 2 * i + 1 : i + dim / 2;
    const double angle = static_cast<double>(noise(s * dim + i) * 3.0F);
    y[a] = n[a] * std::cos(angle) - n[other] * std::sin(angle);
    y[other] = n[other] * std::cos(angle) + n[a] * std::sin(angle);
  }
  return y;
}

// Largest difference from the equations; the elements between rows must be untouched.
inline double difference(Problem& problem, Rope style) {
  const Case& c = problem.c;
  double worst = 0.0;
  for (int tensor = 0; tensor < 2; ++tensor) {
    int64_t first_head = 0;
    for (Buffer& part : problem.outputs[tensor]) {
      for (int64_t b = 0; b < c.batch; ++b) {
        for (int64_t s = 0; s < c.seq; ++s) {
          for (int64_t h = 0; h < part.part.heads; ++h) {
            const auto expected = expected_head(problem, tensor, b, s, first_head + h, style);
            for (int64_t d = 0; d < c.head_dim; ++d) {
              worst = std::max(worst, std::fabs(expected[d] - part.at(b, s, h, d, c.head_dim)));
            }
          }
          for (int64_t pad = 0; pad < kPad; ++pad) {
            expect(part.at(b, s, part.part.heads, pad, c.head_dim) == kUntouched,
                   "nothing is written between rows");
          }
        }
      }
      first_head += part.part.heads;
    }
  }
  return worst;
}

}  // namespace ulysses_ops
