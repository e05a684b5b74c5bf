// What the token-wise operators do to one row: residual sum, norm, gate. Shared with the operators that quantise the
// result at once, which so have the same bits.
#pragma once

#include "../simd.h"

namespace kiln::KILN_ISA {

// total = x + skip; returns the sum of its squares. Squares of floats neither overflow nor vanish in doubles, and
// doubles cost no time here: loads and stores bound the loop.
static double add_row(const float* x, const float* skip, float* total, int64_t n) {
  DoubleVec low = {}, high = {};
  auto accumulate = [&](Vec v) __attribute__((always_inline)) {
    DoubleVec a = doubles_from_low(v), b = doubles_from_high(v);
    low += a * a;
    high += b * b;
  };
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    Vec v = load(x + i) + load(skip + i);
    store(total + i, v);
    accumulate(v);
  }
  if (const int rest = static_cast<int>(n - i)) {
    Vec v = load_part(x + i, rest) + load_part(skip + i, rest);
    store_part(total + i, v, rest);
    accumulate(v);
  }
  return sum_of(low + high);
}

// 1 / sqrt(mean + epsilon)
KILN_INLINE float norm_factor(double squares, int64_t n, float epsilon) {
  const double mean = squares / static_cast<double>(n) + static_cast<double>(epsilon);
  return static_cast<float>(1 / __builtin_sqrt(mean));
}

// out = total * factor * gamma
static void scale_row(const float* total, const float* gamma, float factor, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, load(total + i) * factor * load(gamma + i));
  if (const int rest = static_cast<int>(n - i))
    store_part(out + i, load_part(total + i, rest) * factor * load_part(gamma + i, rest), rest);
}

// out = gate * sigmoid(alpha * gate) * up
static void gate_row(const float* gate, const float* up, float alpha, float* out, int64_t n) {
  const Vec minus_alpha = broadcast(-alpha);
  auto gated = [&](Vec gate, Vec up) __attribute__((always_inline)) {
    return gate / (exp(gate * minus_alpha) + 1.0f) * up;
  };
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, gated(load(gate + i), load(up + i)));
  if (const int rest = static_cast<int>(n - i))
    store_part(out + i, gated(load_part(gate + i, rest), load_part(up + i, rest)), rest);
}

}  // namespace kiln::KILN_ISA
