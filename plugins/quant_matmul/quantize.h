// Rows of activations as 8-bit integers, by themselves or at the end of a norm or a gate.
#pragma once

#include <math.h>

#include "../elementwise/rows.h"
#include "kernels.h"

namespace kiln::KILN_ISA {

// Largest magnitude of n values, as its bits: those of a NaN or an infinity are above those of any finite value.
static int32_t largest_bits(const float* x, int64_t n) {
  IntVec most = {};
  auto take = [&](Vec v) __attribute__((always_inline)) {
    const IntVec bits = (IntVec)v & 0x7fffffff;
    most = bits > most ? bits : most;
  };
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) take(load(x + i));
  if (i < n) take(load_part(x + i, static_cast<int>(n - i)));
  int32_t largest = 0;
#pragma GCC unroll 16
  for (int lane = 0; lane < kWidth; lane++) largest = most[lane] > largest ? most[lane] : largest;
  return largest;
}

// Writes the first n <= kWidth values, rounded to nearest, ties to even.
KILN_INLINE void store_rounded(int8_t* q, Vec v, int n) {
#if defined(__AVX512F__)
  constexpr __mmask16 all = 0xffff;  // without a mask, GCC 12 warns
  const __m128i bytes = _mm512_maskz_cvtepi32_epi8(all, _mm512_maskz_cvtps_epi32(all, (__m512)v));
  if (n == kWidth)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), bytes);
  else
    _mm_mask_storeu_epi8(q, static_cast<__mmask16>((1u << n) - 1), bytes);
#elif defined(__AVX2__)
  const __m256i whole = _mm256_cvtps_epi32((__m256)v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  const __m128i bytes = _mm_packs_epi16(words, words);
  if (n == kWidth) return _mm_storel_epi64(reinterpret_cast<__m128i*>(q), bytes);
  uint64_t rest = static_cast<uint64_t>(_mm_cvtsi128_si64(bytes));
  for (int i = 0; i < n; i++, rest >>= 8) q[i] = static_cast<int8_t>(rest);
#else
  for (int i = 0; i < n; i++) q[i] = static_cast<int8_t>(lrintf(v[i]));
#endif
}

// q of one group; returns its scale.
static float quantize_group(const float* x, int64_t n, int8_t* q) {
  union {
    int32_t bits;
    float value;
  } largest = {largest_bits(x, n)};
  const bool finite = largest.bits < 0x7f800000;
  if (!finite || largest.value < 0x1p-100f) {
    __builtin_memset(q, 0, static_cast<size_t>(n));
    return finite ? 0.0f : __builtin_nanf("");
  }
  const float inverse = 127.0f / largest.value;
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store_rounded(q + i, load(x + i) * inverse, kWidth);
  if (const int rest = static_cast<int>(n - i)) store_rounded(q + i, load_part(x + i, rest) * inverse, rest);
  return largest.value / 127.0f;
}

static void quantize_row(const float* x, int64_t row, int64_t depth, const Quantised& out) {
  const int64_t groups = groups_of(depth, out.group_size), size = out.group_size ? out.group_size : depth;
  int8_t* q = out.q + row * depth;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t begin = g * size, n = begin + size < depth ? size : depth - begin;
    out.scale[row * groups + g] = quantize_group(x + begin, n, q + begin);
  }
}

template <typename Call>
static size_t no_scratch(const Call&, int64_t) {
  return 0;
}

// A row of results that are not yet quantised.
template <typename Call>
static size_t row_scratch(const Call& call, int64_t) {
  return static_cast<size_t>(call.depth) * sizeof(float);
}

static void quantize_rows(const QuantizeRows& call, const Rows& rows, char*) {
  for (int64_t row = rows.begin; row < rows.end; row++)
    quantize_row(call.x + row * call.depth, row, call.depth, call.out);
}

static void add_rms_norm_quantize(const AddRmsNormQuantize& call, const Rows& rows, char* scratch) {
  const int64_t n = call.depth;
  float* normalized = reinterpret_cast<float*>(scratch);
  for (int64_t row = rows.begin; row < rows.end; row++) {
    float* total = call.sum ? call.sum + row * n : normalized;
    const double squares = add_row(call.x + row * n, call.skip + row * n, total, n);
    scale_row(total, call.gamma, norm_factor(squares, n, call.epsilon), normalized, n);
    quantize_row(normalized, row, n, call.out);
  }
}

static void swiglu_quantize(const SwiGluQuantize& call, const Rows& rows, char* scratch) {
  const int64_t n = call.depth;
  float* gated = reinterpret_cast<float*>(scratch);
  for (int64_t row = rows.begin; row < rows.end; row++) {
    gate_row(call.gate + row * n, call.up + row * n, call.alpha, gated, n);
    quantize_row(gated, row, n, call.out);
  }
}

}  // namespace kiln::KILN_ISA
