// What prefill multiplies: FP32 numbers, FP32 numbers rounded to bfloat16, or pairs of bfloat16 numbers.
//
// A format says how a vector of operands is made of a row of floats, how one multiplies and adds, and how scores become
// softmax weights. Sums are FP32 in all of them. Knows nothing of tiles.
#pragma once

#include "rows.h"

namespace kiln::KILN_ISA {

// x rounded to bfloat16, ties to even; NaN stays NaN.
KILN_INLINE Vec rounded_to_bf16(Vec x) {
  const UintVec bits = (UintVec)x;
  const Vec rounded = (Vec)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
  return x == x ? rounded : x;
}

// The first at most kWidth of `left` numbers of a row (a pointer, or a ScaledRow), the rest zero.
template <typename Row>
KILN_INLINE Vec load_some(Row row, int64_t left) {
  if (left >= kWidth) return load(row);
  return left > 0 ? load_part(row, static_cast<int>(left)) : Vec{};
}

// Operands as they are.
struct Exact {
  typedef float Element;
  static constexpr int kPer = 1;  // numbers per element

  KILN_INLINE Vec convert(Vec x) { return x; }

  // The elements of the first at most kPer * kWidth of `left` numbers, the rest zero.
  template <typename Row>
  KILN_INLINE Vec take(Row row, int64_t left) {
    return load_some(row, left);
  }
  KILN_INLINE Vec broadcast_element(const float* p) { return broadcast(*p); }
  KILN_INLINE Vec multiply_add(Vec a, Vec b, Vec sum) { return sum + a * b; }

  // scores[v] = 2^(scores[v] - maximum) for `vecs` vectors, as operands; the result is their sum, lanes apart.
  KILN_INLINE Vec weigh(float* scores, int64_t vecs, float maximum) {
    Vec total = {};
    for (int64_t v = 0; v < vecs; v++) {
      const Vec weight = exp2(load(scores + v * kWidth) - broadcast(maximum));
      total += weight;
      store(scores + v * kWidth, weight);
    }
    return total;
  }
};

// Operands rounded to bfloat16 and multiplied as FP32: what Pairs computes, where there is no instruction for it.
struct Rounded {
  typedef float Element;
  static constexpr int kPer = 1;

  KILN_INLINE Vec convert(Vec x) { return rounded_to_bf16(x); }

  template <typename Row>
  KILN_INLINE Vec take(Row row, int64_t left) {
    return convert(load_some(row, left));
  }
  KILN_INLINE Vec broadcast_element(const float* p) { return broadcast(*p); }
  KILN_INLINE Vec multiply_add(Vec a, Vec b, Vec sum) { return sum + a * b; }

  KILN_INLINE Vec weigh(float* scores, int64_t vecs, float maximum) {
    Vec total = {};
    for (int64_t v = 0; v < vecs; v++) {
      const Vec weight = rounded_to_bf16(exp2(load(scores + v * kWidth) - broadcast(maximum)));
      total += weight;
      store(scores + v * kWidth, weight);
    }
    return total;
  }
};

#if defined(__AVX512BF16__)

// An element is two bfloat16 numbers, neighbours along the depth of the product. vdpbf16ps adds both products at once;
// like the conversion, it takes subnormal numbers for zero.
struct Pair {
  uint32_t bits;
};

struct Pairs {
  typedef Pair Element;
  static constexpr int kPer = 2;

  KILN_INLINE Vec convert(Vec low, Vec high) { return (Vec)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }

  template <typename Row>
  KILN_INLINE Vec take(Row row, int64_t left) {
    return convert(load_some(row, left), load_some(row + kWidth, left - kWidth));
  }
  KILN_INLINE Vec broadcast_element(const Pair* p) {
    return (Vec)_mm512_set1_epi32(static_cast<int>(p->bits));
  }
  KILN_INLINE Vec multiply_add(Vec a, Vec b, Vec sum) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  // Elements (first[d], second[d]) of two rows.
  KILN_INLINE Vec interleave(Vec first, Vec second) {
    typedef uint16_t Halves __attribute__((vector_size(64)));
    Halves order;
#pragma GCC unroll 32
    for (int i = 0; i < 32; i++) order[i] = static_cast<uint16_t>(i / 2 + (i % 2) * 16);
    return (Vec)_mm512_permutexvar_epi16((__m512i)order, (__m512i)convert(first, second));
  }

  // 2^x for x < 128, relative error below 3e-6, a thousandth of what rounding the result to bfloat16 does. Exactly 0
  // for -infinity; NaN stays NaN. Minimax polynomial of degree 4 in x - floor(x); vscalefps rounds x down itself.
  KILN_INLINE Vec power_of_two(Vec x) {
    const Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Vec y = broadcast(1.353416792e-2f);
    y = y * f + broadcast(5.201146061e-2f);
    y = y * f + broadcast(2.414427569e-1f);
    y = y * f + broadcast(6.930038345e-1f);
    y = y * f + broadcast(1.000002593f);
    return (Vec)_mm512_scalef_ps((__m512)y, (__m512)x);
  }

  // Two vectors of scores become one of pairs, in the first half of their place. An odd last one is paired with zeros.
  KILN_INLINE Vec weigh(float* scores, int64_t vecs, float maximum) {
    const Vec ones = (Vec)_mm512_set1_epi32(0x3f803f80), offset = broadcast(maximum);
    Vec total = {};
    for (int64_t v = 0; v < vecs; v += 2) {
      const Vec low = power_of_two(load(scores + v * kWidth) - offset);
      const Vec high = v + 1 < vecs ? power_of_two(load(scores + (v + 1) * kWidth) - offset) : Vec{};
      const Vec pairs = convert(low, high);
      total = multiply_add(pairs, ones, total);
      store(scores + v / 2 * kWidth, pairs);
    }
    return total;
  }
};

KILN_INLINE Vec load(const Pair* p) { return load(reinterpret_cast<const float*>(p)); }
KILN_INLINE void store(Pair* p, Vec v) { store(reinterpret_cast<float*>(p), v); }

typedef Pairs Bfloat16;
#else
typedef Rounded Bfloat16;
#endif

}  // namespace kiln::KILN_ISA
