// Caches of 8-bit integers: one row (a token's head) has one scale, max|x| / 127, and holds x / scale.
#pragma once

#include "../simd.h"

namespace kiln::KILN_ISA {

struct Int8 {
  int8_t value;
};

// Whether a type of cache has scales.
template <typename T>
struct Scaled {
  static constexpr bool value = false;
};
template <>
struct Scaled<Int8> {
  static constexpr bool value = true;
};

KILN_INLINE Vec load(const Int8* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  Vec v = {};
  for (int i = 0; i < kWidth; i++) v[i] = static_cast<float>(p[i].value);
  return v;
#endif
}

// The first n < kWidth elements, the rest zero; reads nothing beyond them.
KILN_INLINE Vec load_part(const Int8* p, int n) {
#if defined(__AVX512F__)
  const __m128i part = _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << n) - 1), p);
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(part));
#else
  Vec v = {};
  for (int i = 0; i < n; i++) v[i] = static_cast<float>(p[i].value);
  return v;
#endif
}

// A row with its scale: reads as the numbers that it stands for.
struct ScaledRow {
  const Int8* p;
  float scale;
};
KILN_INLINE ScaledRow operator+(ScaledRow row, int64_t n) { return {row.p + n, row.scale}; }
KILN_INLINE Vec load(ScaledRow row) { return load(row.p) * row.scale; }
KILN_INLINE Vec load_part(ScaledRow row, int n) { return load_part(row.p, n) * row.scale; }

// dst = src in 8 bits, to nearest, ties to even; the result is the scale. A row with a NaN or an infinity has the scale
// NaN, so that nobody takes it for numbers; one of zeros has 0.
KILN_INLINE float quantize_row(const float* src, int64_t n, Int8* dst) {
  float largest = 0, zeros = 0;  // 0 * x is NaN for what is not finite
  for (int64_t i = 0; i < n; i++) {
    const float magnitude = __builtin_fabsf(src[i]);
    largest = magnitude > largest ? magnitude : largest;
    zeros += src[i] * 0.0f;
  }
  const float scale = zeros == 0 ? largest / 127.0f : __builtin_nanf("");
  const bool numbers = scale > 0;
  for (int64_t i = 0; i < n; i++) {
    const float y = numbers ? src[i] / scale : 0.0f;
    const float cut = y > 127.0f ? 127.0f : y < -127.0f ? -127.0f : y;  // a subnormal scale is coarse
    dst[i].value = static_cast<int8_t>((cut + kRounder) - kRounder);
  }
  return scale;
}

}  // namespace kiln::KILN_ISA
