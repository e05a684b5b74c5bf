// The kernels of one instruction set. Compiled once per set, with -DKILN_ISA=plain, avx2 or avx512 and the matching
// machine flags; only elementwise_<isa>() is visible outside.
#include "kernels.h"

#include "../simd.h"

namespace kiln {
namespace KILN_ISA {

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

// out = total * factor * gamma
static void scale_row(const float* total, const float* gamma, float factor, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, load(total + i) * factor * load(gamma + i));
  if (const int rest = static_cast<int>(n - i))
    store_part(out + i, load_part(total + i, rest) * factor * load_part(gamma + i, rest), rest);
}

// The second pass over a row finds it in the nearest cache.
static void add_rms_norm(const AddRmsNorm& call, int64_t begin, int64_t end) {
  const int64_t n = call.hidden;
  for (int64_t row = begin; row < end; row++) {
    float* out = call.normalized + row * n;
    float* total = call.sum ? call.sum + row * n : out;
    const double squares = add_row(call.x + row * n, call.skip + row * n, total, n);
    const double mean = squares / static_cast<double>(n) + static_cast<double>(call.epsilon);
    scale_row(total, call.gamma, static_cast<float>(1 / __builtin_sqrt(mean)), out, n);
  }
}

static void swiglu(const SwiGlu& call, int64_t begin, int64_t end) {
  const Vec minus_alpha = broadcast(-call.alpha);
  auto gated = [&](Vec gate, Vec up) __attribute__((always_inline)) {
    return gate / (exp(gate * minus_alpha) + 1.0f) * up;
  };
  int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) store(call.output + i, gated(load(call.gate + i), load(call.up + i)));
  if (const int rest = static_cast<int>(end - i))
    store_part(call.output + i, gated(load_part(call.gate + i, rest), load_part(call.up + i, rest)), rest);
}

}  // namespace KILN_ISA

const ElementwiseKernels& KILN_JOIN(elementwise_, KILN_ISA)() {
  static const ElementwiseKernels kernels = {KILN_ISA::add_rms_norm, KILN_ISA::swiglu};
  return kernels;
}

}  // namespace kiln
